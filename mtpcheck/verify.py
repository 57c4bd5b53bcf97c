"""Compare any two checkpoints in any two layouts, whoever made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.checks.acceptance import judge_acceptance
from mtpcheck.checks.changed import compare_changed
from mtpcheck.checks.changed import describe as describe_components
from mtpcheck.checks.declaration import check_count, compare_configs, compare_facts
from mtpcheck.checks.scales import with_cause
from mtpcheck.checks.topology import check_ranks, explain
from mtpcheck.checks.values import compare_copies, compare_maps, compare_stored
from mtpcheck.dialect import load_dialect
from mtpcheck.draft.probe import Column, Probing, read_workloads, run_all
from mtpcheck.encoding import as_codes
from mtpcheck.errors import UnsupportedError
from mtpcheck.family import load_family
from mtpcheck.normalise import is_quantized, stored_rows
from mtpcheck.packing import WEIGHT
from mtpcheck.progress import Progress, Silent, bar
from mtpcheck.report.finding import Finding, Severity, failure
from mtpcheck.report.report import Report, of_group
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp, read_like, read_tensor_map

Values = Literal["exact", "changed"]


def verify(
    reference: str | Path,
    candidate: str | Path,
    family: str | None = None,
    values: Values = "exact",
    only_mtp: bool = False,
    allow_no_mtp: bool = False,
    show_progress: bool = False,
    iteration: int | None = None,
    probing: Probing | None = None,
) -> Report:
    """Hold ``candidate`` against ``reference``.

    Two HF checkpoints are compared under their stored names, all else through the tensor map. With ``values``
    "changed" (the candidate was trained on), everything but the bits must hold, and the report tells what moved.
    ``iteration`` chooses one of every side that is a Megatron root. With ``probing`` both are run as well.
    Raises MtpcheckError where it cannot judge: unreadable input, unknown family, a reference without MTP layers.
    """
    a, b = open_checkpoint(reference, iteration), open_checkpoint(candidate, iteration)
    a_map = read_tensor_map(a, family)
    require_mtp(a, a_map, allow_no_mtp)
    report = Report("verify", [str(reference), str(candidate)], a_map.family, summary(a, a_map, layout_of(b)))
    sides = Side(a, a_map), Side(b, read_like(b, a_map))
    _require_values(sides, values)
    if values == "changed":
        _compare_trained(report, *sides, only_mtp, show_progress)
    else:
        compare_sides(report, *sides, only_mtp, show_progress)
    if b.layout == "hf":
        report.skip("files", "tokenizer and other files were not looked at")
    if probing is None:
        report.skip("acceptance", "the models were not run (--acceptance)")
    elif not a_map.facts["mtp_stored"]:
        report.skip("acceptance", "there is no MTP layer that could draft")
    else:
        named = [("reference", sides[0]), ("candidate", sides[1])]
        subjects = [(label, side.checkpoint, side.tensor_map) for label, side in named]

        def measure() -> list[Column]:
            return run_all(subjects, read_workloads(a, a_map, probing.files), probing, show_progress)

        judge_acceptance(report, measure, same=values == "exact")
    return report


def summary(checkpoint: Checkpoint, tensor_map: TensorMap, *via: str) -> str:
    """One line: family, layouts, declared MTP layers."""
    stored = tensor_map.facts["mtp_stored"]
    route = " → ".join([layout_of(checkpoint), *via])
    return f"{tensor_map.family} · {route} · {stored} MTP layer{'s' * (stored != 1)}"


def layout_of(checkpoint: Checkpoint) -> str:
    """The layout, with the topology of rank files."""
    ranks = checkpoint.ranks
    beside = str(ranks.ranks.topology) if ranks else "Megatron-FSDP" if checkpoint.fsdp else ""
    return f"{checkpoint.layout} ({beside})" if beside else checkpoint.layout


def require_mtp(checkpoint: Checkpoint, tensor_map: TensorMap, allow_none: bool) -> None:
    """Raise UnsupportedError if there is no MTP layer to judge."""
    declared, stored = tensor_map.facts.get("mtp_layers") or 0, tensor_map.facts["mtp_stored"]
    if declared and not stored:
        raise UnsupportedError(
            f"{checkpoint.path}: declares {declared} MTP layer{'s' * (declared != 1)} and stores none; "
            "the head was lost before, or never released"
        )
    if not stored and not allow_none:
        raise UnsupportedError(f"{checkpoint.path}: has no MTP layer, so there is nothing to judge (--allow-no-mtp)")


def _require_values(sides: tuple[Side, Side], values: Values) -> None:
    """Raise UnsupportedError if packed values are to be compared. Where a packing is damaged, that is found."""
    if values == "exact" and all(side.checkpoint.layout == "hf" for side in sides):
        return
    for side in sides:
        damaged = of_group(side.tensor_map.findings, "quantization")
        if side.tensor_map.packed and not any(f.severity is Severity.FAILURE for f in damaged):
            raise UnsupportedError(
                f"{side.checkpoint.path}: {is_quantized(side.checkpoint, side.tensor_map)}; packed weights are "
                "compared code by code, between two HF checkpoints and without --values changed"
            )


def compare_sides(
    report: Report, a: Side, b: Side, only_mtp: bool = False, show_progress: bool = False, bits: bool = True
) -> None:
    """Add structure, presence, declaration and bits of ``b`` against ``a`` to a report.

    Without ``bits`` (only across layouts): all but the bits, which the caller has compared otherwise.
    """
    _add_structure(report, a, b)
    with bar("comparing", a.checkpoint.nbytes, show_progress) as progress:
        if a.checkpoint.layout == b.checkpoint.layout == "hf":
            found, compared, others = _by_name(a, b, only_mtp, progress)
        else:
            found, compared, others = _by_part(a, b, only_mtp, progress, bits)
    nbytes = sum(ref.nbytes for name, ref in compared.items() if name in others)
    report.add("presence", of_group(found, "presence"), _presence(a, compared))
    _add_declaration(report, a, b)
    values = _add_topology(report, a, b, of_group(found, "values"))
    report.add("values", values, f"{nbytes:,} bytes compared bit for bit")


_Compared = tuple[list[Finding], Mapping[str, TensorRef], Mapping[str, TensorRef]]


def _by_name(a: Side, b: Side, only_mtp: bool, progress: Progress) -> _Compared:
    left, right = dict(a.checkpoint.tensors), dict(b.checkpoint.tensors)
    if only_mtp:  # by what the trunk claims, so that a tensor nobody knows is looked at
        trunk = _trunk_names(a)
        left = {name: ref for name, ref in left.items() if name not in trunk}
        right = {name: ref for name, ref in right.items() if name not in trunk}
    found = [with_cause(finding, left, right) for finding in compare_stored(left, right, progress)]
    known = {f.subject for f in found}  # a tensor that both lack is missing all the same
    missing = [f for f in a.tensor_map.findings if f.check == "presence.missing" and f.subject not in known]
    found += [f for f in missing if not only_mtp or f.subject not in _trunk_names(a)]
    return found, left, right


def _by_part(a: Side, b: Side, only_mtp: bool, progress: Progress, bits: bool) -> _Compared:
    left, right, found = _maps(a, b, only_mtp)
    found += [*of_group(right.findings, "values"), *compare_copies(left, right)]
    if common := left.encoded.keys() & right.encoded.keys():  # codes and scales say more than their products
        before, after = ({s: r for name in common for s, r in m.encoded[name].beside.items()} for m in (left, right))
        found += [with_cause(f, before, after) for f in compare_stored(before, after, Silent())]
        left, right = as_codes(left, common), as_codes(right, common)
    found += compare_maps(left, right, progress, bits, may_widen=b.checkpoint.layout != "hf")
    return found, left.parts, right.parts


def _maps(a: Side, b: Side, only_mtp: bool) -> tuple[TensorMap, TensorMap, list[Finding]]:
    """Both maps and what they found missing or unclaimed; with ``only_mtp`` without what belongs to the trunk."""
    left, right = a.tensor_map, b.tensor_map
    found = [*of_group(left.findings, "presence"), *of_group(right.findings, "presence")]
    if only_mtp:
        trunk = _trunk_names(a) | _trunk_names(b)
        return mtp_part(left), mtp_part(right), [f for f in found if f.subject not in trunk]
    return left, right, found


def _compare_trained(report: Report, a: Side, b: Side, only_mtp: bool, show_progress: bool) -> None:
    """Everything but the bits must hold; what moved is told component by component."""
    _add_structure(report, a, b)
    left, right, presence = _maps(a, b, only_mtp)
    if b.checkpoint.layout == "hf":
        gone = [part for part in left.copies if part in left.parts and part not in right.parts]
        presence += [failure("presence.copy", left.names[part], "is gone") for part in gone]
    with bar("comparing", left.nbytes, show_progress) as progress:
        found, components = compare_changed(left, right, progress)
    report.add("presence", [*presence, *of_group(found, "presence")], _presence(a, left.parts))
    _add_declaration(report, a, b)
    _add_topology(report, a, b, [])
    moved = sum(len(component.moved) for component in components.values())
    report.add("values", of_group(found, "values"), f"dtypes and shapes hold; {moved:,} tensors moved")
    report.notes = describe_components(components)
    if only_mtp:
        report.notes.append("the trunk was not looked at, so whether a head is stale was not judged")


def _add_structure(report: Report, a: Side, b: Side) -> None:
    findings = of_group((*a.checkpoint.findings, *b.checkpoint.findings), "structure")
    report.add("structure", findings, f"{_stored(a.checkpoint)}, {_stored(b.checkpoint)}")
    found = of_group((*a.tensor_map.findings, *b.tensor_map.findings), "quantization")
    if found or any(side.tensor_map.encoded or side.tensor_map.packed for side in (a, b)):
        report.add("quantization", found, " → ".join(dict.fromkeys(_packed(side.tensor_map) for side in (a, b))))


def _packed(tensor_map: TensorMap) -> str:
    """How many weights of one side are packed, and whether they were decoded."""
    still = len({module.name for module in tensor_map.packed.values()})
    method = tensor_map.packing.method if tensor_map.packing else ""
    told = [f"{len(tensor_map.encoded):,} tensors decoded from FP8 blocks"] * bool(tensor_map.encoded)
    told += [f"{still:,} packed weights ({method})"] * bool(still)
    return " and ".join(told) or "no packed weights"


def _add_topology(report: Report, a: Side, b: Side, values: list[Finding]) -> list[Finding]:
    """Judge rank files, if there are any. Findings of ``values`` that one mishap with ranks explains become one."""
    sides = [side.checkpoint for side in (a, b) if side.checkpoint.ranks is not None]
    if not sides:
        return values
    bits = [f for f in values if f.check == "values.bits"]
    subjects, names = {f.subject for f in bits}, b.tensor_map.names
    differing = {part: name for part, name in names.items() if a.tensor_map.names.get(part) in subjects}
    found: list[Finding] = []
    if explained := explain(b.checkpoint, a.tensor_map, differing):
        cause, sides[-1] = explained
        found.append(cause)
        one = failure("values.bits", f"{len(bits):,} tensors", f"differ, all of them because of {cause.check}")
        values = [one, *(f for f in values if f.check != "values.bits")]
    found += [finding for checkpoint in sides for finding in check_ranks(checkpoint)]
    replicas = sum(len(c.ranks.replicas) for c in sides if c.ranks is not None)
    ranks = sum(len(c.ranks.ranks.files) for c in sides if c.ranks is not None)
    report.add("topology", found, f"{ranks:,} ranks; {replicas:,} replicas compared bit for bit")
    return values


def _add_declaration(report: Report, a: Side, b: Side) -> None:
    told = f"{declaration(a.checkpoint, a.tensor_map)} → {declaration(b.checkpoint, b.tensor_map)}"
    report.add("declaration", _declaration(a, b), told)


def _presence(a: Side, compared: Mapping[str, TensorRef]) -> str:
    names = _mtp_names(a.tensor_map)
    own = sum(name in names or is_mtp(name) for name in compared)
    what = "tensors" if compared.keys() <= a.checkpoint.tensors.keys() else "parts"
    return f"{len(compared):,} {what}, {own:,} of them in MTP layers"


def _declaration(a: Side, b: Side) -> list[Finding]:
    config = load_family(a.tensor_map.family).all_config
    counts = list(check_count(b.tensor_map, str(b.checkpoint.path)))
    if a.checkpoint.config is not None and b.checkpoint.config is not None:
        return [*counts, *compare_configs(a.checkpoint.config, b.checkpoint.config, config)]
    counts += of_group(b.tensor_map.findings, "declaration")
    return [*counts, *compare_facts(a.tensor_map, b.tensor_map, config, load_dialect().args)]


def declaration(checkpoint: Checkpoint, tensor_map: TensorMap) -> str:
    """How a checkpoint declares its MTP layers, as ``key=count``."""
    if checkpoint.config is None:
        declared = (checkpoint.args or {}).get("mtp_num_layers")
        return "nothing" if declared is None else f"mtp_num_layers={declared}"
    keys = load_family(tensor_map.family).declared_by
    said = [f"{key}={checkpoint.config[key]}" for key in keys if key in checkpoint.config]
    return ", ".join(said) or "nothing"


def _stored(checkpoint: Checkpoint) -> str:
    passed = ", ".join(f"{count:,} {kind}" for kind, (count, _) in checkpoint.passed_over.items())
    return f"{len(checkpoint.tensors):,} in {checkpoint.layout}" + (f" ({passed} passed over)" if passed else "")


def mtp_part(tensor_map: TensorMap) -> TensorMap:
    """The same map with MTP layers alone, and the tensors that these repeat."""
    repeated = {original for part, original in tensor_map.copies.items() if is_mtp(part)}
    parts = {part: ref for part, ref in tensor_map.parts.items() if is_mtp(part) or part in repeated}
    own = {row.name for row in tensor_map.model.rows if any(part in parts for part in row.parts)}
    encoded = {name: encoding for name, encoding in tensor_map.encoded.items() if name in own}
    return replace(tensor_map, parts=parts, padding={}, encoded=encoded)


def _mtp_names(tensor_map: TensorMap) -> set[str]:
    """HF names of all tensors in MTP layers."""
    return _with_packed({row.name for row in tensor_map.model.rows if is_mtp(row.parts[0])}, tensor_map)


def _with_packed(names: set[str], tensor_map: TensorMap) -> set[str]:
    """Names of weights, with those of the codes and scales that some of them are stored as."""
    modules = tensor_map.packing.modules.values() if tensor_map.packing else ()
    return names.union(*(m.tensors.values() for m in modules if m.codes and f"{m.name}.{WEIGHT}" in names))


def _trunk_names(side: Side) -> set[str]:
    """Stored names that tensors outside MTP layers have in this checkpoint's layout."""
    model = side.tensor_map.model
    rows = model.rows if side.checkpoint.layout == "hf" else stored_rows(side.checkpoint, model)
    return _with_packed({row.name for row in rows if not is_mtp(row.parts[0])}, side.tensor_map)
