"""Scaled FP8 (e4m3fn codes, a scale a block): to bf16 and back, exactly.

    value = bf16( code × scale )        the product in fp32, rounded to nearest even

The way back asks which code gives the value, block by block, and compares all of them: no arithmetic is inverted.
Codes of one block have four significant bits, bf16 has eight, so two codes that differ give values that differ,
unless the product leaves the range of bf16 (see docs/fp8.md). A block whose codes cannot be told apart is *collapsed*.

Both directions look every element up in a table of its block, all that is read at a time in one go: the low bits of
its place are the element, the high bits number the block. What counts is how rarely a worker needs the interpreter
lock, which the other one holds: few calls, of which each does much (docs/benchmarks.md).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtpcheck.box import Shape
from mtpcheck.errors import FormatError
from mtpcheck.move import by_rows, bytes_of, fill, read_plan, scratch
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorRef

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

_NANS = (np.arange(256) >> 7 << 15).astype(np.uint16) | np.uint16(0x7FC0)

WHOLE = (sys.maxsize, sys.maxsize)
"""The block of a tensor with one scale."""

_INVERSES = 64  # blocks coded at a time: an inverse table has 65,536 entries


@lru_cache(maxsize=1)
def values() -> F32:
    """The value of each of the 256 codes of e4m3fn: four exponent bits with bias 7, no infinity, 0x7F and 0xFF NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    plain = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    plain[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, plain, -plain).astype(np.float32)


def tables(scales: F32) -> U16:
    """The bf16 bits of all 256 codes under each scale: one row of 256 a scale. A NaN keeps the sign of its code."""
    import torch

    bits = np.empty((len(scales), 256), np.uint16)
    rounded = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    torch.mul(torch.from_numpy(values()), torch.from_numpy(scales[:, None]), out=rounded)
    if np.isfinite(scales).all():
        bits[:, 0x7F], bits[:, 0xFF] = _NANS[0x7F], _NANS[0xFF]
    else:
        np.copyto(bits, _NANS, where=(bits & 0x7FFF) > 0x7F80)
    return bits


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
        """Whether a scale is so small, large or odd that products leave the range of bf16."""
        exponent = self.read().view(np.uint32) >> 23 & 0xFF
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
        table, places = _placed(self.grid, codes, first, 0, 8)
        _look_up(table, places, out.view(np.uint16))


class Strange(Exception):
    """A tensor of which values are none that its kept scales give: it was trained on. Its name is the argument."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A source: the codes that give a matrix of bf16 values under kept scales. Reading raises Strange for a value
    that no code gives."""

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
        if self._code(first, out.reshape(end - first, -1)):
            raise Strange(self.name)

    def strangers(self, first: int, rows: int) -> int:
        """How many values of the rows from ``first`` on no code gives."""
        return self._code(first, None, rows)

    def _code(self, first: int, out: U8 | None, rows: int = 0) -> int:
        """Fill ``out`` with the codes of the rows from ``first`` on; returns how many values no code gives."""
        rows, width, found = len(out) if out is not None else rows, self.values.shape[1], 0
        raw = scratch(2 * rows * width, "held")
        fill(self.values.slice(0, first, first + rows), raw.data)
        held = raw.view(np.uint16).reshape(rows, width)
        for lines, columns in _regions(self.grid.block, first, rows, width):
            part = held[lines, columns]
            table, places = _placed(self.grid, part, first + lines.start, columns.start, 16)
            codes = out[lines, columns] if out is not None else scratch(part.size, "counted").reshape(part.shape)
            _invert(table, places, codes)
            if codes.max(initial=0) == _NONE:
                found += _count(codes, _NONE) - _count(part, _NANS[_NONE])
        return found


# ---- looking up

_BLOCKS = 64  # coded at a time: an inverse table has 65,536 entries


