"""Two checkpoints side by side: structure, presence, declaration, topology and bits, as findings of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.checks.components import component_table, declared_table
from mtpcheck.checks.copies import check_tied, compare_beside, compare_copies
from mtpcheck.checks.declaration import check_count, compare_configs, compare_facts
from mtpcheck.checks.head import check_head
from mtpcheck.checks.structure import of_conversion, with_bits
from mtpcheck.checks.topology import check_ranks, explain
from mtpcheck.checks.values import compare_maps, compare_stored
from mtpcheck.diagnosis import diagnose
from mtpcheck.dialects import load_dialect
from mtpcheck.encoding import as_codes
from mtpcheck.facts import lookup
from mtpcheck.family import load_family
from mtpcheck.normalise import stored_rows
from mtpcheck.packing import WEIGHT
from mtpcheck.progress import Progress, Silent, bar
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import Report, of_group
from mtpcheck.rules import MISSING
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp


def compare_sides(
    report: Report,
    a: Side,
    b: Side,
    only_mtp: bool = False,
    show_progress: bool = False,
    bits: bool = True,
    blame_source: bool = True,
) -> None:
    """Add structure, presence, declaration and bits of ``b`` against ``a`` to a report.

    Without ``bits`` (only across layouts): all but the bits, which the caller has compared otherwise. Without
    ``blame_source`` faults of files and declaration that ``a`` has itself are warnings: no conversion made them.
    Of sides that are not to be read, what headers tell is compared, and values count as skipped.
    """
    add_structure(report, a, b, blame_source)
    readable = a.readable and b.readable
    with bar("comparing", a.checkpoint.nbytes, show_progress and readable) as progress:
        if a.checkpoint.layout == b.checkpoint.layout == "hf":
            found, compared, others = _by_name(a, b, only_mtp, progress)
        else:
            found, compared, others = _by_part(a, b, only_mtp, progress, bits and readable)
    found += check_tied(a.tensor_map, b.tensor_map) if readable else ()
    report.add("presence", diagnose(of_group(found, "presence"), a, b), presence(a, compared))
    add_declaration(report, a, b, blame_source)
    values = diagnose(add_topology(report, a, b, of_group(found, "values")), a, b)
    both = [ref for name, ref in compared.items() if name in others]
    if readable:
        nbytes = sum(ref.nbytes for ref in both)
        report.add("values", [*values, *check_head(a.tensor_map)], f"{nbytes:,} bytes compared bit for bit")
    elif values:
        report.add("values", values, "dtypes and shapes alone, from headers")
    else:
        report.skip("values", f"dtypes and shapes of {len(both):,} tensors agree; headers tell no more")
    report.components = component_table(a.tensor_map, b.tensor_map, found)


_Compared = tuple[list[Finding], Mapping[str, TensorRef], Mapping[str, TensorRef]]


def _by_name(a: Side, b: Side, only_mtp: bool, progress: Progress) -> _Compared:
    left, right = dict(a.checkpoint.tensors), dict(b.checkpoint.tensors)
    if only_mtp:  # by what the trunk claims, so that a tensor nobody knows is looked at
        trunk = _trunk_names(a)
        left = {name: ref for name, ref in left.items() if name not in trunk}
        right = {name: ref for name, ref in right.items() if name not in trunk}
    found = list(compare_stored(left, right, progress, a.readable and b.readable))
    known = {f.subject for f in found}  # a tensor that both lack is missing all the same
    missing = [f for f in a.tensor_map.findings if f.check == "presence.missing" and f.subject not in known]
    found += [replace(f, source=True) for f in missing if not only_mtp or f.subject not in _trunk_names(a)]
    return found, left, right


def _by_part(a: Side, b: Side, only_mtp: bool, progress: Progress, bits: bool) -> _Compared:
    left, right, found = maps_of(a, b, only_mtp)
    readable = a.readable and b.readable
    found += [*of_group(right.findings, "values"), *compare_copies(left, right, readable)]
    if b.checkpoint.layout != "hf":
        found += compare_beside(left, right)
    if common := left.encoded.keys() & right.encoded.keys():  # codes and scales say more than their products
        before, after = ({s: r for name in common for s, r in m.encoded[name].beside.items()} for m in (left, right))
        found += compare_stored(before, after, Silent(), readable)
        left, right = as_codes(left, common), as_codes(right, common)
    found += compare_maps(left, right, progress, bits, may_widen=b.checkpoint.layout != "hf")
    return found, left.parts, right.parts


def maps_of(a: Side, b: Side, only_mtp: bool) -> tuple[TensorMap, TensorMap, list[Finding]]:
    """Both maps and what they found missing or unclaimed; with ``only_mtp`` without what belongs to the trunk."""
    left, right = a.tensor_map, b.tensor_map
    own = [replace(f, source=True) for f in of_group(left.findings, "presence")]
    found = [*own, *of_group(right.findings, "presence")]
    if only_mtp:
        trunk = _trunk_names(a) | _trunk_names(b)
        return mtp_part(left), mtp_part(right), [f for f in found if f.subject not in trunk]
    return left, right, found


def add_structure(report: Report, a: Side, b: Side, blame_source: bool) -> None:
    findings = of_conversion(_structure(a), _structure(b), blame_source)
    report.add("structure", findings, f"{_stored(a.checkpoint)}, {_stored(b.checkpoint)}")
    found = of_group((*a.tensor_map.findings, *b.tensor_map.findings), "quantization")
    if found or any(side.tensor_map.encoded or side.tensor_map.packed for side in (a, b)):
        report.add("quantization", found, " → ".join(dict.fromkeys(_packed(side.tensor_map) for side in (a, b))))


def _structure(side: Side) -> list[Finding]:
    twice = side.checkpoint.hf.twice if side.checkpoint.hf and side.readable else ()
    return list(with_bits(of_group(side.checkpoint.findings, "structure"), twice))


def _packed(tensor_map: TensorMap) -> str:
    """How many weights of one side are packed, and whether they were decoded."""
    still = len({module.name for module in tensor_map.packed.values()})
    method = tensor_map.packing.method if tensor_map.packing else ""
    told = [f"{len(tensor_map.encoded):,} tensors decoded from FP8 blocks"] * bool(tensor_map.encoded)
    told += [f"{still:,} packed weights ({method})"] * bool(still)
    return " and ".join(told) or "no packed weights"


def add_topology(report: Report, a: Side, b: Side, values: list[Finding]) -> list[Finding]:
    """Judge rank files, if there are any. Findings of ``values`` that one mishap with ranks explains become one."""
    readable = a.readable and b.readable
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
        members = tuple(f.subject for f in bits)
        what = f"differ, all of them because of {cause.check}"
        one = failure("values.bits", f"{len(bits):,} tensors", what, members=members)
        values = [one, *(f for f in values if f.check != "values.bits")]
    found += [finding for checkpoint in sides for finding in check_ranks(checkpoint, readable)]
    replicas = sum(len(c.ranks.replicas) for c in sides if c.ranks is not None) if readable else 0
    ranks = sum(len(c.ranks.ranks.files) for c in sides if c.ranks is not None)
    report.add("topology", found, f"{ranks:,} ranks; {replicas:,} replicas compared bit for bit")
    return values


def add_declaration(report: Report, a: Side, b: Side, blame_source: bool) -> None:
    told = f"{declaration(a.checkpoint, a.tensor_map)} → {declaration(b.checkpoint, b.tensor_map)}"
    report.add("declaration", _declaration(a, b, blame_source), told)
    report.declared = declared_table(a.checkpoint, b.checkpoint, report.findings)


def presence(a: Side, compared: Mapping[str, TensorRef]) -> str:
    names = mtp_names(a.tensor_map)
    own = sum(name in names or is_mtp(name) for name in compared)
    what = "tensors" if compared.keys() <= a.checkpoint.tensors.keys() else "parts"
    return f"{len(compared):,} {what}, {own:,} of them in MTP layers"


def _declaration(a: Side, b: Side, blame_source: bool) -> list[Finding]:
    config = load_family(a.tensor_map.family).all_config
    before, after = (check_count(side.tensor_map, str(side.checkpoint.path)) for side in (a, b))
    counts = of_conversion(before, after, blame_source)
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
    said = [f"{key}={value}" for key in keys if (value := lookup(checkpoint.config, key)) is not MISSING]
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


def mtp_names(tensor_map: TensorMap) -> set[str]:
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
