"""JSON documents for machines; ``configs/report.schema.json`` describes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mtpcheck import __version__
from mtpcheck.report import drafts
from mtpcheck.report.finding import Severity
from mtpcheck.report.report import Cases, Report, Unjudged
from mtpcheck.report.words import ordered

if TYPE_CHECKING:
    from mtpcheck.inspect import Inspection

SCHEMA_VERSION = 1


def as_dict(report: Report) -> dict[str, Any]:
    """The JSON document. Only ``run`` may differ between two runs on the same input."""
    return {
        **_head(report.command),
        "subjects": report.subjects,
        "family": report.family,
        "dialects": report.dialects,
        "verdict": report.verdict,
        "checks": [{"group": c.group, "status": c.status, "detail": c.detail} for c in report.checks],
        "counts": {str(s): sum(1 for f in report.findings if f.severity is s) for s in Severity},
        "acceptance": drafts.as_dicts(report.acceptance),
        "written": [own.as_dict() for own in report.written],
        "findings": [f.as_dict() for f in ordered(report.findings)],
        "components": [asdict(component) for component in report.components],
        "declared": [asdict(declared) for declared in report.declared],
        "notes": report.notes,
        "run": _run(),
    }


def as_json(report: Report) -> str:
    return _text(as_dict(report))


def cases_dict(cases: Cases) -> dict[str, Any]:
    """The document of several cases; each has that of its report."""
    told = {"subjects": cases.subjects, "verdict": cases.verdict, "cases": [as_dict(own) for own in cases.reports]}
    return {**_head(cases.command), **told, "run": _run()}


def cases_json(cases: Cases) -> str:
    return _text(cases_dict(cases))


def error_dict(error: Unjudged) -> dict[str, Any]:
    """The document of a command that could not judge."""
    told = {"subjects": error.subjects, "verdict": "could not judge", "error": error.sentence}
    return {**_head(error.command), **told, "run": _run()}


def error_json(error: Unjudged) -> str:
    return _text(error_dict(error))


def inspection_json(found: Inspection) -> str:
    told = {**asdict(found), "findings": [f.as_dict() for f in found.findings]}
    return _text({**_head("inspect"), **told, "run": _run()})


def _head(command: str) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "command": command}


def _run() -> dict[str, Any]:
    return {"version": __version__}


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2)  # in ASCII, which every terminal and file can hold
