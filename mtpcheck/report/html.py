"""One page that stands for itself: no script runs, nothing is fetched, and the JSON document lies inside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtpcheck.report import bars, layermap
from mtpcheck.report.elements import code, lines, section, table, text
from mtpcheck.report.finding import Finding, Severity
from mtpcheck.report.machine import as_dict, cases_dict, error_dict
from mtpcheck.report.report import Cases, Check, Declared, Report, Unjudged, check_table
from mtpcheck.report.words import (
    details,
    fitting,
    lead,
    listed,
    roles,
    source_heading,
    told_apart,
    unjudged,
    verdict,
    verdict_of_cases,
)

_FINDINGS = 900_000
"""Bytes of findings on the page."""
_DOCUMENT = 700_000
"""Bytes of findings in the document inside it, and how much of each list."""
_LISTED = 100
_MEMBERS = 8
_STATUS = {"passed": "✓ passed", "failed": "✗ failed", "skipped": "– not run", "unjudged": "? could not judge"}
_KINDS = {"holds": "holds", "fails": "fails"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_html(report: Report) -> str:
    """A report as a page of about 2 MB at most."""
    word, rest = verdict(report)
    return _page(f"{word}{rest}", _body(report), _cut(as_dict(report)))


def cases_html(cases: Cases) -> str:
    """One case after the other on one page, below the verdict on all and links to each."""
    word, rest = verdict_of_cases(cases)
    kind = _KINDS.get(cases.verdict, "unjudged")
    rows = [
        [f'<a href="#c{n}">{code(" ".join(report.subjects))}</a>', text("".join(verdict(report)))]
        for n, report in enumerate(cases.reports)
    ]
    head = _header(cases.command, kind, word, rest.lstrip(":,; "), "", cases.subjects, "")
    bodies = [
        f'<section id="c{n}">\n' + "\n".join(_body(report, f"c{n}")) + "\n</section>"
        for n, report in enumerate(cases.reports)
    ]
    document = cases_dict(cases)
    document["cases"] = [_cut(own) for own in document["cases"]]
    return _page(f"{word}{rest}", [head, table(["case", "verdict"], rows, "cases"), *bodies], document)


def _body(report: Report, prefix: str = "") -> list[str]:
    """Heading, links and sections; ids of sections start with ``prefix``."""
    found, source = told_apart(report)
    sections = {
        "Checks": [_checks(report.checks)],
        "Model": [layermap.model(report.components)],
        "Findings": [_findings(found, _FINDINGS)],
        source_heading(report): [_findings(source, _FINDINGS // 4)],
        "Declared": [_declared(report.declared)],
        "Acceptance": [bars.acceptance(report.acceptance), bars.written(report.written)],
        "Notes": [lines(listed(report.notes, 5 * _LISTED))],
        "Not judged": [_skipped(report.checks)],
    }
    made = {title: section(f"{prefix}s{n}", title, *parts) for n, (title, parts) in enumerate(sections.items())}
    links = "".join(f'<a href="#{prefix}s{n}">{text(title)}</a>' for n, title in enumerate(made) if made[title])
    return [_head(report), f"<nav>{links}</nav>", *(part for part in made.values() if part)]


def error_html(error: Unjudged) -> str:
    head = _header(error.command, "unjudged", "COULD NOT JUDGE", "", _lead(text(error.sentence)), error.subjects, "")
    return _page(f"could not judge: mtpcheck {error.command}", [head], error_dict(error))


def _page(title: str, body: Sequence[str], document: dict[str, Any]) -> str:
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    data = json.dumps(document, separators=(",", ":"))
    for sign in "<>&":  # what could end the element early
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{text(title)}</title>", f"<style>\n{style}</style>", "</head>", "<body>", "<main>", *body, "</main>",
        f'<script type="application/json" id="report">{data}</script>', "</body>", "</html>", "",
    ])  # fmt: skip


def _cut(document: dict[str, Any]) -> dict[str, Any]:
    """The document with as much of its lists as a page should hold; ``left_out`` counts the rest."""
    left = {"members": 0, "parts_not_run": 0}
    for finding in document["findings"]:
        left["members"] += len(finding.get("members", [])[_LISTED:])
        finding.update({"members": finding["members"][:_LISTED]} if "members" in finding else {})
    for column in document["acceptance"]:
        left["parts_not_run"] += len(column["parts_not_run"]) - _LISTED if len(column["parts_not_run"]) > _LISTED else 0
        column["parts_not_run"] = dict(list(column["parts_not_run"].items())[:_LISTED])
    _, left["findings"] = fitting(map(json.dumps, document["findings"]), _DOCUMENT)
    document["findings"] = document["findings"][: len(document["findings"]) - left["findings"]]
    told = {name: n for name, n in left.items() if n}
    return {**document, "left_out": told} if told else document


def _head(report: Report) -> str:
    word, rest = verdict(report)
    kind = _KINDS.get(report.verdict, "unjudged")
    if first := lead(report):
        told = {name: value for name, value in details(first).items() if name in ("cause", "to do")}
        message = f"<p>{code(first.subject, 200)}</p><p>{text(first.message, 300)}</p>"
        message += "".join(
            f'<p class="{name.split()[0]}">{name.capitalize()}: {text(value, 300)}</p>' for name, value in told.items()
        )
    else:
        message = "".join(f"<p>{text(check.group)}: {text(check.detail, 400)}</p>" for check in unjudged(report))
    return _header(report.command, kind, word, rest.lstrip(":,; "), _lead(message), report.subjects, report.summary)


def _lead(message: str) -> str:
    return f'<div class="lead">{message}</div>' if message else ""


def _header(command: str, kind: str, word: str, rest: str, message: str, subjects: Sequence[str], summary: str) -> str:
    named = "".join(f"<dt>{role}</dt><dd>{code(subject)}</dd>" for role, subject in roles(command, subjects))
    return "\n".join([
        "<header>", f'<p class="command">mtpcheck {text(command)}</p>',
        f'<h1 class="{kind}">{text(word)}</h1>', f'<p class="rest">{text(rest)}</p>' if rest else "", message,
        f'<dl class="subjects">{named}</dl>', f'<p class="summary">{text(summary)}</p>' if summary else "", "</header>",
    ])  # fmt: skip


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        [f"<b>{text(check.group)}</b>", f'<span class="{check.status}">{_STATUS[check.status]}</span>',
         f"{text(check.detail)}<small>{text(check_table()[check.group]['help'])}</small>"]
        for check in checks
    ]  # fmt: skip
    return table(["check", "result", "covered"], rows, "checks") if rows else ""


def _skipped(checks: Sequence[Check]) -> str:
    told = [f"<dt>{text(c.group)}</dt><dd>{text(c.detail)}</dd>" for c in checks if c.status == "skipped"]
    return f"<dl>{''.join(told)}</dl>" if told else ""


def _declared(declared: Sequence[Declared]) -> str:
    rows = [
        [code(d.key), _value(d.before), _value(d.after), "same" if d.same else '<b class="failed">✗ changed</b>']
        for d in declared
    ]
    more = f"<p>and {len(rows) - _LISTED:,} more keys</p>" if len(rows) > _LISTED else ""
    return table(["key", "before", "after", ""], rows[:_LISTED], "declared") + more if rows else ""


def _value(json_text: str) -> str:
    return code(json_text, 300) if json_text else "<em>not there</em>"


def _findings(findings: Sequence[Finding], room: int) -> str:
    shown, left = fitting(_cards(findings), room)
    more = [f"<p>and {left:,} more findings, which the JSON report has</p>"] if left else []
    return "\n".join([*shown, *more])


def _cards(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        told = details(finding)
        known = "".join(f"<dt>{name}</dt><dd>{_detail(name, value)}</dd>" for name, value in told.items())
        yield "\n".join([
            f'<article class="{finding.severity}">',
            f'<p class="kind"><b>{_GRADES[finding.severity]}</b> {text(finding.check)}</p>',
            f"<h3>{code(finding.subject)}</h3>", f"<p>{text(finding.message)}</p>",
            f"<dl>{known}</dl>" if known else "", _members(finding.members), "</article>",
        ])  # fmt: skip


_GRADES = {Severity.FAILURE: "✗ Failure", Severity.WARNING: "! Warning", Severity.NOTE: "Note"}


def _detail(name: str, value: str) -> str:
    return code(value) if name in ("expected", "got", "in") else text(value)


def _members(members: Sequence[str]) -> str:
    if not members:
        return ""
    named = [f"<li>{code(member)}</li>" for member in members]
    first = f"<p>{len(members):,} in all:</p><ul>{''.join(named[:_MEMBERS])}</ul>"
    rest = listed(named[_MEMBERS:], _LISTED)
    if not rest:
        return first
    inside = "".join(line if line.startswith("<li>") else f"<li>{line}</li>" for line in rest)
    return f"{first}<details><summary>{len(members) - _MEMBERS:,} more</summary><ul>{inside}</ul></details>"
