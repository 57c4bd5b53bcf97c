"""Floating-point dtypes: what one side holds wider or narrower than the other, and how a value gets across.

Widening is exact. Narrowing rounds to nearest even; it is used only where the values come back, or to ask whether
values that were kept still round to what Megatron holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpcheck.compare import compare_all
from mtpcheck.move import by_rows, bytes_of
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, note, warning
from mtpcheck.rows import Row
from mtpcheck.tensormap import DTYPE_BITS, TensorMap, TensorRef

WIDE, NARROW = "F32", ("BF16", "F16")
"""F32 holds every value of the other two, neither of which holds those of the other."""

_SIZE = {dtype: DTYPE_BITS[dtype] // 8 for dtype in (WIDE, *NARROW)}


@dataclass(frozen=True, eq=False)
class Cast:
    """A source: the values of a tensor in another dtype, in C order, computed as they are read."""

    ref: TensorRef
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.ref.dtype} as {self.dtype}"

    @property
    def size(self) -> int:
        return _SIZE[self.dtype] * self.ref.elements

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        plan, element = self.ref.plan, offset // _SIZE[self.dtype]
        index = np.unravel_index(element, plan.shape) if plan.shape else ()
        return f"{plan.place_of(tuple(int(i) for i in index))} (as {self.dtype})"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        plan = self.ref.plan if self.ref.plan.shape else self.ref.plan.reshape((1,))

        def make(first: int, end: int, out: NDArray[np.uint8]) -> None:
            cast_values(bytes_of(plan.slice(0, first, end), "cast"), self.ref.dtype, out, self.dtype)

        by_rows(buffer, offset, _SIZE[self.dtype] * prod(plan.shape[1:]), make, "made")


def cast_values(raw: NDArray[np.uint8], source: str, out: NDArray[np.uint8], target: str) -> None:
    """Values of ``raw`` into ``out``. A NaN stays one; widened to F32 it keeps its bits."""
    if source == "BF16":
        wide = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = raw.view(np.float16 if source == "F16" else np.float32)
    if target == "BF16":
        bits = wide.astype(np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        upper = (bits >> 16).astype(np.uint16)
        quiet = upper | np.where(upper & 0x7F, 0, 0x40).astype(np.uint16)  # else it could become an infinity
        out.view(np.uint16)[:] = np.where(np.isnan(wide), quiet, rounded)
    else:
        with np.errstate(over="ignore"):
            out.view(np.float16 if target == "F16" else np.float32)[:] = wide


def cast(ref: TensorRef, dtype: str) -> TensorRef:
    """The tensor in another of the three dtypes."""
    if ref.dtype == dtype:
        return ref
    return TensorRef(dtype, Plan.region(Cast(ref, dtype), 0, ref.shape, _SIZE[dtype]))


# ---- into Megatron


def joinable(tensor_map: TensorMap, rows: Iterable[Row]) -> TensorMap:
    """The same map with parts widened where Megatron joins several dtypes in one tensor."""
    parts = dict(tensor_map.parts)
    for row in rows:
        dtypes = {parts[part].dtype for part in row.parts if part in parts}
        if len(dtypes) > 1 and dtypes <= _SIZE.keys():
            parts.update({part: cast(parts[part], WIDE) for part in row.parts})
    return replace(tensor_map, parts=parts)


_PARAMS: Mapping[Any, str] = {"bfloat16": "BF16", "float16": "F16"}


def rounded_by_megatron(tensor_map: TensorMap, fp32: set[str]) -> set[str]:
    """Stored names of tensors that Megatron's modules will hold in a narrower dtype, once it has loaded them.

    ``fp32``: parts that they hold in fp32 whatever the dtype of the others.
    """
    if tensor_map.facts.get("dtype") not in _PARAMS:
        return set()
    return {
        tensor_map.names[part]
        for part, ref in tensor_map.parts.items()
        if ref.dtype == WIDE and part not in fp32 and part not in tensor_map.copies
    }


# ---- back


def as_declared(
    tensors: Mapping[str, TensorRef], dtypes: Mapping[str, str], aside: Mapping[str, TensorRef], progress: Progress
) -> tuple[dict[str, TensorRef], list[Finding]]:
    """Tensors of an export in the dtypes of the source, as far as that is no change of Megatron's values.

    Where the source was wider, what was kept aside is used if all of it still rounds to what Megatron holds, else
    Megatron's values are widened. Where it was narrower, they are narrowed if they all fit.
    """
    tried: dict[str, TensorRef] = {}
    pairs: list[tuple[str, TensorRef, TensorRef]] = []
    other = {n: r for n, r in tensors.items() if {r.dtype, dtypes.get(n)} <= _SIZE.keys() and r.dtype != dtypes[n]}
    for name, ref in other.items():
        kept = aside.get(name)
        if dtypes[name] != WIDE:
            tried[name] = cast(ref, dtypes[name])
            pairs.append((name, ref, cast(tried[name], ref.dtype)))
        elif kept is not None and (kept.dtype, kept.shape) == (WIDE, ref.shape):
            tried[name] = kept
            pairs.append((name, ref, cast(kept, ref.dtype)))
    changed = compare_all(pairs, progress)
    result, findings = dict(tensors), list[Finding]()
    for name, ref in other.items():
        if name in tried and name not in changed:
            result[name] = tried[name]
            if dtypes[name] == WIDE:
                findings.append(
                    note("values.kept", name, f"is {ref.dtype} in Megatron; the kept {WIDE} values are used")
                )
        elif dtypes[name] == WIDE:
            result[name] = cast(ref, WIDE)
            why = f"{changed[name].elements:,} kept values do not round to it" if name in tried else "none were kept"
            what = f"was {WIDE} and is {ref.dtype} in Megatron, whose values are used: {why}"
            findings.append(warning("values.rounded", name, what))
        else:
            what = f"was {dtypes[name]}; {changed[name].elements:,} of Megatron's {ref.dtype} values do not fit"
            findings.append(warning("values.rounded", name, f"{what}, and it is written as {ref.dtype}"))
    return result, findings
