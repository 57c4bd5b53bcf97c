"""What all renderers say alike: the verdict, which finding comes first, its details, and how long lists end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mtpcheck.report.finding import Finding, Severity, printable
from mtpcheck.report.report import Cases, Check, Report, cause_table, check_table

LONGEST = 1000
"""Characters of one line, where a format has a limit. Names are untrusted and may be as long as a file."""


def counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def verdict(report: Report) -> tuple[str, str]:
    """The verdict in one word or three, and what to say after it, punctuation included."""
    own = len(report.failures) - sum(1 for f in report.source_faults if f.severity is Severity.FAILURE)
    faults = len(report.source_faults)
    source = f"the {_source(report)} has {counted(faults, 'fault')} of its own" if faults else ""
    skipped = f"not judged: {', '.join(report.skipped)}" if report.skipped else ""
    if report.verdict == "holds":
        warnings = sum(1 for f in report.findings if f.severity is Severity.WARNING and not f.source)
        told = f", {counted(warnings, 'warning')}" if warnings else ""
        told += f", {counted(report.accepted, 'known difference')} accepted" if report.accepted else ""
        return "HOLDS", told + "".join(f"; {text}" for text in (source, skipped) if text)
    if report.verdict == "fails":
        told = counted(own, "failure") if own else ""
    else:
        told = ", ".join(dict.fromkeys(check.group for check in unjudged(report)))
    word = report.verdict.upper()
    return word, ": " + "; ".join(text for text in (told, source, skipped) if text)


def verdict_line(told: Report | Cases) -> str:
    return "".join(verdict_of_cases(told) if isinstance(told, Cases) else verdict(told))


def verdict_of_cases(cases: Cases) -> tuple[str, str]:
    """The verdict on several cases, and how many of them it is about."""
    word = cases.verdict
    about = sum(1 for report in cases.reports if report.verdict == word)
    warnings = sum(1 for report in cases.reports for f in report.findings if f.severity is Severity.WARNING)
    more = f", {counted(warnings, 'warning')}" if warnings and word == "holds" else ""
    return word.upper(), f": {about:,} of {counted(len(cases.reports), 'case')}{more}"


_BRIEF, _LINE = 5, 220


def in_brief(report: Report) -> str:
    """The verdict, why something was not judged, and the first findings, as an assertion shows them."""
    lines = [f"mtpcheck {report.command} {' '.join(report.subjects)}: {verdict_line(report)}"]
    lines += [f"{check.group}: could not judge: {check.detail}" for check in unjudged(report)]
    shown = [f for f in ordered(report.findings) if f.severity is not Severity.NOTE]
    for finding in shown[:_BRIEF]:
        lines.append(f"{finding.severity.upper()} {finding.check} {finding.subject}: {finding.message}")
        lines += [f"    {name}: {text}" for name, text in details(finding).items()]
    lines += [f"and {counted(len(shown) - _BRIEF, 'more finding')}"] * (len(shown) > _BRIEF)
    return "\n".join(clipped(line) for line in lines)


def in_a_line(report: Report) -> str:
    """The verdict and the finding to read first, in a line that pytest does not cut."""
    first = lead(report)
    why = [f"{first.check} {first.subject}: {first.message}"] if first else [c.detail for c in unjudged(report)[:1]]
    return clipped(f"<{': '.join([verdict_line(report), *why])}>", _LINE)


def _source(report: Report) -> str:
    return {"verify": "reference", "accept": "checkpoint"}.get(report.command, "source")


def roles(command: str, subjects: Sequence[str]) -> list[tuple[str, str]]:
    """What each subject of a command is, and the subject."""
    names = {"verify": ("reference", "candidate"), "graft": ("checkpoint", "donor")}.get(command, ("checkpoint",))
    return list(zip(names, subjects, strict=False))


def unjudged(report: Report) -> list[Check]:
    return [check for check in report.checks if check.status == "unjudged"]


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first; of equally bad ones those that conversions made, then those that explain most, then in the order
    of ``configs/checks.yaml``, which has what is stored before what comes of it."""
    grades, groups = list(Severity), list(check_table())

    def place(f: Finding) -> tuple[Any, ...]:
        group = groups.index(f.check.split(".")[0])
        return grades.index(f.severity), f.source, not f.cause_id, -len(f.members), group, f.check, f.subject

    return sorted(findings, key=place)


def lead(report: Report) -> Finding | None:
    """The finding to read first, if anything failed."""
    return next(iter(ordered(report.failures)), None)


def cause(finding: Finding) -> str:
    """What happened: in the words of the check, or those of the table of causes."""
    return finding.cause or _of_table(finding, "help")


def todo(finding: Finding) -> str:
    return finding.todo or _of_table(finding, "todo")


def _of_table(finding: Finding, key: str) -> str:
    entry: dict[str, Any] = cause_table().get(finding.cause_id, {})
    return str(entry.get(key, ""))


def details(finding: Finding) -> dict[str, str]:
    """What is known beside the message, by name."""
    told = {
        "expected": finding.expected,
        "got": finding.got,
        "cause": cause(finding),
        "to do": todo(finding),
        "in": finding.where,
    }
    return {name: text for name, text in told.items() if text}


def told_apart(report: Report) -> tuple[list[Finding], list[Finding]]:
    """Findings in order: those of the conversion or candidate, and those of the source itself."""
    findings = ordered(report.findings)
    return [f for f in findings if not f.source], [f for f in findings if f.source]


def source_heading(report: Report) -> str:
    return f"Faults of the {_source(report)} itself"


def listed(items: Sequence[str], most: int) -> list[str]:
    """At most ``most`` lines, the last of which may say how many more there are."""
    return list(items) if len(items) <= most else [*items[: most - 1], f"and {len(items) - most + 1:,} more"]


def clipped(text: str, most: int = LONGEST) -> str:
    """``text`` on one line without control characters, and not longer than ``most``."""
    told = printable(text[:most])
    return told if len(text) <= most and len(told) <= most else told[: most - 1] + "…"


def fitting(blocks: Iterable[str], room: int) -> tuple[list[str], int]:
    """As many of ``blocks`` as ``room`` bytes hold, and how many do not fit."""
    shown: list[str] = []
    left = 0
    for block in blocks:
        room -= len(block.encode(errors="backslashreplace")) + 1
        if left or room < 0:
            left += 1
        else:
            shown.append(block)
    return shown, left
