"""By how much two tensors differ, where nothing explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpcheck.diagnosis.numbers import STORED, Floats, both
from mtpcheck.tensormap import TensorRef

_ORDERED = {"BF16": (np.float32, 16), "F16": (np.float16, 0), "F32": (np.float32, 0), "F64": (np.float64, 0)}
"""Dtype in which values of a dtype have their own bits, and how many low ones are not its own."""


@dataclass
class _Most:
    """The largest of something so far, and the element it is at."""

    value: float = 0.0
    at: int = 0

    def see(self, values: NDArray[Any], start: int) -> None:
        if values.size and (most := float(values[i := int(values.argmax())])) > self.value:
            self.value, self.at = most, start + i


def nearest(before: TensorRef, after: TensorRef) -> str:
    """In words how far apart two tensors of one dtype and shape are; empty for dtypes that are no plain numbers."""
    if before.dtype not in STORED:
        return ""
    largest, relative, steps = _Most(), _Most(), _Most()
    start = differing = zeros = nans = broken = 0
    for x, y in both(before, after):
        word = f"u{x.itemsize}"
        where = np.flatnonzero(x.view(word) != y.view(word))
        differing += len(where)
        a, b = x[where], y[where]
        zeros += int(((a == 0) & (b == 0)).sum())
        nans += int((np.isnan(a) & np.isnan(b)).sum())
        broken += int((np.isfinite(a) & ~np.isfinite(b)).sum())
        with np.errstate(all="ignore"):
            apart = np.zeros(len(x))
            apart[where] = np.nan_to_num(np.abs(a.astype(np.float64) - b), nan=0.0, posinf=0.0)
            largest.see(apart, start)
            relative.see(np.nan_to_num(apart / np.abs(x), nan=0.0, posinf=0.0), start)
        finite = np.isfinite(x) & np.isfinite(y)
        steps.see(np.where(finite, np.abs(_place(x, before.dtype) - _place(y, before.dtype)), 0.0), start)
        start += len(x)
    share = f"{100 * differing / start:.3g} % of the elements differ"
    if zeros == differing:
        return f"{share}, and only in the sign of zero"
    if nans == differing:
        return f"{share}, and only in the bits of NaN"
    lost = f"; {broken:,} became NaN or infinite" * bool(broken)
    if not largest.value:
        return share + lost
    index = [int(i) for i in np.unravel_index(largest.at, before.shape)] if before.shape else []
    told = f"{share}, by at most {largest.value:.3g} (at {index})"
    told += f", {relative.value:.3g} of the value" * bool(relative.value)  # of zero there is no share
    return f"{told}, {steps.value:.0f} ULP{lost}"


def _place(values: Floats, dtype: str) -> NDArray[np.float64]:
    """The place of each value among all of its dtype, in order; NaN counts as zero."""
    kind, low = _ORDERED[dtype]
    with np.errstate(all="ignore"):
        own = np.where(np.isnan(values), 0, values).astype(kind)
    bits = own.view(f"i{own.itemsize}").astype(np.int64) >> low
    size = bits & (1 << 8 * own.itemsize - 1 - low) - 1
    return np.where(bits < 0, -size, size).astype(np.float64)
