"""The only mover of bytes: fills buffers from plans, in slabs of bounded size.

Long runs go straight from the file into place; short ones through one read of the span they lie in and a
strided copy. Which is faster where was measured, see docs/benchmarks.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import product
from math import gcd

import numpy as np

from mtpcheck.box import Box, Shape, contiguous_steps
from mtpcheck.files import Source
from mtpcheck.plan import Plan

SLAB = 2 << 20
"""Bytes of one step. With less, two workers wait for the interpreter lock more than they gain (docs/benchmarks.md)."""

_DIRECT = 32 << 10  # runs at least this long are read in place, one call each

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_own = threading.local()


def scratch(nbytes: int, use: str) -> Bytes:
    """Memory of the calling thread, valid until it asks for the same ``use`` again.

    Memory made anew for every slab would be zeroed and faulted in every time, which costs as much as a comparison.
    """
    kept: Bytes | None = getattr(_own, use, None)
    if kept is None or len(kept) < nbytes:
        kept = np.empty(max(nbytes, SLAB), np.uint8)
        setattr(_own, use, kept)
    return kept[:nbytes]


def slabs(plan: Plan, limit: int = SLAB) -> Iterator[tuple[int, Plan]]:
    """Cut a plan into (first byte, sub-plan) along its leading axes, each at most ``limit`` bytes if it can be.

    The cuts depend on the shape alone: two plans of one shape are cut alike.
    """
    return _slabs(plan, limit, 0)


def _slabs(plan: Plan, limit: int, start: int) -> Iterator[tuple[int, Plan]]:
    nbytes = plan.nbytes
    axis = next((i for i, n in enumerate(plan.shape) if n > 1), None)
    if nbytes <= limit or axis is None:
        if nbytes:
            yield start, plan
        return
    row = nbytes // plan.shape[axis]
    rows = max(1, limit // row)
    for i in range(0, plan.shape[axis], rows):
        part = plan.slice(axis, i, min(i + rows, plan.shape[axis]))
        if row <= limit:
            yield start + i * row, part
        else:
            yield from _slabs(part, limit, start + i * row)


def straight_run(plan: Plan) -> tuple[Source, int] | None:
    """(source, offset) if the plan is one box that is one run of bytes. Unlike ``Plan.as_region`` it joins nothing."""
    if len(plan.boxes) != 1:
        return None
    box, run = plan.boxes[0], plan.itemsize
    if box.source is None:
        return None
    for n, step in zip(reversed(box.size), reversed(box.steps), strict=True):
        if n > 1 and step != run:
            return None
        run *= n
    return box.source, box.offset


def fill(plan: Plan, buffer: memoryview) -> None:
    """Write the tensor, in C order, into ``buffer`` (``plan.nbytes`` writable bytes).

    Raises FormatError if a source ends early.
    """
    straight = straight_run(plan)
    if straight is not None:
        straight[0].read_into(buffer, straight[1])
        return
    steps = contiguous_steps(plan.shape, plan.itemsize)
    for box in plan.boxes:
        start = sum(a * s for a, s in zip(box.lo, steps, strict=True))
        loops, run = _loops(box, steps, plan.itemsize)
        if box.source is None:
            _view(buffer, start, loops, run, 1)[...] = 0
        else:
            _copy(buffer, start, box.source, box.offset, loops, run)


def bytes_of(plan: Plan, use: str) -> Bytes:
    """The tensor in C order: the file itself where it is one run of a file, else a copy in memory of the thread."""
    run = straight_run(plan)
    mapped = run[0].mapped(run[1], plan.nbytes) if run else None
    if mapped is not None:
        return np.frombuffer(mapped, np.uint8)
    copy = scratch(plan.nbytes, use)
    fill(plan, copy.data)
    return copy


def by_rows(buffer: memoryview, offset: int, row: int, make: Callable[[int, int, Bytes], None], use: str) -> None:
    """Fill ``buffer`` from byte ``offset`` of something that is computed row by row, each of ``row`` bytes.

    ``make(first, end, out)`` fills ``out`` with whole rows: the buffer itself where it holds just these, else memory
    of the thread.
    """
    first, end = offset // row, -(-(offset + len(buffer)) // row)
    target = np.frombuffer(buffer, np.uint8)
    if len(target) == row * (end - first):
        make(first, end, target)
        return
    rows = scratch(row * (end - first), use)
    make(first, end, rows)
    start = offset - row * first
    target[:] = rows[start : start + len(target)]


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset`` of an open file."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def read_plan(plan: Plan) -> bytearray:
    """The whole tensor in C order. For small tensors and tests; streaming code uses ``slabs``."""
    buffer = bytearray(plan.nbytes)
    fill(plan, memoryview(buffer))
    return buffer


_Loops = list[tuple[int, int, int]]  # (count, destination step, source step), outermost first


def _loops(box: Box, steps: Shape, itemsize: int) -> tuple[_Loops, int]:
    """Express a box as as few loops as possible round one contiguous run."""
    loops: _Loops = []
    run = itemsize
    for n, to, at in reversed(list(zip(box.size, steps, box.steps, strict=True))):
        if n == 1:
            continue
        if not loops and to == run and at == run:
            run *= n
        elif loops and to == loops[0][0] * loops[0][1] and at == loops[0][0] * loops[0][2]:
            count, inner_to, inner_at = loops[0]
            loops[0] = (count * n, inner_to, inner_at)
        else:
            loops.insert(0, (n, to, at))
    return loops, run


def _copy(buffer: memoryview, start: int, source: Source, offset: int, loops: _Loops, run: int) -> None:
    if not loops:
        source.read_into(buffer[start : start + run], offset)
        return
    span = run + sum((n - 1) * at for n, _, at in loops)
    useful = run
    for n, _, _ in loops:
        useful *= n
    if run >= _DIRECT:
        for index in product(*(range(n) for n, _, _ in loops)):
            to = start + sum(i * loop[1] for i, loop in zip(index, loops, strict=True))
            at = offset + sum(i * loop[2] for i, loop in zip(index, loops, strict=True))
            source.read_into(buffer[to : to + run], at)
    elif span <= 8 * useful or (len(loops) == 1 and span <= 4 * SLAB):
        whole = scratch(span, "span").data
        source.read_into(whole, offset)
        word = _word(run, loops)
        np.copyto(_view(buffer, start, loops, run, 1, word), _view(whole, 0, loops, run, 2, word))
    else:
        (n, to, at), inner = loops[0], loops[1:]
        for i in range(n):
            _copy(buffer, start + i * to, source, offset + i * at, inner, run)


def _word(run: int, loops: _Loops) -> int:
    """The widest machine word in which every run and step is whole."""
    return gcd(8, run, *(step for loop in loops for step in loop[1:]))


def _view(
    buffer: memoryview, start: int, loops: _Loops, run: int, which: int, word: int = 1
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    shape = (*(loop[0] for loop in loops), run // word)
    strides = (*(loop[which] for loop in loops), word)
    return np.ndarray(shape, dtype=f"u{word}", buffer=buffer, offset=start, strides=strides)
