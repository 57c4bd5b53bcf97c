"""Mutators of a Hugging Face folder: files and index, config, tensors.

In patterns and replacements ``{mtp}`` is how names of MTP layers begin, ``{layer}`` the path of the first MTP layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.coded import index_again
from tests.mutants import anatomy
from tests.mutants.case import Edit
from tests.mutants.values import Change, fresh

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def _spelled(folder: Path, text: str, pattern: bool = True) -> str:
    """``text`` with this folder's own spelling of its MTP layers."""
    if "{" not in text:
        return text
    own = anatomy.of(folder)
    layer = own.layers[0] if own.layers else ""
    return text.replace("{mtp}", f"(?:{own.begins})").replace("{layer}", re.escape(layer) if pattern else layer)


# ---- tensors


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change all tensors at once; new ones go into the last shard. A shard without tensors and its entries go."""
    shards = {path: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    home = {name: path for path, own in shards.items() for name in own}
    last = max(shards)
    tensors = {name: tensor for own in shards.values() for name, tensor in own.items()}
    change(tensors)
    for path in shards:
        own = {n: t.clone().contiguous() for n, t in tensors.items() if home.get(n, last) == path}
        path.unlink()
        if own:
            save_file(own, path, {"format": "pt"})
    if (folder / INDEX).exists():
        index_again(folder)


def matching(folder: Path, tensors: Mapping[str, Any], pattern: str) -> list[str]:
    """Names that begin with the pattern. Raises LookupError for none, since a mutant has to differ."""
    found = [name for name in sorted(tensors) if re.match(_spelled(folder, pattern), name)]
    if not found:
        raise LookupError(f"{folder}: no tensor is named {pattern}")
    return found


def values(pattern: str, change: Change) -> Edit:
    """Change every tensor whose name matches, each by itself."""

    def edited(folder: Path) -> None:
        edit(
            folder, lambda tensors: tensors.update({n: change(tensors[n]) for n in matching(folder, tensors, pattern)})
        )

    return edited


def drop(pattern: str) -> Edit:
    """Take tensors out of shards and index."""

    def edited(folder: Path) -> None:
        edit(folder, lambda tensors: [tensors.pop(name) for name in matching(folder, tensors, pattern)])

    return edited


def rename_in(file: str, pattern: str, other: str) -> Edit:
    """As ``rename``, in one file, where the new names may be those of tensors in other files."""

    def edited(folder: Path) -> None:
        tensors = load_file(folder / file)
        names = _pairs(folder, tensors, pattern, other)
        save_file({names.get(name, name): t for name, t in tensors.items()}, folder / file, {"format": "pt"})
        index_again(folder)

    return edited


def _pairs(folder: Path, tensors: Tensors, pattern: str, other: str) -> dict[str, str]:
    into = _spelled(folder, other, pattern=False)
    return {name: re.sub(_spelled(folder, pattern), into, name, count=1) for name in matching(folder, tensors, pattern)}


def rename(pattern: str, other: str) -> Edit:
    def edited(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            names = _pairs(folder, tensors, pattern, other)
            tensors.update({names[old]: tensors.pop(old) for old in list(names)})

        edit(folder, change)

    return edited


def exchange(pattern: str, other: str) -> Edit:
    """Tensors whose names match, and those named by the replacement, stand in each other's place."""

    def edited(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            names = _pairs(folder, tensors, pattern, other)
            names |= {b: a for a, b in names.items()}
            tensors.update({name: tensors[twin] for name, twin in list(names.items()) if twin in tensors})

        edit(folder, change)

    return edited


def take(pattern: str, other: str) -> Edit:
    """Tensors whose names match hold what those named by the replacement hold."""

    def edited(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            names = _pairs(folder, tensors, pattern, other)
            tensors.update({name: tensors[source].clone() for name, source in names.items()})

        edit(folder, change)

    return edited


def add(name: str, like: str, change: Change = lambda tensor: tensor) -> Edit:
    """A tensor that was not there, made of another."""

    def edited(folder: Path) -> None:
        def new(tensors: Tensors) -> None:
            tensors[_spelled(folder, name, pattern=False)] = change(tensors[_spelled(folder, like, pattern=False)])

        edit(folder, new)

    return edited


def again(pattern: str, other: str, change: Change = torch.clone) -> Edit:
    """Tensors whose names match also stand under the names of the replacement, changed."""

    def edited(folder: Path) -> None:
        def new(tensors: Tensors) -> None:
            names = _pairs(folder, tensors, pattern, other)
            tensors.update({name: change(tensors[source]) for source, name in names.items()})

        edit(folder, new)

    return edited


def experts(number_of: Callable[[int], int]) -> Edit:
    """Expert e of the MTP layer holds what expert ``number_of(e)`` held."""

    def edited(folder: Path) -> None:
        def change(tensors: Tensors) -> None:
            old = dict(tensors)
            for name in matching(folder, tensors, r"{mtp}.*\.experts\.\d+\."):
                lead, number, rest = re.split(r"(?<=\.experts\.)(\d+)", name)
                tensors[name] = old[f"{lead}{number_of(int(number))}{rest}"].clone()

        edit(folder, change)

    return edited


# ---- files and index


def index(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edited(folder: Path) -> None:
        table = json.loads((folder / INDEX).read_text())
        change(table)
        (folder / INDEX).write_text(json.dumps(table, indent=2))

    return edited


def unindex(pattern: str) -> Edit:
    """The shard keeps the tensors, the index does not name them."""

    def edited(folder: Path) -> None:
        def change(table: dict[str, Any]) -> None:
            for name in matching(folder, table["weight_map"], pattern):
                del table["weight_map"][name]

        index(change)(folder)

    return edited


def ghosts(pattern: str) -> Edit:
    """The index names tensors that their shard has lost."""

    def edited(folder: Path) -> None:
        before = (folder / INDEX).read_bytes()
        drop(pattern)(folder)
        (folder / INDEX).write_bytes(before)

    return edited


def lose(file: str, named: bool = False) -> Edit:
    """A shard is gone, and, unless ``named``, its entries in the index."""

    def edited(folder: Path) -> None:
        (folder / file).unlink()
        if not named:
            index_again(folder)

    return edited


def twice(pattern: str, change: Change = lambda tensor: tensor) -> Edit:
    """Tensors also stand in the first or last shard, in which they were not."""

    def edited(folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        shards = {path: load_file(path) for path in paths}
        for name in matching(folder, {n: None for own in shards.values() for n in own}, pattern):
            home = next(path for path in paths if name in shards[path])
            other = paths[-1] if home != paths[-1] else paths[0]
            shards[other][name] = change(shards[home][name]).clone()
            save_file(shards[other], other, {"format": "pt"})

    return edited


def stale(file: str) -> Edit:
    """A shard that another run left: the names of the last one, with other values."""

    def edited(folder: Path) -> None:
        tensors = load_file(max(folder.glob("*.safetensors")))
        save_file({name: fresh(tensor) for name, tensor in tensors.items()}, folder / file, {"format": "pt"})

    return edited


# ---- config


def config(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edited(folder: Path) -> None:
        table = json.loads((folder / "config.json").read_text())
        change(table)
        (folder / "config.json").write_text(json.dumps(table, indent=2))

    return edited


def count(change: Callable[[dict[str, Any], str], object]) -> Edit:
    """Change the config, or that of its text model, by way of the key that declares its MTP layers."""

    def changed(table: dict[str, Any]) -> None:
        own = table.get("text_config", table)
        change(own, next(key for key in anatomy.COUNTS if key in own))

    return config(changed)


def both(*edits: Edit) -> Edit:
    """One after the other."""

    def edited(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edited


def unchanged(folder: Path) -> None:
    """The original itself."""
