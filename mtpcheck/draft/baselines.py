"""What drafters without a head would score, and the positions that none of them gets right.

All of them speak of drafts of depth 1. A position i of a passage is one such draft: it is for the token at i + 2,
and right where it equals ``main[i + 1]``, what the main model says there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtpcheck.draft.passage import Ids, Passage

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Baselines:
    """Acceptance rates that need no head.

    ``constant``: the one best token, always. ``copy``: the last known token again. ``repeat``: the main model's last
    choice again. ``shuffle``: the head's own drafts in random order, as expected. ``token_map``: what the model most
    often says after the last known token in all *other* passages.
    """

    constant: float
    copy: float
    repeat: float
    shuffle: float
    token_map: float

    @property
    def floor(self) -> float:
        """The best of those that know nothing of the text's statistics but a token's share."""
        return max(self.constant, self.copy, self.repeat, self.shuffle)


def baselines(passages: Sequence[Passage]) -> tuple[Baselines, Flags]:
    """The baselines, and which of all positions, passage after passage, are hard: constant, copy, repeat and token
    map are all wrong there."""
    targets = np.concatenate([p.main[1:] for p in passages])
    drafts = np.concatenate([p.drafts[0] for p in passages])
    known = np.concatenate([p.ids[1:] for p in passages])
    before = np.concatenate([p.main[:-1] for p in passages])
    tokens, counts = np.unique(targets, return_counts=True)
    right = {
        "constant": targets == tokens[counts.argmax()],
        "copy": targets == known,
        "repeat": targets == before,
        "token_map": _token_map(known, targets, [len(p.ids) - 1 for p in passages]),
    }
    drafted, draft_counts = np.unique(drafts, return_counts=True)
    _, at, draft_at = np.intersect1d(tokens, drafted, assume_unique=True, return_indices=True)
    shuffle = float((counts[at] / len(targets)) @ (draft_counts[draft_at] / len(targets)))
    rates = {name: float(flags.mean()) for name, flags in right.items()}
    return Baselines(shuffle=shuffle, **rates), ~np.logical_or.reduce([*right.values()])


def _token_map(known: Ids, targets: Ids, lengths: Sequence[int]) -> Flags:
    """Where the target is what most often followed the known token in the other passages (of equals the smallest)."""
    pairs, which = np.unique(np.stack([known, targets]), axis=1, return_inverse=True)
    which = which.reshape(-1)
    counts = np.bincount(which, minlength=pairs.shape[1])
    right = np.zeros(len(known), np.bool_)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        here = slice(end - length, end)
        elsewhere = counts - np.bincount(which[here], minlength=len(counts))
        near = np.flatnonzero(np.isin(pairs[0], known[here]))
        # each token's most frequent successor comes first
        order = near[np.lexsort((pairs[1, near], -elsewhere[near], pairs[0, near]))]
        tokens, first = np.unique(pairs[0, order], return_index=True)
        best = order[first][np.searchsorted(tokens, known[here])]
        right[here] = (best == which[here]) & (elsewhere[best] > 0)
    return right
