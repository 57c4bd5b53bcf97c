"""A report as a person reads it: checks as lines, findings below, the verdict last. Fits 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mtpcheck.report import drafts
from mtpcheck.report.finding import Finding, Severity, printable
from mtpcheck.report.report import Report

_MARKS = {
    "passed": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "skipped": ("–", "yellow"),
    "unjudged": ("?", "bold yellow"),
}
_LEADS = {"skipped": "not run: ", "unjudged": "could not judge: "}
_STYLES = {Severity.FAILURE: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_SHOWN = 20


def render(report: Report, console: Console, verbose: bool = False) -> None:
    """Print a report. Notes, and findings beyond the first twenty, only if ``verbose``."""
    console.print(Text(printable(f"mtpcheck {report.command} {' '.join(report.subjects)}"), style="bold"))
    console.print(Text(report.summary))
    console.print()
    for check in report.checks:
        mark, style = _MARKS[check.status]
        detail = _LEADS.get(check.status, "") + check.detail
        console.print(Text.assemble("  ", (mark, style), f" {check.group:<12} {detail}"))
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
    shown = [f for f in report.findings if verbose or f.severity is not Severity.NOTE]
    for finding in shown if verbose else shown[:_SHOWN]:
        console.print()
        render_finding(finding, console)
    if not verbose and len(shown) > _SHOWN:
        console.print(f"\n  … and {len(shown) - _SHOWN} more (-v shows all)")
    console.print()
    console.print(_verdict(report))


def render_finding(finding: Finding, console: Console) -> None:
    """Print one finding: what, expected and got, cause, what to do, where."""
    head = Text.assemble(
        "  ",
        (finding.severity.upper(), _STYLES[finding.severity]),
        f" {finding.check}  ",
        (printable(finding.subject), "bold"),
    )
    console.print(head)
    lines = [finding.message]
    if finding.expected or finding.got:
        both = [("expected", finding.expected), ("got", finding.got)]
        lines.append("   ".join(f"{name} {value}" for name, value in both if value))
    lines += [f"cause: {finding.cause}"] * bool(finding.cause)
    lines += [f"to do: {finding.todo}"] * bool(finding.todo)
    lines += [f"in {finding.where}"] * bool(finding.where)
    for line in lines:
        console.print(Text("    " + printable(line)))


def _verdict(report: Report) -> Text:
    skipped = f"; not judged: {', '.join(report.skipped)}" if report.skipped else ""
    if report.verdict == "holds":
        warnings = sum(1 for f in report.findings if f.severity is Severity.WARNING)
        noted = f", {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
        return Text.assemble(("HOLDS", "bold green"), noted, skipped)
    if report.verdict == "could not judge":
        why = ", ".join(dict.fromkeys(check.group for check in report.checks if check.status == "unjudged"))
        return Text.assemble(("COULD NOT JUDGE", "bold yellow"), f": {why}", skipped)
    count = len(report.failures)
    return Text.assemble(("FAILS", "bold red"), f": {count} failure{'s' * (count != 1)}", skipped)


def verdict_line(report: Report) -> str:
    """The one line of ``--quiet``."""
    return _verdict(report).plain
