"""Acceptance of drafts in numbers: rates with bounds, what they have to beat, and whether the head is alive.

Names are those of vLLM (v1/spec_decode/metrics.py): *acceptance rate* is accepted over drafted; *per-position*
rates are cumulative, of all rounds those whose drafts up to that depth were all accepted; *mean acceptance length*
is 1 (the token that the model itself adds) plus the sum of these. All are teacher-forced: the text is given, and a
draft is accepted where it equals the model's own choice (argmax) for its token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtpcheck.draft.baselines import Baselines, Flags, baselines
from mtpcheck.draft.binomial import clopper_pearson, mcnemar
from mtpcheck.draft.passage import Passage

ALPHA = 0.001


@dataclass(frozen=True, slots=True)
class Rate:
    """``accepted`` of ``drafted``, with Clopper-Pearson bounds at two-sided ``alpha``; of none drafted nan, 0 to 1."""

    accepted: int
    drafted: int
    alpha: float = ALPHA

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def bounds(self) -> tuple[float, float]:
        return clopper_pearson(self.accepted, self.drafted, self.alpha)

    def shrunk(self, factor: float) -> Rate:
        """The same rate seen on ``factor`` (1 or more) times fewer drafts, in whole drafts, rounded down."""
        return Rate(int(self.accepted / factor), math.ceil(self.drafted / factor), self.alpha) if factor > 1 else self


@dataclass(frozen=True, slots=True)
class Walk:
    """The rounds that serving would have made: after a of d drafts are accepted the next round is a + 1 tokens on.

    Only at those positions are drafts made, so its rate differs a little from that of all positions.
    """

    rounds: int
    rate: Rate

    @property
    def length(self) -> float:
        """Tokens a round, the model's own included: mean acceptance length. nan without a round."""
        return 1 + self.rate.accepted / self.rounds if self.rounds else math.nan


@dataclass(frozen=True, slots=True)
class Ablation:
    """The head against itself with something taken out.

    ``only_head`` and ``only_ablated`` count the positions where just one of the two is right; ``p`` is McNemar's.
    """

    name: str
    rate: Rate
    only_head: int
    only_ablated: int

    @property
    def p(self) -> float:
        return mcnemar(self.only_head, self.only_ablated)


@dataclass(frozen=True)
class Acceptance:
    """What was counted on some passages.

    ``depths[d - 1]``: drafts of depth d, each on its own. ``positions[d - 1]``: vLLM's per-position rate, over the
    positions that have drafts of every depth. ``walk``: as serving would sample them. ``hard``: depth 1 where every
    trivial drafter is wrong. ``clustering``: by how much passages differ in rate more than drafts drawn one by one
    would, as a ratio of variances and never below 1; with one passage it cannot be told and is 1.
    """

    passages: int
    depths: tuple[Rate, ...]
    positions: tuple[Rate, ...]
    walk: Walk
    baselines: Baselines
    hard: Rate
    ablations: tuple[Ablation, ...]
    clustering: float

    @property
    def rate(self) -> Rate:
        """Acceptance rate over all depths as vLLM counts it: a draft after a rejected one is not accepted."""
        return Rate(
            sum(position.accepted for position in self.positions),
            sum(position.drafted for position in self.positions),
            self.depths[0].alpha,
        )

    @property
    def mean_length(self) -> float:
        """Mean acceptance length: 1 plus the sum of the per-position rates."""
        return 1 + sum(position.rate for position in self.positions)

    @property
    def standard_error(self) -> float:
        """Of the rate of depth 1: the larger of the binomial and the between-passage one."""
        first = self.depths[0]
        return math.sqrt(first.rate * (1 - first.rate) / first.drafted * self.clustering)


def measure(passages: Sequence[Passage], alpha: float = ALPHA) -> Acceptance:
    """Count drafts. Raises ValueError if there is none of depth 1 or passages differ in depths or ablations."""
    passages = [passage for passage in passages if len(passage.ids) > 1]
    if not passages or not passages[0].drafts:
        raise ValueError("no draft to count: every passage is shorter than two tokens, or there is no MTP layer")
    depth, names = len(passages[0].drafts), passages[0].ablated.keys()
    if any(len(p.drafts) != depth or p.ablated.keys() != names for p in passages):
        raise ValueError("passages differ in the depth of their drafts or in their ablations")
    flags = [_accepted(passage) for passage in passages]
    each = [np.concatenate(of_depth) for of_depth in zip(*flags, strict=True)]
    prefixes = [np.logical_and.accumulate([f[: len(of_passage[-1])] for f in of_passage]) for of_passage in flags]
    whole = np.concatenate(prefixes, axis=1)
    first = each[0]
    beaten, hard = baselines(passages)

    def rate(accepted: Flags) -> Rate:
        return Rate(int(accepted.sum()), accepted.size, alpha)

    def ablation(name: str) -> Ablation:
        without = np.concatenate([p.ablated[name] == p.main[1:] for p in passages])
        return Ablation(name, rate(without), int((first & ~without).sum()), int((without & ~first).sum()))

    return Acceptance(
        passages=len(passages),
        depths=tuple(map(rate, each)),
        positions=tuple(map(rate, whole)),
        walk=_walk(prefixes, alpha),
        baselines=beaten,
        hard=rate(first[hard]),
        ablations=tuple(map(ablation, names)),
        clustering=_clustering([of_passage[0] for of_passage in flags]),
    )


def _accepted(passage: Passage) -> list[Flags]:
    """Per depth d, which of its n - d drafts are accepted."""
    return [draft == passage.main[d:] for d, draft in enumerate(passage.drafts, start=1)]


def _walk(prefixes: Sequence[Flags], alpha: float) -> Walk:
    """``prefixes`` [depth, positions] of each passage: are the drafts made there accepted up to that depth?"""
    rounds = accepted = 0
    for prefix in prefixes:
        lengths, at = prefix.sum(axis=0), 0
        while at < len(lengths):
            rounds += 1
            accepted += int(lengths[at])
            at += int(lengths[at]) + 1
    return Walk(rounds, Rate(accepted, rounds * len(prefixes[0]), alpha))


def _clustering(flags: Sequence[Flags]) -> float:
    """Variance of the rate if passages are drawn (that of a ratio of sums) over its variance if drafts are."""
    sizes, accepted = np.array([f.size for f in flags]), np.array([f.sum() for f in flags])
    rate = accepted.sum() / sizes.sum()
    if len(flags) < 2 or rate in (0, 1):
        return 1.0
    between = len(flags) / (len(flags) - 1) * float(((accepted - rate * sizes) ** 2).sum())
    return max(1.0, between / float(rate * (1 - rate) * sizes.sum()))
