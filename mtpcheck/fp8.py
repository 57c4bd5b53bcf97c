"""Scaled FP8 (e4m3fn codes, a scale a block): to bf16 and back, exactly.

    value = bf16( code × scale )        the product in fp32, rounded to nearest even

The way back divides, takes the nearest code, and asks whether that gives the very value again. Codes of one block have
four significant bits, bf16 has eight, so two codes that differ give values that differ, unless the product leaves the
range of bf16 (see docs/fp8.md). A grid with such a scale is *collapsed*.

A code's bits, moved to where fp16 has its exponent, are an fp16 of 2^-8 times its value, subnormal ones too; so
processors convert them fast. One worker computes at a time, while the other reads and writes: every operation lets go
of the interpreter lock, and two workers would spend more time passing it to and fro than they gain. docs/benchmarks.md
has what else was tried.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mtpcheck.box import Shape
from mtpcheck.errors import FormatError
from mtpcheck.move import fill, read_plan, scratch
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorRef

if TYPE_CHECKING:
    import torch
    from torch import Tensor

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

WHOLE = (sys.maxsize, sys.maxsize)
"""The block of a tensor with one scale."""

_STEP = 1 << 16  # elements at a time: what is made of them on the way stays in the processor's cache
_one_at_a_time = threading.Lock()
_LIFT = np.float32(256)  # see above
_MOST = np.finfo(np.float32).max / _LIFT


@dataclass(frozen=True)
class Grid:
    """The scales of a matrix: one for each ``block`` of rows and columns, ragged at the edges, in C order.

    Dtypes F32, BF16, and F8_E8M0, which is a power of two. Raises FormatError when made, if they do not fit.
    """

    ref: TensorRef
    block: tuple[int, int]
    matrix: Shape
    name: str

    def __post_init__(self) -> None:
        if len(self.matrix) != 2 or self.ref.dtype not in ("F32", "BF16", "F8_E8M0"):
            what = f"is {len(self.matrix)}-D with {self.ref.dtype} scales, expected 2-D with F32, BF16 or F8_E8M0"
            raise FormatError(f"{self.name} {what}")
        single = self.block == WHOLE and self.ref.shape in ((), (1,))
        if self.ref.shape != self.shape and not single:
            (rows, columns), (high, wide) = self.matrix, self.block
            each = "one scale" if self.block == WHOLE else f"one scale for each block of {high} × {wide}"
            raise FormatError(
                f"the scales of {self.name} have shape {list(self.ref.shape)}, "
                f"expected {list(self.shape)}: {each} of {rows} × {columns}"
            )

    @property
    def shape(self) -> Shape:
        return tuple(-(-n // edge) for n, edge in zip(self.matrix, self.block, strict=True))

    def read(self, first: int = 0, end: int | None = None) -> F32:
        """Scales of some rows of blocks."""
        plan = self.ref.plan.reshape(self.shape)
        raw = read_plan(plan.slice(0, first, self.shape[0] if end is None else end))
        if self.ref.dtype == "F32":
            found = np.frombuffer(raw, np.float32)
        elif self.ref.dtype == "BF16":
            found = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:  # 2^(e - 127); 0xFF is NaN
            codes = np.frombuffer(raw, np.uint8)
            found = np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127)).astype(np.float32)
        return found.reshape(-1, self.shape[1])

    @property
    def collapsed(self) -> bool:
        """Whether a scale is negative, or so small, large or odd that products leave the range of bf16."""
        exponent = self.read().view(np.uint32) >> 23  # with the sign above it
        return bool(((exponent < 3) | (exponent > 245)).any())


@dataclass(frozen=True, eq=False)
class Dequantized:
    """A source: the bf16 values of a matrix of codes, in C order, computed as they are read."""

    codes: Plan
    grid: Grid

    @property
    def name(self) -> str:
        return self.grid.name

    @property
    def size(self) -> int:
        return 2 * prod(self.codes.shape)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return f"{self.codes.place_of(divmod(offset // 2, self.codes.shape[1]))} (dequantized)"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        width = self.codes.shape[1]
        first, end = offset // 2 // width, -(-(offset + len(buffer)) // 2 // width)
        start, target = offset - 2 * width * first, np.frombuffer(buffer, np.uint8)
        codes = scratch(width * (end - first), "codes")
        fill(self.codes.slice(0, first, end), codes.data)
        whole = len(buffer) == 2 * width * (end - first)
        values = target if whole else scratch(2 * width * (end - first), "dequantized")
        rows, out = codes.reshape(-1, width), values.view(np.int16).reshape(-1, width)
        with _one_at_a_time:
            for lines, scales in _strips(self.grid, first, rows.shape):
                decode(rows[lines], scales, out[lines])
        if not whole:
            target[:] = values[start : start + len(buffer)]


class Strange(Exception):
    """A tensor of which values are none that its kept scales give: it was trained on. Its name is the argument."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A source: the codes that give a matrix of bf16 values under kept scales, which are not collapsed. Reading raises
    Strange for a value that no code gives."""

    values: Plan
    grid: Grid

    @property
    def name(self) -> str:
        return self.grid.name

    @property
    def size(self) -> int:
        return prod(self.values.shape)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return f"{self.values.place_of(divmod(offset, self.values.shape[1]))} (quantized)"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        width = self.values.shape[1]
        first, end = offset // width, -(-(offset + len(buffer)) // width)
        start, target = offset - width * first, np.frombuffer(buffer, np.uint8)
        whole = len(buffer) == width * (end - first)
        codes = target if whole else scratch(width * (end - first), "coded")
        if self._code(first, codes.reshape(-1, width)):
            raise Strange(self.name)
        if not whole:
            target[:] = codes[start : start + len(buffer)]

    def strangers(self, first: int, rows: int) -> int:
        """How many values of the rows from ``first`` on no code gives."""
        width = self.values.shape[1]
        return self._code(first, scratch(rows * width, "coded").reshape(rows, width))

    def _code(self, first: int, out: U8) -> int:
        held = scratch(2 * out.size, "held")
        fill(self.values.slice(0, first, first + len(out)), held.data)
        rows = held.view(np.int16).reshape(out.shape)
        with _one_at_a_time:
            return sum(code(rows[lines], scales, out[lines]) for lines, scales in _strips(self.grid, first, out.shape))


# ---- a strip: some rows of one row of blocks


def _strips(grid: Grid, first: int, shape: tuple[int, ...]) -> Iterator[tuple[slice, F32]]:
    """The rows from ``first`` on, strip by strip: where it lies among these rows, and the scale of every column."""
    rows, width = shape
    high, wide = grid.block
    step = max(1, _STEP // width)
    for row in range(first // high, -(-(first + rows) // high)):
        scales = np.repeat(grid.read(row, row + 1)[0], min(wide, width))[:width]
        begin, end = max(row * high, first) - first, min((row + 1) * high, first + rows) - first
        for start in range(begin, end, step):
            yield slice(start, min(start + step, end)), scales


def decode(codes: U8, scales: F32, out: NDArray[np.int16]) -> None:
    """Fill ``out`` with the bits of the bf16 values of ``codes`` [rows, columns]; ``scales`` [columns].

    What is no number becomes 0x7FFF, with its sign.
    """
    import torch

    given, to = torch.from_numpy(codes), torch.from_numpy(out)
    half, wide = _memory("half", torch.int16, codes.shape), _memory("wide", torch.float32, codes.shape)
    half.copy_(given.view(torch.int8)).mul_(1 << 7).bitwise_and_(~0x407F)
    wide.copy_(half.view(torch.float16))
    tame = bool((np.abs(scales) < _MOST).all())
    if not tame:
        wide.mul_(float(_LIFT))
    wide.mul_(torch.from_numpy(scales * _LIFT if tame else scales))
    to.view(torch.bfloat16).copy_(wide)
    magnitude = torch.bitwise_and(given, 0x7F, out=_memory("magnitude", torch.uint8, codes.shape)).numpy()
    if magnitude.max(initial=0) == 0x7F:
        odd = np.equal(magnitude, 0x7F, out=magnitude.view(np.bool_))
        to.bitwise_or_(half.copy_(torch.from_numpy(odd.view(np.int8))).mul_(0x7FFF))
    if not tame:  # a scale that is NaN or infinite
        at = np.flatnonzero(np.isnan(wide.numpy()))
        out.reshape(-1)[at] = (codes.reshape(-1)[at].astype(np.int16) << 8 & -0x8000) | 0x7FFF


def code(values: NDArray[np.int16], scales: F32, out: U8) -> int:
    """Fill ``out`` with the codes nearest to ``values`` (bits of bf16) [rows, columns]; ``scales`` [columns].

    Returns how many values their code does not give.
    """
    import torch

    held, to = torch.from_numpy(values), torch.from_numpy(out)
    half, wide = _memory("half", torch.int16, values.shape), _memory("wide", torch.float32, values.shape)
    sign, again = _memory("sign", torch.int16, values.shape), _memory("again", torch.int16, values.shape)
    wide.copy_(held.view(torch.bfloat16)).mul_(torch.from_numpy(1 / (scales * _LIFT)))
    half.view(torch.float16).copy_(wide)
    torch.bitwise_right_shift(half, 8, out=sign).bitwise_and_(0x80)
    half.bitwise_and_(0x7FFF).clamp_(max=0x3F80).add_(0x40).bitwise_right_shift_(7).bitwise_or_(sign)
    to.copy_(half)
    decode(out, scales, again.numpy())
    return 0 if torch.equal(again, held) else int(np.count_nonzero(again.numpy() != values))


def _memory(use: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor in memory of the thread."""
    import torch

    return torch.from_numpy(scratch(dtype.itemsize * prod(shape), use)).view(dtype).reshape(shape)
