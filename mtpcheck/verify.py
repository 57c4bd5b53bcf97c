"""Compare any two checkpoints in any two layouts, whoever made them."""

from __future__ import annotations

from pathlib import Path

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.checks.declaration import check_count, compare_configs, compare_facts
from mtpcheck.checks.values import compare_maps, compare_stored
from mtpcheck.dialect import load_dialect
from mtpcheck.errors import UnsupportedError
from mtpcheck.family import load_family
from mtpcheck.progress import bar
from mtpcheck.report.finding import Finding
from mtpcheck.report.report import Report, of_group
from mtpcheck.tensormap import TensorMap, is_mtp, read_like, read_tensor_map


def verify(
    reference: str | Path,
    candidate: str | Path,
    family: str | None = None,
    only_mtp: bool = False,
    allow_no_mtp: bool = False,
    show_progress: bool = False,
) -> Report:
    """Hold ``candidate`` against ``reference``.

    Two HF checkpoints are compared under their stored names, all else through the tensor map. Raises
    MtpcheckError where it cannot judge: unreadable input, unknown family, a reference without MTP layers.
    """
    a, b = open_checkpoint(reference), open_checkpoint(candidate)
    a_map = read_tensor_map(a, family)
    b_map = read_like(b, a_map)
    require_mtp(a, a_map, allow_no_mtp)
    report = Report("verify", [str(reference), str(candidate)], a_map.family, summary(a, a_map, b.layout))
    compare_checkpoints(report, a, a_map, b, b_map, only_mtp, show_progress)
    report.skip("acceptance", "this version has no draft probe")
    return report


def summary(checkpoint: Checkpoint, tensor_map: TensorMap, *via: str) -> str:
    """One line: family, layouts, declared MTP layers."""
    stored = tensor_map.facts["mtp_stored"]
    route = " → ".join([checkpoint.layout, *via])
    return f"{tensor_map.family} · {route} · {stored} MTP layer{'s' * (stored != 1)}"


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


def compare_checkpoints(
    report: Report,
    a: Checkpoint,
    a_map: TensorMap,
    b: Checkpoint,
    b_map: TensorMap,
    only_mtp: bool = False,
    show_progress: bool = False,
) -> None:
    """Add structure, presence, declaration and values of ``b`` against ``a`` to a report."""
    structure = of_group((*a.findings, *b.findings), "structure")
    report.add("structure", structure, f"{_stored(a)}; {_stored(b)}")
    found: list[Finding]
    mtp = _mtp_names(a_map)
    with bar("comparing", a.nbytes, show_progress) as progress:
        if a.layout == b.layout == "hf":
            left, right = dict(a.tensors), dict(b.tensors)
            if only_mtp:
                left = {name: ref for name, ref in left.items() if name in mtp}
                right = {name: ref for name, ref in right.items() if name in _mtp_names(b_map)}
            found = list(compare_stored(left, right, progress))
            compared, own = left, sum(name in mtp for name in left)
        else:
            presence = [*of_group(a_map.findings, "presence"), *of_group(b_map.findings, "presence")]
            if only_mtp:
                a_map, b_map = mtp_part(a_map), mtp_part(b_map)
            found = [*presence, *of_group(b_map.findings, "values"), *compare_maps(a_map, b_map, progress)]
            compared, own = dict(a_map.parts), sum(is_mtp(part) for part in a_map.parts)
    nbytes = sum(ref.nbytes for ref in compared.values())
    report.add("presence", of_group(found, "presence"), f"{len(compared):,} tensors, {own:,} of them in MTP layers")
    declared = f"{declaration(a, a_map)} → {declaration(b, b_map)}"
    report.add("declaration", _declaration(a, a_map, b, b_map), declared)
    report.add("values", of_group(found, "values"), f"{nbytes:,} bytes compared bit for bit")


def _declaration(a: Checkpoint, a_map: TensorMap, b: Checkpoint, b_map: TensorMap) -> list[Finding]:
    config = load_family(a_map.family).all_config
    counts = [f for f in check_count(b_map, str(b.path))]
    if a.config is not None and b.config is not None:
        return [*counts, *compare_configs(a.config, b.config, config)]
    counts += of_group(b_map.findings, "declaration")
    return [*counts, *compare_facts(a_map, b_map, config, load_dialect().args)]


def declaration(checkpoint: Checkpoint, tensor_map: TensorMap) -> str:
    """How a checkpoint declares its MTP layers, as ``key=count``."""
    if checkpoint.config is None:
        return f"mtp_num_layers={(checkpoint.args or {}).get('mtp_num_layers')}"
    keys = load_family(tensor_map.family).declared_by
    said = [f"{key}={checkpoint.config[key]}" for key in keys if key in checkpoint.config]
    return ", ".join(said) or "nothing"


def _stored(checkpoint: Checkpoint) -> str:
    passed = "".join(f", {count:,} {kind} passed over" for kind, (count, _) in checkpoint.passed_over.items())
    return f"{len(checkpoint.tensors):,} tensors in {checkpoint.layout}{passed}"


def mtp_part(tensor_map: TensorMap) -> TensorMap:
    """The same map with MTP layers alone."""
    parts = {part: ref for part, ref in tensor_map.parts.items() if is_mtp(part)}
    return TensorMap(tensor_map.model, parts, {}, tensor_map.findings, tensor_map.names)


def _mtp_names(tensor_map: TensorMap) -> set[str]:
    """HF names of all tensors in MTP layers."""
    return {row.name for row in tensor_map.model.rows if is_mtp(row.parts[0])}
