"""Is there a draft head at all? Told from one checkpoint, with no other to compare it with.

A rate above zero, or above chance, says little: matrices of noise agree with a model on a few percent of a text
because both prefer its common tokens. So a head has to beat (A1) every drafter that needs no head, (A2) also where
all of those fail, and (A3) itself with its parts taken out, which catches a head that only passes its input on.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtpcheck.draft.acceptance import ALPHA, Acceptance

# below this many drafts a rate of a half has bounds too wide to tell from the baselines of common text
FEWEST_DRAFTS = 512
# as many hard positions tell an acceptance of a third from HARD_FLOOR
FEWEST_HARD = 64
MARGIN = 1.5
HARD_FLOOR = 0.10
# no head can be asked for more than this
MOST = 0.9


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a living head does. It holds if ``value`` is above ``limit``, or for a p (A3) below."""

    name: str
    claim: str
    value: float
    limit: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """``alive`` is None where it could not be judged, and ``unjudged`` the reason; else ``rules`` are the reasons."""

    alive: bool | None
    rules: tuple[Rule, ...] = ()
    unjudged: str = ""

    @property
    def failed(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if not rule.holds)


def judge(acceptance: Acceptance) -> Verdict:
    """Whether the first MTP layer drafts. Passages count as clusters where they differ more than chance would."""
    first, hard = acceptance.depths[0], acceptance.hard
    floor = acceptance.baselines.floor
    limit = min(MARGIN * floor, (1 + floor) / 2)  # of text that half drafts itself, half of what is left
    if first.drafted < FEWEST_DRAFTS:
        return _unjudged(f"too few tokens to judge: needs {FEWEST_DRAFTS} drafts, got {first.drafted}")
    if limit >= MOST:
        return _unjudged(
            f"the text is too uniform to judge: {acceptance.baselines.floor:.0%} of it can be drafted without a head"
        )
    if hard.drafted < FEWEST_HARD:
        return _unjudged(
            f"too few tokens to judge: needs {FEWEST_HARD} that are hard to draft without a head, got {hard.drafted}"
        )
    if not acceptance.ablations:
        return _unjudged("the head was not run with parts of it taken out")
    rules = (
        *(
            _above("A1", f"drafts of depth {depth} are accepted surely more often than {limit:.0%}, "
                   f"and {floor:.0%} are without a head",
                   rate.shrunk(acceptance.clustering).bounds[0], limit)
            for depth, rate in enumerate(acceptance.depths, start=1)
        ),
        _above("A2", f"where drafting without a head fails, it is surely over {HARD_FLOOR:.0%}",
               hard.shrunk(acceptance.clustering).bounds[0], HARD_FLOOR),
        *(
            Rule("A3", f"the head is better than with {ablation.name}", ablation.p, ALPHA,
                 ablation.only_head > ablation.only_ablated and ablation.p < ALPHA)
            for ablation in acceptance.ablations
        ),
    )  # fmt: skip
    return Verdict(all(rule.holds for rule in rules), rules)


def _above(name: str, claim: str, value: float, limit: float) -> Rule:
    return Rule(name, claim, value, limit, value > limit)


def _unjudged(reason: str) -> Verdict:
    return Verdict(None, unjudged=reason)
