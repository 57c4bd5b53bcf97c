"""Zips as ``torch.save`` writes them, read without torch and without running anything they contain.

Members are stored, not compressed, so a tensor's bytes are a region of the file. The pickle beside them is read
by the one restricted unpickler of this project: tensors become ``StoredTensor`` (offset, shape, strides), a short
list of classes is known, foreign classes inside training arguments become inert placeholders, and everything
else is refused.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zlib_ng.zlib_ng import crc32  # ten times as fast as zlib's, which took as long as writing the file

from mtpcheck.box import Shape
from mtpcheck.errors import FormatError, MtpcheckError, UnsupportedError
from mtpcheck.files import Source, read

TORCH_DTYPES: Mapping[str, str] = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch dtype → our dtype (safetensors' name)."""

_STORAGES: Mapping[str, str] = {
    "BFloat16Storage": "BF16", "HalfStorage": "F16", "FloatStorage": "F32", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside a zip: ``storage`` is the key of the member that holds it; offset and strides in elements."""

    dtype: str
    storage: str
    offset: int
    shape: Shape
    strides: Shape


@dataclass(frozen=True, slots=True)
class Named:
    """A global that a pickle refers to and that we keep as a name only (a dtype, a layout, an enum)."""

    name: str

    def __call__(self, *args: object) -> Named:
        return self

    def __str__(self) -> str:
        return self.name


class Record:
    """An object of a class we do not have: its attributes, nothing else."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(k): v for k, v in state.items()})
        else:
            self.state = state

    def __getattr__(self, name: str) -> Any:
        return None  # pickles leave out attributes that have their class's default

    def _ignore(self, *content: object) -> None:
        """What a pickle puts into a list, set or mapping of a class we do not have."""

    append = extend = add = __setitem__ = _ignore


class Inert(Record):
    """A placeholder for a foreign class inside training arguments."""


_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    **{
        (f"{_CHECKPOINT}.metadata", name): Record
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    **{
        (f"{_CHECKPOINT}.planner", name): Record
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): Record,
    ("argparse", "Namespace"): Record,
    ("types", "SimpleNamespace"): Record,
    ("pathlib", "PosixPath"): Record,
    ("pathlib", "PurePosixPath"): Record,
    ("io", "BytesIO"): Record,
    ("_io", "BytesIO"): Record,
    ("signal", "Signals"): Record,
    ("_codecs", "encode"): Record,
    ("datetime", "timedelta"): Record,
    ("collections", "OrderedDict"): dict,
    ("collections", "defaultdict"): Record,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str, foreign: bool) -> None:
        super().__init__(io.BytesIO(data))
        self.where, self.foreign = where, foreign

    def find_class(self, module: str, name: str) -> Any:
        known: Any = _RECORDS.get((module, name))
        if known is not None:
            return known
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and (name in TORCH_DTYPES or name in _STORAGES):
            return Named(f"torch.{name}")
        if (module, name) == ("torch.serialization", "_get_layout"):
            return Named("torch.layout")
        if module == "torch._utils" and name.startswith("_rebuild"):
            raise UnsupportedError(
                f"{self.where}: holds a tensor of a kind that cannot be read yet ({name}), such as FP8"
            )
        if self.foreign and module.split(".")[0] not in sys.stdlib_module_names:
            return type("Inert", (Inert,), {"__qualname__": f"{module}.{name}"})
        raise FormatError(
            f"{self.where}: the pickle refers to {module}.{name}, which no checkpoint needs; "
            "refused, nothing was run. Do not load this file with torch.load"
        )

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Named):
            return pid
        raise FormatError(f"{self.where}: the pickle refers to an object outside itself in an unknown way")


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: object) -> StoredTensor:
    dtype = _STORAGES[storage[1].name.removeprefix("torch.")]
    return StoredTensor(dtype, str(storage[2]), int(offset), tuple(map(int, size)), tuple(map(int, stride)))


