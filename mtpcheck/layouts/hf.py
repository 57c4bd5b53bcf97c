"""Layout ``hf``: safetensors files, their index, config.json, and every other file of the folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtpcheck.checks.structure import Twice, check_index, check_orphan, check_size, check_twice
from mtpcheck.errors import FormatError
from mtpcheck.files import Source, read
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding
from mtpcheck.tensormap import DTYPE_BITS, TensorRef
from mtpcheck.tree import LocalTree, Tree, is_weights, json_in

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Shard:
    """One safetensors file: the raw header bytes as they stand in it, and its tensors in order of their data."""

    file: str
    header: bytes
    names: tuple[str, ...]


@dataclass(frozen=True)
class HfFolder:
    """What a Hugging Face folder holds, from headers alone."""

    tree: Tree
    config: dict[str, Any]
    tensors: dict[str, TensorRef]
    shards: tuple[Shard, ...]
    shard_of: Mapping[str, str]
    others: tuple[str, ...]
    """Files that are not weights, relative to the folder; config.json and the index among them."""
    findings: tuple[Finding, ...]
    twice: tuple[Twice, ...] = ()


def is_hf(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def read_hf(where: Path | Tree) -> HfFolder:
    """Read config, index and headers. Raises FormatError where they cannot be trusted."""
    tree = LocalTree(where) if isinstance(where, Path) else where
    files, index = _shard_files(tree)
    weight_map: dict[str, str] = index["weight_map"] if index else {}
    config = json_in(tree, "config.json", "an HF checkpoint needs it")
    tensors: dict[str, TensorRef] = {}
    shard_of: dict[str, str] = {}
    shards: list[Shard] = []
    twice: list[Twice] = []
    for file, source in zip(files, tree.open_shards(files), strict=True):
        header, own = read_header(source)
        for name, ref in own.items():
            if name in tensors and weight_map.get(name) != file:
                twice.append(Twice(name, shard_of[name], file, (tensors[name], ref)))
                continue
            if name in tensors:
                twice.append(Twice(name, file, shard_of[name], (ref, tensors[name])))
            tensors[name], shard_of[name] = ref, file
        shards.append(Shard(file, header, tuple(own)))
    findings = list(check_twice(twice))
    if index is not None:
        findings += check_index(INDEX, weight_map, shard_of)
        metadata = index.get("metadata")
        stated = metadata.get("total_size") if isinstance(metadata, dict) else None
        findings += check_size(INDEX, stated, tensors.values())
    others, left = _other_files(tree, set(files))
    findings += [check_orphan(name, _names(tree, name), shard_of) for name in left]
    return HfFolder(tree, config, tensors, tuple(shards), shard_of, others, tuple(findings), tuple(twice))


def _names(tree: Tree, file: str) -> list[str] | None:
    """Tensors of a file that is no part of the checkpoint; None if it is no sound safetensors file of the folder."""
    if not file.endswith(".safetensors"):
        return None
    try:
        return list(read_header(tree.open(file))[1])
    except FormatError:
        return None


def _shard_files(tree: Tree) -> tuple[list[str], dict[str, Any] | None]:
    """Shards in order, and the index if there is one, its ``weight_map`` checked."""
    single, index = tree.has(SINGLE), tree.has(INDEX)
    if single and index:
        raise FormatError(
            f"{tree.name}: both {SINGLE} and {INDEX} are there and loaders disagree on which counts; remove one"
        )
    if index:
        table = json_in(tree, INDEX)
        weight_map = table.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise FormatError(f"{tree.name}/{INDEX}: no weight_map of tensor names to file names")
        files = sorted(set(weight_map.values()))
        for file in files:
            if not tree.has(file):
                raise FormatError(
                    f"{tree.name}/{INDEX}: names {file!r}, which is not in the folder; download or copy it"
                )
        return files, table
    if single:
        return [SINGLE], None
    found = [name for name in tree.names() if name.endswith(".safetensors") and "/" not in name]
    if found:
        raise FormatError(f"{tree.name}: {found[0]} but neither {SINGLE} nor {INDEX}; the index is missing")
    raise FormatError(f"{tree.name}: config.json but no safetensors weights; not a checkpoint mtpcheck can read")


def read_header(source: Source) -> tuple[bytes, dict[str, TensorRef]]:
    """Header bytes and tensors of one safetensors file, every size and offset checked against the file.

    Format: https://github.com/huggingface/safetensors#format
    """
    path = source.name
    if source.size < 8:
        raise FormatError(f"{path}: {source.size} bytes are too few for a safetensors file; it is cut off")
    length = int.from_bytes(read(source, 0, 8), "little")
    if length > min(_MAX_HEADER, source.size - 8):
        raise FormatError(
            f"{path}: the header claims {length} bytes, the file has {source.size}; cut off, or not safetensors"
        )
    raw = read(source, 8, length)
    data = source.size - 8 - length
    tensors, at = {}, 0
    for name, begin, at, dtype, shape in _entries(path, raw):
        if DTYPE_BITS[dtype] % 8:
            tensors[name] = TensorRef(dtype, Plan.region(source, 8 + length + begin, (at - begin,), 1), shape)
        else:
            plan = Plan.region(source, 8 + length + begin, shape, DTYPE_BITS[dtype] // 8)
            tensors[name] = TensorRef(dtype, plan)
    if at != data:
        raise FormatError(
            f"{path}: the header describes {at} bytes of data, the file holds {data}; "
            + ("it is cut off, download or copy it again" if at > data else "bytes at its end belong to no tensor")
        )
    return raw, tensors


_Entry = tuple[str, int, int, str, tuple[int, ...]]


def _entries(path: str, raw: bytes) -> list[_Entry]:
    """(name, first data byte, end, dtype, shape) of every tensor, in the order of the data, which has no gaps."""
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    entries = sorted(((_entry(path, name, e)) for name, e in header.items()), key=lambda entry: entry[1:3])
    at = 0
    for name, begin, end, _, _ in entries:
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise FormatError(f"{path}: tensor {name!r} starts at data byte {begin}, expected {at}: it {what}")
        at = end
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    for key in table:
        key.encode()  # half a surrogate pair is a ValueError
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice")
    return table


def _entry(path: str, name: str, entry: Any) -> _Entry:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        sound = isinstance(dtype, str) and whole and begin <= end
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise FormatError(f"{path}: header entry of tensor {name!r} is malformed")
    if dtype not in DTYPE_BITS:
        raise FormatError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}; a newer mtpcheck may know it")
    if prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise FormatError(
            f"{path}: tensor {name!r} is {dtype} {list(shape)}, {prod(shape) * DTYPE_BITS[dtype] // 8} bytes, "
            f"but its offsets span {end - begin}"
        )
    return name, begin, end, dtype, shape


def _other_files(tree: Tree, shards: set[str]) -> tuple[tuple[str, ...], list[str]]:
    """(files to carry, weight files that are no part of the checkpoint)."""
    others = [name for name in tree.names() if name not in shards]
    carried = tuple(name for name in others if not is_weights(name))
    for name in carried:
        if not tree.has(name):
            raise FormatError(f"{tree.name}/{name}: is a dangling link or no regular file; remove it")
    return carried, [name for name in others if is_weights(name)]


def make_header(tensors: Iterable[tuple[str, TensorRef]]) -> bytes:
    """A safetensors header for these tensors in this order, padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, ref in tensors:
        header[name] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": [at, at + ref.nbytes]}
        at += ref.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % 8)


def header_entries(header: bytes, path: str = "header") -> dict[str, tuple[str, tuple[int, ...], int]]:
    """name → (dtype, shape, first data byte) of a raw header. Raises FormatError if it is not sound."""
    return {name: (dtype, shape, begin) for name, begin, _, dtype, shape in _entries(path, header)}
