"""Reports for machines: JSON and JUnit XML."""

from __future__ import annotations

import json
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from mtpcheck import __version__
from mtpcheck.report import drafts
from mtpcheck.report.finding import Finding, Severity
from mtpcheck.report.report import Report, check_table

SCHEMA_VERSION = 1


def as_dict(report: Report) -> dict[str, Any]:
    """The JSON document. Only ``run`` may differ between two runs on the same input."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": report.command,
        "subjects": report.subjects,
        "family": report.family,
        "verdict": report.verdict,
        "checks": [{"group": c.group, "status": c.status, "detail": c.detail} for c in report.checks],
        "counts": {str(s): sum(1 for f in report.findings if f.severity is s) for s in Severity},
        "acceptance": drafts.as_dicts(report.acceptance),
        "written": [own.as_dict() for own in report.written],
        "findings": [f.as_dict() for f in _sorted(report.findings)],
        "notes": report.notes,
        "run": {"version": __version__},
    }


def as_json(report: Report) -> str:
    return json.dumps(as_dict(report), indent=2, ensure_ascii=False)


def error_json(command: str, subjects: list[str], sentence: str) -> str:
    """The document of a command that could not judge."""
    document = {
        "schema_version": SCHEMA_VERSION, "command": command, "subjects": subjects,
        "verdict": "could not judge", "error": sentence, "run": {"version": __version__},
    }  # fmt: skip
    return json.dumps(document, indent=2, ensure_ascii=False)


def _sorted(findings: list[Finding]) -> list[Finding]:
    order = list(Severity)
    return sorted(findings, key=lambda f: (order.index(f.severity), f.check, f.subject))


def as_junit(report: Report) -> str:
    """One test case for each group of checks, and one for each failing subject."""
    name = " ".join(report.subjects)
    suite = Element("testsuite", name=f"mtpcheck {report.command} {name}")
    classname = f"mtpcheck.{report.command}"
    for check in report.checks:
        case = SubElement(suite, "testcase", classname=classname, name=check.group)
        if check.status == "skipped":
            SubElement(case, "skipped", message=check.detail)
        elif check.status == "unjudged":
            SubElement(case, "error", message=_xml(check.detail)).text = _xml(check.detail)
        elif check.status == "failed":
            _failure(case, check_table()[check.group]["help"], [f for f in report.failures if _of(f, check.group)])
    for finding in _sorted(report.failures):
        case = SubElement(suite, "testcase", classname=f"{classname}.{finding.check}", name=finding.subject)
        _failure(case, finding.message, [finding])
    return _document(suite)


def error_junit(command: str, subjects: list[str], sentence: str) -> str:
    """One test case in error: could not judge."""
    suite = Element("testsuite", name=f"mtpcheck {command} {' '.join(subjects)}")
    case = SubElement(suite, "testcase", classname=f"mtpcheck.{command}", name="could not judge")
    SubElement(case, "error", message=_xml(sentence)).text = _xml(sentence)
    return _document(suite)


def _of(finding: Finding, group: str) -> bool:
    return finding.check.startswith(group + ".")


def _failure(case: Element, message: str, findings: list[Finding]) -> None:
    lines = [f"{k}: {v}" for f in findings[:20] for k, v in f.as_dict().items()]
    if len(findings) > 20:
        lines.append(f"and {len(findings) - 20} more")
    SubElement(case, "failure", message=_xml(message)).text = _xml("\n".join(lines) or message)


def _xml(text: str) -> str:
    """Tensor names come from untrusted files; control characters have no form in XML."""
    return "".join(
        c if c in "\n\t" or " " <= c < "\ud800" or "\ue000" <= c < "\ufffe" or c > "\uffff" else "\ufffd" for c in text
    )


def _document(suite: Element) -> str:
    for case in suite.iter("testcase"):
        case.set("name", _xml(case.get("name", "")))
    suite.set("name", _xml(suite.get("name", "")))
    cases = list(suite)
    for attribute, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(1 for case in cases if case.find(kind) is not None)))
    suite.set("tests", str(len(cases)))
    root = Element("testsuites")
    root.append(suite)
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"
