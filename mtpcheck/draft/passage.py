"""What one pass of a model and its MTP head over token ids gives: ids, choices and drafts, as plain arrays.

Position ``i`` of a text of ``n`` tokens ``t_0 … t_{n-1}``: the model chooses ``main[i]`` for ``t_{i+1}``, and the draft
of depth ``d`` made there, ``drafts[d-1][i]``, is for ``t_{i+d+1}``. It is accepted where it equals ``main[i+d]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

BLOCK_SKIPPED, EMBEDDING_ZEROED, HIDDEN_ZEROED = "block skipped", "embedding zeroed", "hidden zeroed"
ABLATIONS = (BLOCK_SKIPPED, EMBEDDING_ZEROED, HIDDEN_ZEROED)


@dataclass(frozen=True)
class Passage:
    """One text of ``n`` tokens."""

    ids: Ids
    """[n]"""
    main: Ids
    """[n]: the model's choice after each token."""
    drafts: tuple[Ids, ...]
    """Depth ``d`` at index ``d - 1``: [n - d]."""
    ablated: Mapping[str, Ids]
    """Drafts of depth 1, [n - 1], with a piece of the head taken away; keys are ``ABLATIONS``."""
    logits_digest: tuple[str, ...] = ()
    """SHA-256, by depth, of the bits of all draft logits. Two runs of one machine, thread count and batch agree in it
    if and only if every logit has the same bits."""
    logits: tuple[Floats, ...] = ()
    """If asked for: logits of the model, [n, vocab], then of each depth, [n - d, vocab]."""


@dataclass(frozen=True)
class Touched:
    """Which parts of the checkpoint the drafts and choices depend on."""

    ran: frozenset[str]
    not_ran: Mapping[str, str]
    """Part → why it has no influence."""
    embedding_rows: int
    """How many rows of the embedding were looked up."""


@dataclass(frozen=True)
class Run:
    """All texts of one pass, in the order given."""

    passages: tuple[Passage, ...]
    touched: Touched
    nbytes: int = field(compare=False)
    """Bytes of weights that came from the files."""
