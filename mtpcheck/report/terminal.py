"""A report as a person reads it: checks as lines, findings below, the verdict last. Fits 80 columns."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from mtpcheck.report import drafts
from mtpcheck.report.finding import Finding, Severity, printable
from mtpcheck.report.report import Cases, Check, Report, Status, Verdict
from mtpcheck.report.words import details, listed, source_heading, told_apart, verdict, verdict_of_cases

_MARKS = {
    "passed": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "skipped": ("–", "yellow"),
    "unjudged": ("?", "bold yellow"),
}
_LEADS = {"skipped": "not run: ", "unjudged": "could not judge: "}
_STYLES = {Severity.FAILURE: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_WORDS = {"holds": "bold green", "fails": "bold red", "could not judge": "bold yellow"}
_STATUSES: Mapping[Verdict, Status] = {"holds": "passed", "fails": "failed", "could not judge": "unjudged"}
_SHOWN = 20
_MEMBERS = 5


def render(report: Report, console: Console, verbose: bool = False) -> None:
    """Print a report. Notes, and findings beyond the first twenty, only if ``verbose``."""
    console.print(Text(printable(f"mtpcheck {report.command} {' '.join(report.subjects)}"), style="bold"))
    console.print(Text(report.summary))
    console.print()
    for check in report.checks:
        _render_check(check, console)
    for line in report.notes:
        console.print(Text(printable(f"    {line}")))
    if report.acceptance:
        console.print()
        for line in drafts.lines(report.acceptance):
            console.print(Text(printable(f"    {line}")))
    if report.written:
        console.print()
        for line in drafts.written(report.written):
            console.print(Text(printable(f"    {line}")))
    render_findings(report, console, verbose)
    console.print()
    word, rest = verdict(report)
    console.print(Text.assemble((word, _WORDS[report.verdict]), rest))


def render_cases(cases: Cases, console: Console, verbose: bool = False) -> None:
    """Print one line for each case, then what there is to say of those that fail; of all, if ``verbose``."""
    console.print(Text(printable(f"mtpcheck {cases.command} {' '.join(cases.subjects)}"), style="bold"))
    console.print()
    names = [printable(" ".join(report.subjects)) for report in cases.reports]
    width = max(map(len, names))
    for name, report in zip(names, cases.reports, strict=True):
        mark, style = _MARKS[_STATUSES[report.verdict]]
        console.print(Text.assemble("  ", (mark, style), f" {name:<{width}}  ", "".join(verdict(report))))
    for name, report in zip(names, cases.reports, strict=True):
        if verbose or report.verdict != "holds" or any(f.severity is Severity.WARNING for f in report.findings):
            console.print()
            console.print(Text(f"{name}: {printable(report.summary)}", style="bold"))
            _render_case(report, console, verbose)
    console.print()
    word, rest = verdict_of_cases(cases)
    console.print(Text.assemble((word, _WORDS[cases.verdict]), rest))


def _render_case(report: Report, console: Console, verbose: bool) -> None:
    for check in report.checks:
        if verbose or check.status in ("failed", "unjudged"):
            _render_check(check, console)
    for line in report.notes if verbose or report.verdict != "holds" else ():
        console.print(Text(printable(f"    {line}")))
    for line in drafts.lines(report.acceptance) if verbose and report.acceptance else ():
        console.print(Text(printable(f"    {line}")))
    render_findings(report, console, verbose)


def _render_check(check: Check, console: Console) -> None:
    mark, style = _MARKS[check.status]
    detail = printable(_LEADS.get(check.status, "") + check.detail)
    console.print(Text.assemble("  ", (mark, style), f" {check.group:<12} {detail}"))


def render_findings(report: Report, console: Console, verbose: bool) -> None:
    """Print the findings, those of the source itself apart. Notes only if ``verbose``."""
    for findings, heading in zip(told_apart(report), ("", source_heading(report)), strict=True):
        _render_all([f for f in findings if verbose or f.severity is not Severity.NOTE], heading, console, verbose)


def _render_all(findings: list[Finding], heading: str, console: Console, verbose: bool) -> None:
    if findings and heading:
        console.print(f"\n  {heading}:")
    for finding in findings if verbose else findings[:_SHOWN]:
        console.print()
        render_finding(finding, console, verbose)
    if not verbose and len(findings) > _SHOWN:
        console.print(f"\n  … and {len(findings) - _SHOWN:,} more (-v shows all)")


def render_finding(finding: Finding, console: Console, verbose: bool = False) -> None:
    """Print one finding: what, expected and got, cause, what to do, where, and the first of its members."""
    head = Text.assemble(
        "  ",
        (finding.severity.upper(), _STYLES[finding.severity]),
        f" {finding.check}  ",
        (printable(finding.subject), "bold"),
    )
    console.print(head)
    told = details(finding)
    both = [f"{name} {told.pop(name)}" for name in ("expected", "got") if name in told]
    lines = [finding.message, *(["   ".join(both)] if both else [])]
    lines += [f"in {text}" if name == "in" else f"{name}: {text}" for name, text in told.items()]
    for line in lines:
        console.print(Text("    " + printable(line)))
    members = finding.members if verbose else listed(finding.members, _MEMBERS)
    if members:
        console.print(f"    {len(finding.members):,} in all:")
    for member in members:
        console.print(Text("      - " + printable(member)))
