"""Parts of a checkpoint as fp32 tensors, read when they are needed and noted down.

fp32 holds every bf16 and fp16 value exactly, its sums round 65,536 times finer than bf16's, so that two logits of one
position are hardly ever equal, and CPUs multiply it fast.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod

import torch
from torch import Tensor

from mtpcheck.errors import UnsupportedError
from mtpcheck.move import fill, scratch, slabs
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress, Silent
from mtpcheck.rows import Row
from mtpcheck.tensormap import TensorMap

_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Weights:
    """Reads from a tensor map of any layout, and notes what was used: ``read`` are the parts, ``embedding_rows`` the
    ids that were looked up, ``nbytes`` what came from the files.

    ``resident`` keeps every tensor, for small models that run many times.
    """

    def __init__(self, tensor_map: TensorMap, resident: bool = False, progress: Progress | None = None) -> None:
        self.tensor_map = tensor_map
        self.note_anew()
        self._progress = progress or Silent()
        self._kept: dict[Hashable, Tensor] | None = {} if resident else None

    def note_anew(self) -> None:
        """Forget what was used so far."""
        self.read: set[str] = set()
        self.embedding_rows: set[int] = set()
        self.nbytes = 0

    def joined(self, row: Row) -> Tensor:
        """The tensor that ``row`` makes of its parts, in its stored shape."""

        def make() -> Tensor:
            plans = {part: self._plan(part) for part in row.parts}
            return self._values(row.join(plans, self.tensor_map.model.shapes), row.parts[0])

        self.read.update(row.parts)
        return self._keep(row.parts, make)

    def part(self, part: str) -> Tensor:
        """One part, in its stored shape."""
        return self.joined(Row(part, (part,)))

    def rows(self, part: str, first: int, stop: int) -> Tensor:
        """Rows ``first <= i < stop`` of a part of two axes."""
        self.read.add(part)
        return self._keep((part, first, stop), lambda: self._values(self._plan(part).slice(0, first, stop), part))

    def lookup(self, part: str, ids: Tensor) -> Tensor:
        """Rows of an embedding: [...] → [..., hidden]. Only rows that are asked for are read."""
        self.read.add(part)
        distinct, place = torch.unique(ids, return_inverse=True)
        self.embedding_rows.update(distinct.tolist())
        if self._kept is not None:
            return self.part(part)[ids]
        plan = self._plan(part)
        picked = [self._values(plan.slice(0, row, row + 1), part) for row in distinct.tolist()]
        return torch.cat(picked)[place]

    def _plan(self, part: str) -> Plan:
        ref = self.tensor_map.parts.get(part)
        if ref is None:
            raise UnsupportedError(f"could not judge: the checkpoint holds no {part}, without which it cannot be run")
        if ref.dtype not in _STORED:
            known = ", ".join(_STORED)
            raise UnsupportedError(f"could not judge: {part} is {ref.dtype}; weights of {known} can be run")
        return ref.plan

    def _values(self, plan: Plan, part: str) -> Tensor:
        """Converted slab by slab, so that the stored bytes take no memory beside the values."""
        dtype = _STORED[self.tensor_map.parts[part].dtype]
        values = torch.empty(prod(plan.shape))
        for start, piece in slabs(plan):
            first, count = start // plan.itemsize, piece.nbytes // plan.itemsize
            stored = scratch(piece.nbytes, "weights")
            fill(piece, stored.data)
            values[first : first + count] = torch.from_numpy(stored).view(dtype)
            self.nbytes += piece.nbytes
            self._progress.advance(piece.nbytes)
        return values.view(plan.shape)

    def _keep(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if self._kept is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
