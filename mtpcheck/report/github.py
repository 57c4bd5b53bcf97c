"""GitHub Actions: annotations as workflow commands, the step summary, and outputs of the step.

GitHub shows ten errors and ten warnings of a step, so the first of each is a summary. It takes them from what the step
prints; summary and outputs are appended to the files that two environment variables name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtpcheck.report.finding import Finding, Severity
from mtpcheck.report.markdown import LIMIT, as_markdown, cases_markdown, error_markdown
from mtpcheck.report.report import Cases, Report, Unjudged
from mtpcheck.report.words import clipped, counted, details, ordered, unjudged, verdict_line

MOST = 10
"""Annotations of one kind that GitHub shows of a step."""


def as_github(report: Report) -> str:
    """Workflow commands, one a line: the verdict, then the worst failures and warnings."""
    title = f"mtpcheck {report.command}"
    findings = ordered(report.findings)
    failures, warnings = ([f for f in findings if f.severity is s] for s in (Severity.FAILURE, Severity.WARNING))
    why = "".join(f"\n{check.group}: {check.detail}" for check in unjudged(report))
    kind = "notice" if report.verdict == "holds" else "error"
    lines = [_command(kind, title, f"{' '.join(report.subjects)}\n{verdict_line(report)}{why}")]
    lines += [_annotation("error", finding) for finding in failures[: MOST - 1]]
    if len(warnings) > MOST:
        lines += [_command("warning", title, counted(len(warnings), "warning"))]
        warnings = warnings[: MOST - 1]
    lines += [_annotation("warning", finding) for finding in warnings]
    return "\n".join(lines) + "\n"


def cases_github(cases: Cases) -> str:
    """The verdict on all cases, then what each that fails has to tell."""
    title, kind = f"mtpcheck {cases.command}", "notice" if cases.verdict == "holds" else "error"
    head = _command(kind, title, f"{' '.join(cases.subjects)}\n{verdict_line(cases)}")
    told = [as_github(report) for report in cases.reports if report.verdict != "holds" or report.findings]
    return "\n".join([head, *told]).rstrip("\n") + "\n"


def error_github(error: Unjudged) -> str:
    title = f"mtpcheck {error.command}: could not judge"
    return _command("error", title, f"{' '.join(error.subjects)}\n{error.sentence}") + "\n"


def append(told: Report | Cases | Unjudged, environment: Mapping[str, str]) -> None:
    """Append summary and outputs where GitHub wants them; nowhere if the variables are not set."""
    if path := environment.get("GITHUB_STEP_SUMMARY"):
        _append(path, _summary(told, LIMIT - (Path(path).stat().st_size if Path(path).exists() else 0)))
    if path := environment.get("GITHUB_OUTPUT"):
        _append(path, "".join(f"{name}={value}\n" for name, value in _outputs(told).items()))


def _summary(told: Report | Cases | Unjudged, room: int) -> str:
    if isinstance(told, Unjudged):
        return error_markdown(told)
    if room <= 0:
        return ""
    return cases_markdown(told, room) if isinstance(told, Cases) else as_markdown(told, room)


def _outputs(told: Report | Cases | Unjudged) -> dict[str, str]:
    """``verdict``, and ``acceptance``: the rate of depth 1 of the first checkpoint, the lowest of several cases, or
    nothing."""
    if isinstance(told, Unjudged):
        return {"verdict": "could not judge", "acceptance": ""}
    reports = told.reports if isinstance(told, Cases) else [told]
    rates = [column.overall.depths[0].rate for report in reports for column in report.acceptance[:1]]
    return {"verdict": told.verdict, "acceptance": f"{min(rates):.4f}" if rates else ""}


def _append(path: str, text: str) -> None:
    with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _annotation(kind: str, finding: Finding) -> str:
    lines = [finding.message, *(f"{name}: {text}" for name, text in details(finding).items())]
    if finding.members:
        lines.append(f"{len(finding.members):,} in all, first {finding.members[0]}")
    return _command(kind, f"{finding.check} {finding.subject}", "\n".join(lines))


def _command(kind: str, title: str, message: str) -> str:
    """A workflow command; what ends a property or a line is written as GitHub wants it."""
    lines: Sequence[str] = [clipped(line) for line in message.split("\n")]
    title = clipped(title, 200)
    properties = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={properties}::{_escaped(chr(10).join(lines))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
