"""Bit-for-bit comparison of tensors, streamed: on bytes, so that NaN payloads and signs of zero count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mtpcheck.move import fill, slabs
from mtpcheck.parallel import Alive, in_parallel
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress, Silent
from mtpcheck.tensormap import TensorRef

_PIECE = 32 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two tensors of one shape differ: how many elements, the first one's C-order index and both its bytes."""

    elements: int
    first: int
    expected: bytes
    got: bytes

    def merge(self, later: Difference | None) -> Difference:
        if later is None:
            return self
        return Difference(self.elements + later.elements, self.first, self.expected, self.got)


def compare_all(
    pairs: Sequence[tuple[str, TensorRef, TensorRef]], progress: Progress | None = None
) -> dict[str, Difference]:
    """Compare named pairs of equal shape and item size; the result names only those that differ."""
    found: dict[str, Difference] = {}
    for name, difference in in_parallel(_jobs(pairs, progress or Silent())):
        if difference is not None:
            found[name] = found[name].merge(difference) if name in found else difference
    return found


def differs(a: TensorRef, b: TensorRef) -> bool:
    """Whether two tensors differ in dtype, shape or any bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return True
    return bool(compare_all([("", a, b)]))


def is_zero(ref: TensorRef) -> bool:
    """Whether every byte is zero."""
    return not differs(ref, TensorRef(ref.dtype, Plan.zeros(ref.plan.shape, ref.plan.itemsize)))


_Job = Callable[[Alive], tuple[str, Difference | None]]


def _jobs(pairs: Sequence[tuple[str, TensorRef, TensorRef]], progress: Progress) -> Iterator[_Job]:
    for name, a, b in pairs:
        for (at, part), (_, other) in zip(slabs(a.plan, _PIECE), slabs(b.plan, _PIECE), strict=True):
            yield partial(_compare, name, at, part, other, progress)


def _compare(
    name: str, start: int, a: Plan, b: Plan, progress: Progress, alive: Alive
) -> tuple[str, Difference | None]:
    found: Difference | None = None
    left = right = bytearray()
    for (at, part), (_, other) in zip(slabs(a), slabs(b), strict=True):
        alive()
        n = part.nbytes
        if len(left) < n:
            left, right = bytearray(n), bytearray(n)
        fill(part, memoryview(left)[:n])
        fill(other, memoryview(right)[:n])
        if not _same(left, right, n):
            difference = _locate(left, right, n, start + at, a.itemsize)
            found = found.merge(difference) if found else difference
        progress.advance(n)
    return name, found


def _same(left: bytearray, right: bytearray, n: int) -> bool:
    words = n // 8
    a, b = np.frombuffer(left, "u8", words), np.frombuffer(right, "u8", words)
    return bool(np.array_equal(a, b)) and left[words * 8 : n] == right[words * 8 : n]


def _locate(left: bytearray, right: bytearray, n: int, start: int, itemsize: int) -> Difference:
    a = np.frombuffer(left, f"V{itemsize}", n // itemsize)
    b = np.frombuffer(right, f"V{itemsize}", n // itemsize)
    where = np.flatnonzero(a != b)
    first = int(where[0])
    return Difference(len(where), start // itemsize + first, a[first].tobytes(), b[first].tobytes())
