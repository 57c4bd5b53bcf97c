"""Compare any two checkpoints in any two layouts, whoever made them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mtpcheck.checkpoint import Checkpoint, Layout, open_checkpoint
from mtpcheck.checks.acceptance import judge_acceptance
from mtpcheck.checks.changed import compare_changed
from mtpcheck.checks.changed import describe as describe_components
from mtpcheck.checks.checksums import add_checksums, require_checksums
from mtpcheck.comparison import add_declaration, add_structure, add_topology, compare_sides, maps_of, presence
from mtpcheck.diagnosis import diagnose
from mtpcheck.dialects import CORE
from mtpcheck.draft.probe import Column, Probing, read_workloads, run_all
from mtpcheck.errors import UnsupportedError, UsageError, require_one_of
from mtpcheck.fetch import fetched, is_remote
from mtpcheck.normalise import is_quantized, taken_for_granted
from mtpcheck.progress import bar
from mtpcheck.report.finding import Severity, failure
from mtpcheck.report.report import Report, of_group
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorMap, read_like, read_tensor_map

Values = Literal["exact", "changed", "headers", "sha256"]


def verify(
    reference: str | Path,
    candidate: str | Path,
    family: str | None = None,
    values: Values | None = None,
    only_mtp: bool = False,
    allow_no_mtp: bool = False,
    show_progress: bool = False,
    iteration: int | None = None,
    probing: Probing | None = None,
    dialect: str | None = None,
) -> Report:
    """Hold ``candidate`` against ``reference``.

    Two HF checkpoints are compared under their stored names, all else through the tensor map. ``values``: "exact", bit
    for bit; "changed" (the candidate was trained on), where everything but the bits must hold, and the report tells
    what moved; "headers", which reads no weights; "sha256", which goes by headers and the Hub's checksums of files. By
    default it is exact, and headers where a side is a repository on the Hub, of which the first two fetch all weights.
    ``iteration`` chooses one of every side that is a Megatron root, ``dialect`` the one that
    Megatron tensors of either side are read in. With ``probing`` both are run as well.
    Raises MtpcheckError where it cannot judge: unreadable input, unknown family, a reference without MTP layers.
    """
    if values is not None:
        require_one_of("values", values, Values)
    a, b = (open_checkpoint(path, iteration, dialect) for path in (reference, candidate))
    values = values or ("headers" if is_remote(a) or is_remote(b) else "exact")
    by_headers = values in ("headers", "sha256")
    if by_headers and probing is not None:
        raise UsageError("a model that is to draft has to be read: --values exact fetches what is on the Hub")
    if values == "sha256":
        require_checksums(a, b, only_mtp)
    a_map = read_tensor_map(a, family)
    require_mtp(a, a_map, allow_no_mtp)
    if not by_headers:
        a, b = fetched(a, show_progress), fetched(b, show_progress)
        a_map = read_tensor_map(a, family)
    report = Report("verify", [str(a.path), str(b.path)], a_map.family, summary(a, a_map, layout_of(b)))
    report.dialects = dialects_of(a, b)
    sides = Side(a, a_map, not by_headers), Side(b, read_like(b, a_map), not by_headers)
    _require_values(sides, values)
    if values == "changed":
        _compare_trained(report, *sides, only_mtp, show_progress)
    else:
        compare_sides(report, *sides, only_mtp, show_progress, blame_source=False)
    if values == "sha256":
        add_checksums(report, *sides, show_progress)
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
    """The layout, with the topology of rank files, and the dialect if it is not megatron-core's."""
    ranks = checkpoint.ranks
    beside = str(ranks.ranks.topology) if ranks else "Megatron-FSDP" if checkpoint.fsdp else ""
    return in_words(checkpoint.layout, beside, checkpoint.dialect)


def in_words(layout: Layout, beside: str, dialect: str | None) -> str:
    """A layout, what there is to say of it, and its dialect if that is not megatron-core's."""
    told = ", ".join(filter(None, (beside, dialect if layout != "hf" and dialect != CORE else "")))
    return f"{layout} ({told})" if told else layout


def dialects_of(*checkpoints: Checkpoint) -> list[str]:
    """Dialects that the Megatron ones among some checkpoints are read in, each once."""
    return list(dict.fromkeys(own.dialect for own in checkpoints if own.layout != "hf"))


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
    if values != "changed" and all(side.checkpoint.layout == "hf" for side in sides):
        return
    for side in sides if values in ("exact", "changed") else ():
        damaged = of_group(side.tensor_map.findings, "quantization")
        if side.tensor_map.packed and not any(f.severity is Severity.FAILURE for f in damaged):
            raise UnsupportedError(
                f"{side.checkpoint.path}: {is_quantized(side.checkpoint, side.tensor_map)}; packed weights are "
                "compared code by code, between two HF checkpoints and without --values changed"
            )


def _compare_trained(report: Report, a: Side, b: Side, only_mtp: bool, show_progress: bool) -> None:
    """Everything but the bits must hold; what moved is told component by component."""
    add_structure(report, a, b, blame_source=False)
    left, right, lost = maps_of(a, b, only_mtp)
    if b.checkpoint.layout == "hf":
        gone = [part for part in left.copies if part in left.parts and part not in right.parts]
        lost += [failure("presence.copy", left.names[part], "is gone") for part in gone]
    with bar("comparing", left.nbytes, show_progress) as progress:
        found, components = compare_changed(left, right, progress)
    lost = diagnose([*lost, *of_group(found, "presence")], a, b)
    report.add("presence", lost, presence(a, left.parts))
    add_declaration(report, a, b, blame_source=False)
    add_topology(report, a, b, [])
    moved = sum(len(component.moved) for component in components.values())
    report.add("values", of_group(found, "values"), f"dtypes and shapes hold; {moved:,} tensors moved")
    granted = taken_for_granted((a.checkpoint, a.tensor_map.model), (b.checkpoint, a.tensor_map.model))
    report.notes = [*granted, *describe_components(components)]
    if only_mtp:
        report.notes.append("the trunk was not looked at, so whether a head is stale was not judged")
