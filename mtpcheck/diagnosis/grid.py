"""Were values rounded to a few levels a group, as weights are for 4 or 8 bits, and widened again?

It holds for a tensor if in every group all values stand on an even grid of at most 2**bits levels, as closely as their
dtype can tell, and each is the level that is nearest to the original.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtpcheck.diagnosis.arranged import units
from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.numbers import STORED, both, half_step
from mtpcheck.tensormap import TensorRef

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)
_LEAST = 256  # elements: on less, any values stand on some grid
_FINE = 1 / 64  # of a step: no fit is better than that
_SURE = 10  # bits by which the values of a group must be nearer to the grid than chance would have them
_FIRST = 16  # groups looked at before all of a step

Wide = NDArray[np.float64]


def quantized(case: Case, key: str) -> Told:
    """The pieces of the matrix that ``key`` lies in, if it was quantized by itself or along with those beside it."""
    widths: set[int] = set()
    for unit in units(case, key) if case.before[key].dtype in STORED else ():
        if unit.before.shape[1] not in widths:
            widths.add(unit.before.shape[1])
            dtype = case.before[key].dtype
            if cause := _quantized(TensorRef(dtype, unit.before), TensorRef(dtype, unit.after)):
                return dict.fromkeys(unit.parts, cause)
    return {}


def _quantized(before: TensorRef, after: TensorRef) -> Cause | None:
    """The largest groups that hold for the whole matrix, and the bits that they need."""
    columns = after.shape[1]
    if columns < 2 or after.elements < _LEAST:
        return None
    for size in sorted({columns, *_GROUPS}, reverse=True):
        if size < 16 or after.elements % size:
            continue
        most = 0.0
        for x, y in both(before, after):
            if len(y) % size:
                return None
            old, new = (values.astype(np.float64).reshape(-1, size) for values in (x, y))
            most = max(most, _levels(old, new, after.dtype))
            if most > 1 << _BITS[-1]:
                break
        else:
            bits = next(bits for bits in _BITS if most <= 1 << bits)
            return Cause("quantized", f"the values were rounded to {bits} bits in groups of {size}, and widened again")
    return None


def _levels(before: Wide, after: Wide, dtype: str) -> float:
    """The most levels that any group has on its grid, [groups, size] each; infinite if one has none."""
    if len(after) > _FIRST and np.isinf(_levels(before[:_FIRST], after[:_FIRST], dtype)):
        return np.inf
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return np.inf
    most = 1.0
    left = np.flatnonzero(after.max(axis=1) != after.min(axis=1))  # one value: nothing says what its step was
    for way in range(_WAYS):
        if not len(left):
            break
        levels = _levels_under(way, before[left], after[left], dtype)
        most = max(most, float(levels.max(initial=0, where=np.isfinite(levels))))
        left = left[np.isinf(levels)]
    return np.inf if len(left) else most


def _levels_under(way: int, before: Wide, after: Wide, dtype: str) -> Wide:
    """Levels of each group on the grid that one way of guessing its step leads to; infinite where it does not fit."""
    own = half_step(after, dtype).astype(np.float64)
    start = np.zeros((len(after), 1)) if way % 2 == 0 else after.min(axis=1, keepdims=True)  # most have a level at zero
    number, step, start = _fitted(after, own, _step(way // 2, after)[:, None], start)
    slack = np.maximum(own, step * _FINE) * 1.5  # of the level's own rounding, and of the fit
    fits = np.abs(after - start - number * step) <= slack
    fits &= np.abs(before - after) <= step / 2 * (1 + 1e-3) + slack
    told = np.log2(np.maximum(1, step / (2 * slack))).sum(axis=1) > _SURE
    levels: Wide = np.where(told & fits.all(axis=1), np.ptp(number, axis=1) + 1, np.inf)
    return levels


_SHARES = (1, 2, 3)
_WAYS = 2 * (len(_SHARES) + 3 * len(_BITS))


def _step(way: int, values: Wide) -> Wide:
    """What the step of each group may be, about: a share of the smallest gap, or of the largest value or the range."""
    if way < len(_SHARES):
        gaps = np.diff(np.sort(values, axis=1), axis=1)
        step = np.where(gaps > 0, gaps, np.inf).min(axis=1) / _SHARES[way]
    else:
        bits, kind = divmod(way - len(_SHARES), 3)
        half = 1 << _BITS[bits] - 1
        if kind == 2:
            step = np.ptp(values, axis=1) / (2 * half - 1)
        else:
            step = np.abs(values).max(axis=1) / (half - 1 if kind == 0 else half)
    return np.asarray(step, np.float64)


def _fitted(values: Wide, own: Wide, step: Wide, start: Wide) -> tuple[Wide, Wide, Wide]:
    """Number of each value's level, the step and the first level, fitted to all values of a group, the more so the more
    exactly (``own``) each is stored."""
    for _ in range(2):
        number = np.rint((values - start) / step)
        weight = np.maximum(own, step * _FINE) ** -2.0
        weight /= weight.sum(axis=1, keepdims=True)
        mean, middle = ((weight * v).sum(axis=1, keepdims=True) for v in (values, number))
        spread = (weight * (number - middle) ** 2).sum(axis=1, keepdims=True)
        slope = (weight * (number - middle) * (values - mean)).sum(axis=1, keepdims=True)
        step = np.where(slope > 0, slope / np.where(spread > 0, spread, 1), step)
        start = mean - step * middle
    return number, step, start
