"""Codes of e4m3fn in blocks with one scale each: to bf16, and back to the code that gives a value.

    value = bf16( code × scale )        the product in fp32, rounded to nearest even

The way there multiplies; where there is NaN or a huge scale it looks values up in a table of each block instead.
The way back looks up in the inverse of that table, so that no arithmetic is inverted. Codes of one block have four
significant bits, bf16 has eight: two codes that differ give values that differ, unless the product leaves the range of
bf16 (docs/fp8.md).

Arrays are rows of a matrix from row ``first`` on, [rows, width], and the scales of the rows of blocks that these touch.
With two workers what costs is waiting for the interpreter lock, so there are few calls, of which each does much
(docs/benchmarks.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mtpcheck.box import Shape
from mtpcheck.move import scratch

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

Block = tuple[int, int]
"""Rows and columns that have a scale."""

_NANS = (np.arange(256) >> 7 << 15).astype(np.uint16) | np.uint16(0x7FC0)


@lru_cache(maxsize=1)
def values() -> F32:
    """The value of each of the 256 codes of e4m3fn: four exponent bits with bias 7, no infinity, 0x7F and 0xFF NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    plain = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    plain[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, plain, -plain).astype(np.float32)


def decode(codes: U8, scales: F32, block: Block, first: int, out: U16) -> None:
    """Fill ``out`` with the bits of the bf16 values of ``codes``. A NaN keeps the sign of its code."""
    if _multiplies(codes, scales):
        _multiply(codes, scales, block, first, out)
        return
    for part, blocks in _regions(codes.shape, block, first, _TABLES):
        places = _places(codes[part], scales[blocks].shape, block, first + part[0].start)
        _look_up(_tables(scales[blocks]), places, out[part])


def encode(held: U16, scales: F32, block: Block, first: int, out: U8) -> int:
    """Fill ``out`` with the codes of bf16 values, given as bits. The result is how many of them no code gives; what is
    in their place in ``out`` means nothing. No two codes of a block may have one value."""
    found = 0
    for part, blocks in _regions(held.shape, block, first, _INVERSES):
        codes = out[part]
        places = _places(held[part], scales[blocks].shape, block, first + part[0].start)
        _invert(scales[blocks], places, codes)
        if codes.max(initial=0) == _NONE:  # which is the code of one value in every block
            found += _count(codes, _NONE) - _count(held[part], _NANS[_NONE])
    return found


# ---- multiplying


def _multiplies(codes: U8, scales: F32) -> bool:
    """Whether no code is NaN, and every scale a number below 2^119, so that 2^8 times it is one of fp32 too."""
    numbers = codes.view(np.int8).max(initial=0) < 0x7F and codes.max(initial=0) < 0xFF
    return bool(numbers and (np.abs(scales) < 2.0**119).all())


def _multiply(codes: U8, scales: F32, block: Block, first: int, out: U16) -> None:
    """The bits of a code, seven places to the left, are an fp16 number of 2^-8 times its value, subnormal if it is; the
    scale makes up for that, so that one product is rounded, and once."""
    import torch

    (rows, width), (high, wide) = codes.shape, block
    if not codes.size:
        return
    halves = out.view(np.int16)
    np.left_shift(codes.view(np.int8), 7, out=halves, dtype=np.int16)  # repeats the sign in the bit after it
    np.bitwise_and(halves, np.int16(~0x4000), out=halves)
    products = torch.from_numpy(scratch(4 * codes.size, "products").view(np.float32).reshape(codes.shape))
    products.copy_(torch.from_numpy(halves).view(torch.float16))
    factors = torch.from_numpy(np.repeat(scales * np.float32(256), min(wide, width), axis=1)[:, None, :width])
    for lines, blocks in _whole_blocks(first, rows, high):
        products[lines].view(blocks.stop - blocks.start, -1, width).mul_(factors[blocks])
    torch.from_numpy(halves).view(torch.bfloat16).copy_(products)


# ---- looking up

_TABLES = 4096  # blocks looked up at a time: a table has 512 bytes
_INVERSES = 64  # coded at a time: an inverse table has 64 KiB


