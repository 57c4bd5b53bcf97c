"""Theories of values: every element is computed from the one that stood in its place.

Each is recomputed for all elements and held against their bits; where the arithmetic may have run in one dtype or in
another, both are tried. Elements are read in steps, and the first that does not fit ends a theory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from mtpcheck.diagnosis.case import Cause
from mtpcheck.diagnosis.numbers import STORED, Floats, alike, both, floats, half_step, rounded
from mtpcheck.diagnosis.same import samples
from mtpcheck.dtypes import WIDE
from mtpcheck.move import read_plan, slabs
from mtpcheck.tensormap import TensorRef

_FEW = 4  # elements that differ: any one difference is a constant
_NARROWER = {"F64": ("F32", "BF16", "F16"), "F32": ("BF16", "F16"), "BF16": (), "F16": ()}
_CASTS = {
    "F64": ("F32", "BF16", "F16"), "F32": ("BF16", "F16", "F8_E4M3", "F8_E5M2"),
    "BF16": ("F16", "F8_E4M3", "F8_E5M2"), "F16": ("BF16", "F8_E4M3", "F8_E5M2"),
}  # fmt: skip


def constant(after: TensorRef) -> Cause | None:
    """All elements alike."""
    if after.elements < 2 or after.packed_shape is not None:
        return None
    size = after.plan.itemsize
    first = next(samples(after.plan))[:size]
    pieces = chain(samples(after.plan), (read_plan(plan) for _, plan in slabs(after.plan)))
    if any(raw != first * (len(raw) // size) for raw in pieces):
        return None
    if not any(first):
        return Cause("zeroed", "every element is zero")
    if after.dtype not in STORED:
        return Cause("constant", f"every element is 0x{first[::-1].hex()}")
    return Cause("constant", f"every element is {floats(first, after.dtype)[0]:.9g}")


def offset(before: TensorRef, after: TensorRef) -> Cause | None:
    """A constant was added, in the dtype of the tensor or in a narrower one."""

    def bounds(x: Floats, y: Floats, slack: Floats) -> tuple[Floats, Floats]:
        return y - slack - x, y + slack - x

    found = _one_number(before, after, bounds, lambda x, c: x + c, 0.0, (1.0, -1.0))
    if found is None:
        return None
    value, where = found
    told = "exactly 1" if abs(value) == 1 else f"{abs(value):.9g}"
    way = "was added to" if value > 0 else "was subtracted from"
    return Cause("offset", f"{told} {way} every element{where}")


def scaled(before: TensorRef, after: TensorRef) -> Cause | None:
    """Every element was multiplied by a constant."""

    def bounds(x: Floats, y: Floats, slack: Floats) -> tuple[Floats, Floats]:
        ends = (y - slack) / x, (y + slack) / x
        kept = x != 0
        return np.minimum(*ends)[kept], np.maximum(*ends)[kept]

    found = _one_number(before, after, bounds, lambda x, c: x * c, 1.0, (0.0, -1.0))
    if found is None:
        return None
    if found[0] == 0:
        return Cause("zeroed", "every element is zero, and has kept its sign")
    return Cause("scaled", f"every element is {found[0]:.9g} times what it was{found[1]}")


def casted(before: TensorRef, after: TensorRef) -> Cause | None:
    """Rounded to a narrower dtype, and widened again."""
    for dtype in _CASTS[before.dtype]:
        if all(alike(rounded(x, dtype), y) for x, y in both(before, after)):
            return Cause("cast", f"the values were rounded to {dtype} and widened again")
    if before.dtype == WIDE and all(alike(_cut(x), y) for x, y in both(before, after)):
        return Cause("cast", "the values were cut off to BF16, not rounded, and widened again")
    return None


def _cut(values: Floats) -> Floats:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def raw_codes(codes: TensorRef, after: TensorRef) -> Cause | None:
    """FP8 codes read as numbers, without their scales."""
    if after.dtype not in STORED or codes.shape != after.shape:
        return None
    for x, y in both(codes, after):
        if not alike(rounded(x, after.dtype), y):
            return None
    return Cause("raw-codes", f"the values are the FP8 codes themselves, as {after.dtype}, without their scales")


# ---- one number that explains all elements

_Bounds = Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]
_Apply = Callable[[Floats, Floats], Floats]


def _one_number(
    before: TensorRef, after: TensorRef, bounds: _Bounds, apply: _Apply, idle: float, first: Sequence[float]
) -> tuple[float, str] | None:
    """The number under which ``apply`` gives every element, and in words where it was rounded; None if none does.

    ``bounds`` tells for each element between which numbers it must lie, given how far rounding may have moved it.
    """
    if not _differ_in(before, after, _FEW):
        return None
    for dtype in (before.dtype, *_NARROWER[before.dtype]):
        span = _span(before, after, bounds, dtype)
        where = "" if dtype == before.dtype else f", in {dtype}"
        if span is None or span[0] <= idle <= span[1]:  # what does nothing would do: rounding says it all
            continue
        for number in _numbers(*span, first, dtype):
            if _gives(before, after, apply, number, dtype):
                return number, where
    return None


def _differ_in(before: TensorRef, after: TensorRef, least: int) -> bool:
    """Whether at least so many elements differ in value."""
    differing = 0
    for x, y in both(before, after):
        differing += int((x != y).sum())
        if differing >= least:
            return True
    return False


def _span(before: TensorRef, after: TensorRef, bounds: _Bounds, dtype: str) -> tuple[float, float] | None:
    """Between which numbers all elements agree that it must lie."""
    low, high = -np.inf, np.inf
    for x, y in both(before, after):
        known = np.isfinite(x) & np.isfinite(y)
        wide_x, wide_y = x[known].astype(np.float64), y[known].astype(np.float64)
        slack = half_step(wide_y, dtype) * (1 + 1e-6)
        with np.errstate(all="ignore"):
            least, most = bounds(wide_x, wide_y, slack)
        low, high = max(low, float(least.max(initial=-np.inf))), min(high, float(most.min(initial=np.inf)))
        if low > high:
            return None
    return (low, high) if np.isfinite(low) and np.isfinite(high) else None


def _numbers(low: float, high: float, first: Sequence[float], dtype: str) -> Iterator[float]:
    """Numbers to try, as they are or as ``dtype`` has them: those expected, a power of two, the shortest decimal."""

    def fits(number: float) -> bool:
        return any(low <= own <= high for own in (number, float(rounded(np.array([number]), dtype)[0])))

    middle = (low + high) / 2
    power = float(np.copysign(2.0 ** round(float(np.log2(abs(middle)))), middle)) if middle else 0.0
    short = next(filter(fits, (float(f"{middle:.{digits}g}") for digits in range(1, 18))), middle)
    yield from filter(fits, dict.fromkeys((*first, power, short, middle)))


def _gives(before: TensorRef, after: TensorRef, apply: _Apply, number: float, dtype: str) -> bool:
    """Whether all elements come out, the number being taken as float32 or as the dtype has it."""
    kind = np.float64 if dtype == "F64" else np.float32
    for own in dict.fromkeys((float(kind(number)), float(rounded(np.array([number], kind), dtype)[0]))):
        factor: Floats = np.array([own], kind)
        with np.errstate(all="ignore"):
            if all(alike(rounded(apply(x, factor), dtype), y) for x, y in both(before, after)):
                return True
    return False
