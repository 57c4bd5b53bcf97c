"""Rows or columns in an order that no theory names: told by what they hold, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mtpcheck.diagnosis.arranged import Unit, units
from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.same import same
from mtpcheck.move import read_plan
from mtpcheck.plan import Plan

_STEP = 1 << 20  # bytes
_GLANCE = 16  # elements

U64 = NDArray[np.uint64]


def reordered(case: Case, key: str) -> Told:
    """The pieces of the matrix that ``key`` lies in, if its rows or columns are all there in another order."""
    for unit in units(case, key):
        for axis, word, marks in ((0, "rows", _of_rows), (1, "columns", _of_columns)):
            order = _order(unit, axis, marks) if unit.before.shape[axis] > 1 else None
            if order is not None and _holds(unit, order, axis):
                told = f"the {len(order):,} {word} are all there and stand in another order"
                return dict.fromkeys(unit.parts, Cause(f"{word}-permuted", told))
    return {}


def _order(unit: Unit, axis: int, marks: Callable[[Plan, U64], U64]) -> NDArray[np.intp] | None:
    """Which row (or column) of the reference each of the candidate's is; None if they are not the same ones."""
    weights = np.random.default_rng().integers(0, 1 << 63, max(unit.before.shape), np.uint64) | np.uint64(1)
    whole = unit.before.shape[1 - axis]
    for width in (min(_GLANCE, whole), whole):  # a few elements of each tell most apart
        before, after = (marks(plan.slice(1 - axis, 0, width), weights) for plan in (unit.before, unit.after))
        if not (np.sort(before) == np.sort(after)).all():
            return None
    from_, to = np.argsort(before, kind="stable"), np.argsort(after, kind="stable")
    order = np.empty_like(from_)
    order[to] = from_
    return order


def _of_rows(plan: Plan, weights: U64) -> U64:
    """A number for each row, which rows of other bits hardly ever share."""
    found = [(_words(part) * weights[: plan.shape[1]]).sum(axis=1, dtype=np.uint64) for part in _parts(plan)]
    return np.concatenate(found)


def _of_columns(plan: Plan, weights: U64) -> U64:
    total, start = np.zeros(plan.shape[1], np.uint64), 0
    for part in _parts(plan):
        words = _words(part)
        total += (words * weights[start : start + len(words), None]).sum(axis=0, dtype=np.uint64)
        start += len(words)
    return total


def _parts(plan: Plan) -> list[Plan]:
    """Some rows at a time."""
    rows = max(1, _STEP // max(1, plan.nbytes // plan.shape[0]))
    return [plan.slice(0, i, min(i + rows, plan.shape[0])) for i in range(0, plan.shape[0], rows)]


def _words(plan: Plan) -> U64:
    return np.frombuffer(read_plan(plan), f"u{plan.itemsize}").reshape(plan.shape).astype(np.uint64)


def _holds(unit: Unit, order: NDArray[np.intp], axis: int) -> bool:
    """Whether the reference in this order is the candidate, bit for bit."""
    if axis == 1:
        pairs = zip(_parts(unit.before), _parts(unit.after), strict=True)
        return all((_words(a)[:, order] == _words(b)).all() for a, b in pairs)
    starts = np.flatnonzero(np.diff(order, prepend=order[0] - 2) != 1)
    ends = [*starts[1:], len(order)]
    return all(
        same(unit.before.slice(0, int(order[i]), int(order[i]) + int(j - i)), unit.after.slice(0, int(i), int(j)))
        for i, j in zip(starts, ends, strict=True)
    )
