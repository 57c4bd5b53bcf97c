"""Mutators of a Megatron checkpoint, torch_dist or rank files, with torch's own classes.

Names are Megatron's, as ``mtpcheck convert`` writes them; patterns have to match from the start.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import megatron_edit
from tests.megatron_edit import edit_metadata, load_pickled, payload_of
from tests.mutants.case import Edit
from tests.mutants.values import Change

Tensors = dict[str, torch.Tensor]
FILE = "model_optim_rng.pt"
MTP = r"mtp\.layers\.\d+\."
LAYER = r"mtp\.layers\.0\.transformer_layer\."


def _release(folder: Path) -> Path | None:
    """The folder of a torch_dist checkpoint; None for rank files."""
    return next((path.parent for path in folder.rglob(".metadata")), None)


def edit(pattern: str, change: Callable[[Tensors], object], ranks: str = "") -> Edit:
    """Change all tensors that match at once: of a torch_dist checkpoint values alone, of rank files (those whose
    folder begins with ``ranks``) anything. Raises LookupError if none matches."""

    def edited(folder: Path) -> None:
        release = _release(folder)
        found = _in_ranks(folder, pattern, change, ranks) if release is None else _in_place(release, pattern, change)
        if not found:
            raise LookupError(f"{folder}: no tensor is named {pattern}")

    return edited


def _in_place(folder: Path, pattern: str, change: Callable[[Tensors], object]) -> bool:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places: dict[str, list[tuple[Path, int, tuple[slice, ...]]]] = {}
    tensors: Tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not re.match(pattern, key) or not hasattr(entry, "chunks"):
            continue
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        whole = tensors[key] = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        places[key] = []
        for number, index in enumerate(k for k in metadata.storage_data if k.fqn == key):
            size = sizes[tuple(index.offset)]
            box = tuple(slice(at, at + n) for at, n in zip(index.offset, size, strict=True))
            path, start = payload_of(folder, key, number)
            places[key].append((path, start, box))
            raw = bytearray(path.read_bytes()[start : start + whole[box].numel() * whole.itemsize])
            whole[box] = torch.frombuffer(raw, dtype=whole.dtype).reshape(size)
    old = dict(tensors)
    change(tensors)
    assert tensors.keys() == old.keys(), "a torch_dist checkpoint is renamed through its metadata"
    for key, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (old[key].shape, old[key].dtype), key
        for path, start, box in places[key]:
            with path.open("r+b") as file:
                file.seek(start)
                file.write(tensor[box].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return bool(tensors)


def _in_ranks(folder: Path, pattern: str, change: Callable[[Tensors], object], ranks: str) -> bool:
    found = False
    for path in sorted(folder.rglob(FILE)):
        if not path.parent.name.startswith(ranks):
            continue
        root = load_pickled(path)
        for chunk in [key for key in root if key.startswith("model")]:
            own = {n: t for n, t in root[chunk].items() if isinstance(t, torch.Tensor) and re.match(pattern, n)}
            if not own:
                continue
            found = True
            rest = {n: t for n, t in root[chunk].items() if n not in own}
            change(own)
            root[chunk] = {**rest, **own}
        torch.save(root, path)
    return found


# ---- values


def values(pattern: str, change: Change, ranks: str = "") -> Edit:
    """Change every tensor whose name matches, each by itself."""
    return edit(pattern, lambda tensors: tensors.update({n: change(t) for n, t in tensors.items()}), ranks)


def take(name: str, other: str, of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Edit:
    """One tensor holds what another one, or ``of`` it, holds."""

    def change(tensors: Tensors) -> None:
        tensors[name] = of(tensors[other]).clone()

    return edit(f"(?:{re.escape(name)}|{re.escape(other)})$", change)


def exchange(name: str, other: str) -> Edit:
    """Two tensors stand in each other's place."""

    def change(tensors: Tensors) -> None:
        tensors[name], tensors[other] = tensors[other], tensors[name]

    return edit(f"(?:{re.escape(name)}|{re.escape(other)})$", change)


# ---- names


def rename(pattern: str, other: str, ranks: str = "") -> Edit:
    """Give every key that matches another name; with an empty one drop it."""

    def name_of(name: str) -> str:
        if re.match(pattern, name) is None:
            return name
        return re.sub(pattern, other, name, count=1) if other else ""

    return spell(name_of, ranks)


def drop(pattern: str) -> Edit:
    return rename(pattern, "")


def swap_names(one: str, other: str) -> Edit:
    """Keys that begin with one of two paths begin with the other."""
    paths = {one: other, other: one}

    def name_of(name: str) -> str:
        lead = next((path for path in paths if name.startswith(path)), "")
        return paths.get(lead, "") + name.removeprefix(lead)

    return spell(name_of)


def spell(name_of: Callable[[str], str], ranks: str = "") -> Edit:
    """Keys under other names, ``_extra_state`` too; one whose new name is empty goes."""

    def change(metadata: Any) -> None:
        old = metadata.state_dict_metadata
        new = {key: name_of(key) for key in old}
        assert new != {key: key for key in old}, "nothing was renamed"
        metadata.state_dict_metadata = {new[key]: entry for key, entry in old.items() if new[key]}
        metadata.storage_data = {
            replace(index, fqn=new[index.fqn]): info for index, info in metadata.storage_data.items() if new[index.fqn]
        }

    def edited(folder: Path) -> None:
        release = _release(folder)
        if release is not None:
            edit_metadata(release, change)
            return
        for path in sorted(folder.rglob(FILE)):
            if not path.parent.name.startswith(ranks):
                continue
            root = load_pickled(path)
            for chunk in [key for key in root if key.startswith("model")]:
                root[chunk] = {name_of(name): value for name, value in root[chunk].items() if name_of(name)}
            torch.save(root, path)

    return edited


def renumber(chunk: str, number_of: Callable[[int], int], ranks: str = "") -> Edit:
    """Decoder layers of one virtual stage (``model``, ``model0`` …) of some ranks get other numbers."""

    def name_of(name: str) -> str:
        lead, number, rest = (
            re.split(r"^decoder\.layers\.(\d+)", name) if name.startswith("decoder.layers.") else ("",) * 3
        )
        return f"decoder.layers.{number_of(int(number))}{rest}" if number else lead + name

    def edited(folder: Path) -> None:
        for path in sorted(folder.rglob(FILE)):
            if path.parent.name.startswith(ranks):
                root = load_pickled(path)
                root[chunk] = {name_of(name): value for name, value in root[chunk].items()}
                torch.save(root, path)

    return edited


def args(**changed: Any) -> Edit:
    """Change training arguments of a torch_dist checkpoint."""

    def edited(folder: Path) -> None:
        release = _release(folder)
        assert release is not None
        megatron_edit.edit_args(release, **changed)

    return edited


def add(name: str, like: str, change: Change) -> Edit:
    """A tensor that was not there, made of another; in rank files."""
    return edit(re.escape(like) + "$", lambda tensors: tensors.update({name: change(tensors[like])}))
