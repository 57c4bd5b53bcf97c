"""Block-scaled FP8 (e4m3fn codes with a scale a block): to bf16 and back, exactly.

    value = bf16( code × scale )        the product in fp32, rounded to nearest even

The way back asks which code gives the value, block by block, and compares all of them: no arithmetic is inverted.
Codes of one block have four significant bits, bf16 has eight, so two codes that differ give values that differ,
unless the product leaves the range of bf16 (see docs/fp8.md). A block whose codes cannot be told apart is *collapsed*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtpcheck.box import Shape
from mtpcheck.errors import FormatError
from mtpcheck.move import fill, read_plan, scratch
from mtpcheck.plan import Plan

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]


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
    with np.errstate(all="ignore"):
        product = values() * scales[:, None]
    bits = product.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    sign = (np.arange(256) >> 7 << 15).astype(np.uint16)
    return np.where(np.isnan(product), sign | np.uint16(0x7FC0), rounded)


@dataclass(frozen=True)
class Scaled:
    """A matrix of codes and the grid of its scales: one fp32 for each ``block`` of rows and columns, ragged at the
    edges. Raises FormatError when made, if the grid does not fit."""

    codes: Plan
    scales: Plan
    block: tuple[int, int]
    name: str

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if self.scales.shape != grid:
            raise FormatError(
                f"{self.name}_scale_inv has shape {list(self.scales.shape)}, expected {list(grid)}: one scale for each "
                f"block of {self.block[0]} × {self.block[1]} of {rows} × {columns}"
            )

    @property
    def shape(self) -> Shape:
        return self.codes.shape


def grid_of(scaled: Scaled) -> F32:
    """All scales. A grid is a 16,384th of its matrix and is read whole."""
    return np.frombuffer(read_plan(scaled.scales), np.float32).reshape(scaled.scales.shape)


@dataclass(frozen=True, eq=False)
class Dequantized:
    """A source: the bf16 values of a block-scaled matrix, in C order, computed as they are read."""

    scaled: Scaled

    @property
    def name(self) -> str:
        return self.scaled.name

    @property
    def size(self) -> int:
        return 2 * prod(self.scaled.shape)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        row, column = divmod(offset // 2, self.scaled.shape[1])
        return f"{self.scaled.codes.place_of((row, column))} (dequantized)"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        width = self.scaled.shape[1]
        first, end = offset // 2 // width, -(-(offset + len(buffer)) // 2 // width)
        whole = scratch(2 * width * (end - first), "dequantized").view(np.uint16).reshape(end - first, width)
        dequantize(self.scaled, first, whole)
        start = offset - 2 * width * first
        np.frombuffer(buffer, np.uint8)[:] = whole.reshape(-1).view(np.uint8)[start : start + len(buffer)]


def dequantize(scaled: Scaled, first: int, out: U16) -> None:
    """Fill ``out`` with the values of the rows from ``first`` on."""
    rows, width = out.shape
    codes = scratch(rows * width, "codes").reshape(rows, width)
    fill(scaled.codes.slice(0, first, first + rows), codes.reshape(-1).data)
    for block, table in _blocks(grid_of(scaled), scaled.block, first, out.shape):
        out[block] = table.take(codes[block], mode="clip")  # other modes check every index first


def _blocks(
    grid: F32, block: tuple[int, int], first: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, slice], U16]]:
    """Every block of the rows from ``first`` on: where it lies among these rows, and its table."""
    (rows, width), (high, wide) = shape, block
    for row in range(first // high, -(-(first + rows) // high)):
        lines = slice(max(row * high, first) - first, min((row + 1) * high, first + rows) - first)
        for column, table in enumerate(tables(grid[row])):
            yield (lines, slice(column * wide, min((column + 1) * wide, width))), table


@dataclass(frozen=True, eq=False)
class Coded:
    """A source: the codes that give a matrix of bf16 values under kept scales. Where none does, it is any: who uses
    them compares what they give with the values."""

    values: Plan
    scales: Plan
    block: tuple[int, int]
    name: str

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
        codes = scratch(width * (end - first), "coded").reshape(end - first, width)
        code(self, first, codes)
        start = offset - width * first
        np.frombuffer(buffer, np.uint8)[:] = codes.reshape(-1)[start : start + len(buffer)]


def _held(coded: Coded, first: int, rows: int) -> tuple[U16, F32]:
    """Values of some rows, and all scales."""
    width = coded.values.shape[1]
    held = scratch(2 * rows * width, "held").view(np.uint16).reshape(rows, width)
    fill(coded.values.slice(0, first, first + rows), held.reshape(-1).view(np.uint8).data)
    return held, np.frombuffer(read_plan(coded.scales), np.float32).reshape(coded.scales.shape)


def code(coded: Coded, first: int, out: U8) -> None:
    """Fill ``out`` with the codes of the rows from ``first`` on."""
    held, grid = _held(coded, first, out.shape[0])
    inverse = scratch(1 << 16, "inverse")
    for block, table in _blocks(grid, coded.block, first, out.shape):
        inverse[table] = np.arange(256)  # entries of earlier blocks stay: what no code gives, gets any
        out[block] = inverse.take(held[block], mode="clip")


def strangers(coded: Coded, first: int, rows: int) -> int:
    """How many values of the rows from ``first`` on no code gives."""
    held, grid = _held(coded, first, rows)
    known, found = np.zeros(1 << 16, np.bool_), 0
    for block, table in _blocks(grid, coded.block, first, held.shape):
        known[table] = True
        hit = known.take(held[block], mode="clip")
        found += hit.size - int(np.count_nonzero(hit))
        known[table] = False
    return found
