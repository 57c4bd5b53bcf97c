"""Does a matrix look as if it had just been initialised? The one cause that no bits can prove: it is named only where
nothing speaks against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.moved import Index
from mtpcheck.diagnosis.numbers import STORED, both, floats
from mtpcheck.diagnosis.words import split_layer
from mtpcheck.move import read_plan, slabs
from mtpcheck.rows import flat
from mtpcheck.tensormap import TensorRef

_LEAST, _FEW = 512, 64  # elements, of a matrix alone and of one among others
_SIGMAS = 5
_FRESH = Cause("random", "the values have nothing of the original and look freshly initialised")

Wide = NDArray[np.float64]


def is_random(case: Case, index: Index, key: str) -> Told:
    """A matrix that has nothing of the reference's, nor of any other piece there, and is independent noise."""
    return {key: _FRESH} if _is_random(case, index, key) else {}


def _is_random(case: Case, index: Index, key: str, least: int = _LEAST) -> bool:
    before, after = case.before[key], case.after[key]
    shape = flat(case.model.shapes[key]) if key in case.model.shapes else after.shape
    if len(shape) != 2 or after.elements < least or after.dtype not in STORED or index.shares_runs(key):
        return False
    x, y = (part.astype(np.float64) for part in next(both(before, after)))
    if not (np.isfinite(y).all() and np.isfinite(x).all()):
        return False
    rows = y[: len(y) // shape[1] * shape[1]].reshape(-1, shape[1])
    return _unrelated(x, y) and _noise(rows) and not _same_values(before, after)


def _unrelated(x: Wide, y: Wide) -> bool:
    """Whether they correlate no more than independent values do."""
    a, b = x - x.mean(), y - y.mean()
    spread = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return bool(spread) and abs(float((a * b).sum())) / spread < _SIGMAS / len(x) ** 0.5


def _noise(values: Wide) -> bool:
    """Whether values look drawn one by one from a normal or a uniform distribution round zero: trained rows and columns
    differ in length by more than these do."""
    rows, columns = values.shape
    count, spread = values.size, float(values.std())
    if rows < 2 or not spread or abs(float(values.mean())) > _SIGMAS * spread / count**0.5:
        return False
    unit = values / spread
    fourth = float((unit**4).mean())
    if abs(fourth - 3) < _SIGMAS * (24 / count) ** 0.5 + 0.05:
        variance = 2.0
    elif abs(fourth - 1.8) < _SIGMAS * (4 / count) ** 0.5 + 0.02:
        variance = 0.8
    else:
        return False
    return all(_even((unit**2).mean(axis=axis), variance / n) for axis, n in ((1, columns), (0, rows)))


def _even(lengths: Wide, variance: float) -> bool:
    """Whether mean squares scatter no more than those of independent values."""
    ratio = float(((lengths - 1) ** 2).mean()) / variance
    return ratio < 1.1 + _SIGMAS * math.sqrt(2 / len(lengths))


def _same_values(before: TensorRef, after: TensorRef) -> bool:
    """Whether the same values stand in another order, or nearly: counts of values agree better than by chance."""
    a, b = (_counts(ref) for ref in (before, after))
    there = a + b > 0
    surprise = float(((a - b) ** 2)[there].astype(np.float64) @ (1 / (a + b)[there]))
    return bool(surprise < 0.5 * int(there.sum()))


def _counts(ref: TensorRef) -> NDArray[np.int64]:
    """How often each value occurs, in 16 bits."""
    total = np.zeros(1 << 16, np.int64)
    for _, plan in slabs(ref.plan, 512 << 10):
        values = floats(read_plan(plan), ref.dtype).astype(np.float32)
        total += np.bincount(values.view(np.uint32) >> 16, minlength=1 << 16)
    return total


def with_layers(case: Case, left: Sequence[str], told: Told, index: Index) -> Told:
    """Causes with those of what stands beside several random matrices of a layer: small matrices, which alone tell too
    little, norms of exactly one and biases of zero."""
    random = Counter(split_layer(key)[0] for key, cause in told.items() if cause.id == "random")
    layers = {layer for layer, count in random.items() if layer and count > 1}
    causes = dict(told)
    for key in left:
        if split_layer(key)[0] in layers and _is_random(case, index, key, least=_FEW):
            causes[key] = _FRESH
    for key, cause in told.items():
        one, zero = Cause("constant", "every element is 1"), Cause("zeroed", "every element is zero")
        plain = cause == (one if key.endswith("norm") else zero) and len(case.after[key].shape) == 1
        if plain and split_layer(key)[0] in layers:
            causes[key] = _FRESH
    return causes
