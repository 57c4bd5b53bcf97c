"""Do two plans give the same bytes? Answered from a few runs of elements where it can be, whole where it must be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

from mtpcheck.box import Shape
from mtpcheck.compare import compare_all
from mtpcheck.move import SLAB, read_plan
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorRef

_RUNS, _LONG = 6, 32
_PIECE = 4 * SLAB  # bytes
_SMALL = 4096  # bytes: read at once


def samples(plan: Plan) -> Iterator[bytes]:
    """Some runs of elements along the last axis; plans of one shape give them at the same places."""
    for lead, (start, stop) in _places(plan.shape):
        cut = plan
        for axis, i in enumerate(lead):
            cut = cut.slice(axis, i, i + 1)
        yield bytes(read_plan(cut.slice(len(lead), start, stop) if plan.shape else cut))


@lru_cache(maxsize=4096)
def _places(shape: Shape) -> tuple[tuple[Shape, tuple[int, int]], ...]:
    """Index on all axes but the last, and first and last element on that."""
    if not shape:
        return (((), (0, 1)),)
    drawn = random.Random(repr(shape))  # any places will do, if they are the same ones every time
    found = []
    for _ in range(_RUNS if all(shape) else 0):
        start = drawn.randrange(max(1, shape[-1] - _LONG + 1))
        run = start, min(start + _LONG, shape[-1])
        found.append((tuple(drawn.randrange(n) for n in shape[:-1]), run))
    return tuple(found)


def same(a: Plan, b: Plan) -> bool:
    """Whether two plans have one shape and give the same bytes, all of them."""
    if (a.shape, a.itemsize) != (b.shape, b.itemsize):
        return False
    if a.nbytes <= _SMALL:
        return read_plan(a) == read_plan(b)
    if any(x != y for x, y in zip(samples(a), samples(b), strict=True)):
        return False
    if a.nbytes <= SLAB:
        return read_plan(a) == read_plan(b)
    axis = _outermost(a)
    step = max(1, _PIECE * a.shape[axis] // a.nbytes)
    pairs = []
    for i in range(0, a.shape[axis], step):
        left, right = (TensorRef("", plan.slice(axis, i, min(i + step, plan.shape[axis]))) for plan in (a, b))
        pairs.append(("", left, right))
    return not compare_all(pairs)


def _outermost(plan: Plan) -> int:
    """The axis whose neighbours lie farthest apart in the file: cut along it, a transposed matrix is read in runs."""
    box = plan.boxes[0]
    return max(range(len(plan.shape)), key=lambda axis: box.steps[axis] if box.size[axis] > 1 else 0)
