"""What a checkpoint declares and what it stores, from headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.checks.declaration import check_count, declared_keys
from mtpcheck.normalise import alike_dialects
from mtpcheck.report.finding import Finding
from mtpcheck.rows import flat
from mtpcheck.tensormap import TensorMap, is_mtp, read_tensor_map


@dataclass(frozen=True)
class Packed:
    """How weights are packed: modules in all, those in MTP layers, and matrices of MTP layers that are plain."""

    method: str
    modules: int
    mtp_modules: int
    mtp_plain: int


@dataclass(frozen=True)
class Inspection:
    """Figures are counts and bytes. ``copies``: part → stored or absent. ``files`` hold weights."""

    path: str
    layout: str
    topology: str
    fsdp: bool
    dialect: str
    """The one that Megatron tensors are read in; empty of an HF checkpoint."""
    dialect_alike: list[str]
    """Others that have the same names and shapes for other bytes, and so might be meant."""
    family: str
    tensors: int
    nbytes: int
    dtypes: dict[str, int]
    files: int
    layers: int
    mtp_declared: int
    mtp_declared_by: dict[str, Any]
    mtp_stored: int
    mtp_parts: int
    mtp_elements: int
    elements: int
    copies: dict[str, str]
    passed_over: dict[str, tuple[int, int]] = field(default_factory=dict)
    packed: Packed | None = None
    findings: tuple[Finding, ...] = ()


def _copy(tensor_map: TensorMap, part: str) -> str:
    """Whether a part that may repeat another is stored, told from shape and dtype alone."""
    ref, main = tensor_map.parts.get(part), tensor_map.parts.get(tensor_map.copies[part])
    if ref is None:
        return "absent"
    alike = main is None or (ref.dtype, ref.shape) == (main.dtype, main.shape)
    return "stored" if alike else "stored with another dtype or shape"


def _packed(checkpoint: Checkpoint, tensor_map: TensorMap) -> Packed | None:
    """What is packed, if anything is: decoded or not."""
    packing = tensor_map.packing
    if packing is None or not any(module.codes for module in packing.modules.values()):
        return None
    own = {row.name.removesuffix(".weight") for row in tensor_map.model.rows if is_mtp(row.parts[0])}
    modules = [module for module in packing.modules.values() if module.codes]
    plain = [m.plain for m in packing.modules.values() if m.name in own and m.plain and not m.codes]
    return Packed(
        packing.method,
        len(modules),
        sum(module.name in own for module in modules),
        sum(len(checkpoint.tensors[name].shape) > 1 for name in plain),
    )


def _files(checkpoint: Checkpoint) -> set[str]:
    """Files that hold weights."""
    return {box.source.name for ref in checkpoint.tensors.values() for box in ref.plan.boxes if box.source}


def inspect(
    path: str | Path, family: str | None = None, iteration: int | None = None, dialect: str | None = None
) -> Inspection:
    """Open a checkpoint and account for its tensors without reading any. Raises MtpcheckError as opening does."""
    checkpoint = open_checkpoint(path, iteration, dialect)
    tensor_map = read_tensor_map(checkpoint, family)
    if checkpoint.config is not None:
        declared_by = declared_keys(checkpoint.config)
    else:
        declared_by = {"mtp_num_layers": (checkpoint.args or {}).get("mtp_num_layers")}
    sizes = {part: ref.elements for part, ref in tensor_map.parts.items()}
    sizes |= {part: prod(flat(tensor_map.model.shapes[part])) for part in tensor_map.packed}
    own = [size for part, size in sizes.items() if is_mtp(part)]
    return Inspection(
        path=str(checkpoint.path),
        layout=checkpoint.layout,
        topology=str(checkpoint.ranks.ranks.topology) if checkpoint.ranks else "",
        fsdp=checkpoint.fsdp,
        dialect="" if checkpoint.layout == "hf" else checkpoint.dialect,
        dialect_alike=alike_dialects(checkpoint, tensor_map.model),
        family=tensor_map.family,
        tensors=len(checkpoint.tensors),
        nbytes=checkpoint.nbytes,
        dtypes=dict(Counter(ref.dtype for ref in checkpoint.tensors.values()).most_common()),
        files=len(_files(checkpoint)),
        layers=tensor_map.facts["layers"],
        mtp_declared=tensor_map.facts.get("mtp_layers") or 0,
        mtp_declared_by=declared_by,
        mtp_stored=tensor_map.facts["mtp_stored"],
        mtp_parts=len(own),
        mtp_elements=sum(own),
        elements=sum(sizes.values()),
        copies={part: _copy(tensor_map, part) for part in tensor_map.copies},
        passed_over=dict(checkpoint.passed_over),
        packed=_packed(checkpoint, tensor_map),
        findings=(*tensor_map.findings, *check_count(tensor_map, str(checkpoint.path))),
    )
