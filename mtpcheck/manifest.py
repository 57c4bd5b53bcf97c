"""The manifest: how the HF side looked besides its weights, kept inside a Megatron checkpoint that we made.

    mtpcheck/manifest.json   family, shards, copies
    mtpcheck/headers/*       the raw header of every shard: order, dtypes, shapes, metadata; no weights
    mtpcheck/files/*         config.json, index, tokenizer and all other files, as they were
    mtpcheck/aside.safetensors   what Megatron cannot hold: scales of FP8 blocks
    mtpcheck/dialect         whose order the tensors are in, where that is not megatron-core's

It lends an export its *form*. Every weight, and every config key that Megatron has a word for, comes from Megatron.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from mtpcheck.errors import FormatError
from mtpcheck.files import LocalFile, inside
from mtpcheck.layouts.hf import HfFolder, header_entries, read_header
from mtpcheck.tensormap import TensorRef
from mtpcheck.tree import read_json

FOLDER, ASIDE, DIALECT = "mtpcheck", "aside.safetensors", "dialect"
_SCHEMA = 1


@dataclass(frozen=True)
class Manifest:
    """The form of an HF checkpoint: read from a Megatron folder that we made, or taken from the HF folder itself."""

    root: Path
    """Where ``files`` are."""
    family: str
    headers: Mapping[str, bytes]
    """Shard file → raw safetensors header."""
    copies: Mapping[str, str]
    """Part that repeats another → absent, equal or own, as in the source."""
    files: tuple[str, ...]
    aside: Mapping[str, TensorRef] = field(default_factory=dict)
    """Values kept beside Megatron, to be used only where Megatron's own still agree with them."""

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.root / "config.json", "the manifest is incomplete")

    def file(self, name: str) -> Path:
        return inside(self.root, name)


def write_manifest(folder: Path, source: Path, hf: HfFolder, family: str, copies: Mapping[str, str]) -> None:
    """Write ``folder/mtpcheck`` for an HF source. Holds no weight bytes."""
    root = folder / FOLDER
    (root / "headers").mkdir(parents=True)
    for number, shard in enumerate(hf.shards):
        (root / "headers" / f"{number}.json").write_bytes(shard.header)
    for name in hf.others:
        target = root / "files" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    content = {
        "schema": _SCHEMA,
        "family": family,
        "shards": [shard.file for shard in hf.shards],
        "copies": dict(copies),
        "files": list(hf.others),
    }
    (root / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")


def record_dialect(folder: Path, name: str) -> None:
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / DIALECT).write_text(name + "\n")


def recorded_dialect(folder: Path) -> str | None:
    """The dialect that we wrote a Megatron iteration folder in, if it is not megatron-core's."""
    path = inside(folder, f"{FOLDER}/{DIALECT}")
    return path.read_text(encoding="utf-8", errors="replace")[:100].strip() if path.is_file() else None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a Megatron iteration folder, or None. Raises FormatError if it is not sound."""
    root = folder / FOLDER
    path = root / "manifest.json"
    if not path.is_file():
        return None
    inside(folder, FOLDER)
    content = read_json(path, "")
    if content.get("schema") != _SCHEMA:
        raise FormatError(f"{path}: schema {content.get('schema')!r}, this mtpcheck knows {_SCHEMA}")
    try:
        shards, files = list(content["shards"]), list(content["files"])
        manifest = Manifest(
            root / "files",
            str(content["family"]),
            {_plain(path, s): inside(root, f"headers/{n}.json").read_bytes() for n, s in enumerate(shards)},
            dict(content["copies"]),
            tuple(_plain(path, name) for name in files),
        )
        if (root / ASIDE).is_file():
            manifest = replace(manifest, aside=read_header(LocalFile(inside(root, ASIDE)))[1])
        for number, header in enumerate(manifest.headers.values()):
            header_entries(header, str(root / "headers" / f"{number}.json"))
    except (KeyError, TypeError, ValueError, OSError) as error:
        what = f"{type(error).__name__}: {error}"
        raise FormatError(f"{path}: damaged ({what}); remove {root} to go on without") from None
    return manifest


def _plain(path: Path, name: str) -> str:
    """A relative name that stays below its folder."""
    parts = PurePosixPath(name).parts
    if PurePosixPath(name).is_absolute() or ".." in parts or not parts or "\0" in name:
        raise FormatError(f"{path}: {name!r} leads out of the folder; refused")
    return name
