"""Acceptance in numbers: small cases by hand, a plain recount of any case, and heads that are dead in known ways."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpcheck.draft.acceptance import Rate, measure
from mtpcheck.draft.alive import FEWEST_DRAFTS, FEWEST_HARD, judge
from mtpcheck.draft.binomial import clopper_pearson, mcnemar, tail
from mtpcheck.draft.passage import Ids, Passage


def passage(ids: Sequence[int], main: Sequence[int], *drafts: Sequence[int], **ablated: Sequence[int]) -> Passage:
    def array(values: Sequence[int]) -> Ids:
        return np.array(values, np.int64)

    return Passage(array(ids), array(main), tuple(map(array, drafts)), {k: array(v) for k, v in ablated.items()})


# ------------------------------------------------------------------------------------------------- binomial
@pytest.mark.parametrize(
    "k, n, lower, upper",
    # 95 % limits as published tables give them
    [
        (0, 10, 0.0, 0.3085),
        (1, 10, 0.0025, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (9, 10, 0.5550, 0.9975),
        (10, 10, 0.6915, 1.0),
        (1, 20, 0.0013, 0.2487),
        (10, 100, 0.0490, 0.1762),
    ],
)
def test_clopper_pearson_tables(k: int, n: int, lower: float, upper: float) -> None:
    assert clopper_pearson(k, n, 0.05) == pytest.approx((lower, upper), abs=5e-5)


def test_clopper_pearson_where_it_has_a_formula() -> None:
    for n in (1, 7, 512, 20_000):
        assert clopper_pearson(0, n, 0.001) == pytest.approx((0, 1 - 0.0005 ** (1 / n)), rel=1e-9)
        assert clopper_pearson(n, n, 0.001) == pytest.approx((0.0005 ** (1 / n), 1), rel=1e-9)
    assert clopper_pearson(0, 0, 0.001) == (0, 1)
    with pytest.raises(ValueError):
        clopper_pearson(3, 2, 0.05)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.05, 0.001]))
def test_bounds_are_where_the_tails_are_half_of_alpha(counts: tuple[int, int], alpha: float) -> None:
    k, n = counts
    lower, upper = clopper_pearson(k, n, alpha)
    assert lower < (k or 1e-9) / n and k / n < upper + (k == n)
    if k:
        assert 1 - tail(k - 1, n, lower) == pytest.approx(alpha / 2, rel=1e-6)
    if k < n:
        assert tail(k, n, upper) == pytest.approx(alpha / 2, rel=1e-6)
    assert clopper_pearson(n - k, n, alpha) == pytest.approx((1 - upper, 1 - lower), abs=1e-9)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_counts_every_split_as_odd(b: int, c: int) -> None:
    ways = sum(math.comb(b + c, j) for j in range(b + c + 1) if min(j, b + c - j) <= min(b, c))
    assert mcnemar(b, c) == pytest.approx(min(1.0, ways / 2 ** (b + c)))


# --------------------------------------------------------------------------------------------- by hand
def test_one_layer_by_hand() -> None:
    #         targets of the drafts: main[1:] = 2 3 3 4 2
    counted = measure([passage([1, 2, 3, 3, 4, 2], [2, 2, 3, 3, 4, 2], [2, 3, 4, 4, 2], block=[2, 9, 4, 4, 9])])
    assert counted.depths == counted.positions == (Rate(4, 5),)
    assert counted.rate.rate == 0.8
    assert counted.mean_length == 1.8
    # rounds at 0 (accepted), 2 (rejected), 3 (accepted), and 5 has no draft
    assert (counted.walk.rounds, counted.walk.rate) == (3, Rate(2, 3))
    assert counted.walk.length == pytest.approx(1 + 2 / 3)
    beaten = counted.baselines
    assert beaten.constant == 0.4  # 2 or 3
    assert beaten.copy == 1.0  # known: 2 3 3 4 2
    assert beaten.repeat == 0.4  # the choice before: 2 2 3 3 4
    # drafts hold 2 twice, 3 once, 4 twice; targets 2 twice, 3 twice, 4 once
    assert beaten.shuffle == pytest.approx((2 * 2 + 1 * 2 + 2 * 1) / 25)
    assert beaten.token_map == 0.0  # there is no other passage
    assert beaten.floor == 1.0
    assert counted.hard == Rate(0, 0)
    assert math.isnan(counted.hard.rate)
    [ablation] = counted.ablations
    assert (ablation.name, ablation.rate, ablation.only_head, ablation.only_ablated) == ("block", Rate(2, 5), 2, 0)
    assert ablation.p == 0.5


def test_two_layers_by_hand() -> None:
    main = [0, 1, 2, 3, 4, 5]
    first = [1, 9, 3, 4, 9]  # accepted at 0, 2, 3
    second = [2, 3, 9, 5]  # accepted at 0, 1, 3
    counted = measure([passage([7] * 6, main, first, second)])
    assert counted.depths == (Rate(3, 5), Rate(3, 4))
    # positions 0..3 have both: at the first depth 0, 2, 3, up to the second 0 and 3
    assert counted.positions == (Rate(3, 4), Rate(2, 4))
    assert counted.rate == Rate(5, 8)
    assert counted.mean_length == 1 + 0.75 + 0.5
    # at 0 both are accepted, so the next round is at 3, where both are again
    assert (counted.walk.rounds, counted.walk.rate, counted.walk.length) == (2, Rate(4, 4), 3.0)


def test_the_token_map_leaves_its_own_passage_out() -> None:
    mine = passage([0, 5, 5, 5], [0, 6, 6, 8], [1, 1, 1])
    others = [passage([0, 5], [0, 8], [1]), passage([0, 5], [0, 8], [1]), passage([0, 5], [0, 6], [1])]
    counted = measure([mine, *others])
    # After 5 the other three say 8, 8, 6, so the map says 8 in `mine`: right once. Without one 8 it is 6, 6, 8, 8, 6
    # that the others say, and without the last 6, 6, 8, 8, 8: wrong each time.
    assert counted.baselines.token_map == pytest.approx(1 / 6)


# --------------------------------------------------------------------------------------------- properties
@st.composite
def passages(draw: st.DrawFn) -> list[Passage]:
    token, depth = st.integers(0, 3), draw(st.integers(1, 3))
    made = []
    for length in draw(st.lists(st.integers(2, 9), min_size=1, max_size=4)):
        of = {n: st.lists(token, min_size=n, max_size=n) for n in range(length + 1)}
        drafts = [draw(of[max(length - d, 0)]) for d in range(1, depth + 1)]
        made.append(passage(draw(of[length]), draw(of[length]), *drafts, block=draw(of[length - 1])))
    return made


@given(passages())
def test_counts_are_those_of_a_plain_recount(given_passages: list[Passage]) -> None:
    counted = measure(given_passages)
    depth = len(given_passages[0].drafts)
    each, whole, rounds, walked = [[0, 0] for _ in range(depth)], [[0, 0] for _ in range(depth)], 0, 0
    for p in given_passages:
        n = len(p.ids)
        right = [[int(p.drafts[d - 1][i]) == int(p.main[i + d]) for i in range(n - d)] for d in range(1, depth + 1)]
        for d in range(depth):
            each[d][0] += sum(right[d])
            each[d][1] += len(right[d])
            for i in range(n - depth):
                whole[d][0] += all(right[e][i] for e in range(d + 1))
                whole[d][1] += 1
        i = 0
        while i < n - depth:
            prefix = next((d for d in range(depth) if not right[d][i]), depth)
            rounds, walked, i = rounds + 1, walked + prefix, i + prefix + 1
    assert [[r.accepted, r.drafted] for r in counted.depths] == each
    assert [[r.accepted, r.drafted] for r in counted.positions] == whole
    assert (counted.walk.rounds, counted.walk.rate) == (rounds, Rate(walked, rounds * depth))
    assert counted.clustering >= 1


@given(passages())
def test_baselines_are_those_of_a_plain_recount(given_passages: list[Passage]) -> None:
    counted = measure(given_passages)
    places = [(p, s, i) for s, p in enumerate(given_passages) for i in range(len(p.ids) - 1)]
    target = [int(p.main[i + 1]) for p, _, i in places]
    often = max(Counter(target).values())
    best = min(t for t, count in Counter(target).items() if count == often)

    def mapped(s: int, known: int) -> int | None:
        seen = Counter(int(p.main[i + 1]) for p, other, i in places if other != s and int(p.ids[i + 1]) == known)
        return min((t for t in seen if seen[t] == max(seen.values())), default=None)

    right = {
        "constant": [t == best for t in target],
        "copy": [int(p.ids[i + 1]) == t for (p, _, i), t in zip(places, target, strict=True)],
        "repeat": [int(p.main[i]) == t for (p, _, i), t in zip(places, target, strict=True)],
        "token_map": [mapped(s, int(p.ids[i + 1])) == t for (p, s, i), t in zip(places, target, strict=True)],
    }
    for name, flags in right.items():
        assert getattr(counted.baselines, name) == pytest.approx(sum(flags) / len(flags)), name
    drafts = [int(p.drafts[0][i]) for p, _, i in places]
    pairs = sum(d == t for d in drafts for t in target)
    assert counted.baselines.shuffle == pytest.approx(pairs / len(target) ** 2)
    hard = [not any(flags[j] for flags in right.values()) for j in range(len(target))]
    accepted = sum(d == t for d, t, h in zip(drafts, target, hard, strict=True) if h)
    assert counted.hard == Rate(accepted, sum(hard))


def test_passages_that_differ_widen_the_error() -> None:
    """Ten drafts each, all right in some passages and all wrong in others: as good as one draft a passage."""
    made = [passage(range(11), range(11), range(1, 11) if s % 2 else [99] * 10) for s in range(20)]
    counted = measure(made)
    assert counted.clustering == pytest.approx(10 * 20 / 19)
    assert counted.standard_error == pytest.approx(math.sqrt(0.25 / 19))
    alike = [passage(range(11), range(11), [*range(1, 6), *[99] * 5]) for _ in range(20)]
    assert measure(alike).clustering == 1
    assert measure(made[:1]).clustering == 1


def test_a_rate_seen_on_fewer_drafts_is_surely_no_better() -> None:
    assert Rate(90, 100).shrunk(1) == Rate(90, 100)
    assert Rate(90, 100).shrunk(7) == Rate(12, 15)
    assert Rate(90, 100).shrunk(7).bounds[0] < Rate(90, 100).bounds[0]


def test_nothing_to_count() -> None:
    for nothing in ([], [passage([1], [2], [])], [passage([1, 2], [2, 3])]):
        with pytest.raises(ValueError, match="no draft"):
            measure(nothing)
    with pytest.raises(ValueError, match="differ"):
        measure([passage([1, 2], [2, 3], [3]), passage([1, 2], [2, 3], [3], block=[3])])


# ------------------------------------------------------------------------------------------------- alive
def text(rng: np.random.Generator, share: float, without: float | None, tokens: int = 2048) -> list[Passage]:
    """Passages of a vocabulary of 50, whose drafts are right at ``share`` of the positions, and at ``without`` with
    the block skipped (None: the same drafts)."""
    made = []
    for _ in range(tokens // 128):
        ids, main = rng.integers(0, 50, 129), rng.integers(0, 50, 129)

        def drafts(rate: float, main: Ids = main) -> Ids:
            return np.where(rng.random(128) < rate, main[1:], rng.integers(0, 50, 128))

        head = drafts(share)
        made.append(Passage(ids, main, (head,), {"block": head if without is None else drafts(without)}))
    return made


def test_a_healthy_head_is_alive() -> None:
    verdict = judge(measure(text(np.random.default_rng(1), 0.8, 0.4)))
    assert verdict.alive is True
    assert [rule.name for rule in verdict.rules] == ["A1", "A2", "A3"]
    assert not verdict.failed and not verdict.unjudged


def test_random_drafts_are_not() -> None:
    verdict = judge(measure(text(np.random.default_rng(2), 0.0, 0.0)))
    assert verdict.alive is False
    assert [rule.name for rule in verdict.failed] == ["A1", "A2", "A3"]


def test_a_dead_block_shows_against_the_head_without_it() -> None:
    verdict = judge(measure(text(np.random.default_rng(3), 0.6, None)))
    assert verdict.alive is False
    [rule] = verdict.failed
    assert (rule.name, rule.value) == ("A3", 1.0)
    # nor is a head alive that is better without its block
    assert judge(measure(text(np.random.default_rng(4), 0.5, 0.8))).failed[0].name == "A3"


def test_a_head_that_only_copies_fails_where_copying_does() -> None:
    """Half of the text repeats its last token, and drafts of the last token are right there alone."""
    rng = np.random.default_rng(5)
    made = []
    for p in text(rng, 0.0, 0.0):
        main = np.where(rng.random(129) < 0.5, p.ids, p.main)
        made.append(Passage(p.ids, main, (p.ids[1:],), {"block": np.zeros(128, np.int64)}))
    verdict = judge(measure(made))
    assert [rule.name for rule in verdict.failed] == ["A1", "A2"]


def test_passages_that_differ_count_as_few_drafts() -> None:
    """The same counts are no evidence if they come from two passages out of eight."""
    rng = np.random.default_rng(6)
    even = text(rng, 0.13, 0.0)
    uneven = [*text(rng, 1.0, 0.0, 256), *text(rng, 0.0, 0.0, 2048 - 256)]
    assert judge(measure(even)).rules[0].holds
    assert measure(uneven).depths[0].rate >= measure(even).depths[0].rate - 0.02
    assert not judge(measure(uneven)).rules[0].holds


def test_what_cannot_be_judged() -> None:
    rng = np.random.default_rng(7)
    short = text(rng, 0.9, 0.1, FEWEST_DRAFTS - 128)
    assert judge(measure(short)).unjudged == (
        f"too few tokens to judge: needs {FEWEST_DRAFTS} drafts, got {FEWEST_DRAFTS - 128}"
    )
    constant = [passage([3] * 600, [3] * 600, [3] * 599, block=[4] * 599)]
    assert "too uniform" in judge(measure(constant)).unjudged
    # a cycle of four is said by the token map of the other passages, everywhere
    cycle = [passage(c := [0, 1, 2, 3] * 100, [*c[1:], 0], [*c[2:], 0], block=[9] * 399) for _ in range(2)]
    assert f"needs {FEWEST_HARD}" in judge(measure(cycle)).unjudged
    bare = [Passage(p.ids, p.main, p.drafts, {}) for p in text(rng, 0.9, 0.1)]
    assert "taken out" in judge(measure(bare)).unjudged
    for passages_of in (short, constant, cycle, bare):
        verdict = judge(measure(passages_of))
        assert verdict.alive is None and not verdict.rules


def test_counting_needs_no_torch() -> None:
    script = (
        "import sys; import mtpcheck.draft.alive, mtpcheck.draft.workloads\n"
        "assert not {'torch', 'scipy', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
