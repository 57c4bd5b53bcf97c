"""A row: one stored tensor and the parts it is made of. Both directions derive from it.

    stored = stack over leading indices ( join of the parts along one axis, factored axes flattened ), padded

The same record describes a Hugging Face tensor (a family's row) and a Megatron tensor (a dialect's row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from mtpcheck.box import Shape
from mtpcheck.errors import FamilyError
from mtpcheck.plan import Plan, concat, stack

PartShape = tuple[Shape, ...]
"""Shape of a part, one inner tuple for each stored axis: ``((groups, heads, dim), (hidden,))`` is stored 2-D."""


def flat(shape: PartShape) -> Shape:
    """The stored shape: factored axes multiplied out."""
    return tuple(prod(axis) for axis in shape)


def factored(shape: PartShape) -> Shape:
    """The part's own shape: every factor an axis."""
    return tuple(n for axis in shape for n in axis)


@dataclass(frozen=True, slots=True)
class Row:
    """One stored tensor.

    ``parts`` are ordered with the stack indices outermost; each group of ``len(parts) / prod(stack)`` parts is
    joined along ``axis`` of their factored shape. ``pad`` is the number of rows the first axis is padded to
    with zeros. ``chained`` parts are laid end to end along a stored axis, factors multiplied out before, so their
    factors need not agree. The first ``turns`` parts of a group, of one shape, take turns along ``axis``. ``offset`` is
    what the stored value is more than the part's. ``origin`` is the file and row of the table, for messages.
    """

    name: str
    parts: tuple[str, ...]
    axis: int = 0
    stack: Shape = ()
    pad: int | None = None
    chained: bool = False
    turns: int = 0
    offset: int = 0
    origin: str = ""

    @property
    def _simple(self) -> bool:
        """One part as it is: nine rows in ten, worth a short way."""
        return len(self.parts) == 1 and not self.stack and self.pad is None

    def groups(self) -> list[tuple[str, ...]]:
        """The parts that are joined, for every index of the stack."""
        n = len(self.parts) // prod(self.stack)
        return [self.parts[i : i + n] for i in range(0, len(self.parts), n)]

    def _axes(self, shape: PartShape) -> PartShape:
        """The axes of a part that ``axis`` counts."""
        return tuple((n,) for n in flat(shape)) if self.chained else shape

    def _joined_shape(self, shapes: Mapping[str, PartShape], group: Sequence[str]) -> PartShape:
        """Shape of one group, its joined axis summed."""
        total = sum(factored(self._axes(shapes[part]))[self.axis] for part in group)
        axes, position = [], 0
        for axis in self._axes(shapes[group[0]]):
            axes.append(tuple(total if position + i == self.axis else n for i, n in enumerate(axis)))
            position += len(axis)
        return tuple(axes)

    def _group_shape(self, shapes: Mapping[str, PartShape]) -> Shape:
        return flat(self._joined_shape(shapes, self.groups()[0]))

    def shape(self, shapes: Mapping[str, PartShape]) -> Shape:
        """Stored shape of the whole tensor, padding included."""
        if self._simple:
            return flat(shapes[self.parts[0]])
        inner = self._group_shape(shapes)
        if self.pad is not None:
            inner = (self.pad, *inner[1:])
        return (*self.stack, *inner)

    def chunks(
        self, plans: Mapping[str, Plan], shapes: Mapping[str, PartShape], padding: Mapping[str, Plan] | None = None
    ) -> list[Plan]:
        """One flattened plan for each stack index, in order: parts → stored. Rows beyond a part, up to ``pad``, are
        those of ``padding`` as far as there are any, then zeros."""
        inner = self._group_shape(shapes)
        chunks = []
        for group in self.groups():
            own = [plans[part].reshape(factored(self._axes(shapes[part]))) for part in group]
            chunk = concat(self._woven(own), self.axis).reshape(inner)
            if self.pad is not None:
                pieces, missing = [chunk], self.pad - inner[0]
                if beyond := (padding or {}).get(group[0]):
                    pieces.append(beyond.slice(0, 0, min(missing, beyond.shape[0])))
                    missing -= pieces[-1].shape[0]
                chunk = concat([*pieces, Plan.zeros((missing, *inner[1:]), chunk.itemsize)], 0)
            chunks.append(chunk)
        return chunks

    def _woven(self, plans: list[Plan]) -> list[Plan]:
        """Those that take turns as one: what follows ``axis`` holds a piece of each, and becomes part of it."""
        if not self.turns:
            return plans
        first, rest = plans[: self.turns], plans[self.turns :]
        shape = list(first[0].shape)
        shape[self.axis] *= self.turns
        return [concat(first, self.axis + 1).reshape(shape), *rest]

    def _unwoven(self, woven: Plan) -> list[Plan]:
        """The inverse of ``_woven``."""
        shape = list(woven.shape)
        shape[self.axis] //= self.turns
        each = shape[self.axis + 1]
        shape[self.axis + 1] *= self.turns
        whole = woven.reshape(shape)
        return [whole.slice(self.axis + 1, i * each, (i + 1) * each) for i in range(self.turns)]

    def join(
        self, plans: Mapping[str, Plan], shapes: Mapping[str, PartShape], padding: Mapping[str, Plan] | None = None
    ) -> Plan:
        """Parts → stored tensor."""
        chunks = self.chunks(plans, shapes, padding)
        return stack(chunks).reshape(self.shape(shapes)) if self.stack else chunks[0]

    def split(self, stored: Plan, shapes: Mapping[str, PartShape]) -> dict[str, Plan]:
        """Stored tensor → parts; the inverse of ``join``. Rows beyond the parts (padding) are left out."""
        if self._simple:
            return {self.parts[0]: stored.reshape(factored(shapes[self.parts[0]]))}
        chunks = [stored]
        for _ in self.stack:
            chunks = [inner for chunk in chunks for inner in chunk.unstack()]
        parts: dict[str, Plan] = {}
        for group, chunk in zip(self.groups(), chunks, strict=True):
            if self.pad is not None:
                chunk = chunk.slice(0, 0, self._group_shape(shapes)[0])
            whole = chunk.reshape(factored(self._joined_shape(shapes, group)))
            lengths = [factored(self._axes(shapes[part]))[self.axis] for part in group]
            if self.turns:
                lengths = [sum(lengths[: self.turns]), *lengths[self.turns :]]
            ends = list(accumulate(lengths))
            own = [whole.slice(self.axis, end - n, end) for n, end in zip(lengths, ends, strict=True)]
            if self.turns:
                own = [*self._unwoven(own[0]), *own[1:]]
            for part, plan in zip(group, own, strict=True):
                parts[part] = plan.reshape(factored(shapes[part])).normalise()
        return parts


