"""Bit-for-bit comparison of tensors, streamed: on bytes, so that NaN payloads and signs of zero count."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mtpcheck.move import SLAB, Bytes, bytes_of, slabs, straight_run
from mtpcheck.parallel import JOB, Alive, batches, in_parallel
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress, Silent
from mtpcheck.tensormap import TensorRef


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two tensors of one shape differ: how many elements, the first one's C-order index and both its bytes."""

    elements: int
    first: int
    expected: bytes
    got: bytes

    def merge(self, later: Difference) -> Difference:
        return Difference(self.elements + later.elements, self.first, self.expected, self.got)


def compare_all(
    pairs: Sequence[tuple[str, TensorRef, TensorRef]], progress: Progress | None = None
) -> dict[str, Difference]:
    """Compare named pairs of equal shape and item size; the result names only those that differ."""
    found: dict[str, Difference] = {}
    jobs = (partial(_compare, progress or Silent(), pieces) for pieces in batches(_pieces(pairs)))
    for differences in in_parallel(jobs):
        for name, difference in differences:
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


_SIGNED = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1}


def only_zeros(ref: TensorRef) -> bool:
    """Whether every element is zero, of either sign. Reads no further than the first that is not."""
    size = _SIGNED.get(ref.dtype)
    if size is None:
        return is_zero(ref)
    value = (1 << 8 * size - 1) - 1  # all bits but the sign
    return not any((np.frombuffer(bytes_of(part, "left"), f"u{size}") & value).any() for _, part in slabs(ref.plan))


_Piece = tuple[str, int, Plan, Plan]  # name, first byte, and both sides of it
_Found = list[tuple[str, Difference]]


def _pieces(pairs: Sequence[tuple[str, TensorRef, TensorRef]]) -> Iterator[tuple[int, _Piece]]:
    for name, a, b in pairs:
        for (at, part), (_, other) in zip(slabs(a.plan, JOB), slabs(b.plan, JOB), strict=True):
            yield part.nbytes, (name, at, part, other)


def _compare(progress: Progress, pieces: list[_Piece], alive: Alive) -> _Found:
    found = []
    for name, start, a, b in pieces:
        step = JOB if straight_run(a) and straight_run(b) else SLAB  # what is mapped needs no buffer
        for (at, part), (_, other) in zip(slabs(a, step), slabs(b, step), strict=True):
            alive()
            left, right = bytes_of(part, "left"), bytes_of(other, "right")
            if _memcmp(left.ctypes.data, right.ctypes.data, len(left)):
                found.append((name, _locate(left, right, start + at, a.itemsize)))
            progress.advance(part.nbytes)
    return found


_memcmp = ctypes.CDLL(None).memcmp  # lets go of the interpreter lock, and makes no array of booleans
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _locate(left: Bytes, right: Bytes, start: int, itemsize: int) -> Difference:
    a, b = left.view(f"V{itemsize}"), right.view(f"V{itemsize}")
    where = np.flatnonzero(a != b)
    first = int(where[0])
    return Difference(len(where), start // itemsize + first, a[first].tobytes(), b[first].tobytes())
