"""Were values rounded to a few levels a group, as weights are for 4 or 8 bits, and widened again?

It holds for a tensor if in every group all values stand on an even grid of at most 2**bits levels, as closely as their
dtype can tell, and each is the level that is nearest to the original.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mtpcheck.diagnosis.case import Cause
from mtpcheck.diagnosis.numbers import both, half_step
from mtpcheck.tensormap import TensorRef

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)
_LEAST = 256  # elements: on less, any values stand on some grid
_FIRST = 16  # groups looked at before all of a step

Wide = NDArray[np.float64]


def quantized(before: TensorRef, after: TensorRef) -> Cause | None:
    """The fewest bits, and for these the largest groups, that hold for the whole tensor."""
    if len(after.shape) < 2 or after.elements < _LEAST:
        return None
    row = after.shape[-1]
    sizes = [n for n in dict.fromkeys((row, *_GROUPS)) if n >= 16 and after.elements % n == 0]
    left = {(bits, size): True for bits in _BITS for size in sizes}
    for x, y in both(before, after):
        for size in dict.fromkeys(size for (_, size), holds in left.items() if holds):
            if len(y) % size:
                return None
            old, new = (values.astype(np.float64).reshape(-1, size) for values in (x, y))
            levels = _levels(old, new, after.dtype)
            left.update({(bits, n): False for (bits, n) in left if n == size and levels > 1 << bits})
        if not any(left.values()):
            return None
    bits, size = next(kind for kind, holds in left.items() if holds)
    group = f"every row of {size}" if size == row else f"every group of {size}"
    return Cause("quantized", f"the values were rounded to {bits} bits in {group}, and widened again")


def _levels(before: Wide, after: Wide, dtype: str) -> float:
    """The most levels that any group has on its grid, [groups, size] each; infinite if one has none."""
    if len(after) > _FIRST and np.isinf(_levels(before[:_FIRST], after[:_FIRST], dtype)):
        return np.inf
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return np.inf
    slack = half_step(np.abs(after).max(axis=1), dtype)[:, None] * 1.3  # of the level and of the fit
    best = np.where(after.max(axis=1) == after.min(axis=1), 1, np.inf)  # one value: nothing says what its step was
    for step in _steps(np.sort(after, axis=1)):
        number, step, start = _fitted(after, step[:, None])
        fits = np.abs(after - start - number * step) <= slack
        fits &= np.abs(before - after) <= step / 2 * (1 + 1e-3) + slack
        told = fits.all(axis=1) & (slack * 2 < step)[:, 0]
        best = np.minimum(best, np.where(told, np.ptp(number, axis=1) + 1, np.inf))
    return float(best.max())


def _steps(ordered: Wide) -> Iterator[Wide]:
    """What the step of each group may be, about: a share of the smallest gap, or of the largest value or the range."""
    gaps = np.diff(ordered, axis=1)
    least = np.where(gaps > 0, gaps, np.inf).min(axis=1)
    least = np.where(np.isinf(least), 1, least)
    largest, whole = np.abs(ordered).max(axis=1), ordered[:, -1] - ordered[:, 0]
    for share in (1, 2, 3):
        yield least / share
    for bits in _BITS:
        half = 1 << bits - 1
        for step in (largest / (half - 1), largest / half, whole / (2 * half - 1)):
            yield np.where(step > 0, step, 1)


def _fitted(values: Wide, step: Wide) -> tuple[Wide, Wide, Wide]:
    """Number of each value's level, the step and the first level, fitted to all values of a group."""
    start = values.min(axis=1, keepdims=True)
    for _ in range(3):
        number = np.rint((values - start) / step)
        around, mean = number - number.mean(axis=1, keepdims=True), values.mean(axis=1, keepdims=True)
        weight = (around * around).sum(axis=1, keepdims=True)
        step = np.where(
            weight > 0, (around * (values - mean)).sum(axis=1, keepdims=True) / np.maximum(weight, 1e-9), step
        )
        step = np.where(step > 0, step, 1)
        start = mean - step * number.mean(axis=1, keepdims=True)
    return number, step, start
