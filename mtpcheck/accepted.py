"""Known differences: findings that the settings accept, with a reason, until a date."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from mtpcheck.report.finding import Finding, Severity, failure, warning
from mtpcheck.report.report import Report, of_group
from mtpcheck.settings import Accepted, read_settings


@dataclass
class Known:
    """The entries of a file of settings, and which of them were of use. An expired one accepts nothing."""

    entries: Sequence[Accepted]
    today: datetime.date = field(default_factory=datetime.date.today)
    used: set[Accepted] = field(default_factory=set)

    def accept(self, report: Report) -> None:
        """Turn findings that an entry speaks of into notes; a group without other failures has passed then."""
        report.findings = [own for finding in report.findings for own in self._without_known(finding, report)]
        for number, check in enumerate(report.checks):
            left = any(f.severity is Severity.FAILURE for f in of_group(report.findings, check.group))
            if check.status == "failed" and not left:
                told = f"{check.detail}; all that fails is accepted"
                report.checks[number] = replace(check, status="passed", detail=told)

    def _without_known(self, finding: Finding, report: Report) -> Iterator[Finding]:
        """What is left of a finding of a report, and a note for each entry that accepts some or all of its members."""
        left = list(finding.members or (finding.subject,))
        for entry in self._valid:
            if finding.check != entry.check or finding.severity is Severity.NOTE:
                continue
            if own := [name for name in left if fnmatchcase(name, entry.tensor)]:
                self.used.add(entry)
                left = [name for name in left if name not in own]
                report.accepted += 1
                yield _noted(finding, own, entry)
        if len(left) == len(finding.members or (finding.subject,)):
            yield finding
        elif left:
            yield replace(finding, subject=_named(left), members=tuple(left))

    @property
    def told(self) -> str:
        return f"{len(self.used)} of {len(self.entries)} known differences met"

    @property
    def _valid(self) -> list[Accepted]:
        return [entry for entry in self.entries if entry.expires >= self.today]

    def findings(self, all_was_judged: bool = True) -> list[Finding]:
        """Entries that are expired, and, if ``all_was_judged``, those that nothing was accepted by."""
        return [*self._expired(), *(self._unused() if all_was_judged else ())]

    def _expired(self) -> Iterator[Finding]:
        for entry in self.entries:
            if entry not in self._valid:
                yield failure(
                    "accepted.expired", f"{entry.check} {entry.tensor}",
                    f"expired on {entry.expires}, so it accepts nothing ({entry.reason})", where=entry.where,
                    todo="repair what it stood for and remove it, or give it another date",
                )  # fmt: skip

    def _unused(self) -> Iterator[Finding]:
        for entry in self._valid:
            if entry not in self.used:
                yield warning(
                    "accepted.unused", f"{entry.check} {entry.tensor}", f"nothing was found that it accepts "
                    f"({entry.reason})", where=entry.where, todo="remove it, if what it stood for is repaired",
                )  # fmt: skip


def _noted(finding: Finding, names: Sequence[str], entry: Accepted) -> Finding:
    told = f"accepted until {entry.expires}: {entry.reason} ({finding.message})"
    members = tuple(names) if finding.members else ()
    return replace(
        finding, severity=Severity.NOTE, subject=_named(names), members=members, message=told, todo="",
    )  # fmt: skip


def _named(names: Collection[str]) -> str:
    first = next(iter(names))
    return first if len(names) == 1 else f"{first} and {len(names) - 1:,} more"


def add_known(report: Report, config: Path | None) -> Report:
    """Apply the known differences of a file of settings, if one was named, to a finished report."""
    if config is not None:
        known = Known(read_settings(config).accepted)
        known.accept(report)
        report.add("accepted", known.findings(), known.told)
    return report
