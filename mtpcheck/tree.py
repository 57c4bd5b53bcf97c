"""The files of a Hugging Face checkpoint, wherever they are: a folder on disk, or a repository on the Hub (hub.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mtpcheck.errors import FormatError
from mtpcheck.files import LocalFile, Source, inside, read

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"}
"""Suffixes of files that hold weights, in this format or another."""


class Tree(Protocol):
    """Names are relative, with ``/`` between folders; hidden folders are left out."""

    @property
    def name(self) -> str:
        """What stands for the folder in messages."""

    def names(self) -> list[str]:
        """All files in order. Raises FormatError for what cannot be followed."""

    def has(self, file: str) -> bool:
        """Whether there is such a file. Raises FormatError for a name that leads out of the folder."""

    def open(self, file: str) -> Source:
        """One file. Raises FormatError for a name that leads out of the folder."""

    def open_shards(self, files: Sequence[str]) -> list[Source]:
        """Files whose headers are about to be read."""


class LocalTree:
    """A folder on disk. ``name``: what it is called, where that is not its path."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self._name = folder, name

    @property
    def name(self) -> str:
        return self._name or str(self.folder)

    def names(self) -> list[str]:
        found = []
        for base, folders, files in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            linked = next((name for name in folders if (Path(base) / name).is_symlink()), None)
            if linked:
                raise FormatError(
                    f"{Path(base) / linked}: is a link to a folder, which is not followed; put the folder here"
                )
            found += [(Path(base) / file).relative_to(self.folder).as_posix() for file in files]
        return sorted(found)

    def has(self, file: str) -> bool:
        return inside(self.folder, file).is_file()

    def open(self, file: str) -> Source:
        return LocalFile(inside(self.folder, file))

    def open_shards(self, files: Sequence[str]) -> list[Source]:
        return [self.open(file) for file in files]


def is_weights(file: str) -> bool:
    return Path(file).suffix in WEIGHTS


def json_in(tree: Tree, file: str, why: str = "") -> dict[str, Any]:
    """A JSON object. Raises FormatError, with ``why`` if the file is missing."""
    where = f"{tree.name}/{file}"
    if not tree.has(file):
        raise FormatError(f"{where}: no such file; {why}")
    source = tree.open(file)
    return parse_json(read(source, 0, source.size), where)


def read_json(path: Path, why: str) -> dict[str, Any]:
    """As ``json_in``, of a file on disk."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file; {why}") from None


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
