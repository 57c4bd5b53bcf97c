"""Values that one side keeps with a constant added: Megatron holds some gains as their distance from one.

Adding rounds, so the way back does not always give the value that was there (in bf16 not for most gains below 0.5).
What cannot be had back is kept beside Megatron, and used for every value that still gives what Megatron holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtpcheck.compare import differs
from mtpcheck.dtypes import NARROW, WIDE, cast, cast_values
from mtpcheck.move import by_rows, bytes_of
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding, warning
from mtpcheck.rows import Row
from mtpcheck.tensormap import DTYPE_BITS, TensorMap, TensorRef

_BITS = {2: np.uint16, 4: np.uint32}
_FLOATS = (WIDE, *NARROW)


def _converted(raw: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    size = DTYPE_BITS[target] // 8
    out = np.empty(raw.nbytes * 8 // DTYPE_BITS[source] * size, np.uint8)
    cast_values(raw, source, out, target)
    return out


def _sum(raw: NDArray[np.uint8], dtype: str, by: int) -> NDArray[np.uint8]:
    """Values plus ``by``, added in fp32 and rounded to their dtype: as torch adds in bf16 and fp16."""
    wide = _converted(raw, dtype, WIDE).view(np.float32) + np.float32(by)
    return _converted(wide.view(np.uint8), WIDE, dtype)


@dataclass(frozen=True, eq=False)
class Offset:
    """A source: ``ref`` plus ``by``, in C order, computed as it is read.

    With ``kept`` in place of every sum whose kept value is what ``ref`` was made of; in the dtype of ``kept``.
    """

    ref: TensorRef
    by: int
    kept: TensorRef | None = None

    @property
    def name(self) -> str:
        return f"{self.ref.dtype} {self.by:+d}"

    @property
    def dtype(self) -> str:
        return self.kept.dtype if self.kept else self.ref.dtype

    @property
    def size(self) -> int:
        return DTYPE_BITS[self.dtype] // 8 * self.ref.elements

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        plan, element = self.ref.plan, offset // (DTYPE_BITS[self.dtype] // 8)
        index = np.unravel_index(element, plan.shape)
        return f"{plan.place_of(tuple(int(i) for i in index))} ({self.by:+d})"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        itemsize = DTYPE_BITS[self.dtype] // 8

        def make(first: int, end: int, out: NDArray[np.uint8]) -> None:
            held = bytes_of(self.ref.plan.slice(0, first, end), "offset")
            if self.kept is None:
                out[:] = _sum(held, self.dtype, self.by)
                return
            kept = bytes_of(self.kept.plan.slice(0, first, end), "kept")
            again = _converted(_sum(kept, self.dtype, -self.by), self.dtype, self.ref.dtype)
            bits, same = _BITS[itemsize], _BITS[self.ref.plan.itemsize]
            plain = _sum(_converted(held, self.ref.dtype, self.dtype), self.dtype, self.by)
            out.view(bits)[:] = np.where(again.view(same) == held.view(same), kept.view(bits), plain.view(bits))

        by_rows(buffer, offset, itemsize * prod(self.ref.shape[1:]), make, "made")


def _added(ref: TensorRef, by: int, kept: TensorRef | None = None) -> TensorRef:
    source = Offset(ref, by, kept)
    return TensorRef(source.dtype, Plan.region(source, 0, ref.shape, DTYPE_BITS[source.dtype] // 8))


def offsets(rows: Iterable[Row]) -> dict[str, int]:
    """Part → what a Megatron checkpoint of these rows adds to it; parts that it holds as they are are left out."""
    return {part: row.offset for row in rows if row.offset for part in row.parts}


def from_megatron(tensor_map: TensorMap, by: Mapping[str, int], aside: Mapping[str, TensorRef]) -> TensorMap:
    """Parts in place of Megatron's values, which have ``by`` more. ``aside``: what was kept, by HF name."""
    held = {part: tensor_map.parts[part] for part in by if _is_float(tensor_map.parts.get(part))}
    kept = {row.parts[0]: aside[row.name] for row in tensor_map.model.rows if row.name in aside}
    made = {}
    for part, ref in held.items():
        own = kept.get(part)
        fits = _is_float(own) and own is not None and own.shape == ref.shape
        made[part] = _added(ref, -by[part], own if fits else None)
    return replace(tensor_map, parts={**tensor_map.parts, **made}, held=held)


def _is_float(ref: TensorRef | None) -> bool:
    return ref is not None and ref.dtype in _FLOATS


def as_held(tensor_map: TensorMap, by: Mapping[str, int]) -> TensorMap:
    """Megatron's values in place of parts: those that a Megatron source held, else sums."""
    own = {part: n for part, n in by.items() if _is_float(tensor_map.parts.get(part))}
    held = {part: tensor_map.held.get(part) or _added(tensor_map.parts[part], n) for part, n in own.items()}
    return replace(tensor_map, parts={**tensor_map.parts, **held}, held=held)


def inexact(tensor_map: TensorMap, by: Mapping[str, int]) -> list[str]:
    """Stored names of tensors that a sum and a difference do not give back."""
    own = {part: tensor_map.parts[part] for part in by if _is_float(tensor_map.parts.get(part))}
    return [
        tensor_map.names[part]
        for part, ref in own.items()
        if part not in tensor_map.held and differs(ref, _added(_added(ref, by[part]), -by[part]))
    ]


def rounded(tensor_map: TensorMap, by: Mapping[str, int]) -> Iterator[Finding]:
    """Parts that lost something of what Megatron holds, where it is nearer to one than their dtype can tell.

    ``by``: what Megatron adds to each."""
    for part, ref in tensor_map.held.items():
        if differs(ref, cast(_added(tensor_map.parts[part], by[part]), ref.dtype)):
            what = f"is a distance from one in Megatron, finer than {tensor_map.parts[part].dtype} can tell the sum"
            yield warning("values.rounded", tensor_map.names[part], what)