def prove_invertible(rows: Sequence[Row], shapes: Mapping[str, PartShape]) -> None:
    """Check that names and parts are claimed once, and that every row's inverse gives its parts back.

    Raises FamilyError naming the row. Works on symbolic sources; no byte is read.
    """
    names: dict[str, str] = {}
    claimed: dict[str, str] = {}
    for row in rows:
        if row.name in names:
            raise FamilyError(f"{row.origin}: two rows spell {row.name!r} (the other: {names[row.name]})")
        names[row.name] = row.origin
        for part in row.parts:
            if part not in shapes:
                raise FamilyError(f"{row.origin}: {row.name!r} uses {part!r}, which no block of the family declares")
            if part in claimed:
                raise FamilyError(f"{row.origin}: part {part!r} is stored twice (the other: {claimed[part]})")
            claimed[part] = row.origin
        sources = {part: Plan.region(_Symbol(part), 0, factored(shapes[part]), 2) for part in row.parts}
        try:
            back = row.split(row.join(sources, shapes), shapes)
        except ValueError as error:
            raise FamilyError(f"{row.origin}: the parts of {row.name!r} do not fit together: {error}") from None
        if any(back[part].normalise() != sources[part] for part in row.parts):
            raise FamilyError(f"{row.origin}: {row.name!r} is not invertible")


@dataclass(frozen=True, slots=True)
class _Symbol:
    """A source that stands for a part in a proof and is never read."""

    name: str
    size: int = 0

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return self.name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        raise AssertionError(f"a proof must not read {self.name}")
