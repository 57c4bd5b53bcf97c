"""A Hugging Face folder made of the files of another and of shards of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpcheck.files import inside
from mtpcheck.layouts.hf import INDEX, make_header
from mtpcheck.progress import Progress
from mtpcheck.tensormap import TensorRef

_STEP = 1 << 26


@dataclass(frozen=True)
class Folder:
    """What is to be written. ``shards``: file of ``source`` → its name here, copied as it is. ``files``: JSON files
    with new content. ``more``: further shards that are made anew."""

    source: Path
    shards: Mapping[str, str]
    others: tuple[str, ...]
    shard: str
    tensors: Mapping[str, TensorRef]
    index: bytes
    files: Mapping[str, dict[str, Any]]
    more: Mapping[str, Mapping[str, TensorRef]] = field(default_factory=dict)

    @property
    def made(self) -> dict[str, Mapping[str, TensorRef]]:
        return {self.shard: self.tensors, **self.more}

    @property
    def nbytes(self) -> int:
        copied = sum((self.source / file).stat().st_size for file in (*self.shards, *self.others))
        return copied + sum(ref.nbytes for own in self.made.values() for ref in own.values())


def write_folder(folder: Path, wanted: Folder, progress: Progress) -> None:
    """Fill a new folder. Files are copied, never linked: a link would let a change of one checkpoint reach the other.
    Where the file system can share blocks until one side is written to, the kernel does that."""
    from mtpcheck.layouts.hf_writer import Form, write_shards

    for file, name in wanted.shards.items():
        _copy(inside(wanted.source, file), folder / name, progress)
    for file in wanted.others:
        if file != INDEX and file not in wanted.files:
            _copy(inside(wanted.source, file), folder / file, progress)
    for file, content in wanted.files.items():
        (folder / file).write_bytes(_json(content, wanted.source / file))
    headers = {file: make_header(own.items()) for file, own in wanted.made.items()}
    tensors = {name: ref for own in wanted.made.values() for name, ref in own.items()}
    write_shards(folder, Form(headers, wanted.index), tensors, progress)


def new_index(original: Path | None, tensors: Mapping[str, TensorRef], file_of: Mapping[str, str]) -> bytes:
    """The index of these tensors, with what else the original index says, in its order; sizes are counted anew."""
    old = json.loads(original.read_bytes()) if original and original.is_file() else {}
    before = old.get("weight_map", {})
    names = [name for name in before if name in file_of] + [name for name in file_of if name not in before]
    names = sorted(names) if list(before) == sorted(before) else names
    said = old.get("metadata")
    metadata = {**said} if isinstance(said, dict) else {}
    metadata["total_size"] = sum(ref.nbytes for ref in tensors.values())
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(ref.elements for ref in tensors.values())
    return _json({**old, "metadata": metadata, "weight_map": {name: file_of[name] for name in names}}, original)


def _json(content: Mapping[str, Any], original: Path | None) -> bytes:
    """JSON as the original file has it: its bytes if it says the same, else its order of keys and its last newline."""
    raw = original.read_bytes() if original and original.is_file() else b"{}\n"
    before = json.loads(raw)
    if before == content:
        return raw
    keys = sorted(content) if list(before) == sorted(before) else content
    text = json.dumps({key: content[key] for key in keys}, indent=2, ensure_ascii=False)
    return (text + "\n" * raw.endswith(b"\n")).encode()


def _copy(source: Path, target: Path, progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("xb") as written:
        try:
            while done := os.copy_file_range(read.fileno(), written.fileno(), _STEP):
                progress.advance(done)
        except OSError:  # two file systems that know nothing of each other
            shutil.copyfileobj(read, written)
