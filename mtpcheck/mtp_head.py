"""The MTP layers of one Hugging Face checkpoint as something to be carried to another: tensors and declaration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.comparison import mtp_names
from mtpcheck.declared import Packing
from mtpcheck.errors import CheckpointFails, UnsupportedError
from mtpcheck.facts import store
from mtpcheck.family import load_family
from mtpcheck.fetch import fetched, is_remote
from mtpcheck.megatron import copy_states, read_for_copies
from mtpcheck.model import Model
from mtpcheck.packing import WEIGHT, Module
from mtpcheck.report.finding import Finding, Severity
from mtpcheck.rules import MISSING
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp, read_tensor_map


@dataclass(frozen=True)
class Head:
    """What a checkpoint stores of its MTP layers.

    ``tensors``: stored name → tensor, in the order of the files, codes and scales as they are. ``copies``: part that
    may repeat another → absent, equal or own.
    """

    side: Side
    tensors: Mapping[str, TensorRef]
    copies: Mapping[str, str]

    @property
    def layers(self) -> int:
        return int(self.side.tensor_map.facts["mtp_stored"])

    @property
    def packed(self) -> dict[str, Module]:
        """Modules of these layers that are stored as codes, by name."""
        return {name: m for name, m in packing_of(self.side).modules.items() if m.codes and m.stored in self.tensors}


def read_head(path: str | Path, family: str | None = None, show: bool = False, whole: bool = False) -> Head:
    """The head of a Hugging Face checkpoint, or of a folder that ``extract`` made, which lacks most of the trunk.

    Of a repository on the Hub the shards of the head are fetched, and those of what its copies repeat; for a ``whole``
    folder also those of the embedding and the output head, and all files without weights.
    Raises UnsupportedError if there is none, CheckpointFails if it is not whole.
    """
    checkpoint = open_hf(path)
    tensor_map = read_tensor_map(checkpoint, family)
    if not tensor_map.facts["mtp_stored"]:
        raise UnsupportedError(f"{path}: stores no MTP layer, so there is none to take; name a checkpoint that has one")
    trunk = {row.name for row in tensor_map.model.rows if not is_mtp(row.parts[0])}
    require_whole(path, (f for f in tensor_map.findings if f.check != "presence.missing" or f.subject not in trunk))
    own = mtp_names(tensor_map)
    if is_remote(checkpoint):
        more = stored_of(Side(checkpoint, tensor_map), "embed", "head") if whole else ()
        checkpoint = fetched(checkpoint, show, {*own, *read_for_copies(tensor_map), *more}, others=whole)
        tensor_map = read_tensor_map(checkpoint, family)
    tensors = {name: ref for name, ref in checkpoint.tensors.items() if name in own}
    copies = {part: state for part, state in copy_states(tensor_map).items() if is_mtp(part)}
    return Head(Side(checkpoint, tensor_map), tensors, copies)


def open_hf(path: str | Path) -> Checkpoint:
    """Open a Hugging Face checkpoint. Raises UnsupportedError for one in another layout."""
    checkpoint = open_checkpoint(path)
    if checkpoint.layout != "hf":
        what = f"is a Megatron checkpoint ({checkpoint.layout}); graft works on Hugging Face ones"
        raise UnsupportedError(f"{path}: {what}, so convert it first")
    return checkpoint


def require_whole(path: str | Path, findings: Iterator[Finding]) -> None:
    """Raise CheckpointFails if a tensor is missing, misshapen or claimed by nobody."""
    bad = tuple(f for f in findings if f.severity is Severity.FAILURE and f.check.startswith("presence."))
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointFails(f"{path}: {bad[0].subject}: {bad[0].message}{more}; nothing was written", bad)


def packing_of(side: Side) -> Packing:
    assert side.tensor_map.packing is not None  # every HF map has one
    return side.tensor_map.packing


def stored_of(side: Side, *parts: str) -> list[str]:
    """Stored names of what makes up some parts, with codes and scales."""
    rows = {row.name for row in side.tensor_map.model.rows if not set(parts).isdisjoint(row.parts)}
    packed = (m.tensors.values() for m in packing_of(side).modules.values() if f"{m.name}.{WEIGHT}" in rows)
    names = rows.union(*packed)
    return [name for name in side.checkpoint.tensors if name in names]


def check_fit(head: Head, broken: Side) -> None:
    """Raise UnsupportedError unless ``broken`` is a model that these layers can belong to."""
    ours, theirs = head.side.tensor_map, broken.tensor_map
    donor, path = head.side.checkpoint.path, broken.checkpoint.path
    if ours.family != theirs.family:
        raise UnsupportedError(f"{donor}: is {ours.family}, and {path} is {theirs.family}; no head fits another family")
    family = load_family(ours.family)
    needed = _shapes(family.model({**theirs.facts, "mtp_stored": head.layers}))
    has = _shapes(ours.model)
    if has == needed:
        return
    apart = [
        f"{row.keys[0]} is {ours.facts[row.fact]} there and {theirs.facts[row.fact]} here"
        for row in family.all_config
        if row.fact is not None
        if row.fact in ours.facts and row.fact in theirs.facts and row.fact not in ("mtp_layers", "dtype")
        if ours.facts[row.fact] != theirs.facts[row.fact]
    ]
    name = next(name for name in [*has, *needed] if has.get(name) != needed.get(name))
    shapes = [f"{name} would be {needed[name]}, not {has[name]}"] if name in has and name in needed else []
    told = "; ".join([*apart[:3], *shapes]) or f"{name} is not a tensor of both"
    raise UnsupportedError(f"{donor}: its MTP layer does not fit {path}: {told}")


def _shapes(model: Model) -> dict[str, list[int]]:
    """Shapes of all MTP tensors, and of the embedding and the head, under their stored names."""
    rows = (row for row in model.rows if is_mtp(row.parts[0]) or row.parts[0] in ("embed", "head"))
    return {row.name: list(row.shape(model.shapes)) for row in rows}


# ---- declaration


def declare_as(config: Mapping[str, Any], donor: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """``config`` with the donor's keys that speak of MTP at the donor's places, and no others.

    A list that the donor has longer than ``layers`` (decoder layers), and of which ``config`` has but the start, is the
    donor's again: its last entries speak of MTP layers.
    """
    made: dict[str, Any] = deepcopy(dict(config))
    theirs = dict(_paths(donor))
    for path, _ in list(_paths(config)):
        if _speaks_of_mtp(path) and path not in theirs:
            store(made, path, MISSING)
    for path, value in theirs.items():
        if _speaks_of_mtp(path) or _is_cut(dict(_paths(config)).get(path), value, layers):
            store(made, path, deepcopy(value))
    return made


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted path and value at the top and under text_config, where MTP layers are declared; keys with a dot are none
    of these."""
    for lead, table in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(table, Mapping):
            yield from ((lead + key, value) for key, value in table.items() if "." not in key)


def _speaks_of_mtp(path: str) -> bool:
    return bool(re.search("mtp|nextn", path.rpartition(".")[2]))


def _is_cut(value: Any, whole: Any, layers: int) -> bool:
    both = isinstance(value, list) and isinstance(whole, list)
    return both and layers <= len(value) < len(whole) and whole[: len(value)] == value


def modules_in(tensor_map: TensorMap, tensors: Mapping[str, TensorRef]) -> list[str]:
    """Modules with a plain matrix among MTP ``tensors`` that an engine might build packed: all but embeddings."""
    embeddings = {row.name for row in tensor_map.model.rows if tensor_map.copies.get(row.parts[0]) == "embed"}
    end = f".{WEIGHT}"
    return [
        name.removesuffix(end)
        for name, ref in tensors.items()
        if name.endswith(end) and len(ref.shape) > 1 and ref.dtype in ("BF16", "F16", "F32") and name not in embeddings
    ]
