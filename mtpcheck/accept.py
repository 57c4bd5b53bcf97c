"""How many of its drafts a model accepts, workload by workload, as a verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtpcheck.baseline import open_baseline
from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.checks.acceptance import add_acceptance, check_minimum
from mtpcheck.checks.declaration import check_count
from mtpcheck.comparison import declaration
from mtpcheck.convert import lent_form
from mtpcheck.draft.probe import Probing, read_workloads, run_all
from mtpcheck.draft.writing import Writing, write_all
from mtpcheck.errors import MtpcheckError
from mtpcheck.fetch import fetched, is_remote
from mtpcheck.hub import short_name
from mtpcheck.normalise import taken_for_granted
from mtpcheck.progress import bar
from mtpcheck.report.finding import Finding
from mtpcheck.report.report import Report, of_group
from mtpcheck.tensormap import TensorMap, read_tensor_map
from mtpcheck.verify import dialects_of, require_mtp, summary


def accept(
    source: str | Path,
    family: str | None = None,
    probing: Probing | None = None,
    minimum: float | None = None,
    baseline: str | Path | None = None,
    like: str | Path | None = None,
    iteration: int | None = None,
    show_progress: bool = False,
    writing: Writing | None = None,
    dialect: str | None = None,
) -> Report:
    """Run ``source`` and its MTP head over workloads, and judge whether the head is alive.

    ``minimum``: acceptance rate of depth 1 over all workloads that it must have. ``baseline``: a file that is written
    if there is none, and held against otherwise; what fails is not recorded. ``like`` lends a Megatron checkpoint the
    config keys and the tokenizer that it lacks. ``writing``: also let the model write with its drafts.
    ``dialect`` is the one that Megatron tensors are read in. Raises MtpcheckError where it cannot judge.
    """
    opened = open_checkpoint(source, iteration, dialect)
    if like is not None:
        opened = replace(opened, manifest=lent_form(opened, like, show_progress))
    tensor_map = read_tensor_map(opened, family)
    require_mtp(opened, tensor_map, allow_none=False)
    if writing is not None:
        writing.check(tensor_map.facts["mtp_stored"])
    if is_remote(opened):
        opened = fetched(opened, show_progress)
        tensor_map = read_tensor_map(opened, family)
    probing = probing or Probing()
    workloads = read_workloads(opened, tensor_map, probing.files)
    apart = [Path(source), *([Path(like)] if like is not None else [])]
    before = open_baseline(Path(baseline), tensor_map.family, workloads, apart) if baseline is not None else None
    report = Report("accept", [str(opened.path)], tensor_map.family, summary(opened, tensor_map))
    report.dialects = dialects_of(opened)
    _add_headers(report, opened, tensor_map)
    report.notes += taken_for_granted((opened, tensor_map.model))
    label = Path(source).resolve().name if Path(source).exists() else short_name(str(opened.path))
    columns = run_all([(label, opened, tensor_map)], workloads, probing, show_progress)
    found: list[Finding] = list(check_minimum(columns[0], minimum)) if minimum is not None else []
    found += before.check(columns[0]) if before is not None else []
    add_acceptance(report, columns, more=found)
    if writing is not None:
        try:
            with bar("writing", tensor_map.nbytes, show_progress) as progress:
                report.written = write_all(opened, tensor_map, workloads, writing, progress)
        except MtpcheckError as error:
            report.could_not("acceptance", f"writing with drafts: {error}")
    if before is not None:
        report.notes.append(f"{before.path}: held against")
        if before.before is None:
            if report.verdict == "holds":
                before.record(columns[0])
            told = "recorded" if report.verdict == "holds" else "not recorded, since this does not hold"
            report.notes[-1] = f"{before.path}: {told}"
    return report


def _add_headers(report: Report, opened: Checkpoint, tensor_map: TensorMap) -> None:
    """What headers alone tell of the checkpoint."""
    findings = [*tensor_map.findings, *check_count(tensor_map, str(opened.path))]
    told = {
        "structure": f"{len(opened.tensors):,} tensors in {opened.layout}",
        "presence": f"{len(tensor_map.parts):,} parts",
        "declaration": declaration(opened, tensor_map),
    }
    for group, detail in told.items():
        report.add(group, of_group(findings, group), detail)
    if scales := of_group(findings, "quantization"):
        report.add("quantization", scales, f"{len(tensor_map.encoded):,} tensors decoded")