def _regions(block: tuple[int, int], first: int, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Cut the rows from ``first`` on into regions of at most ``_BLOCKS`` blocks: lines among these rows, columns."""
    high, wide = (min(edge, n) for edge, n in zip(block, (first + rows, width), strict=True))
    across = min(_BLOCKS, -(-width // wide))
    down = _BLOCKS // across
    for top in range(first // high, -(-(first + rows) // high), down):
        lines = slice(max(top * high, first) - first, min((top + down) * high, first + rows) - first)
        for left in range(0, width, across * wide):
            yield lines, slice(left, min(left + across * wide, width))


_FEW = 1 << 16  # blocks: their tables come to 32 MB


def _tables(grid: Grid, above: int, below: int) -> U16:
    """Tables of some rows of blocks, [rows of blocks, columns of blocks, 256]."""
    if prod(grid.shape) <= _FEW:
        return _all_tables(grid)[above:below]
    return tables(grid.read(above, below).reshape(-1)).reshape(below - above, -1, 256)


@lru_cache(maxsize=4)
def _all_tables(grid: Grid) -> U16:
    """Slabs of a matrix are read one after the other, so that few matrices are in use at a time."""
    return tables(grid.read().reshape(-1)).reshape(*grid.shape, 256)


def _placed(grid: Grid, elements: U8 | U16, first: int, left: int, bits: int) -> tuple[U16, I32]:
    """Tables of the blocks of a region from row ``first`` and column ``left`` on, where a block begins, and the place of
    each element in them: the bits from ``bits`` on number its block. Places are in memory of the thread."""
    (rows, columns), (high, wide) = elements.shape, grid.block
    end, across = first + rows, -(-columns // wide)
    above, below, before = first // high, -(-end // high), left // wide
    numbers = _numbers(below - above, across, min(wide, columns), bits)
    places = scratch(4 * elements.size, "places").view(np.int32).reshape(elements.shape)
    for start, stop in _whole_blocks(first, end, high):
        row, count = start // high - above, -(-stop // high) - start // high
        piece, into = (array[start - first : stop - first].reshape(count, -1, columns) for array in (elements, places))
        np.add(piece, numbers[row : row + count, :, :columns], out=into)
    own = _tables(grid, above, below)[:, before : before + across]
    return np.ascontiguousarray(own).reshape(-1, 256), places


def _whole_blocks(first: int, end: int, high: int) -> Iterator[tuple[int, int]]:
    """Cut rows into what is left of a first block, whole blocks, and what there is of a last one."""
    head = min(-(-first // high) * high, end)
    cuts = [first, head, max(end // high * high, head), end]
    return ((start, stop) for start, stop in pairwise(cuts) if start < stop)


@lru_cache(maxsize=8)
def _numbers(down: int, across: int, wide: int, bits: int) -> I32:
    """The numbers of blocks, ``bits`` bits to the left, for a row of elements in each row of blocks."""
    numbers = np.arange(down * across, dtype=np.int32).reshape(down, 1, across) << bits
    return np.repeat(numbers, wide, axis=2)


class _Own(threading.local):
    def __init__(self) -> None:
        self.inverse: U8 = np.full(_BLOCKS << 16, _NONE, np.uint8)


_NONE = 0xFF  # the entry of an inverse table for a value that no code gives; it is that of the negative NaN too
_CODES = np.tile(np.arange(256, dtype=np.uint8), _BLOCKS)
_FIRST = np.arange(_BLOCKS)[:, None] << 16
_own = _Own()


def _look_up(table: U8 | U16, places: I32, out: U8 | U16) -> None:
    """``out`` = ``table[places]``. numpy would copy the places to 64 bits, and hold the interpreter lock meanwhile."""
    import torch

    whole = out.flags.c_contiguous
    found = out if whole else scratch(out.nbytes, "found").view(out.dtype).reshape(out.shape)
    signed = np.dtype(f"i{out.itemsize}")  # torch selects no unsigned 16 bits
    entries, to = (torch.from_numpy(array.reshape(-1).view(signed)) for array in (table, found))
    torch.index_select(entries, 0, torch.from_numpy(places.reshape(-1)), out=to)
    if not whole:
        np.copyto(out, found)


def _invert(table: U16, places: I32, out: U8) -> None:
    """``out`` = the code of every element, or ``_NONE``. The inverse table is as clean afterwards as it was before."""
    import torch

    spots = torch.from_numpy(np.add(table, _FIRST[: len(table)], dtype=np.int64).reshape(-1))
    inverse = torch.from_numpy(_own.inverse)
    inverse.scatter_(0, spots, torch.from_numpy(_CODES))
    try:
        _look_up(_own.inverse, places, out)
    finally:
        inverse.scatter_(0, spots, _NONE)


def _count(elements: U8 | U16, value: int) -> int:
    equal = scratch(elements.size, "equal").view(np.bool_).reshape(elements.shape)
    return int(np.count_nonzero(np.equal(elements, value, out=equal)))
