"""Zips as ``torch.save`` writes them, streamed: storages of any size go from plan to file, the rest is put round them.

Needs torch for the classes that a pickle of tensors names.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from zlib_ng.zlib_ng import crc32  # ten times as fast as zlib's, which took as long as writing the file

from mtpcheck.box import Shape
from mtpcheck.layouts.zipstore import TORCH_DTYPES
from mtpcheck.move import fill, scratch, slabs, write_at
from mtpcheck.parallel import Alive
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress

DTYPES: Mapping[str, torch.dtype] = {ours: getattr(torch, name) for name, ours in TORCH_DTYPES.items()}
"""Our dtype → torch's."""

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16, 4.5.3
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_DATE = 0x21  # 1 January 1980, the first day there is
_LIMIT, _MOST = 0xFFFFFFFF, 0xFFFF  # say that the true number is wider and stands elsewhere
_ALIGNMENT = 64  # torch.serialization's default storage alignment


@dataclass(frozen=True)
class Frame:
    """What stands around the storages of a zip. Lengths and places do not depend on any CRC."""

    length: int
    starts: tuple[int, ...]
    """First byte of each storage."""
    pieces: tuple[tuple[int, bytes], ...]
    """(first byte, what stands there)"""


def frame(pickled: bytes, storages: Sequence[tuple[int, int]]) -> Frame:
    """A zip around storages of (bytes, CRC-32), which the pickle calls "0", "1", ... Places count from its start."""
    zipped = _Zip()
    zipped.add(b"archive/data.pkl", pickled)
    zipped.add(b"archive/byteorder", b"little")
    starts = [zipped.leave_room(b"archive/data/%d" % i, *storage) for i, storage in enumerate(storages)]
    zipped.add(b"archive/version", b"3\n")
    return Frame(zipped.close(), tuple(starts), tuple(zipped.pieces))


class _Zip:
    """A zip under construction: pieces that are known, with room between them for storages."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._at = self._count = 0
        self._begin, self._piece, self._directory = 0, bytearray(), bytearray()

    def _put(self, data: bytes | bytearray) -> None:
        self._piece += data
        self._at += len(data)

    def add(self, name: bytes, data: bytes) -> None:
        self._note(name, len(data), crc32(data))
        self._put(_local(name, len(data), crc32(data)) + data)

    def leave_room(self, name: bytes, nbytes: int, crc: int) -> int:
        self._note(name, nbytes, crc)
        self._put(_local(name, nbytes, crc, self._at))
        self.pieces.append((self._begin, bytes(self._piece)))
        start = self._at
        self._at += nbytes
        self._begin, self._piece = self._at, bytearray()
        return start

    def _note(self, name: bytes, nbytes: int, crc: int) -> None:
        self._count += 1
        self._directory += _central(name, nbytes, crc, self._at)

    def close(self) -> int:
        at = self._at
        self._put(self._directory + _end(self._count, len(self._directory), at))
        self.pieces.append((self._begin, bytes(self._piece)))
        return self._at


def _local(name: bytes, nbytes: int, crc: int, align_from: int | None = None) -> bytes:
    """A member's header; with ``align_from``, its own place, padded so that the data after it are aligned."""
    extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT else b""
    if align_from is not None:
        padding = -(align_from + _LOCAL.size + len(name) + len(extra) + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    size = min(nbytes, _LIMIT)
    fields = (b"PK\3\4", 45 if size == _LIMIT else 20, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def _central(name: bytes, nbytes: int, crc: int, at: int) -> bytes:
    wide = [n for n in (nbytes, nbytes, at) if n >= _LIMIT]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version, size = 45 if wide else 20, min(nbytes, _LIMIT)
    fields = (b"PK\1\2", version, version, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _CENTRAL.pack(*fields, 0, 0, 0, 0, min(at, _LIMIT)) + name + extra


def _end(count: int, nbytes: int, at: int) -> bytes:
    """The end of a zip whose central directory of ``nbytes`` stands at ``at``."""
    short = min(count, _MOST)
    end = _END.pack(b"PK\5\6", 0, 0, short, short, nbytes, min(at, _LIMIT), 0)
    if at < _LIMIT and count < _MOST:
        return end
    wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, nbytes, at)
    return wide + _LOCATOR64.pack(b"PK\6\7", 0, at + nbytes, 1) + end


def stream(plan: Plan, fd: int, start: int, progress: Progress, alive: Alive) -> int:
    """Write a tensor, in C order, at ``start`` of an open file. The result is its CRC-32."""
    crc = 0
    for at, part in slabs(plan):
        alive()
        slab = scratch(part.nbytes, "slab")
        fill(part, slab.data)
        crc = crc32(slab.data, crc)
        write_at(fd, slab.data, start + at)
        progress.advance(part.nbytes)
    return crc


# ---- the pickle


@dataclass(frozen=True)
class Pending:
    """Stands for a contiguous tensor in what is to be pickled; its values are storage number ``storage``."""

    dtype: str
    shape: Shape
    storage: int = 0


def pickled(root: Any) -> bytes:
    """What torch.save writes for ``root``, each ``Pending`` as the tensor that it stands for."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(root)
    return buffer.getvalue()


class _Storage:
    """Stands for one storage while its pickle is written. Dtypes without a class of storage lie in an untyped one."""

    def __init__(self, pending: Pending) -> None:
        dtype = DTYPES[pending.dtype]
        self.kind = torch.storage._dtype_to_storage_type_map().get(dtype, "")
        self.number, self.numel = pending.storage, prod(pending.shape) * (1 if self.kind else dtype.itemsize)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            kind = getattr(torch, obj.kind) if obj.kind else torch.storage.UntypedStorage
            return ("storage", kind, str(obj.number), "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Pending):
            storage, strides = _Storage(obj), tuple(prod(obj.shape[i + 1 :]) for i in range(len(obj.shape)))
            plain: tuple[Any, ...] = (storage, 0, obj.shape, strides, False, OrderedDict())
            if storage.kind:
                return torch._utils._rebuild_tensor_v2, plain
            return torch._utils._rebuild_tensor_v3, (*plain, DTYPES[obj.dtype])
        return NotImplemented
