"""Matrices of FP8 codes with a scale a block, as sources of bytes: their bf16 values, and codes of such values.

What is computed is in ``e4m3``. Values and codes are computed as they are read, and never kept.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod

import numpy as np

from mtpcheck.box import Shape
from mtpcheck.e4m3 import F32, U8, decode, encode
from mtpcheck.errors import FormatError
from mtpcheck.move import by_rows, bytes_of, read_plan, scratch
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorRef

WHOLE = (sys.maxsize, sys.maxsize)
"""The block of a tensor with one scale."""


@dataclass(frozen=True, eq=False)
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

    def of_rows(self, first: int, end: int) -> F32:
        """Scales of the rows of blocks that some rows of the matrix touch."""
        high = self.block[0]
        return self._read(self.ref.plan.reshape(self.shape).slice(0, first // high, -(-end // high)))

    def _read(self, plan: Plan) -> F32:
        raw = read_plan(plan)
        if self.ref.dtype == "F32":
            found = np.frombuffer(raw, np.float32)
        elif self.ref.dtype == "BF16":
            found = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:  # 2^(e - 127); 0xFF is NaN
            codes = np.frombuffer(raw, np.uint8)
            found = np.where(codes == 0xFF, np.nan, np.ldexp(1.0, codes.astype(np.int32) - 127)).astype(np.float32)
        return found.reshape(plan.shape)

    @property
    def collapsed(self) -> bool:
        """Whether a scale is so small, large or odd that products leave the range of bf16."""
        exponent = self._read(self.ref.plan).view(np.uint32) >> 23 & 0xFF
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
        by_rows(buffer, offset, 2 * self.codes.shape[1], self._decode, "dequantized")

    def _decode(self, first: int, end: int, out: U8) -> None:
        """Fill ``out`` with the values of some rows."""
        codes = bytes_of(self.codes.slice(0, first, end), "codes").reshape(end - first, -1)
        bits = out.view(np.uint16).reshape(codes.shape)
        decode(codes, self.grid.of_rows(first, end), self.grid.block, first, bits)


class Strange(Exception):
    """A tensor of which values are none that its kept scales give: it was trained on. Its name is the argument."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A source: the codes that give a matrix of bf16 values under kept scales, which are not ``collapsed``. Reading
    raises Strange for a value that no code gives."""

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
        by_rows(buffer, offset, self.values.shape[1], self._filled, "coded")

    def _filled(self, first: int, end: int, out: U8) -> None:
        if self._code(first, end, out):
            raise Strange(self.name)

    def strangers(self, first: int, end: int) -> int:
        """How many values of some rows no code gives."""
        return self._code(first, end, scratch((end - first) * self.values.shape[1], "counted"))

    def _code(self, first: int, end: int, out: U8) -> int:
        """Fill ``out`` with the codes of some rows; returns how many values no code gives."""
        shape = end - first, self.values.shape[1]
        held = bytes_of(self.values.slice(0, first, end), "held")
        scales = self.grid.of_rows(first, end)
        return encode(held.view(np.uint16).reshape(shape), scales, self.grid.block, first, out.reshape(shape))
