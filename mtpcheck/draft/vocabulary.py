"""The two ends of a model, whose size is that of the vocabulary: token ids to vectors, and vectors to logits.

The LM head is read in chunks of rows. How many rows a chunk has depends on the width of the model alone, so that equal
weights give logits of equal bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from mtpcheck.draft.passage import Floats, Ids
from mtpcheck.draft.weights import Weights
from mtpcheck.rows import factored

CHUNK = 64 << 20
"""Bytes of one chunk in fp32."""


@dataclass
class Scored:
    """What the head makes of one batch of vectors: per text the choice at each position, and the digest of its logits;
    the logits too, if they are kept."""

    choices: list[Ids]
    digests: list[str]
    logits: list[Floats] = field(default_factory=list)
    finite: bool = True
    """Whether every largest logit is a finite number."""


def score(
    weights: Weights, part: str, features: Mapping[str, Tensor], lengths: Mapping[str, Sequence[int]], keep: bool
) -> dict[str, Scored]:
    """Multiply [texts, positions, hidden] of several names by the head ``part``, each chunk of it read once.

    ``lengths``: how many positions of each text count. Of equal largest logits the first is chosen.
    """
    shapes = weights.tensor_map.model.shapes
    vocab, hidden = factored(shapes[part])
    best = {name: torch.full(x.shape[:2], -torch.inf) for name, x in features.items()}
    choice = {name: torch.zeros(x.shape[:2], dtype=torch.int64) for name, x in features.items()}
    hashes = {name: [hashlib.sha256() for _ in x] for name, x in features.items()}
    kept: dict[str, list[list[Floats]]] = {name: [[] for _ in x] for name, x in features.items()}
    rows = max(64, CHUNK // (4 * hidden) // 64 * 64)
    for first in range(0, vocab, rows):
        chunk = weights.rows(part, first, min(first + rows, vocab))
        for name, x in features.items():
            logits = linear(x, chunk)
            top, at = logits.max(-1)
            higher = (top > best[name]) | (top.isnan() & ~best[name].isnan())
            best[name] = torch.where(higher, top, best[name])
            choice[name] = torch.where(higher, at + first, choice[name])
            for text, length in enumerate(lengths[name]):
                values: Floats = np.ascontiguousarray(logits[text, :length].numpy())
                hashes[name][text].update(values.tobytes())
                if keep:
                    kept[name][text].append(values)
        del chunk  # before the next is read
    return {
        name: Scored(
            [row[:length].numpy() for row, length in zip(choice[name], lengths[name], strict=True)],
            [own.hexdigest() for own in hashes[name]],
            [np.concatenate(chunks, axis=-1) for chunks in kept[name]] if keep else [],
            all(bool(row[:length].isfinite().all()) for row, length in zip(best[name], lengths[name], strict=True)),
        )
        for name in features
    }
