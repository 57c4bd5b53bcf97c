"""Are weights stored the way the checkpoint declares, so that an engine builds for every module what is there?

What is plain and what is packed is judged tensor by tensor and by *role*: the part without the numbers of its layer and
expert, the MTP layer's like any other's. A role that is packed nowhere (embedding, router, norms) is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.declared import Declaration, Packing, runs
from mtpcheck.family import Model, load_family
from mtpcheck.packing import WEIGHT, Module, known_as, packings
from mtpcheck.report.finding import Finding, failure, warning

_TRUNK = "the trunk"


@dataclass(frozen=True)
class Role:
    """What a module does, and where: ``MTP layer 0`` or the trunk."""

    name: str
    place: str


@dataclass(frozen=True)
class _Case:
    """All that the checks of one checkpoint look at."""

    checkpoint: Checkpoint
    model: Model
    packing: Packing
    roles: Mapping[str, Role]
    told: set[str] = field(default_factory=set)
    """Modules whose fault has been named, so that each cause is one finding."""

    def where(self, module: Module) -> str:
        hf = self.checkpoint.hf
        return str(Path(self.checkpoint.path) / hf.shard_of[module.stored]) if hf else ""

    def declared_in(self, declared: Declaration) -> str:
        return str(Path(self.checkpoint.path) / declared.where)

    @cached_property
    def layers(self) -> int:
        """Decoder layers; what is numbered higher is an MTP layer."""
        return sum(1 for layer in self.model.layers if layer.startswith("layers."))

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


def check_quantization(checkpoint: Checkpoint, model: Model, packing: Packing) -> list[Finding]:
    """Everything that is wrong with how an HF checkpoint stores or declares packed weights."""
    case = _Case(checkpoint, model, packing, roles_of(model))
    found = [*packing.findings, *_scales(case), *_both(case)]
    packed = [module for module in packing.modules.values() if module.codes]
    if not packing.declared:
        unread = bool(packing.findings)
        return found if unread or not packed else [*found, _nothing_declared(case, packed)]
    declared = packing.declared[0]
    if not packed:
        return [*found, _nothing_packed(case, declared)]
    found += [*_fused(case, declared), *_excluded(case, declared), *_undeclared(case, declared)]
    found += [finding for one in packing.declared for finding in (*_unmatched(case, one), *_description(case, one))]
    return [*found, *_contradiction(case, packing.declared)]


def _nothing_declared(case: _Case, packed: list[Module]) -> Finding:
    what = (
        f"codes are stored, {len(packed):,} of them, and neither config.json nor another file declares a quantization"
    )
    return failure(
        "quantization.declared", packed[0].stored, what, where=case.where(packed[0]),
        todo="add the quantization_config that they were made with; an engine takes them for plain weights",
    )  # fmt: skip


def _nothing_packed(case: _Case, declared: Declaration) -> Finding:
    what = f"declares {declared.method.name}, and every weight is stored plain"
    return failure(
        "quantization.declared", "quantization_config", what, where=case.declared_in(declared),
        todo="remove the declaration; an engine builds for packed weights and finds none",
    )  # fmt: skip


# ---- what belongs to a packed weight


def _scales(case: _Case) -> Iterator[Finding]:
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


def _is_nested(case: _Case, module: Module) -> bool:
    scale = module.tensors.get("weight_scale")
    return scale is not None and case.checkpoint.tensors[scale].dtype == "F8_E4M3"


def _foreign(end: str, needs: list[tuple[str, ...]]) -> bool:
    """Whether a scale is one that the method has no name for, and so the missing one under a wrong name."""
    return end.startswith(("weight_scale", "_scales", "scales")) and all(end not in either for either in needs)


def _without(case: _Case, module: Module, either: tuple[str, ...], instead: list[str]) -> Finding:
    lacks = module.name + (either[0] if either[0].startswith("_") else f".{either[0]}")
    others = f" ({' or '.join(either[1:])} would do too)" if either[1:] else ""
    what = f"{lacks} is missing, without which the codes mean nothing{others}"
    if instead:
        renamed = f"{instead[0]} stands there instead, a name that {case.packing.method} does not use: it was renamed"
        return failure("quantization.scale", module.codes, what, where=case.where(module), cause=renamed,
                       expected=either[0], got=instead[0])  # fmt: skip
    return failure("quantization.scale", module.codes, what, where=case.where(module))


def _both(case: _Case) -> Iterator[Finding]:
    for module in case.packing.modules.values():
        if module.plain and module.codes:
            yield failure(
                "quantization.both", module.plain, f"is stored plain, and packed as {module.codes} too",
                where=case.where(module), todo="remove one; which of them counts is up to the engine",
            )  # fmt: skip


# ---- declared against stored


def _grouped(
    case: _Case, modules: Iterable[Module], find: Callable[[str, str, list[Module]], Finding]
) -> Iterator[Finding]:
    """One finding for the trunk and one for each MTP layer. All of them count as told."""
    places: dict[str, list[Module]] = {}
    for module in modules:
        places.setdefault(case.roles[module.name].place, []).append(module)
    for where, own in places.items():
        case.told.update(module.name for module in own)
        more = f" and {len(own) - 1:,} more" if len(own) > 1 else ""
        yield find(own[0].stored + more, where, own)


def _count(modules: list[Module]) -> str:
    return f"{len(modules):,} weight{'s' * (len(modules) != 1)}"


def _some(modules: list[Module]) -> str:
    return _first([module.name for module in modules])


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _excluded(case: _Case, declared: Declaration) -> Iterator[Finding]:
    wrong = [m for m in case.known if m.codes and m.name not in case.told and declared.excludes(known_as(m.name))]
    yield from _grouped(case, wrong, lambda subject, where, own: failure(
        "quantization.excluded", subject, f"{declared.where} leaves {_count(own)} of {where} alone; packed is stored",
        where=case.where(own[0]), got=_some(own),
        todo="take them off the list; an engine builds plain weights there",
    ))  # fmt: skip


def _undeclared(case: _Case, declared: Declaration) -> Iterator[Finding]:
    judged = case.judged
    wrong = [
        module for module in case.known
        if not module.codes and case.roles[module.name].name in judged and module.name not in case.told
        if not declared.excludes(known_as(module.name)) and not declared.silent_on(module.name)
    ]  # fmt: skip
    yield from _grouped(case, wrong, lambda subject, where, own: failure(
        "quantization.undeclared", subject,
        f"{_count(own)} of {where} are plain, and {declared.where} does not leave them alone",
        where=case.where(own[0]), got=_some(own),
        todo=f"list them in {_list_of(declared)}; an engine builds packed weights there",
    ))  # fmt: skip


def _list_of(declared: Declaration) -> str:
    return next(iter(declared.method.exclude), declared.where)


def _fused(case: _Case, declared: Declaration) -> Iterator[Finding]:
    """Members of one fused module must be alike. Told once for each kind of module in the trunk and an MTP layer."""
    torn: dict[tuple[str, str], list[list[Module]]] = {}
    alias: dict[tuple[str, str], list[list[Module]]] = {}
    for fused, members in _fused_groups(case):
        key = fused.rpartition(".")[2], case.roles[members[0].name].place
        excluded = {declared.excludes(known_as(m.name)) for m in members}
        if len(excluded) > 1 or len({bool(m.codes) for m in members}) > 1:
            torn.setdefault(key, []).append(members)
        elif True in excluded and not any(declared.excludes([m.name]) for m in members):
            alias.setdefault(key, []).append(members)
    for (fused, where), groups in torn.items():
        case.told.update(m.name for members in groups for m in members)
        yield _torn(case, declared, fused, where, groups)
    for (fused, where), groups in alias.items():
        names = ", ".join(m.name.rpartition(".")[2] for m in groups[0])
        yield warning(
            "quantization.fused", groups[0][0].name.rpartition(".")[0] + "." + fused,
            f"{declared.where} leaves {fused} of {where} alone, which is stored as {names}",
            where=case.declared_in(declared), todo=f"list {names} as well; not every engine takes {fused} apart",
        )  # fmt: skip


def _fused_groups(case: _Case) -> Iterator[tuple[str, list[Module]]]:
    """Fused module → those of its members that are stored, where there are several."""
    known = {module.name: module for module in case.known}
    for fused, ends in packings().fused.items():
        for name in known:
            parent, _, last = name.rpartition(".")
            if last == ends[0]:
                members = [known[f"{parent}.{end}"] for end in ends if f"{parent}.{end}" in known]
                if len(members) > 1:
                    yield f"{parent}.{fused}", members


def _torn(case: _Case, declared: Declaration, fused: str, where: str, groups: list[list[Module]]) -> Finding:
    members = groups[0]
    plain = [m for m in members if not m.codes]
    listed = [m for m in members if declared.excludes(known_as(m.name))]
    by_store = 0 < len(plain) < len(members)
    some = plain if by_store else listed
    rest = [m for m in members if m not in some]
    first, last = (", ".join(m.name.rpartition(".")[2] for m in own) for own in (some, rest))
    what = (
        f"of {where}: {first} stored plain, {last} packed" if by_store
        else f"of {where}: {declared.where} leaves {first} alone, and not {last}"
    )  # fmt: skip
    more = f" and {len(groups) - 1:,} more groups" if len(groups) > 1 else ""
    return failure(
        "quantization.fused", rest[0].stored + more, what, where=case.declared_in(declared), got=_some(rest),
        cause=f"engines build these as one {fused}, all packed or all plain",
    )  # fmt: skip


# ---- declarations


def _unmatched(case: _Case, declared: Declaration) -> Iterator[Finding]:
    """Exclusions that speak of the MTP layer and name no tensor and no module of it."""
    if declared.described is not None:
        return
    names = {alias for name in (*case.packing.modules, *case.roles) for alias in known_as(name)}
    names |= case.checkpoint.tensors.keys()
    names = {name for name in names if _speaks_of_mtp(case, name)}
    idle = sorted(entry for entry in _idle(declared, names) if _speaks_of_mtp(case, entry))
    if idle:
        more = f" and {len(idle) - 1:,} more" if len(idle) > 1 else ""
        yield warning(
            "quantization.unmatched", idle[0] + more, "is excluded, speaks of the MTP layer, and is no name of it",
            where=case.declared_in(declared), got=_first(idle),
        )  # fmt: skip


def _idle(declared: Declaration, names: set[str]) -> Iterator[str]:
    """Entries that hit none of the names."""
    parts = {run for name in names for run in runs(name)}
    for rule in declared.rules:
        if rule.excluded:
            yield from rule.exact - names
            yield from rule.within - parts
            if rule.pattern is not None and not any(map(rule.pattern, names)):
                yield rule.text


def _speaks_of_mtp(case: _Case, text: str) -> bool:
    layer = re.search(r"layers\\?\.(\d{1,9})", text)
    return bool(re.search("mtp|nextn", text)) or bool(layer and int(layer[1]) >= case.layers)


def _description(case: _Case, declared: Declaration) -> Iterator[Finding]:
    """Tensors that a description lacks though it has their like in other layers."""
    described = declared.described
    if described is None:
        return
    known = {(case.roles[m.name].name, end) for m in case.known for end, name in m.tensors.items() if name in described}
    lacking = [
        module for module in case.known
        if any(name not in described and (case.roles[module.name].name, end) in known
               for end, name in module.tensors.items())
    ]  # fmt: skip
    yield from _grouped(case, lacking, lambda subject, where, own: failure(
        "quantization.description", subject, f"{declared.where} does not describe {_count(own)} of {where}",
        where=case.declared_in(declared), got=_some(own),
        todo="describe every stored tensor; a loader looks each of them up",
    ))  # fmt: skip


def _contradiction(case: _Case, declared: tuple[Declaration, ...]) -> Iterator[Finding]:
    judged = case.judged
    for other in declared[1:] if declared[0].described is None else ():
        apart = [
            m for m in case.known
            if case.roles[m.name].name in judged
            and declared[0].excludes(known_as(m.name)) != other.excludes(known_as(m.name))
        ]  # fmt: skip
        if apart:
            first = declared[0] if declared[0].excludes(known_as(apart[0].name)) else other
            second = other if first is declared[0] else declared[0]
            what = f"{first.where} leaves it alone, {second.where} does not"
            more = f" and {len(apart) - 1:,} more" if len(apart) > 1 else ""
            yield failure("quantization.contradiction", apart[0].name + more, what, where=case.declared_in(other),
                          got=_some(apart), todo="make both say the same; engines read either")  # fmt: skip
