"""Findings are values: checks return them, renderers render them, nobody prints from a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


def printable(text: str) -> str:
    """``text`` with control characters spelled out: names come from untrusted files and end in a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Severity(StrEnum):
    FAILURE = "failure"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of one check.

    ``check`` is a stable id of ``configs/checks.yaml``; ``subject`` the tensor, part or config key, or in words what
    the ``members`` have in common where one cause explains many; ``where`` the file, with the byte or the line if
    there is one. ``cause`` tells what happened, ``cause_id`` is its id in ``configs/causes.yaml`` where it was
    confirmed bit for bit. ``source``: a fault of the source or reference itself, which no conversion made. ``part``:
    our own name of what was compared, where that is not the subject whole.
    """

    check: str
    severity: Severity
    subject: str
    message: str
    where: str = ""
    expected: str = ""
    got: str = ""
    cause: str = ""
    todo: str = ""
    cause_id: str = ""
    members: tuple[str, ...] = ()
    source: bool = False
    part: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For machines: what is set; all strings but ``members`` and ``source``."""
        told = {key: value for key, value in asdict(self).items() if value}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}


def failure(check: str, subject: str, message: str, **details: Any) -> Finding:
    return Finding(check, Severity.FAILURE, subject, message, **details)


def warning(check: str, subject: str, message: str, **details: Any) -> Finding:
    return Finding(check, Severity.WARNING, subject, message, **details)


def note(check: str, subject: str, message: str, **details: Any) -> Finding:
    return Finding(check, Severity.NOTE, subject, message, **details)
