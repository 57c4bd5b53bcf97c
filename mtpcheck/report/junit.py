"""JUnit XML as CI services show it: a test case for each check, each component, and each failing subject.

Tensors of one component are one case, since a model has tens of thousands. GitLab shows the body of a failure, about
80 lines of it, and drops a case whose name it has seen; XML 1.0 has no form for most control characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from mtpcheck.report.finding import Finding, Severity
from mtpcheck.report.report import Cases, Component, Report, Unjudged, check_table, of_group
from mtpcheck.report.words import LONGEST, counted, details, listed, told_apart

_CASES = 500
"""Failing subjects with a case of their own; what follows them is counted."""
_BODY = 75
_MEMBERS = 50


def as_junit(report: Report) -> str:
    """A report as one test suite."""
    return _document([_suite_of(report, f"mtpcheck.{report.command}")])


def cases_junit(cases: Cases) -> str:
    """A test suite for each case."""
    names = [f"mtpcheck.{cases.command}.{' '.join(report.subjects)}" for report in cases.reports]
    return _document([_suite_of(report, name) for report, name in zip(cases.reports, names, strict=True)])


def _suite_of(report: Report, classname: str) -> Element:
    suite = _suite(report.command, report.subjects)
    for check in report.checks:
        case = _case(suite, classname, check.group)
        if check.status == "skipped":
            SubElement(case, "skipped", message=_line(check.detail))
        elif check.status == "unjudged":
            _tell(case, "error", check.detail, [check.detail])
        elif check.status == "failed":
            failures = of_group(report.failures, check.group)
            _tell(case, "failure", check_table()[check.group]["help"], map(_sentence, failures))
        _others(case, of_group(report.findings, check.group))
    for component in report.components:
        _component(_case(suite, f"{classname}.component", component.name), component)
    conversion, source = ([f for f in told if f.severity is Severity.FAILURE] for told in told_apart(report))
    _failures(suite, classname, conversion)
    _failures(suite, f"{classname}.source", source)
    return suite


def error_junit(error: Unjudged) -> str:
    """One test case in error: could not judge."""
    suite = _suite(error.command, error.subjects)
    _tell(_case(suite, f"mtpcheck.{error.command}", "could not judge"), "error", error.sentence, [error.sentence])
    return _document([suite])


def _suite(command: str, subjects: Sequence[str]) -> Element:
    return Element("testsuite", name=_line(f"mtpcheck {command} {' '.join(subjects)}"))


def _case(suite: Element, classname: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=_line(classname), name=_line(name), time="0")


def _tell(case: Element, kind: str, message: str, body: Iterable[str]) -> None:
    text = "\n".join(listed([_line(line) for line in body], _BODY))
    SubElement(case, kind, message=_line(message), type=f"mtpcheck.{kind}").text = text or _line(message)


def _others(case: Element, findings: Iterable[Finding]) -> None:
    """Warnings and notes, which fail nothing."""
    told = [f"{f.severity}: {_sentence(f)}" for f in findings if f.severity is not Severity.FAILURE]
    if told:
        SubElement(case, "system-out").text = "\n".join(listed([_line(line) for line in told], _BODY))


def _sentence(finding: Finding) -> str:
    return f"{finding.check}  {finding.subject}: {finding.message}"


def _component(case: Element, component: Component) -> None:
    compared = f"{component.compared:,} of {counted(component.tensors, 'tensor')} compared"
    if component.differing or component.missing:
        told = f"{component.differing:,} differing, {component.missing:,} missing"
        _tell(case, "failure", told, [f"{told}; {compared}"])
    elif component.tensors and not component.compared:
        SubElement(case, "skipped", message="not compared")


def _failures(suite: Element, classname: str, failures: list[Finding]) -> None:
    for finding in failures[:_CASES]:
        body = [finding.message, *(f"{name}: {text}" for name, text in details(finding).items())]
        body += listed(finding.members, _MEMBERS)
        _tell(_case(suite, f"{classname}.{finding.check}", finding.subject), "failure", finding.message, body)
    if len(failures) > _CASES:
        more = f"and {len(failures) - _CASES:,} more failures"
        _tell(_case(suite, classname, more), "failure", more, ["the JSON report has all of them"])


def _line(text: str) -> str:
    """One line that XML can hold; of characters it cannot, and of what is too long, something stays to be seen."""
    cut = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return "".join(
        c if c == "\t" or " " <= c < "\ud800" or "\ue000" <= c < "\ufffe" or c > "\uffff" else "\ufffd" for c in cut
    )


def _document(suites: Sequence[Element]) -> str:
    for suite in suites:
        _number(suite)
    root = Element("testsuites")
    for attribute in ("name", "failures", "errors", "tests", "time"):
        values = [suite.get(attribute, "") for suite in suites]
        root.set(attribute, values[0] if attribute in ("name", "time") else str(sum(map(int, values))))
    root.extend(suites)
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _number(suite: Element) -> None:
    """Give cases of one name numbers, and the suite its counts."""
    cases, taken = list(suite), set()
    for case in cases:
        classname, first = case.get("classname"), case.get("name")
        name, number = first, 1
        while (classname, name) in taken:
            number += 1
            name = f"{first} ({number})"
        taken.add((classname, name))
        case.set("name", str(name))
    for attribute, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(1 for case in cases if case.find(kind) is not None)))
    suite.set("tests", str(len(cases)))
    suite.set("time", "0")
