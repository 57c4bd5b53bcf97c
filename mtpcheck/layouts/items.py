"""Items of .distcp files: each a small torch.save zip, and as a source the tensor inside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from mtpcheck.box import Shape, contiguous_steps
from mtpcheck.errors import FormatError
from mtpcheck.files import LocalFile, Source
from mtpcheck.layouts.zipstore import Archive, StoredTensor, read_archive
from mtpcheck.tensormap import DTYPE_BITS


@dataclass(frozen=True)
class Item:
    """One stored item: bytes ``[offset, offset + length)`` of a .distcp file."""

    file: LocalFile
    offset: int
    length: int

    def archive(self, what: str, foreign: bool = False) -> Archive:
        return read_archive(self.file, self.offset, self.length, f"{self.file.path}: {what}", foreign)


@dataclass(frozen=True)
class Chunk:
    """A source: the tensor inside one item, in C order. Its zip is parsed at the first read."""

    item: Item
    key: str
    dtype: str
    shape: Shape

    @property
    def name(self) -> str:
        return self.item.file.name

    @property
    def size(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @cached_property
    def _payload(self) -> tuple[Source, int]:
        """(source, first byte) of the elements in C order."""
        archive = self.item.archive(self.key)
        tensor = archive.root
        if not isinstance(tensor, StoredTensor) or (tensor.dtype, tensor.shape) != (self.dtype, self.shape):
            raise FormatError(
                f"{self.name}: {self.key}: .metadata promises {self.dtype} {list(self.shape)}, the item holds "
                + (f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, StoredTensor) else "no tensor")
            )
        return elements_of(tensor, archive, self.item.file, self.key)

    def mapped(self, offset: int, length: int) -> memoryview | None:
        source, start = self._payload
        return source.mapped(start + offset, length)

    def place_of(self, offset: int) -> str:
        source, start = self._payload
        return f"{source.place_of(start + offset)} ({self.key})"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        source, start = self._payload
        source.read_into(buffer, start + offset)


def elements_of(tensor: StoredTensor, archive: Archive, file: LocalFile, what: str) -> tuple[Source, int]:
    """(source, first byte) of a tensor's elements in C order. Raises FormatError if its storage is too small."""
    itemsize = DTYPE_BITS[tensor.dtype] // 8
    start, nbytes = archive.storage(tensor.storage)
    strides = tuple(s * itemsize for s in tensor.strides)
    end = tensor.offset * itemsize + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + itemsize
    empty, large = 0 in tensor.shape, prod(tensor.shape) * itemsize
    if min(tensor.offset, *tensor.strides, *tensor.shape, 0) < 0 or (not empty and max(end, large) > nbytes):
        raise FormatError(f"{file.name}: {what}: the storage is too small for its tensor; damaged")
    start += tensor.offset * itemsize
    straight = contiguous_steps(tensor.shape, itemsize)
    if all(n == 1 or a == b for n, a, b in zip(tensor.shape, strides, straight, strict=True)):
        return file, start
    return _Straightened(file, start, tensor.shape, strides, itemsize), 0


@dataclass(frozen=True)
class _Straightened:
    """A transposed or otherwise strided tensor, put into C order in memory (one chunk at a time)."""

    file: LocalFile
    start: int
    shape: Shape
    strides: Shape
    itemsize: int

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return prod(self.shape) * self.itemsize

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return f"{self.file.path}, the tensor at byte {self.start:,}"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = _straighten(self)[offset : offset + len(buffer)]


@lru_cache(maxsize=4)
def _straighten(chunk: _Straightened) -> memoryview:
    """All bytes of a chunk in C order; the last few are kept, since a chunk is read slab by slab."""
    span = sum((n - 1) * s for n, s in zip(chunk.shape, chunk.strides, strict=True)) + chunk.itemsize
    raw = bytearray(span)
    chunk.file.read_into(memoryview(raw), chunk.start)
    array = np.ndarray(chunk.shape, f"V{chunk.itemsize}", buffer=raw, strides=chunk.strides)
    return memoryview(array.tobytes())
