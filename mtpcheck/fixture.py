"""A tiny checkpoint for people to test their own code with: a bundled one, trained, or one of any size, random."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mtpcheck.box import Shape
from mtpcheck.bundled import find_bundled
from mtpcheck.checkpoint import Checkpoint, Layout, open_checkpoint
from mtpcheck.errors import UnsupportedError, UsageError
from mtpcheck.facts import config_from_facts
from mtpcheck.family import load_family
from mtpcheck.layouts.hf import INDEX, SINGLE, make_header
from mtpcheck.model import Model
from mtpcheck.plan import Plan
from mtpcheck.rules import resized
from mtpcheck.target import check_target, new_folder
from mtpcheck.tensormap import TensorMap, TensorRef, read_tensor_map


@dataclass(frozen=True)
class Size:
    """How large a fixture is to be; what is None is as in the bundled checkpoint of the family."""

    layers: int | None = None
    experts: int | None = None
    mtp_layers: int | None = None

    @property
    def given(self) -> bool:
        return self != Size()


def make_fixture(name: str, target: Path, size: Size, layout: Layout = "hf", seed: int = 0) -> bool:
    """Put a tiny checkpoint of a family, or the bundled one of this name, into the new folder ``target``.

    Without a size it is the bundled one. Whether its head is trained. Raises FamilyError for an unknown name,
    UsageError for the path and for a size that the family cannot have.
    """
    source = find_bundled(name)
    if source is None:
        raise UnsupportedError(f"{load_family(name).name}: no tiny checkpoint of this family comes with mtpcheck")
    check_target(source, target)
    if layout == "hf":
        with new_folder(target) as folder:
            _fill(folder, source, size, seed)
    else:
        from mtpcheck.convert import convert

        with tempfile.TemporaryDirectory(prefix="mtpcheck-") as between:
            _fill(Path(between), source, size, seed)
            convert(between, target, layout)
    return not size.given


def _fill(folder: Path, source: Path, size: Size, seed: int) -> None:
    if not size.given:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return
    base = open_checkpoint(source)
    tensor_map = read_tensor_map(base)
    family = load_family(tensor_map.family)
    facts = _facts(tensor_map, size)
    _write(folder / SINGLE, list(_tensors(family.model(facts), tensor_map, seed)))
    lists = {key for row in family.all_config if isinstance(facts.get(row.fact or ""), list) for key in row.keys}
    stated = {key: value for key, value in (base.config or {}).items() if key not in lists}
    config = config_from_facts(family.all_config, facts, stated)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _copy_others(base, folder)


def _copy_others(base: Checkpoint, folder: Path) -> None:
    """The tokenizer and whatever else lies beside the weights."""
    assert base.hf is not None
    for name in base.hf.others:
        if name not in ("config.json", INDEX):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base.folder / name, folder / name)


def _facts(base: TensorMap, size: Size) -> dict[str, Any]:
    """Facts of the bundled checkpoint at another size. Raises UsageError if the family has no experts to count."""
    facts = dict(base.facts)
    if size.experts is not None and not facts["experts"]:
        raise UsageError(f"{base.family}: is dense, --experts says nothing of it")
    layers = facts["layers"] if size.layers is None else size.layers
    mtp = facts["mtp_stored"] if size.mtp_layers is None else size.mtp_layers
    if facts["experts"]:
        facts["experts"] = facts["experts"] if size.experts is None else size.experts
        facts["topk"] = min(facts["topk"], facts["experts"])
        facts["dense_layers"] = min(facts["dense_layers"], layers)
        if facts["experts"] % facts["router_groups"] or facts["experts"] < 2 * facts["router_groups"]:
            facts |= {"router_groups": 1, "router_topk_groups": 1}  # a group is judged by its two best
    if mtp > 1 and "mtp_steps" in facts:
        facts["mtp_steps"] = None  # several steps are for a layer that is repeated
    facts |= {name: resized(value, base.facts, layers, mtp) for name, value in facts.items() if isinstance(value, list)}
    return facts | {"layers": layers, "mtp_layers": mtp, "mtp_stored": mtp}


_Values = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class _Drawn:
    """A tensor that is made and not yet: what it is drawn by, and the part that says how."""

    name: str
    dtype: str
    shape: Shape
    seed: list[int]
    role: str

    @property
    def values(self) -> _Values:
        """Norms lie about one, and far enough from it for two exchanged ones to show."""
        noise = np.random.default_rng(self.seed).standard_normal(self.shape, np.float32)
        norm = "norm" in self.role and not self.role.endswith("bias")
        return np.exp(np.float32(0.5) * noise) if norm else np.float32(0.08) * noise

    @property
    def stored(self) -> bytes:
        bits = self.values.view("<u4")
        return ((bits + 0x8000) >> 16).astype("<u2").tobytes() if self.dtype == "BF16" else bits.tobytes()


def _tensors(model: Model, base: TensorMap, seed: int) -> Iterator[_Drawn]:
    """Every tensor of a model, drawn by its name, copies by that of what they repeat. Which copies there are, and
    dtypes, are those of the bundled checkpoint."""
    dtypes = {_role(part): ref.dtype for part, ref in base.parts.items()}
    row_of = {row.parts[0]: row.name for row in model.rows}
    for row in model.rows:
        part = original = row.parts[0]
        if part in model.copies and _role(part) not in dtypes:
            continue
        while original in model.copies and (original == part or _role(original) not in dtypes):
            original = model.copies[original]
        dtype = dtypes.get(_role(part), "BF16")
        assert dtype in ("BF16", "F32"), dtype
        drawn_by = [seed, crc32(row_of[original].encode())]
        yield _Drawn(row.name, dtype, row.shape(model.shapes), drawn_by, _role(original))


def _write(path: Path, tensors: Sequence[_Drawn]) -> None:
    sizes = {"BF16": 2, "F32": 4}
    header = make_header((own.name, TensorRef(own.dtype, Plan.zeros(own.shape, sizes[own.dtype]))) for own in tensors)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for own in tensors:
            file.write(own.stored)


def _role(part: str) -> str:
    """What a part is, whatever its layer and expert; an MTP layer's own embedding is not the model's."""
    return re.sub(r"\.\d+(?=\.|$)", "", part.replace("layers.", "", 1))
