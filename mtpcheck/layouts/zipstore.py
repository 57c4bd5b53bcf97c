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

from mtpcheck.box import Shape
from mtpcheck.errors import FormatError, MtpcheckError, UnsupportedError
from mtpcheck.files import Source, read

TORCH_DTYPES: Mapping[str, str] = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
"""torch dtype → our dtype (safetensors' name)."""

_STORAGES: Mapping[str, str] = {
    "BFloat16Storage": "BF16", "HalfStorage": "F16", "FloatStorage": "F32", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""Classes of storage → our dtype. Dtypes without a class of their own lie in an untyped storage."""


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


class Ordered(dict[Any, Any]):
    """An OrderedDict: a module's state_dict carries attributes beside its entries, which a plain dict cannot take."""


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
    ("collections", "OrderedDict"): Ordered,
    ("collections", "defaultdict"): Record,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}  # fmt: skip


_NAMES = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.storage", "UntypedStorage")}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str, foreign: bool) -> None:
        super().__init__(io.BytesIO(data))
        self.where, self.foreign = where, foreign

    def find_class(self, module: str, name: str) -> Any:
        known: Any = _RECORDS.get((module, name))
        if known is not None:
            return known
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _rebuild_untyped
        if (module, name) in (
            ("torch._utils", "_rebuild_parameter"),
            ("torch._utils", "_rebuild_parameter_with_state"),
        ):
            return lambda data, *rest: data
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return lambda rebuild, kind, args, state: rebuild(*args)
        if (module, name) in _NAMES:
            return Named(f"{module}.{name}")
        if module == "torch" and (name in TORCH_DTYPES or name in _STORAGES):
            return Named(f"torch.{name}")
        if (module, name) == ("torch.serialization", "_get_layout"):
            return Named("torch.layout")
        if module == "torch._utils" and name.startswith("_rebuild"):
            raise UnsupportedError(f"{self.where}: holds a tensor of a kind that cannot be read yet ({name})")
        if self.foreign and module.split(".")[0] not in sys.stdlib_module_names:
            return type("Inert", (Inert,), {"__qualname__": f"{module}.{name}"})
        raise self._refused(f"{module}.{name}")

    def _member(self, kind: Any, name: Any) -> Record:
        """A member of an enum: Python 3.11.0 to 3.11.3 pickle it as an attribute of its class (enum.py)."""
        if isinstance(kind, type) and issubclass(kind, Record) and isinstance(name, str):
            return kind(name)
        raise self._refused("builtins.getattr")

    def _refused(self, name: str) -> FormatError:
        return FormatError(
            f"{self.where}: the pickle refers to {name}, which no checkpoint needs; "
            "refused, nothing was run. Do not load this file with torch.load"
        )

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Named):
            return pid
        raise FormatError(f"{self.where}: the pickle refers to an object outside itself in an unknown way")


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: object) -> StoredTensor:
    dtype = _STORAGES[storage[1].name.removeprefix("torch.")]
    return StoredTensor(dtype, str(storage[2]), int(offset), tuple(map(int, size)), tuple(map(int, stride)))


def _rebuild_untyped(
    storage: Any, offset: int, size: Any, stride: Any, grad: object, hooks: object, dtype: Any, *rest: object
) -> StoredTensor:
    """Of dtypes without a class of storage, as torch._utils._rebuild_tensor_v3; the offset is in elements."""
    ours = TORCH_DTYPES[dtype.name.removeprefix("torch.")]
    return StoredTensor(ours, str(storage[2]), int(offset), tuple(map(int, size)), tuple(map(int, stride)))


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


_END = 4096


class Window(io.RawIOBase):
    """Part of a source as a read-only file object, for the standard library's readers.

    Both ends are kept once they are read. What a zip holds beside one large tensor lies there, in a dozen fields, and
    every read lets go of the interpreter lock, which costs a worker more than the read (docs/benchmarks.md).
    """

    def __init__(self, source: Source, start: int, length: int) -> None:
        self.source, self.start, self.length, self.position = source, start, length, 0
        self._ends: dict[int, bytes] = {}

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
        self.fill(view[:n], self.position)
        self.position += n
        return n

    def fill(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from byte ``offset`` of the part on, and from what follows the part where it reaches so far."""
        for first in (0, max(0, self.length - _END)):
            if first <= offset and offset + len(view) <= min(first + _END, self.length):
                if first not in self._ends:
                    self._ends[first] = read(self.source, self.start + first, min(_END, self.length))
                view[:] = self._ends[first][offset - first : offset - first + len(view)]
                return
        self.source.read_into(view, self.start + offset)


@dataclass(frozen=True)
class Archive:
    """One ``torch.save`` zip: its unpickled root object, and where its members are in the source."""

    root: Any
    window: Window
    where: str
    members: Mapping[str, tuple[int, int]]
    """name → (place of its local header within the zip, bytes)"""

    def storage(self, key: str) -> tuple[int, int]:
        """(first byte in the source, bytes) of one storage. Raises FormatError if there is none, or no room for it."""
        at, nbytes = self.members.get(f"data/{key}", (0, -1))
        if nbytes < 0:
            raise FormatError(f"{self.where}: the pickle names a storage {key!r} that the zip does not hold; damaged")
        header = bytearray(30)
        self.window.fill(memoryview(header), at)
        names, extra = struct.unpack("<HH", header[26:30])
        begin = at + 30 + names + extra
        if header[:4] != b"PK\3\4" or begin + nbytes > self.window.length:
            raise FormatError(f"{self.where}: member 'data/{key}' reaches past the end of its zip")
        return self.window.start + begin, nbytes


def read_archive(source: Source, start: int, length: int, where: str, foreign: bool = False) -> Archive:
    """Parse the zip at ``[start, start + length)`` of ``source``. Raises FormatError if it is not a sound one."""
    window = Window(source, start, length)
    window.fill(memoryview(bytearray(min(length, 4))), 0)  # an unreadable file is no damaged zip
    try:
        with zipfile.ZipFile(window) as zipped:
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
    places = {name: (info.header_offset, info.file_size) for name, info in members.items()}
    return Archive(root, window, where, places)
