"""Layout ``torch_dist``: Megatron's distributed checkpoint, read without Megatron and without torch.

.metadata            pickle: every tensor's shape, dtype and chunks, and where each chunk lies
__<rank>_<n>.distcp  the chunks, each a small torch.save zip
common.pt            arguments and counters (megatron-core up to 0.18)
common_state/...     the same as a bytes entry of the .distcp files (from 0.19)
metadata.json        names the format; written last

Megatron-FSDP saves through plain torch.distributed.checkpoint, with neither of the last two: keys start with
``model.module.`` and the arguments are an entry of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mtpcheck.box import Shape
from mtpcheck.errors import FormatError, UnsupportedError
from mtpcheck.files import LocalFile
from mtpcheck.layouts.items import Chunk, Item
from mtpcheck.layouts.zipstore import (
    TORCH_DTYPES,
    Record,
    read_archive,
    unpickle,
)
from mtpcheck.plan import Plan
from mtpcheck.tensormap import DTYPE_BITS, TensorRef
from mtpcheck.tree import read_json

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON_STATE = "common_state/"
_FSDP = "model.module."
_TRAINING = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")


@dataclass(frozen=True)
class TorchDistFolder:
    """What one iteration folder holds."""

    args: dict[str, Any] | None
    tensors: dict[str, TensorRef]
    passed_over: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What is no model weight: kind → (entries, bytes)."""
    fsdp: bool = False
    """Saved by Megatron-FSDP."""


def is_torch_dist(folder: Path) -> bool:
    return (folder / ".metadata").is_file() or (folder / "metadata.json").is_file()


def read_torch_dist(folder: Path, prefixes: tuple[str, ...]) -> TorchDistFolder:
    """Read ``.metadata`` and the common state of an iteration folder.

    ``prefixes`` are wrappers that may stand before model keys. Raises FormatError where the files contradict
    themselves, UnsupportedError for another backend.
    """
    if not (folder / ".metadata").is_file():
        raise FormatError(f"{folder}: no .metadata; copy the hidden file too")
    metadata = _read_metadata(folder / ".metadata")
    fsdp = any(str(key).startswith(_FSDP) for key in metadata.state_dict_metadata)
    if not fsdp or (folder / "metadata.json").is_file():
        _check_backend(folder)
    try:
        items = _items(folder, metadata)
        tensors, passed_over = _entries(folder, metadata.state_dict_metadata, items, prefixes)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise FormatError(f"{folder / '.metadata'}: malformed ({type(error).__name__}: {error})") from None
    return TorchDistFolder(_args(folder, items), tensors, passed_over, fsdp)


def _entries(
    folder: Path,
    entries: dict[str, Any],
    items: Mapping[str, list[tuple[Shape | None, Item]]],
    prefixes: tuple[str, ...],
) -> tuple[dict[str, TensorRef], dict[str, tuple[int, int]]]:
    """Weights of the model by name, and what else there is."""
    tensors: dict[str, TensorRef] = {}
    passed_over: dict[str, tuple[int, int]] = {}
    for key, entry in entries.items():
        own = items.get(key, [])
        kind = _passed_over(key, entry)
        if kind:
            count, nbytes = passed_over.get(kind, (0, 0))
            passed_over[kind] = (count + 1, nbytes + sum(item.length for _, item in own))
        elif not key.startswith(_COMMON_STATE):
            name = _unwrapped(key, prefixes)
            if name in tensors:
                raise FormatError(
                    f"{folder / '.metadata'}: {name} is stored twice, with and without a wrapper such as "
                    f"{prefixes[0]!r} before it"
                )
            tensors[name] = _tensor(folder, key, entry, own)
    return tensors, passed_over


def _check_backend(folder: Path) -> None:
    path = folder / "metadata.json"
    if not path.is_file():
        raise FormatError(f"{folder}: no metadata.json, which Megatron writes last; the save was interrupted")
    backend = read_json(path, "").get("sharded_backend")
    if backend != "torch_dist":
        raise UnsupportedError(f"{path}: sharded_backend is {backend!r}; only 'torch_dist' can be read")


def _read_metadata(path: Path) -> Any:
    metadata = unpickle(path.read_bytes(), str(path))
    sound = isinstance(getattr(metadata, "state_dict_metadata", None), dict)
    if not sound or not isinstance(metadata.storage_data, dict):
        raise FormatError(f"{path}: not the metadata of a distributed checkpoint")
    return metadata


