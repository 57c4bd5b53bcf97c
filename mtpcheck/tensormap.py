"""The one internal tensor map: every piece of weight under a name that means one thing.

Part names: ``embed``, ``head``, ``final_norm``, ``layers.3.attn.q``, ``layers.3.mlp.experts.7.gate``,
``mtp.0.proj.embed`` and ``mtp.0.proj.hidden`` (the halves of the projection are two parts, so no order is
ever implied). Which parts a model has, and their shapes, stands in ``configs/blocks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from mtpcheck.box import Shape
from mtpcheck.model import Model
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding

if TYPE_CHECKING:
    from mtpcheck.checkpoint import Checkpoint
    from mtpcheck.declared import Packing
    from mtpcheck.fp8 import Grid
    from mtpcheck.packing import Module

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element under safetensors' dtype names, which are ours too."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that has not been read: dtype (safetensors name), shape, and the plan of its bytes.

    For dtypes narrower than a byte the plan is a flat run of bytes and only whole reads make sense.
    """

    dtype: str
    plan: Plan
    packed_shape: Shape | None = None

    @property
    def shape(self) -> Shape:
        return self.plan.shape if self.packed_shape is None else self.packed_shape

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def read(self) -> bytes:
        """All bytes in C order. For small tensors; conversions stream through ``move.slabs``."""
        from mtpcheck.move import read_plan

        return bytes(read_plan(self.plan))


@dataclass(frozen=True)
class Encoded:
    """A tensor that is stored as codes: its values, which are computed as they are read, and what they come from.

    ``beside``: tensors that belong to the codes, by stored name; the scales are the first.
    """

    values: TensorRef
    codes: TensorRef
    beside: Mapping[str, TensorRef]
    grid: Grid


@dataclass(frozen=True)
class TensorMap:
    """Parts of one checkpoint, in the order of its layers, with the model they make up.

    ``padding`` are vocabulary rows beyond the true size. ``findings`` tell what did not fit while reading.
    """

    model: Model
    parts: Mapping[str, TensorRef]
    padding: Mapping[str, TensorRef] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """Part → the stored tensor it was read from, for messages."""
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    """Stored tensors that hold codes and not values, by name."""
    packed: Mapping[str, Module] = field(default_factory=dict)
    """Part → the module that stores it in a packing that is not decoded; it is not among ``parts``."""
    held: Mapping[str, TensorRef] = field(default_factory=dict)
    """Part → what Megatron holds of it, where that is another value (offset.py)."""
    packing: Packing | None = None
    """How an HF checkpoint stores its modules, and declares it."""

    @property
    def family(self) -> str:
        return self.model.family

    @property
    def facts(self) -> Mapping[str, Any]:
        """Neutral facts of the model; ``mtp_layers`` is what is declared, ``mtp_stored`` what is there."""
        return self.model.facts

    @property
    def copies(self) -> Mapping[str, str]:
        """Parts that repeat another (an MTP layer's embedding, a tied head) → what they repeat."""
        return self.model.copies

    def repeated_by(self, part: str) -> str:
        """What a copy repeats in the end: an MTP head the head, or, where that is not stored, a tied embedding."""
        original = self.copies[part]
        while original in self.copies and original not in self.parts:
            original = self.copies[original]
        return original

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.parts.values())

    @property
    def padding_plans(self) -> dict[str, Plan]:
        return {part: ref.plan for part, ref in self.padding.items()}


def is_mtp(part: str) -> bool:
    """Whether a part belongs to an MTP layer."""
    return part.startswith("mtp.")


def read_tensor_map(checkpoint: Checkpoint, family: str | None = None) -> TensorMap:
    """Normalise any checkpoint. Reads headers only.

    What does not fit (a stored tensor nobody claims, a missing one, a wrong shape) becomes a finding of the map.
    Raises FamilyError if no family or more than one fits and ``family`` does not decide.
    """
    from mtpcheck.normalise import read_tensor_map as read

    return read(checkpoint, family)


def read_like(checkpoint: Checkpoint, reference: TensorMap) -> TensorMap:
    """Normalise a checkpoint that is to be held against ``reference``, through the reference's own rows.

    Whatever it lacks, adds or says differently is a finding, or shows in the facts of the result.
    """
    from mtpcheck.normalise import read_like as read

    return read(checkpoint, reference)
