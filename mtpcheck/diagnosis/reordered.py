"""Rows or columns in an order that no theory names: told by what they hold, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpcheck.diagnosis.arranged import Unit, units
from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.move import read_plan
from mtpcheck.plan import Plan

_STEP = 1 << 20  # bytes
_GLANCE = 16  # elements
_MOST = 1 << 20  # rows or columns that are told apart: as many as a vocabulary has
_BLOCK = 8 << 20  # bytes

U64 = NDArray[np.uint64]


def reordered(case: Case, key: str) -> Told:
    """The pieces of the matrix that ``key`` lies in, if its rows or columns are all there in another order."""
    for unit in units(case, key):
        for axis, word, marks in ((0, "rows", _of_rows), (1, "columns", _of_columns)):
            order = _order(unit, axis, marks) if 1 < unit.before.shape[axis] <= _MOST else None
            if order is not None and _holds(unit, order, axis):
                told = f"the {len(order):,} {word} are all there and stand in another order"
                return dict.fromkeys(unit.parts, Cause(f"{word}-permuted", told))
    return {}


def _order(unit: Unit, axis: int, marks: Callable[[Plan, U64], U64]) -> NDArray[np.intp] | None:
    """Which row (or column) of the reference each of the candidate's is; None if they are not the same ones."""
    whole = unit.before.shape[1 - axis]
    weights = np.random.default_rng().integers(0, 1 << 63, whole, np.uint64) | np.uint64(1)
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


def _raw(plan: Plan) -> NDArray[Any]:
    return np.frombuffer(read_plan(plan), f"V{plan.itemsize}").reshape(plan.shape)


def _words(plan: Plan) -> U64:
    return _raw(plan).view(f"u{plan.itemsize}").astype(np.uint64)


def _holds(unit: Unit, order: NDArray[np.intp], axis: int) -> bool:
    """Whether the reference in this order is the candidate, bit for bit."""
    size = unit.before.shape[1 - axis]
    step = max(_GLANCE, _BLOCK // (len(order) * unit.before.itemsize))  # all rows, some columns at a time; or turned
    cut = ((i, min(i + step, size)) for i in range(0, size, step))
    pairs = ((_raw(side.slice(1 - axis, i, j)) for side in (unit.before, unit.after)) for i, j in cut)
    return all((np.take(a, order, axis) == b).all() for a, b in pairs)
