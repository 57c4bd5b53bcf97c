"""The result of one command: which checks ran, what they found, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from mtpcheck.data import configs, load
from mtpcheck.errors import COULD_NOT_JUDGE, FAILS, HOLDS
from mtpcheck.report.finding import Finding, Severity

if TYPE_CHECKING:
    from mtpcheck.draft.probe import Column
    from mtpcheck.draft.writing import Written

Status = Literal["passed", "failed", "skipped", "unjudged"]
Verdict = Literal["holds", "fails", "could not judge"]
EXIT_CODES: Mapping[Verdict, int] = {"fails": FAILS, "could not judge": COULD_NOT_JUDGE, "holds": HOLDS}
"""Worst first."""


@lru_cache(maxsize=1)
def check_table() -> Mapping[str, Any]:
    """``configs/checks.yaml``: group → help and ids; id → severities and help."""
    table: Mapping[str, Any] = load(configs() / "checks.yaml")
    return table


@lru_cache(maxsize=1)
def cause_table() -> Mapping[str, Any]:
    """``configs/causes.yaml``: id → help and, where something can be done, what to do."""
    table: Mapping[str, Any] = load(configs() / "causes.yaml")
    return table


@dataclass(frozen=True)
class Check:
    """One group of checks: that it ran and what it covered, why it was not asked for, or why it could not be judged."""

    group: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Component:
    """A component of the model (``embed``, ``layers.3``, ``mtp.0`` …) and how its tensors fared.

    ``tensors`` and ``nbytes`` are the reference's; ``compared`` tells how many were held against the candidate's.
    """

    name: str
    tensors: int
    nbytes: int
    compared: int = 0
    differing: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Declared:
    """A config key or Megatron argument before and after, as JSON text; empty where it is not there."""

    key: str
    before: str
    after: str

    @property
    def same(self) -> bool:
        return self.before == self.after


@dataclass(repr=False)
class Report:
    """Everything a renderer needs. ``summary`` is one line on what was judged.

    True if everything holds, so that ``assert verify(a, b)`` is a test; ``str`` tells the verdict and the first
    findings, ``repr`` as much as fits a line.
    """

    command: str
    subjects: list[str]
    family: str = ""
    summary: str = ""
    dialects: list[str] = field(default_factory=list)
    """Those that Megatron tensors were read or written in, each once; empty where there are none."""
    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines for a person, without weight for the verdict."""
    accepted: int = 0
    """Findings that would count and are known differences: the verdict says so, lest they hide what is new."""
    components: list[Component] = field(default_factory=list)
    """In the order of the model, the MTP layers last; empty where nothing was compared."""
    declared: list[Declared] = field(default_factory=list)
    """Keys that declare MTP layers, and all that differ; those of Megatron under their own names."""
    acceptance: list[Column] = field(default_factory=list)
    """What each checkpoint drafts; the first is the one that the others are held against."""
    written: list[Written] = field(default_factory=list)
    """What the model wrote with its drafts."""

    def __bool__(self) -> bool:
        return self.verdict == "holds"

    def __str__(self) -> str:
        from mtpcheck.report.words import in_brief

        return in_brief(self)

    def __repr__(self) -> str:
        from mtpcheck.report.words import in_a_line

        return in_a_line(self)

    def add(self, group: str, findings: Iterable[Finding], detail: str) -> None:
        """Record that a group ran. It fails if any of its findings is a failure."""
        own = list(findings)
        known = {f"{group}.{name}": entry["severity"] for name, entry in check_table()[group]["ids"].items()}
        assert all(f.severity in known[f.check] for f in own), [(f.check, f.severity) for f in own]
        failed = any(f.severity is Severity.FAILURE for f in own)
        self._record(Check(group, "failed" if failed else "passed", detail))
        self.findings += own

    def include(self, findings: Iterable[Finding]) -> None:
        """Take over findings of another pass, each check, subject and cause once."""
        known = {(f.check, f.subject, f.cause) for f in self.findings}
        for finding in findings:
            if (own := (finding.check, finding.subject, finding.cause)) not in known:
                known.add(own)
                self.findings.append(finding)

    def skip(self, group: str, why: str) -> None:
        """Record that a group did not run. Skipped is never success; the verdict says so."""
        self._record(Check(group, "skipped", why))

    def could_not(self, group: str, why: str) -> None:
        """Record that a group was to run and could not. Nothing holds then; what fails still does."""
        self._record(Check(group, "unjudged", why))

    def _record(self, check: Check) -> None:
        """A group that was skipped before is no longer."""
        self.checks = [c for c in self.checks if (c.group, c.status) != (check.group, "skipped")]
        self.checks.append(check)

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.severity is Severity.FAILURE]

    @property
    def source_faults(self) -> list[Finding]:
        """What is wrong with the source or reference itself."""
        return [f for f in self.findings if f.source and f.severity is not Severity.NOTE]

    @property
    def verdict(self) -> Verdict:
        if self.failures:
            return "fails"
        return "could not judge" if any(check.status == "unjudged" for check in self.checks) else "holds"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def skipped(self) -> list[str]:
        return [check.group for check in self.checks if check.status == "skipped"]


@dataclass
class Cases:
    """What one command found in several cases, each of them a report. ``subjects``: what named the cases."""

    command: str
    subjects: list[str]
    reports: list[Report]

    @property
    def verdict(self) -> Verdict:
        """The worst of all; a failure is sure, whatever else could not be judged."""
        verdicts = {report.verdict for report in self.reports}
        return next((verdict for verdict in EXIT_CODES if verdict in verdicts), "holds")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


@dataclass(frozen=True)
class Unjudged:
    """What there is to render of a command that ended in an error before there was a report."""

    command: str
    subjects: list[str]
    sentence: str


def of_group(findings: Iterable[Finding], group: str) -> list[Finding]:
    return [f for f in findings if f.check.startswith(group + ".")]
