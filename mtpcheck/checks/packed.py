"""Is a packed weight whole? And what every check of packed weights looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.declared import Declaration, Packing
from mtpcheck.family import load_family
from mtpcheck.model import Model
from mtpcheck.packing import WEIGHT, Module, packings
from mtpcheck.report.finding import Finding, failure

_TRUNK = "the trunk"


@dataclass(frozen=True)
class Role:
    """What a module does, and where: ``MTP layer 0`` or the trunk."""

    name: str
    place: str


@dataclass(frozen=True)
class Case:
    """All that the checks of one checkpoint look at."""

    checkpoint: Checkpoint
    model: Model
    packing: Packing
    told: set[str] = field(default_factory=set)
    """Modules whose fault has been named, so that each cause is one finding."""
    excluded: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """Role of every module of the model that has a weight."""
        return roles_of(self.model)

    def where(self, module: Module) -> str:
        hf = self.checkpoint.hf
        return str(Path(self.checkpoint.path) / hf.shard_of[module.stored]) if hf else ""

    def declared_in(self, declared: Declaration) -> str:
        return str(Path(self.checkpoint.path) / declared.where)

    @cached_property
    def layers(self) -> int:
        """Decoder layers; what is numbered higher is an MTP layer."""
        return sum(1 for layer in self.model.layers if layer.startswith("layers."))

    def left_alone(self, declared: Declaration) -> frozenset[str]:
        """Modules that a declaration leaves alone."""
        key = declared.where, declared.listed
        if key not in self.excluded:
            self.excluded[key] = declared.left_alone(module.name for module in self.known)
        return self.excluded[key]

    @cached_property
    def known(self) -> list[Module]:
        """Modules of the model that store a weight."""
        return [m for name, m in self.packing.modules.items() if name in self.roles and (m.plain or m.codes)]

    @cached_property
    def judged(self) -> frozenset[str]:
        """Roles that an engine builds for packed weights: those packed somewhere, and those that a block names."""
        blocks = load_family(self.model.family).blocks
        return frozenset(self.roles[m.name].name for m in self.known if m.codes) | {
            part for block in blocks for part in block.quantized
        }


def roles_of(model: Model) -> dict[str, Role]:
    """Module → role, for every weight of a model."""
    found = {}
    for row in model.rows:
        if row.name.endswith(f".{WEIGHT}"):
            lead, _, rest = row.parts[0].partition(".")
            number, _, own = rest.partition(".")
            inside = lead in ("layers", "mtp") and number.isdecimal()
            name = ".".join(piece for piece in (own if inside else row.parts[0]).split(".") if not piece.isdecimal())
            found[row.name.removesuffix(f".{WEIGHT}")] = Role(name, f"MTP layer {number}" if lead == "mtp" else _TRUNK)
    return found


def check_stored(case: Case) -> Iterator[Finding]:
    """What belongs to codes stands beside them, and none stand beside the plain weight."""
    yield from _scales(case)
    yield from _both(case)


def _scales(case: Case) -> Iterator[Finding]:
    table = packings()
    method = case.packing.declared[0].method if case.packing.declared else None
    for module in case.packing.modules.values():
        own = [end for end in module.tensors if end in table.scales]
        if own and not module.codes:
            yield failure(
                "quantization.scale", module.tensors[own[0]], "is a scale, and no codes are stored that it belongs to",
                where=case.where(module),
            )  # fmt: skip
        needs = [*(method.needs.get(module.codes_end, ()) if method else ())]
        if method and method.nested and _is_nested(case, module):
            needs.append(method.nested)
        for either in needs:
            if not any(end in module.tensors for end in either):
                yield _without(case, module, either, [end for end in own if _foreign(end, needs)])


def _is_nested(case: Case, module: Module) -> bool:
    scale = module.tensors.get("weight_scale")
    return scale is not None and case.checkpoint.tensors[scale].dtype == "F8_E4M3"


def _foreign(end: str, needs: list[tuple[str, ...]]) -> bool:
    """Whether a scale is one that the method has no name for, and so the missing one under a wrong name."""
    return end.startswith(("weight_scale", "_scales", "scales")) and all(end not in either for either in needs)


def _without(case: Case, module: Module, either: tuple[str, ...], instead: list[str]) -> Finding:
    lacks = module.name + (either[0] if either[0].startswith("_") else f".{either[0]}")
    others = f" ({' or '.join(either[1:])} would do too)" if either[1:] else ""
    what = f"{lacks} is missing, without which the codes mean nothing{others}"
    if instead:
        renamed = f"{instead[0]} stands there instead, a name that {case.packing.method} does not use: it was renamed"
        return failure("quantization.scale", module.codes, what, where=case.where(module), cause=renamed,
                       expected=either[0], got=instead[0])  # fmt: skip
    return failure("quantization.scale", module.codes, what, where=case.where(module))


def _both(case: Case) -> Iterator[Finding]:
    for module in case.packing.modules.values():
        if module.plain and module.codes:
            yield failure(
                "quantization.both", module.plain, f"is stored plain, and packed as {module.codes} too",
                where=case.where(module), todo="remove one; which of them counts is up to the engine",
            )  # fmt: skip