def _regions(
    shape: Shape, block: Block, first: int, most: int
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Cut rows into regions of at most ``most`` blocks: where their elements are, and their scales."""
    (rows, width), (high, wide) = shape, block
    end, above = first + rows, first // high
    across = max(1, min(most, -(-width // wide)))
    down = most // across
    for top in range(above, -(-end // high) if rows else above, down):
        lines = slice(max(top * high, first) - first, min((top + down) * high, end) - first)
        own = slice(top - above, top - above + down)
        for left in range(0, -(-width // wide), across):
            yield (lines, slice(left * wide, min((left + across) * wide, width))), (own, slice(left, left + across))


def _whole_blocks(first: int, rows: int, high: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows into what is left of a first block, whole blocks, and what there is of a last one: which of the rows,
    and which rows of blocks."""
    end, above = first + rows, first // high
    head = min(-(-first // high) * high, end)
    for start, stop in pairwise((first, head, max(end // high * high, head), end)):
        if start < stop:
            yield slice(start - first, stop - first), slice(start // high - above, -(-stop // high) - above)


def _tables(scales: F32) -> U16:
    """The bf16 bits of all 256 codes under each scale: one row of 256 a scale."""
    import torch

    bits = np.empty((scales.size, 256), np.uint16)
    rounded = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    torch.mul(torch.from_numpy(values()), torch.from_numpy(scales.reshape(-1, 1)), out=rounded)
    if np.isfinite(scales).all():
        bits[:, 0x7F], bits[:, 0xFF] = _NANS[0x7F], _NANS[0xFF]
    else:
        np.copyto(bits, _NANS, where=bits & 0x7FFF > 0x7F80)
    return bits


def _places(elements: U8 | U16, grid: Shape, block: Block, first: int) -> I32:
    """Where each element is in tables of its region: its low bits are the element, those above number its block among
    ``grid`` of them. In memory of the thread, where the numbers stay for the next region of that form."""
    form = elements.shape, elements.itemsize, grid, block, first % block[0] if grid[0] > 1 else 0
    if _own.form != form:
        _own.form = None  # as long as the numbers are neither those of before nor these
        _own.places = _numbers(elements, grid, block, first)
        _own.form = form
    np.copyto(_own.places.view(elements.dtype).reshape(*elements.shape, -1)[:, :, 0], elements)
    return _own.places


def _numbers(elements: U8 | U16, grid: Shape, block: Block, first: int) -> I32:
    """The numbers of blocks for every element, as many bits to the left as an element has: in the upper bytes of a
    little-endian number."""
    rows, width = elements.shape
    places = scratch(4 * elements.size, "places").view(np.int32).reshape(elements.shape)
    numbers = np.arange(grid[0] * grid[1], dtype=np.int32).reshape(grid[0], 1, grid[1]) << 8 * elements.itemsize
    wide = np.repeat(numbers, min(block[1], width), axis=2)[:, :, :width]
    for lines, blocks in _whole_blocks(first, rows, block[0]):
        places[lines].reshape(blocks.stop - blocks.start, -1, width)[...] = wide[blocks]
    return places


class _Own(threading.local):
    def __init__(self) -> None:
        self.inverse: U8 = np.full(_INVERSES << 16, _NONE, np.uint8)
        # where the inverse table of each block begins; the lowest 16 bits are then the values of its codes
        self.spots = np.repeat(np.arange(_INVERSES)[:, None] << 16, 256, axis=1)
        self.form: object = None
        self.places: I32 = np.empty((0, 0), np.int32)


_NONE = 0xFF  # the entry of an inverse table for a value that no code gives; it is that of the negative NaN too
_CODES = np.tile(np.arange(256, dtype=np.uint8), _INVERSES)
_NOTHING = np.full(_INVERSES << 8, _NONE, np.uint8)  # an array, since torch takes longer to scatter a scalar
_own = _Own()


def _invert(scales: F32, places: I32, out: U8) -> None:
    """``out`` = the code of every element, or ``_NONE``. The inverse table is as clean afterwards as it was before."""
    import torch

    found = _own.spots[: scales.size]
    found.view(np.uint16)[:, ::4] = _tables(scales)
    spots = torch.from_numpy(found.reshape(-1))
    inverse = torch.from_numpy(_own.inverse)
    try:
        inverse.scatter_(0, spots, torch.from_numpy(_CODES))
        _look_up(_own.inverse, places, out)
    finally:
        inverse.scatter_(0, spots, torch.from_numpy(_NOTHING))


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


def _count(elements: U8 | U16, value: int) -> int:
    equal = scratch(elements.size, "equal").view(np.bool_).reshape(elements.shape)
    return int(np.count_nonzero(np.equal(elements, value, out=equal)))
