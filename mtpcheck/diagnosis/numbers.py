"""Bytes as floating-point numbers and back, with the roundings that a converter may have made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpcheck import e4m3
from mtpcheck.dtypes import cast_values
from mtpcheck.move import read_plan, slabs
from mtpcheck.tensormap import TensorRef

Floats = NDArray[np.floating[Any]]

STORED = ("BF16", "F16", "F32", "F64")
"""Dtypes whose elements are looked at as numbers."""

_STEP = 128 << 10  # elements of one look: a theory that fails mostly fails at the first


def floats(raw: bytes | bytearray, dtype: str) -> Floats:
    """Values as float32, which holds them exactly; of F64 as float64."""
    if dtype == "F64":
        return np.frombuffer(raw, np.float64)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _narrow(dtype)[0][np.frombuffer(raw, np.uint8)]
    out = np.empty(len(raw) // (4 if dtype == "F32" else 2), np.float32)
    cast_values(np.frombuffer(raw, np.uint8), dtype, out.view(np.uint8), "F32")
    return out


def both(before: TensorRef, after: TensorRef) -> Iterator[tuple[Floats, Floats]]:
    """Two tensors of one shape, piece by piece."""
    cut = (slabs(ref.plan, _STEP * ref.plan.itemsize) for ref in (before, after))
    for (_, a), (_, b) in zip(*cut, strict=True):
        yield floats(read_plan(a), before.dtype), floats(read_plan(b), after.dtype)


def alike(a: Floats, b: Floats) -> bool:
    """Whether all bits are the same: NaN payloads and signs of zero count."""
    if a.dtype != b.dtype:
        a = a.astype(b.dtype)  # rounded to F32 or less, and held against F64
    word = f"u{a.itemsize}"
    return bool((a.view(word) == b.view(word)).all())


def rounded(values: Floats, dtype: str) -> Floats:
    """Values as a narrower dtype holds them: nearest, ties to even; FP8 saturates."""
    if dtype == "F64":
        return values
    with np.errstate(all="ignore"):
        narrow = np.ascontiguousarray(values, np.float32)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return _nearest(narrow, dtype)
    size = 4 if dtype == "F32" else 2
    out = np.empty(size * len(narrow), np.uint8)
    cast_values(narrow.view(np.uint8), "F32", out, dtype)
    return floats(out.tobytes(), dtype)


def _narrow(dtype: str) -> tuple[Floats, Floats]:
    """All values by code, and the finite positive ones in order; code order is value order for these."""
    if dtype == "F8_E4M3":
        values: Floats = e4m3.values()
    else:  # e5m2 is the upper byte of an fp16
        values = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    positive = values[:128]
    return values, positive[np.isfinite(positive)]


def _nearest(values: Floats, dtype: str) -> Floats:
    _, grid = _narrow(dtype)
    size = np.abs(values)
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    with np.errstate(all="ignore"):
        up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))  # ties to the even code
    found: Floats = np.where(np.isnan(values), values, np.copysign(np.where(up, high, low), values)).astype(np.float32)
    return found


def half_step(values: Floats, dtype: str) -> Floats:
    """Half the distance of neighbours of a dtype, as float64: by how much a rounding may have moved each value."""
    digits, least = {"BF16": (8, -133), "F16": (11, -24), "F32": (24, -149), "F64": (53, -1074)}[dtype]
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0).astype(np.float64))
    steps: Floats = np.ldexp(0.5, np.where(values == 0, least, np.maximum(exponent - digits, least)).astype(np.int32))
    return steps
