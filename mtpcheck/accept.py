"""How many of its drafts a model accepts, workload by workload, as a verdict."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.checks.acceptance import add_acceptance, check_minimum
from mtpcheck.convert import lent_form
from mtpcheck.draft.acceptance import Rate
from mtpcheck.draft.probe import Column, Probing, read_workloads, run_all
from mtpcheck.draft.writing import Writing, write_all
from mtpcheck.errors import FormatError, UsageError
from mtpcheck.progress import bar
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import Report
from mtpcheck.tensormap import read_tensor_map
from mtpcheck.verify import declaration, require_mtp, summary


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
) -> Report:
    """Run ``source`` and its MTP head over workloads, and judge whether the head is alive.

    ``minimum``: acceptance rate of depth 1 over all workloads that it must have. ``baseline``: a file that is written
    if there is none, and held against otherwise. ``like`` lends a Megatron checkpoint the config keys and the tokenizer
    that it lacks. ``writing``: also let the model write with its drafts. Raises MtpcheckError where it cannot judge.
    """
    opened = open_checkpoint(source, iteration)
    if like is not None:
        opened = replace(opened, manifest=lent_form(opened, Path(like)))
    tensor_map = read_tensor_map(opened, family)
    require_mtp(opened, tensor_map, allow_none=False)
    report = Report("accept", [str(source)], tensor_map.family, summary(opened, tensor_map))
    report.add("declaration", [], declaration(opened, tensor_map))
    probing = probing or Probing()
    columns = run_all([(Path(source).name, opened, tensor_map)], probing, show_progress)
    add_acceptance(report, columns)
    found: list[Finding] = []
    if minimum is not None:
        found += check_minimum(columns[0], minimum)
    if baseline is not None:
        fresh = not Path(baseline).exists()
        found += _against(Path(baseline), columns[0], tensor_map.family, sound=report.verdict == "holds" and not found)
        report.notes.append(f"{baseline}: {'recorded' if fresh else 'held against'}")
    report.include(found)
    if writing is not None:
        with bar("writing", tensor_map.nbytes, show_progress) as progress:
            workloads = read_workloads(opened, tensor_map, probing.files)
            report.written = write_all(opened, tensor_map, workloads, writing, progress)
    return report


# ---- baselines

_SCHEMA = 1


def _against(path: Path, column: Column, family: str, sound: bool) -> list[Finding]:
    """Record a baseline where there is none, else hold against it. What is not ``sound`` is never recorded."""
    now = _recorded(column, family)
    if not path.exists():
        if not sound:
            raise UsageError(f"{path}: not recorded, since this head does not draft well enough to be a baseline")
        _write_whole(path, json.dumps(now, indent=1) + "\n")
        return []
    before = _read(path)
    if before["family"] != family:
        raise UsageError(f"{path}: is of {before['family']}, and this is {family}; name another file")
    found = []
    for name, own in now["workloads"].items():
        old = before["workloads"].get(name)
        if old is None or old["ids"] != own["ids"]:
            raise UsageError(f"{path}: was recorded on another {name}; remove it and record it again")
        rate, limit = Rate(own["accepted"], own["drafted"]), old["accepted"] / old["drafted"]
        if rate.bounds[1] < limit:
            found.append(failure("acceptance.baseline", name, "is surely below what was recorded",
                                 expected=f"{limit:.4f}", got=f"{rate.rate:.4f}", where=str(path)))  # fmt: skip
    return found


def _recorded(column: Column, family: str) -> dict[str, Any]:
    start, workloads = 0, {}
    for name, own in column.workloads.items():
        ids = hashlib.sha256()
        for passage in column.passages[start : start + own.passages]:
            ids.update(len(passage.ids).to_bytes(8, "little") + passage.ids.tobytes())
        start += own.passages
        first = own.depths[0]
        workloads[name] = {"ids": ids.hexdigest(), "accepted": first.accepted, "drafted": first.drafted}
    return {"schema_version": _SCHEMA, "family": family, "workloads": workloads}


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != _SCHEMA:
            raise FormatError(f"{path}: schema {content['schema_version']!r}, this mtpcheck knows {_SCHEMA}")
        for own in content["workloads"].values():
            if not (isinstance(own["ids"], str) and 0 <= own["accepted"] <= own["drafted"] and own["drafted"]):
                raise ValueError(own)
        return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: no baseline that mtpcheck wrote ({type(error).__name__}: {error})") from None


def _write_whole(path: Path, text: str) -> None:
    """Write a new file, whole or not at all."""
    if not path.parent.is_dir():
        raise UsageError(f"{path}: lies in no folder that exists")
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
