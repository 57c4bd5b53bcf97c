"""Sources of bytes: anything with a name, a size and a positioned read."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Protocol

from mtpcheck.errors import FormatError

_STORE = ".huggingface-shared-blobs"  # marks the store of blobs that huggingface_hub 2 keeps for a whole cache


class Source(Protocol):
    """Immutable bytes at rest. Two sources are the same bytes if and only if they are equal."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from byte ``offset`` on, or raise FormatError. Safe from many threads."""

    def mapped(self, offset: int, length: int) -> memoryview | None:
        """The bytes without a copy, where that is possible; valid as long as the file is not cut short."""

    def place_of(self, offset: int) -> str:
        """File and byte where ``offset`` lies, in words."""


def inside(folder: Path, name: str) -> Path:
    """``folder/name``, refusing what leads out of the folder; links of the Hub's cache are followed into its blobs,
    those of the repository and, where the cache has a store for all of them, that one."""
    if "\0" in name:
        raise FormatError(f"{folder}: {name!r} is no file name")
    path, root = folder / name, folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        repo = root.parent.parent
        roots.append(repo / "blobs")
        if repo.name.startswith("models--") and (repo.parent / "blobs" / _STORE).is_file():
            roots.append(repo.parent / "blobs")
    if Path(name).is_absolute() or not any(path.resolve().is_relative_to(r) for r in roots):
        raise FormatError(f"{folder}: {name!r} leads out of the folder; refused")
    return path


def read(source: Source, offset: int, length: int) -> bytes:
    """Bytes ``[offset, offset + length)`` of ``source``."""
    buffer = bytearray(length)
    source.read_into(memoryview(buffer), offset)
    return bytes(buffer)


class LocalFile:
    """A file on disk, opened at the first read and closed with the object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._fd: int | None = None
        self._map: mmap.mmap | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LocalFile({self.name!r})"

    def _descriptor(self) -> int:
        if self._fd is None:
            fd = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, fd)
            self._fd = fd
        return self._fd

    def mapped(self, offset: int, length: int) -> memoryview | None:
        if self._map is None:
            self._map = mmap.mmap(self._descriptor(), 0, prot=mmap.PROT_READ)
        view = memoryview(self._map)[offset : offset + length]
        if len(view) < length:
            raise FormatError(f"{self.path}: file ends at byte {len(self._map)}; copy or download it again")
        return view

    def place_of(self, offset: int) -> str:
        return f"{self.path}, byte {offset:,}"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        fd, done = self._descriptor(), 0
        while done < len(buffer):
            n = os.preadv(fd, [buffer[done:]], offset + done)
            if n == 0:
                raise FormatError(
                    f"{self.path}: file ends at byte {offset + done}, expected {len(buffer) - done} bytes more; "
                    "copy or download it again"
                )
            done += n
