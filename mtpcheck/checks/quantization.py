"""Are weights stored the way the checkpoint declares, so that an engine builds for every module what is there?

What is plain and what is packed is judged tensor by tensor and by *role*: the part without the numbers of its layer and
expert, the MTP layer's like any other's. A role that is packed nowhere (embedding, router, norms) is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.checks.packed import Case, check_stored
from mtpcheck.declared import Declaration, Packing, runs
from mtpcheck.model import Model
from mtpcheck.packing import WEIGHT, Module, known_as, packings
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.tensormap import is_mtp


def check_quantization(checkpoint: Checkpoint, model: Model, packing: Packing) -> list[Finding]:
    """Everything that is wrong with how an HF checkpoint stores or declares packed weights."""
    case = Case(checkpoint, model, packing)
    found = [*packing.findings, *check_stored(case)]
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


def _nothing_declared(case: Case, packed: list[Module]) -> Finding:
    what = f"is one of {len(packed):,} packed weights, and no file declares a quantization"
    return failure(
        "quantization.declared", packed[0].stored, what, where=case.where(packed[0]),
        todo="add the quantization_config that they were made with; an engine takes them for plain weights",
    )  # fmt: skip


def _nothing_packed(case: Case, declared: Declaration) -> Finding:
    what = f"declares {declared.method.name}, and every weight is stored plain"
    return failure(
        "quantization.declared", "quantization_config", what, where=case.declared_in(declared),
        todo="remove the declaration; an engine builds for packed weights and finds none",
    )  # fmt: skip


# ---- declared against stored


def _grouped(
    case: Case, modules: Iterable[Module], find: Callable[[str, str, list[Module]], Finding]
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


def _roles(case: Case, modules: list[Module]) -> str:
    return _first(list(dict.fromkeys(case.roles[module.name].name for module in modules)))


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


def _excluded(case: Case, declared: Declaration) -> Iterator[Finding]:
    wrong = [m for m in case.known if m.codes and m.name not in case.told and m.name in case.left_alone(declared)]
    yield from _grouped(case, wrong, lambda subject, where, own: failure(
        "quantization.excluded", subject,
        f"{declared.where} leaves {_count(own)} of {where} alone, and they are packed",
        where=case.where(own[0]), got=_roles(case, own),
        todo="take them off the list; an engine builds plain weights there",
    ))  # fmt: skip


def _undeclared(case: Case, declared: Declaration) -> Iterator[Finding]:
    judged = case.judged
    wrong = [
        module for module in case.known
        if not module.codes and case.roles[module.name].name in judged and module.name not in case.told
        if module.name not in case.left_alone(declared) and not declared.silent_on(module.name)
    ]  # fmt: skip
    yield from _grouped(case, wrong, lambda subject, where, own: failure(
        "quantization.undeclared", subject,
        f"{_count(own)} of {where} are plain, and {declared.where} does not leave them alone",
        where=case.where(own[0]), got=_roles(case, own),
        todo=f"list them in {declared.listed}; an engine builds packed weights there",
    ))  # fmt: skip


def _fused(case: Case, declared: Declaration) -> Iterator[Finding]:
    """Members of one fused module must be alike. Told once for each kind of module in the trunk and an MTP layer."""
    torn: dict[tuple[str, str], list[list[Module]]] = {}
    alias: dict[tuple[str, str], list[list[Module]]] = {}
    alone = case.left_alone(declared)
    for fused, members in _fused_groups(case):
        key = fused.rpartition(".")[2], case.roles[members[0].name].place
        excluded = {m.name in alone for m in members}
        if len(excluded) > 1 or len({bool(m.codes) for m in members}) > 1:
            torn.setdefault(key, []).append(members)
        elif True in excluded and not any(declared.excludes(m.name) for m in members):
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


def _fused_groups(case: Case) -> Iterator[tuple[str, list[Module]]]:
    """Fused module → those of its members that are stored, where there are several."""
    known = {module.name: module for module in case.known}
    for fused, ends in packings().fused.items():
        for name in known:
            parent, _, last = name.rpartition(".")
            if last == ends[0]:
                members = [known[f"{parent}.{end}"] for end in ends if f"{parent}.{end}" in known]
                if len(members) > 1:
                    yield f"{parent}.{fused}", members


def _torn(case: Case, declared: Declaration, fused: str, where: str, groups: list[list[Module]]) -> Finding:
    members = groups[0]
    plain = [m for m in members if not m.codes]
    listed = [m for m in members if m.name in case.left_alone(declared)]
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
        "quantization.fused", rest[0].stored + more, what, where=case.declared_in(declared),
        cause=f"engines build these as one {fused}, all packed or all plain",
    )  # fmt: skip


# ---- declarations


def _unmatched(case: Case, declared: Declaration) -> Iterator[Finding]:
    """Exclusions that speak of the MTP layer and name none of its modules, stored or not."""
    if declared.described is not None:
        return
    own = [row.name for row in case.model.rows if is_mtp(row.parts[0])]
    names = {alias for name in own for alias in (name, *known_as(name.removesuffix(f".{WEIGHT}")))}
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


def _speaks_of_mtp(case: Case, text: str) -> bool:
    layer = re.search(r"layers\\?\.(\d{1,9})", text)
    return bool(re.search("mtp|nextn", text)) or bool(layer and int(layer[1]) >= case.layers)


def _description(case: Case, declared: Declaration) -> Iterator[Finding]:
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
        where=case.declared_in(declared), got=_roles(case, own),
        todo="describe every stored tensor; a loader looks each of them up",
    ))  # fmt: skip


def _contradiction(case: Case, declared: tuple[Declaration, ...]) -> Iterator[Finding]:
    for other in declared[1:] if declared[0].described is None else ():
        differ = case.left_alone(declared[0]) ^ case.left_alone(other)
        apart = [m for m in case.known if m.name in differ and case.roles[m.name].name in case.judged]
        if apart:
            first = declared[0] if apart[0].name in case.left_alone(declared[0]) else other
            second = other if first is declared[0] else declared[0]
            what = f"{first.where} leaves it alone, {second.where} does not"
            more = f" and {len(apart) - 1:,} more" if len(apart) > 1 else ""
            yield failure("quantization.contradiction", apart[0].name + more, what, where=case.declared_in(other),
                          got=_roles(case, apart), todo="make both say the same; engines read either")  # fmt: skip
