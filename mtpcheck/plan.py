"""Plans: which bytes of which files, in which order, make up one tensor.

A plan is a set of disjoint boxes that tile the tensor. Each box maps its indices affinely to bytes of one
source, or is zeros. Slicing, permuting, joining and reshaping a plan give a plan, so a conversion is algebra
on plans and never computes on values: bits survive by construction, for every dtype.

``normalise`` joins what touches. A tensor that went there and back must normalise to one box that reads its
source region straight through; that is a proof of the mapping without reading a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from mtpcheck.box import (
    Box,
    Shape,
    contiguous_steps,
    dropped,
    inserted,
    join_along,
    make_box,
    merge_box,
    replaced,
    split_box,
)
from mtpcheck.files import Source


@dataclass(frozen=True, slots=True)
class Plan:
    """Boxes that tile a tensor of ``shape`` with elements of ``itemsize`` bytes, without gap or overlap."""

    shape: Shape
    itemsize: int
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    # ---- making plans

    @staticmethod
    def region(source: Source, offset: int, shape: Sequence[int], itemsize: int) -> Plan:
        """A C-ordered tensor that starts at byte ``offset`` of ``source``."""
        return Plan.strided(source, offset, shape, contiguous_steps(shape, itemsize), itemsize)

    @staticmethod
    def strided(source: Source, offset: int, shape: Sequence[int], steps: Sequence[int], itemsize: int) -> Plan:
        shape = tuple(shape)
        return Plan(shape, itemsize, _whole(shape, source, offset, tuple(steps)))

    @staticmethod
    def zeros(shape: Sequence[int], itemsize: int) -> Plan:
        shape = tuple(shape)
        return Plan(shape, itemsize, _whole(shape, None, 0, shape))

    @staticmethod
    def place(shape: Shape, itemsize: int, placed: Iterable[tuple[Shape, Plan]]) -> Plan:
        """Put plans at offsets of a bigger tensor. The caller vouches that they tile it."""
        boxes = [
            Box(tuple(a + o for a, o in zip(box.lo, at, strict=True)), box.size, box.source, box.offset, box.steps)
            for at, plan in placed
            for box in plan.boxes
        ]
        return Plan(shape, itemsize, tuple(boxes))

    # ---- operations

    def slice(self, axis: int, start: int, stop: int) -> Plan:
        """Indices ``start <= i < stop`` of one axis."""
        boxes = []
        for box in self.boxes:
            lo = max(box.lo[axis], start)
            n = min(box.lo[axis] + box.size[axis], stop) - lo
            if n > 0:
                offset = box.offset + (lo - box.lo[axis]) * box.steps[axis]
                boxes.append(
                    make_box(
                        replaced(box.lo, axis, lo - start), replaced(box.size, axis, n), box.source, offset, box.steps
                    )
                )
        return Plan(replaced(self.shape, axis, stop - start), self.itemsize, tuple(boxes))

    def unstack(self) -> list[Plan]:
        """One plan for each index of the first axis; linear in the number of boxes."""
        found: list[list[Box]] = [[] for _ in range(self.shape[0])]
        for box in self.boxes:
            for i in range(box.size[0]):
                offset = box.offset + i * box.steps[0]
                found[box.lo[0] + i].append(make_box(box.lo[1:], box.size[1:], box.source, offset, box.steps[1:]))
        return [Plan(self.shape[1:], self.itemsize, tuple(boxes)) for boxes in found]

    def permute(self, order: Sequence[int]) -> Plan:
        """Reorder the axes; axis ``i`` of the result is axis ``order[i]`` of this plan."""

        def pick(values: Shape) -> Shape:
            return tuple(values[i] for i in order)

        boxes = tuple(make_box(pick(b.lo), pick(b.size), b.source, b.offset, pick(b.steps)) for b in self.boxes)
        return Plan(pick(self.shape), self.itemsize, boxes)

    def reshape(self, shape: Sequence[int]) -> Plan:
        """The same elements in C order under another shape of equal size."""
        shape = tuple(shape)
        if prod(shape) != prod(self.shape):
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        if shape == self.shape or not self.boxes:
            return Plan(shape, self.itemsize, self.boxes)
        plan, axis = self, 0
        for old, new in _matching_groups(self.shape, shape):
            for _ in range(len(old) - 1):
                plan = plan._merge(axis)
            if not old:
                plan = plan._insert(axis)
            for n in reversed(new[1:]):
                plan = plan._split(axis, n)
            if not new:
                plan = plan._drop(axis)
            axis += len(new)
        return plan

    def _insert(self, axis: int) -> Plan:
        boxes = tuple(
            Box(inserted(b.lo, axis, 0), inserted(b.size, axis, 1), b.source, b.offset, inserted(b.steps, axis, 0))
            for b in self.boxes
        )
        return Plan(inserted(self.shape, axis, 1), self.itemsize, boxes)

    def _drop(self, axis: int) -> Plan:
        boxes = tuple(
            Box(dropped(b.lo, axis), dropped(b.size, axis), b.source, b.offset, dropped(b.steps, axis))
            for b in self.boxes
        )
        return Plan(dropped(self.shape, axis), self.itemsize, boxes)

    def _split(self, axis: int, inner: int) -> Plan:
        """Axis of ``a * inner`` elements becomes two axes ``(a, inner)``."""
        boxes = [piece for box in self.boxes for piece in split_box(box, axis, inner)]
        shape = (*self.shape[:axis], self.shape[axis] // inner, inner, *self.shape[axis + 1 :])
        return Plan(shape, self.itemsize, tuple(boxes))

    def _merge(self, axis: int) -> Plan:
        """Axes ``axis`` and ``axis + 1`` become one."""
        inner = self.shape[axis + 1]
        boxes = [piece for box in self.boxes for piece in merge_box(box, axis, inner)]
        shape = (*self.shape[:axis], self.shape[axis] * inner, *self.shape[axis + 2 :])
        return Plan(shape, self.itemsize, tuple(boxes))

    # ---- reading the result

    def normalise(self) -> Plan:
        """Join boxes that continue one another, until none does; boxes come out ordered by position.

        A tensor that is one straight run of bytes always becomes one box. Other plans keep, at worst, more boxes
        than they need.
        """
        region = self.as_region()
        if region is not None:
            return Plan.region(*region, self.shape, self.itemsize)
        boxes = list(self.boxes)
        count = len(boxes) + 1
        while len(boxes) < count:
            count = len(boxes)
            for axis in reversed(range(len(self.shape))):
                boxes = join_along(boxes, axis)
        return Plan(self.shape, self.itemsize, tuple(sorted(boxes, key=lambda b: (b.lo, b.size))))

    def as_region(self) -> tuple[Source, int] | None:
        """(source, offset) if the tensor is one straight run of bytes, else None.

        Exact, since the boxes tile the tensor: each must read just the bytes that its place in the run asks for.
        """
        if not self.boxes or (source := self.boxes[0].source) is None:
            return None
        straight = contiguous_steps(self.shape, self.itemsize)
        start = None
        for box in self.boxes:
            begin = box.offset - sum(i * step for i, step in zip(box.lo, straight, strict=True))
            start = begin if start is None else start
            fits = all(n == 1 or a == b for n, a, b in zip(box.size, box.steps, straight, strict=True))
            if box.source != source or begin != start or not fits:
                return None
        return source, start or 0

    def same_bytes(self, other: Plan) -> bool:
        """Whether both plans read the same byte for every byte of the tensor, however they are cut into boxes."""
        return (self.shape, self.itemsize) == (other.shape, other.itemsize) and all(
            _reads_as(piece, box) for box in other.boxes for piece in self._within(box)
        )

    def _within(self, box: Box) -> Iterator[Box]:
        part = self
        for axis, (lo, n) in enumerate(zip(box.lo, box.size, strict=True)):
            part = part.slice(axis, lo, lo + n)
        yield from part.boxes

    def place_of(self, index: Shape) -> str:
        """File and byte of one element, in words; empty if it is a zero that stands in no file."""
        for box in self.boxes:
            at = [i - lo for i, lo in zip(index, box.lo, strict=True)]
            if box.source and all(0 <= i < n for i, n in zip(at, box.size, strict=True)):
                return box.source.place_of(box.offset + sum(i * s for i, s in zip(at, box.steps, strict=True)))
        return ""


def concat(plans: Sequence[Plan], axis: int) -> Plan:
    """Join along an existing axis. All other axes must agree."""
    first = plans[0]
    start, placed = 0, []
    for plan in plans:
        if dropped(plan.shape, axis) != dropped(first.shape, axis) or plan.itemsize != first.itemsize:
            raise ValueError(f"cannot join {plan.shape} to {first.shape} along axis {axis}")
        placed.append((replaced((0,) * len(plan.shape), axis, start), plan))
        start += plan.shape[axis]
    return Plan.place(replaced(first.shape, axis, start), first.itemsize, placed)


def stack(plans: Sequence[Plan]) -> Plan:
    """Join along a new first axis."""
    return concat([plan._insert(0) for plan in plans], 0)


def _reads_as(piece: Box, box: Box) -> bool:
    """Whether ``piece``, placed relative to ``box``, reads just what ``box`` reads there."""
    if piece.source is None or piece.source != box.source:
        return piece.source is box.source
    offset = box.offset + sum(i * step for i, step in zip(piece.lo, box.steps, strict=True))
    steps = zip(piece.size, piece.steps, box.steps, strict=True)
    return piece.offset == offset and all(n == 1 or a == b for n, a, b in steps)


def _whole(shape: Shape, source: Source | None, offset: int, steps: Shape) -> tuple[Box, ...]:
    """One box for all of a tensor; none for an empty one."""
    return (make_box((0,) * len(shape), shape, source, offset, steps),) if all(shape) else ()


def _matching_groups(old: Shape, new: Shape) -> list[tuple[Shape, Shape]]:
    """Cut two shapes of equal size into the shortest runs of axes with equal products."""
    groups: list[tuple[Shape, Shape]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = (i, j)
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((old[a:i], new[b:j]))
    return groups
