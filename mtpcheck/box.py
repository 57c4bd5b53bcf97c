"""Boxes: one affine piece of a tensor each, and how a piece is cut, folded and joined to its neighbour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mtpcheck.files import Source

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor and where its elements are.

    Element ``index`` (within ``lo <= index < lo + size``) starts at byte
    ``offset + sum(step * (index - lo))`` of ``source``. ``source`` None means zeros.
    Steps of axes of size one are 0, so that equal boxes compare equal.
    """

    lo: Shape
    size: Shape
    source: Source | None
    offset: int
    steps: Shape


def make_box(lo: Shape, size: Shape, source: Source | None, offset: int, steps: Shape) -> Box:
    """A box in its canonical form."""
    if source is None:
        return Box(lo, size, None, 0, (0,) * len(size))
    return Box(lo, size, source, offset, tuple(0 if n == 1 else s for n, s in zip(size, steps, strict=True)))


def contiguous_steps(shape: Sequence[int], itemsize: int) -> Shape:
    """Bytes per index step of a C-ordered tensor."""
    steps: list[int] = []
    step = itemsize
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))


def split_box(box: Box, axis: int, inner: int) -> list[Box]:
    """The same elements with ``axis`` taken apart into rows of ``inner``: at most a head, whole rows and a tail."""
    lo, n, step = box.lo[axis], box.size[axis], box.steps[axis]
    row, column = divmod(lo, inner)
    last_row, last_column = divmod(lo + n, inner)
    runs: list[tuple[int, int, int, int]] = []  # row, rows, column, columns
    if row == last_row or (row + 1 == last_row and not last_column):
        runs.append((row, 1, column, n))
    else:
        if column:
            runs.append((row, 1, column, inner - column))
            row += 1
        if last_row > row:
            runs.append((row, last_row - row, 0, inner))
        if last_column:
            runs.append((last_row, 1, 0, last_column))
    return [
        make_box(
            (*box.lo[:axis], r, c, *box.lo[axis + 1 :]),
            (*box.size[:axis], rows, columns, *box.size[axis + 1 :]),
            box.source,
            box.offset + (r * inner + c - lo) * step,
            (*box.steps[:axis], step * inner, step, *box.steps[axis + 1 :]),
        )
        for r, rows, c, columns in runs
    ]


def merge_box(box: Box, axis: int, inner: int) -> list[Box]:
    """The same elements with ``axis`` and the next one, of length ``inner``, made one: one box, or one a row."""
    (row, column), (rows, columns) = box.lo[axis : axis + 2], box.size[axis : axis + 2]
    outer_step, step = box.steps[axis : axis + 2]
    straight = columns == inner and (box.source is None or columns == 1 or outer_step == inner * step)
    if rows == 1:
        runs = [(row, 1, step)]
    elif straight:
        runs = [(row, rows, outer_step if columns == 1 else step)]
    else:
        runs = [(r, 1, step) for r in range(row, row + rows)]
    return [
        make_box(
            (*box.lo[:axis], r * inner + column, *box.lo[axis + 2 :]),
            (*box.size[:axis], count * columns, *box.size[axis + 2 :]),
            box.source,
            box.offset + (r - row) * outer_step,
            (*box.steps[:axis], new_step, *box.steps[axis + 2 :]),
        )
        for r, count, new_step in runs
    ]


def join_along(boxes: list[Box], axis: int) -> list[Box]:
    """One pass of joins along ``axis``: boxes equal on all other axes that follow one another."""
    lanes: dict[tuple[object, ...], list[Box]] = defaultdict(list)
    for box in boxes:
        lanes[(dropped(box.lo, axis), dropped(box.size, axis), dropped(box.steps, axis), box.source)].append(box)
    joined: list[Box] = []
    for lane in lanes.values():
        lane.sort(key=lambda b: b.lo[axis])
        current = lane[0]
        for box in lane[1:]:
            both = _joined(current, box, axis)
            if both is None:
                joined.append(current)
                current = box
            else:
                current = both
        joined.append(current)
    return joined


def _joined(a: Box, b: Box, axis: int) -> Box | None:
    n = a.size[axis]
    if a.lo[axis] + n != b.lo[axis]:
        return None
    size = replaced(a.size, axis, n + b.size[axis])
    if a.source is None:
        return make_box(a.lo, size, None, 0, a.steps)
    step = a.steps[axis] if n > 1 else (b.offset - a.offset)
    if step < 0:  # readers take the span from the first to the last byte
        return None
    if b.offset != a.offset + n * step or (b.size[axis] > 1 and b.steps[axis] != step):
        return None
    return make_box(a.lo, size, a.source, a.offset, replaced(a.steps, axis, step))


# ---- shapes


def replaced(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def inserted(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis:])


def dropped(values: Shape, axis: int) -> Shape:
    return values[:axis] + values[axis + 1 :]
