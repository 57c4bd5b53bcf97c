"""Quantizing anew: bf16 values into e4m3fn codes, with new scales, for weights that were trained on.

    scale = largest magnitude of the block / 448        codes = value / scale, rounded to nearest even

as the DeepSeek-V3 report has it (section 3.3.2), per block; with ``powers`` the scale is the next power of two
(``scale_fmt`` "ue8m0"). A block of zeros has the scale 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from mtpcheck.box import Shape
from mtpcheck.e4m3 import F32, U8
from mtpcheck.encoding import CODES
from mtpcheck.fp8 import WHOLE
from mtpcheck.move import SLAB, by_rows, bytes_of
from mtpcheck.parallel import Alive, in_parallel
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorRef

_LARGEST = 448.0
_SMALLEST = 2.0**-124  # below it bf16 cannot tell two codes apart, see docs/fp8.md


@dataclass(frozen=True, eq=False)
class Given:
    """A source of bytes that are in memory."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return memoryview(self.data)[offset : offset + length]

    def place_of(self, offset: int) -> str:
        return self.name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A source: the codes of a bf16 matrix under new scales, in C order, computed as they are read."""

    values: Plan
    grid: F32
    block: tuple[int, int]
    name: str

    @property
    def size(self) -> int:
        return prod(self.values.shape)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return f"{self.values.place_of(divmod(offset, self.values.shape[1]))} (quantized anew)"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        by_rows(buffer, offset, self.values.shape[1], self._quantize, "quantized")

    def _quantize(self, first: int, end: int, out: U8) -> None:
        import torch

        rows = np.arange(first, end) // self.block[0]
        scales = self.grid[rows][:, np.arange(self.values.shape[1]) // self.block[1]]
        scaled = torch.from_numpy(_floats(self.values, first, end)) / torch.from_numpy(scales)
        out[:] = scaled.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1)


def _floats(values: Plan, first: int, end: int) -> F32:
    """Some rows of a bf16 matrix."""
    raw = bytes_of(values.slice(0, first, end), "floats").view(np.uint16)
    return (raw.astype(np.uint32) << 16).view(np.float32).reshape(end - first, values.shape[1])


def quantize(name: str, ref: TensorRef, block: tuple[int, int], powers: bool) -> tuple[TensorRef, TensorRef] | None:
    """Codes and scales of a bf16 matrix; None if it is none, or holds NaN, infinity, or what its codes would round to
    infinity.

    Reads it once, for the scales; the codes are computed when they are read.
    """
    if len(ref.shape) != 2 or ref.dtype != "BF16":
        return None
    rows, columns = ref.shape
    high = min(block[0], rows)
    step = max(1, SLAB // (2 * columns)) if block == WHOLE else high * max(1, SLAB // (2 * columns * high))
    jobs = (partial(_largest, ref.plan, block, a, min(a + step, rows)) for a in range(0, rows, step))
    found = np.concatenate(list(in_parallel(jobs)))
    largest = found.max(0, keepdims=True) if block == WHOLE else found
    if not np.isfinite(largest).all():
        return None
    grid = np.maximum(largest / np.float32(_LARGEST), np.float32(_SMALLEST))
    if powers:
        grid = np.exp2(np.ceil(np.log2(grid.astype(np.float64)))).astype(np.float32)
    grid = np.where(largest == 0, np.float32(1), grid)
    if (grid >= 2.0**119).any():  # then codes give infinity, see docs/fp8.md
        return None
    shape: Shape = () if block == WHOLE else grid.shape
    codes = Plan.region(Quantized(ref.plan, grid, block, name), 0, ref.shape, 1)
    scales = Plan.region(Given(f"new scales of {name}", grid.tobytes()), 0, shape, 4)
    return TensorRef(CODES, codes), TensorRef("F32", scales)


def _largest(values: Plan, block: tuple[int, int], first: int, end: int, alive: Alive) -> F32:
    """The largest magnitude of every block of some rows; NaN where there is one."""
    alive()
    high, wide = (min(edge, n) for edge, n in zip(block, values.shape, strict=True))
    magnitudes = np.abs(_floats(values, first, end))
    by_rows = np.maximum.reduceat(magnitudes, np.arange(0, end - first, high), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, values.shape[1], wide), axis=1)