def _items(folder: Path, metadata: Any) -> dict[str, list[tuple[Shape | None, Item]]]:
    """key → [(offset of the chunk or None for bytes, item)], every item checked to lie within its file."""
    files: dict[str, LocalFile] = {}
    items: dict[str, list[tuple[Shape | None, Item]]] = {}
    for index, info in metadata.storage_data.items():
        name, offset, length = info.relative_path, info.offset, info.length
        if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int)):
            raise FormatError(f"{folder / '.metadata'}: malformed storage entry of {index.fqn!r}")
        if name not in files:
            if Path(name).name != name or not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise FormatError(f"{folder / '.metadata'}: {name!r} leads out of the folder; refused")
            if not (folder / name).is_file():
                raise FormatError(f"{folder}: {name} is missing; {index.fqn} lies in it")
            files[name] = LocalFile(folder / name)
        file = files[name]
        if offset < 0 or length < 0 or offset + length > file.size:
            raise FormatError(
                f"{file.path}: {index.fqn} lies at bytes {offset} to {offset + length}, the file has {file.size}; "
                "it is cut off, copy it again"
            )
        if info.transform_descriptors:
            raise UnsupportedError(f"{file.path}: {index.fqn} is stored through a transform, which cannot be read")
        items.setdefault(str(index.fqn), []).append((index.offset, Item(file, offset, length)))
    return items


def _unwrapped(key: str, prefixes: tuple[str, ...]) -> str:
    """A key without wrapper names before it (``module.``, ``model.module.``), often as it is.

    Key by key: a wrapper around the language model may leave its MTP layers outside.
    """
    while lead := next((prefix for prefix in prefixes if key.startswith(prefix)), None):
        key = key.removeprefix(lead)
    return key


def _passed_over(key: str, entry: Any) -> str:
    """What an entry is if it is no weight of the model: a name for the report, or nothing."""
    holds_tensor = bool(entry.size or entry.chunks)
    if not holds_tensor and key.partition("/")[0].endswith("._extra_state"):
        return "_extra_state"
    if key.startswith(_TRAINING):
        return "optimizer and training state"
    if not holds_tensor and not key.startswith(_COMMON_STATE):
        return "other objects"
    return ""


def _tensor(folder: Path, key: str, entry: Any, items: list[tuple[Shape | None, Item]]) -> TensorRef:
    where = folder / ".metadata"
    dtype_name = str(_dtype(entry)).removeprefix("torch.")
    if dtype_name not in TORCH_DTYPES:
        raise UnsupportedError(f"{where}: {key} has dtype {dtype_name}, which cannot be read")
    dtype = TORCH_DTYPES[dtype_name]
    size = tuple(entry.size)
    shapes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
    itemsize = DTYPE_BITS[dtype] // 8
    placed = []
    for at, item in {at: item for at, item in items if at is not None}.items():
        shape = shapes.get(at)
        if shape is None or len(at) != len(size) or any(a < 0 or a + n > s for a, n, s in _zip(at, shape, size)):
            raise FormatError(f"{where}: {key} has a chunk at {list(at)} outside its shape {list(size)}")
        placed.append((at, Plan.region(Chunk(item, key, dtype, shape), 0, shape, itemsize)))
    covered = sum(prod(plan.shape) for _, plan in placed)
    if covered != prod(size) or _overlap([(at, plan.shape) for at, plan in placed]):
        raise FormatError(
            f"{where}: the chunks of {key} cover {covered} of {prod(size)} elements; a file or a rank is missing"
        )
    return TensorRef(dtype, Plan.place(size, itemsize, placed))


def _zip(at: Shape, shape: Shape, size: Shape) -> zip[tuple[int, int, int]]:
    return zip(at, shape, size, strict=True)


def _overlap(boxes: list[tuple[Shape, Shape]]) -> bool:
    """Whether any two chunks share an element: a sweep along the first axis over those still open."""
    opened: list[tuple[Shape, Shape]] = []
    for at, shape in sorted(boxes):
        opened = [box for box in opened if not at or box[0][0] + box[1][0] > at[0]]
        for other, size in opened:
            if all(a < b + m and b < a + n for a, n, b, m in zip(at, shape, other, size, strict=True)):
                return True
        opened.append((at, shape))
    return False


def _dtype(entry: Any) -> Any:
    """TensorProperties pickles as a tuple whose first element is the dtype, or as attributes."""
    properties = entry.properties
    return properties.state[0] if isinstance(properties.state, tuple) else properties.dtype


def _args(folder: Path, items: Mapping[str, list[tuple[Shape | None, Item]]]) -> dict[str, Any] | None:
    """The training arguments, from any of three places; None if nobody stored any."""
    path = folder / "common.pt"
    state: Any = None
    if path.is_file():
        file = LocalFile(path)
        state = read_archive(file, 0, file.size, str(path), foreign=True).root
    elif item := next((own[0][1] for key, own in items.items() if key.startswith(_COMMON_STATE)), None):
        root = item.archive("common_state", foreign=True).root
        state = root[0] if isinstance(root, list) and root else None
    elif "args" in items:
        state = {"args": items["args"][0][1].archive("args", foreign=True).root}
    args = state.get("args") if isinstance(state, dict) else None
    return {k: v for k, v in vars(args).items() if k != "args"} if isinstance(args, Record) else None
