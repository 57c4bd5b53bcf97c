"""Theories of order: the bits of a tensor are all there, and stand elsewhere in it.

A theory is another way to put plans together, so that none needs code that undoes it: it gives pairs of plans, what
the reference gives under it and what the candidate has, and it holds if all of them are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.same import same, samples
from mtpcheck.plan import Plan, concat
from mtpcheck.rows import PartShape, Row

Pairs = list[tuple[Plan, Plan]]
Theories = Iterator[tuple[Cause, Pairs]]


@dataclass(frozen=True)
class Unit:
    """A matrix, of one part or of several that are stored joined: [rows, columns], a vector with one column."""

    parts: tuple[str, ...]
    shapes: Mapping[str, PartShape]
    before: Plan
    after: Plan
    own: Mapping[str, tuple[Plan, Plan]]
    """Part → both its plans, every factor an axis."""


def units(case: Case, key: str) -> Iterator[Unit]:
    """The matrices that a piece lies in: its own, that of the candidate's layout, that of the other.
    Only what both sides have whole."""
    if not case.comparable(key) or case.before[key].packed_shape is not None:
        return
    if key not in case.model.shapes:
        before, after = case.before[key].plan, case.after[key].plan
        if len(before.shape) in (1, 2):
            yield Unit((key,), {}, _matrix(before), _matrix(after), {})
        return
    tables = case.spellings if case.b.checkpoint.layout == "hf" else case.spellings[::-1]
    seen: set[tuple[tuple[str, ...], int, bool]] = set()
    for row in [Row("", (key,)), *(_group(table[key], key) for table in tables if key in table)]:
        parts = row.parts
        joined = (parts, row.axis, row.chained)
        if joined not in seen and all(map(case.comparable, parts)) and len({case.before[p].dtype for p in parts}) == 1:
            seen.add(joined)
            yield _unit(case, row)


def _group(row: Row, key: str) -> Row:
    """The row of the parts that a stored tensor joins with ``key``; of a stack, those of one index."""
    return replace(row, parts=next(group for group in row.groups() if key in group), stack=(), pad=None)


def _unit(case: Case, row: Row) -> Unit:
    parts, shapes = row.parts, case.model.shapes
    sides = ({p: side[p].plan for p in parts} for side in (case.before, case.after))
    before, after = (_matrix(row.join(plans, shapes).normalise()) for plans in sides)
    return Unit(
        parts, {p: shapes[p] for p in parts}, before, after,
        {p: (case.before[p].plan, case.after[p].plan) for p in parts},
    )  # fmt: skip


def _matrix(plan: Plan) -> Plan:
    return plan if len(plan.shape) == 2 else plan.reshape((plan.shape[0], prod(plan.shape[1:])))


# ---- theories


def transposed(unit: Unit, facts: Mapping[str, int]) -> Theories:
    rows, columns = unit.before.shape
    if min(rows, columns) > 1:
        what = "the matrix is transposed" + ("" if rows == columns else ", and has its old shape all the same")
        yield Cause("transposed", what), [(unit.before.permute((1, 0)), unit.after.reshape((columns, rows)))]
        what = "the matrix is not transposed any more, as it was in its shape"
        yield Cause("transposed", what), [(unit.before.reshape((columns, rows)).permute((1, 0)), unit.after)]


def gate_up(unit: Unit, facts: Mapping[str, int]) -> Theories:
    """Rows of two joined parts, taken in turn in blocks; and the other way round."""
    if len(unit.parts) != 2 or not unit.parts[0].endswith("gate") or not unit.parts[1].endswith("up"):
        return
    rows, columns = unit.before.shape
    half = rows // 2
    blocks = {1 << i for i in range(half.bit_length())} | {half // n for n in (2, 4, 8, 16, 32, 64)}
    for block in sorted(n for n in blocks if n and n < half and half % n == 0):
        for shape, what in (((2, half // block), "alternate"), ((half // block, 2), "were taken to alternate")):
            joined = unit.before.reshape((*shape, block, columns)).permute((1, 0, 2, 3))
            told = f"rows of gate and up {what}, in blocks of {block}"
            yield Cause("gate-up-interleaved", told), [(joined, unit.after.reshape(joined.shape))]


_KINDS = {"q": "queries", "g": "gates", "k": "keys", "v": "values", "z": "gates"}
_MOST = 4  # kinds of rows in one tensor that are tried in every order; more have too many

Kinds = list[tuple[str, tuple[Plan, Plan]]]
"""What rows are, and both sides' plans of them: [groups, rows of a group, columns]."""