def unpickle(data: bytes, where: str, foreign: bool = False) -> Any:
    """Read a pickle. ``foreign`` allows inert placeholders for classes outside the standard library.

    Raises FormatError for a class that is not allowed and for damaged pickles.
    """
    try:
        return _Unpickler(data, where, foreign).load()
    except MtpcheckError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise FormatError(f"{where}: damaged pickle ({type(error).__name__}: {error})") from None


class Window(io.RawIOBase):
    """Part of a source as a read-only file object, for the standard library's readers."""

    def __init__(self, source: Source, start: int, length: int) -> None:
        self.source, self.start, self.length, self.position = source, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        n = max(0, min(len(view), self.length - self.position))
        if n:
            self.source.read_into(view[:n], self.start + self.position)
            self.position += n
        return n


@dataclass(frozen=True, slots=True)
class Archive:
    """One ``torch.save`` zip: its unpickled root object and where each storage's bytes are in the source."""

    root: Any
    storages: Mapping[str, tuple[int, int]]
    """storage key → (first byte in the source, bytes)"""


def read_archive(source: Source, start: int, length: int, where: str, foreign: bool = False) -> Archive:
    """Parse the zip at ``[start, start + length)`` of ``source``. Raises FormatError if it is not a sound one."""
    read(source, start, min(length, 4))  # an unreadable file is no damaged zip
    try:
        with zipfile.ZipFile(io.BufferedReader(Window(source, start, length), 4096)) as zipped:
            members = {info.filename.partition("/")[2]: info for info in zipped.infolist()}
            if len(members) != len(zipped.infolist()):
                raise FormatError(f"{where}: two members of one name; refused")
            packed = [name for name, info in members.items() if info.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise FormatError(f"{where}: member {packed[0]!r} is compressed; torch.save stores members as they are")
            if "data.pkl" not in members:
                raise FormatError(f"{where}: no data.pkl inside; not written by torch.save")
            if "byteorder" in members and zipped.read(members["byteorder"]) != b"little":
                raise FormatError(f"{where}: big-endian tensors are not supported")
            root = unpickle(zipped.read(members["data.pkl"]), where, foreign)
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError) as error:
        raise FormatError(f"{where}: not a sound zip ({error}); the file is cut off or damaged") from None
    storages = {}
    for name, info in members.items():
        if name.startswith("data/"):
            header = read(source, start + info.header_offset, 30)
            names, extra = struct.unpack("<HH", header[26:30])
            at = info.header_offset + 30 + names + extra
            if header[:4] != b"PK\3\4" or at + info.file_size > length:
                raise FormatError(f"{where}: member {name!r} reaches past the end of its zip")
            storages[name.removeprefix("data/")] = (start + at, info.file_size)
    return Archive(root, storages)


# ---- writing

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16, 4.5.3
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_DATE = 0x21  # 1 January 1980, the first day there is
_LIMIT = 0xFFFFFFFF  # says that the true number is 64 bits wide and stands elsewhere
_ALIGNMENT = 64  # torch.serialization's default storage alignment


def archive(pickled: bytes, nbytes: int, crc: int) -> tuple[bytes, bytes]:
    """What stands before and after the one storage, of ``nbytes``, in a zip that ``torch.load`` opens.

    Only the values depend on ``crc``, the CRC-32 of the storage, and no length does: the storage can be written first.
    """
    head, central = b"", b""
    for name, data in ((b"archive/data.pkl", pickled), (b"archive/byteorder", b"little")):
        central += _central(name, len(data), crc32(data), len(head))
        head += _local(name, len(data), crc32(data)) + data
    central += _central(b"archive/data/0", nbytes, crc, len(head))
    head += _local(b"archive/data/0", nbytes, crc, len(head))
    at = len(head) + nbytes
    name, data = b"archive/version", b"3\n"
    central += _central(name, len(data), crc32(data), at)
    tail = _local(name, len(data), crc32(data)) + data
    return head, tail + central + _end(4, len(central), at + len(tail))


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
    end = _END.pack(b"PK\5\6", 0, 0, count, count, nbytes, min(at, _LIMIT), 0)
    if at < _LIMIT:
        return end
    wide = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, nbytes, at)
    return wide + _LOCATOR64.pack(b"PK\6\7", 0, at + nbytes, 1) + end
