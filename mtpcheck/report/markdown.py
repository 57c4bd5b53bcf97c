"""Markdown as GitHub and GitLab render it: for step summaries, comments and pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from mtpcheck.report import drafts
from mtpcheck.report.finding import Finding, Severity
from mtpcheck.report.report import Cases, Component, Declared, Report, Unjudged
from mtpcheck.report.words import (
    clipped,
    counted,
    details,
    fitting,
    lead,
    listed,
    source_heading,
    told_apart,
    verdict,
    verdict_line,
    verdict_of_cases,
)

LIMIT = 900_000
"""Bytes. GitHub drops a step summary of more than 1 MiB altogether."""
_ROWS = 100
_MEMBERS = 20
_MARKS = {"passed": "✓ passed", "failed": "✗ **failed**", "skipped": "– not run", "unjudged": "? **could not judge**"}


def as_markdown(report: Report, limit: int = LIMIT) -> str:
    """A report of at most ``limit`` bytes: all that matters at a glance, then findings until it is full."""
    parts = ["\n".join(lines) + "\n" for lines in _sections(report) if lines]
    room = limit - sum(len(part.encode()) for part in parts) - 200
    blocks = (block for told, heading in zip(told_apart(report), ("Findings", source_heading(report)), strict=True)
              for block in _blocks(told, heading))  # fmt: skip
    shown, left = fitting(blocks, room)
    more = [f"and {left:,} more findings, which the JSON report has.\n"] if left else []
    return "\n".join([*parts, *shown, *more])


def cases_markdown(cases: Cases, limit: int = LIMIT) -> str:
    """All verdicts in a table, then every case that does not simply hold, in as many bytes as are left for each."""
    word, rest = verdict_of_cases(cases)
    rows = [
        [code(" ".join(report.subjects)), _text(verdict_line(report)), _text(report.summary)]
        for report in cases.reports
    ]
    head = [f"## mtpcheck {cases.command}: {word}{_text(rest)}", "", " ".join(map(code, cases.subjects)),
            *_table(["case", "verdict", ""], rows), ""]  # fmt: skip
    told = [report for report in cases.reports if report.verdict != "holds" or report.findings or report.acceptance]
    first = "\n".join(head)
    room = (limit - len(first.encode())) // max(1, len(told))
    return "\n".join([first, *(as_markdown(report, room) for report in told)])


def error_markdown(error: Unjudged) -> str:
    head = f"## {_text(f'mtpcheck {error.command}')}: COULD NOT JUDGE"
    return "\n\n".join([head, " ".join(map(code, error.subjects)), _text(error.sentence)]) + "\n"


def code(text: str) -> str:
    """A code span that holds any text, in a table too."""
    told = clipped(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", told)), default=0))
    pad = " " if told[:1] in ("`", "") or told[-1:] == "`" else ""
    return f"{fence}{pad}{told}{pad}{fence}"


def _text(text: str) -> str:
    """Text in which nothing is markup, a mention or a link."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&@]|(?<=:)/|(?<=www)\.)", r"\\\1", clipped(text))


def _sections(report: Report) -> Iterator[list[str]]:
    word, rest = verdict(report)
    yield [f"## mtpcheck {report.command}: {word}{_text(rest)}"]
    yield [(" → " if report.command == "verify" else ", ").join(map(code, report.subjects)), "", _text(report.summary)]
    if first := lead(report):
        told = details(first)
        yield [f"**{code(first.subject)}**: {_text(told.get('cause') or first.message)}"]
    checks = [[code(c.group), _MARKS[c.status], _text(c.detail)] for c in report.checks]
    yield _table(["check", "", "covered"], checks)
    yield from _bad(report.components)
    yield from _declared(report.declared)
    if report.acceptance:
        yield ["### Acceptance", "", *_fenced(drafts.lines(report.acceptance))]
    if report.written:
        yield ["### Written with drafts", "", *_fenced(drafts.written(report.written))]
    if report.notes:
        yield ["### Notes", "", *_fenced(listed(report.notes, _ROWS))]


def _bad(components: Sequence[Component]) -> Iterator[list[str]]:
    bad = [c for c in components if c.differing or c.missing]
    rows = [[code(c.name), f"{c.tensors:,}", f"{c.differing:,}", f"{c.missing:,}"] for c in bad]
    if components:
        told = f"{len(bad):,} of {counted(len(components), 'component')} differ or lack tensors."
        yield ["### Model", "", told, *_table(["component", "tensors", "differing", "missing"], rows)]


def _declared(declared: Sequence[Declared]) -> Iterator[list[str]]:
    rows = [[code(d.key), _json(d.before), _json(d.after), "" if d.same else "**changed**"] for d in declared]
    if declared:
        yield ["### Declared", *_table(["key", "before", "after", ""], rows)]


def _json(text: str) -> str:
    return code(clipped(text, 200)) if text else "not there"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows[:_ROWS])]
    more = [f"and {len(rows) - _ROWS:,} more"] if len(rows) > _ROWS else []
    return ["", *lines, *(["", *more] if more else [])]


def _fenced(lines: Iterable[str]) -> list[str]:
    told = [clipped(line) for line in lines]
    fence = "`" * max(3, 1 + max((len(run) for line in told for run in re.findall("`+", line)), default=0))
    return [fence, *told, fence]


def _blocks(findings: Sequence[Finding], heading: str) -> Iterator[str]:
    for number, finding in enumerate(f for f in findings if f.severity is not Severity.NOTE):
        head = f"### {heading}\n\n" if number == 0 else ""
        lines = [f"- **{finding.severity.upper()}** {code(finding.check)} {code(finding.subject)}",
                 f"  - {_text(finding.message)}"]  # fmt: skip
        lines += [f"  - {name}: {_text(text)}" for name, text in details(finding).items()]
        if finding.members:
            lines += [f"  - {len(finding.members):,} in all:"]
            lines += [f"    - {code(member)}" for member in listed(finding.members, _MEMBERS)]
        yield head + "\n".join(lines) + "\n"