def qkv(unit: Unit, facts: Mapping[str, int]) -> Theories:
    """Queries, gates, keys and values joined other than group by group."""
    for kinds, word in _kinds(unit, facts):
        groups = kinds[0][1][0].shape[0]
        for ranks in (n for n in range(1, groups + 1) if groups % n == 0):
            each = {1: f"all {word}s", groups: f"each {word}"}.get(ranks, f"each of {ranks} runs of {word}s")
            natural = tuple(range(len(kinds)))
            for order in permutations(natural) if len(kinds) <= _MOST else (natural,):
                names = ", ".join(kinds[i][0] for i in order)
                for side, what in ((0, "joined"), (1, "taken to be joined")):
                    other = _segments([kinds[i][1][side] for i in order], ranks)
                    pair = (other, unit.after) if side == 0 else (unit.before, other)
                    yield Cause("qkv-regrouped", f"rows are {what} as {names} of {each}"), [pair]


def _kinds(unit: Unit, facts: Mapping[str, int]) -> Iterator[tuple[Kinds, str]]:
    """The ways to tell the rows of a matrix apart by what they are, and what a group of them is called."""
    words = [part.split(".")[-1] for part in unit.parts]
    if unit.shapes and words == ["kv_b"]:
        at = facts["nope_dim"]
        both = [_grouped(plan, 2) for plan in unit.own[unit.parts[0]]]
        keys, values = ([plan.slice(1, i, j or plan.shape[1]) for plan in both] for i, j in ((0, at), (at, 0)))
        yield [("keys", (keys[0], keys[1])), ("values", (values[0], values[1]))], "head"
    if len(words) < 2 or not words[0].startswith("q"):
        return
    factors = len(unit.shapes[unit.parts[0]][0])
    own = [unit.own[part] for part in unit.parts]
    named = [_KINDS.get(word[0], word) for word in words]
    kinds: Kinds = [
        (name, (_grouped(a, factors), _grouped(b, factors))) for name, (a, b) in zip(named, own, strict=True)
    ]
    yield kinds, "group"
    if words[1] == "gate" and len(words) > 2:
        a, b = (_grouped(concat(pair, 2), factors) for pair in zip(*own[:2], strict=True))
        yield [("queries and gates head by head", (a, b)), *kinds[2:]], "group"


def _grouped(plan: Plan, factors: int) -> Plan:
    """A part whose first axis has so many factors, as [groups, rows of a group, columns]."""
    return plan.reshape((plan.shape[0], prod(plan.shape[1:factors]), prod(plan.shape[factors:])))


def _segments(kinds: Sequence[Plan], ranks: int) -> Plan:
    """Of every run of groups all rows of each kind."""
    step = kinds[0].shape[0] // ranks
    cut = [plan.slice(0, r * step, (r + 1) * step) for r in range(ranks) for plan in kinds]
    return concat([plan.reshape((plan.shape[0] * plan.shape[1], plan.shape[2])) for plan in cut], 0)


def heads(unit: Unit, facts: Mapping[str, int]) -> Theories:
    """Heads in reverse order: all of them, or those of each group, or the groups."""
    if len(unit.parts) != 1 or not unit.shapes:
        return
    (part,) = unit.parts
    before, after = unit.own[part]
    first = unit.shapes[part][0]
    axes = list(range(len(first) - 1))
    if part.endswith("attn.o") and facts.get("heads"):
        shape = (before.shape[0], facts["heads"], before.shape[1] // facts["heads"])  # columns, head by head
        before, after, axes = before.reshape(shape), after.reshape(shape), [1]
    ways = [(axes, f"the {prod(before.shape[axis] for axis in axes)} heads")]
    if len(axes) > 1:
        ways += [([0], "the groups of heads"), ([1], "the heads of each group")]
    for turned, what in ways:
        if any(before.shape[axis] > 1 for axis in turned):
            plan = before
            for axis in turned:
                plan = concat([plan.slice(axis, i, i + 1) for i in reversed(range(plan.shape[axis]))], axis)
            yield Cause("heads-reversed", f"{what} stand in reverse order"), [(plan, after)]


def rope(unit: Unit, facts: Mapping[str, int]) -> Theories:
    """Rows that are rotated in pairs: the first half beside the second, or next to each other."""
    if len(unit.parts) != 1 or not unit.shapes:
        return
    (part,) = unit.parts
    before, after = unit.own[part]
    axis = len(unit.shapes[part][0]) - 1
    for start, end in _rotated(part, before.shape[axis], facts):
        half = (end - start) // 2
        if half < 2 or (end - start) % 2:
            continue
        rest = [(0, start), (end, before.shape[axis])]
        fixed = [(before.slice(axis, i, j), after.slice(axis, i, j)) for i, j in rest if i < j]
        region, other = (_split(plan.slice(axis, start, end), axis) for plan in (before, after))
        order = [*range(axis), axis + 1, axis, *range(axis + 2, len(region(half, 2).shape))]
        which = "" if end - start == before.shape[axis] else f" {start} to {end - 1}"
        rows = f"rows{which} of each head" if axis else f"rows{which}"
        for (a, b), what in (((2, half), "in pairs and stood in halves"), ((half, 2), "in halves and stood in pairs")):
            told = f"{rows} stand {what}, for the other form of rotary embedding"
            yield Cause("rope-permuted", told), [(region(a, b).permute(order), other(b, a)), *fixed]


def _split(plan: Plan, axis: int) -> Callable[[int, int], Plan]:
    return lambda a, b: plan.reshape((*plan.shape[:axis], a, b, *plan.shape[axis + 1 :]))


def _rotated(part: str, size: int, facts: Mapping[str, int]) -> Iterable[tuple[int, int]]:
    """First and last row of what may be rotated within a head."""
    if ".attn." not in part or part.endswith((".o", ".v", ".v_bias")):
        return []
    if facts.get("mla"):
        return [(size - facts["rope_dim"], size)] if size >= facts["rope_dim"] else []
    fraction = int(size * (facts.get("rope_fraction") or 1))
    return dict.fromkeys([(0, fraction), (0, size)])


_LEAST = 8  # rows or columns of a shard: less is no shard


def shards(unit: Unit, facts: Mapping[str, int]) -> Theories:
    """Shards of tensor parallelism, of rows or of columns: in another order, or one of them not there."""
    for axis, word in ((0, "rows"), (1, "columns")):
        size = unit.before.shape[axis]
        for count in (n for n in (2, 4, 8, 16, 32, 64) if size % n == 0 and size // n >= _LEAST):
            before, after = (_cut(plan, axis, count) for plan in (unit.before, unit.after))
            found = _order(before, after)
            if found is None or found == list(range(count)):
                continue
            pairs = [(_zeros(new) if i < 0 else before[i], new) for i, new in zip(found, after, strict=True)]
            each = f"{count} shards of {word}"
            if sorted(found) == list(range(count)):
                told = f"the {each} stand in the order {', '.join(map(str, found))}"
                yield Cause("shards-exchanged", told), pairs
            elif len(wrong := [i for i, old in enumerate(found) if i != old]) == 1:
                what = "is zero" if found[wrong[0]] < 0 else f"is missing, and number {found[wrong[0]]} stands there"
                yield Cause("shard-missing", f"of {each} number {wrong[0]} {what} (from 0)"), pairs


def _cut(plan: Plan, axis: int, count: int) -> list[Plan]:
    step = plan.shape[axis] // count
    return [plan.slice(axis, i * step, (i + 1) * step) for i in range(count)]


def _order(before: Sequence[Plan], after: Sequence[Plan]) -> list[int] | None:
    """Which shard of the reference each of the candidate's looks like; -1 for zeros, None if one is like none."""
    known = {tuple(samples(plan)): i for i, plan in enumerate(before)}
    found = []
    for plan in after:
        runs = tuple(samples(plan))
        number = known.get(runs, None if any(map(any, runs)) else -1)
        if number is None:
            return None
        found.append(number)
    return found


def _zeros(plan: Plan) -> Plan:
    return Plan.zeros(plan.shape, plan.itemsize)


THEORIES: tuple[Callable[[Unit, Mapping[str, int]], Theories], ...] = (transposed, gate_up, qkv, heads, rope, shards)


def arranged(theory: Callable[[Unit, Mapping[str, int]], Theories], case: Case, key: str) -> Told:
    """The pieces of the matrix that ``key`` lies in, with their cause, if the theory holds for all of it."""
    for unit in units(case, key):
        for cause, pairs in theory(unit, case.model.facts):
            if all(same(a, b) for a, b in pairs):
                return dict.fromkeys(unit.parts, cause)
    return {}
