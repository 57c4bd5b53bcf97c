"""Whether a case was judged as it has to be: exit code, checks and causes, from the JSON of one command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.anatomy import STORED
from tests.mutants.case import Case
from tests.mutants.originals import Originals

Call = Callable[..., tuple[int, str, str]]
"""Runs mtpcheck with arguments; exit code, stdout, stderr."""


@dataclass(frozen=True)
class Judged:
    """``caught``: the findings that were expected, as "check cause"; ``missed``: what had to be said and was not."""

    code: int
    found: tuple[str, ...]
    caught: tuple[str, ...]
    missed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.missed


def judge(case: Case, name: str, originals: Originals, at: Path, call: Call) -> Judged:
    """Make the mutant at ``at`` and hold what its command says against what is expected."""
    mutant = originals.mutant(name, case.made, case.edit, at)
    places: dict[str, object] = {"MUTANT": mutant, "hf": originals.hf(name)}
    if "TEXT" in case.command:
        places["some=TEXT"] = f"some={originals.text()}"
    if "megatron" in case.command:
        places["megatron"] = originals.megatron(name)
    places |= {word: originals.hf(word) for word in case.command.split() if word in STORED}
    words = [places.get(word, word) for word in case.command.split()]
    code, out, err = call(*words, *["--json"] * (words[0] != "convert"))
    document: dict[str, Any] = json.loads(out) if out.startswith("{") else {"error": err.strip().rpartition("\n")[2]}
    findings: list[dict[str, Any]] = document.get("findings", [])
    answers = {expected: _answer(case, expected, findings) for expected in case.expects}
    missed = [*_wrong(case, code, document), *(expected for expected, answer in answers.items() if not answer)]
    found = dict.fromkeys(_told(finding) for finding in findings)
    return Judged(code, tuple(found), tuple(filter(None, answers.values())), tuple(missed))


def _wrong(case: Case, code: int, document: dict[str, Any]) -> Iterator[str]:
    """What the exit code, a complaint, causes that are not expected, and failures of a legal variant tell."""
    error = document.get("error", "").strip().rpartition("\n")[2]
    if code != case.exit:
        yield f"exit {case.exit}, got {code}" + f": {error}" * bool(error)
    if case.exit == 2 and not re.search(case.says, error):
        yield f"a complaint with {case.says}"
    causes = {cause for expected in case.expects for cause in expected.partition(" ")[2].split("|")} - {""}
    for finding in document.get("findings", []):
        if causes and finding.get("cause_id") not in {None, *causes}:
            yield f"no other cause, got {_told(finding)} of {finding['subject']}"
        if case.exit == 0 and finding["severity"] == "failure":
            yield f"no failure, got {finding['check']} of {finding['subject']}"


def _answer(case: Case, expected: str, findings: list[dict[str, Any]]) -> str:
    """The finding that fulfils an expectation; empty if none does."""
    checks, _, causes = expected.partition(" ")
    first = expected == case.expects[0]
    for finding in findings:
        fits = finding["check"] in checks.split("|") and (not causes or finding.get("cause_id") in causes.split("|"))
        fails = finding["severity"] == "failure" or case.exit != 1 or not first
        says = not first or re.search(case.says, finding.get("cause", ""))
        if fits and fails and says and bool(finding.get("source")) >= case.source:
            return _told(finding)
    return ""


def _told(finding: dict[str, Any]) -> str:
    return f"{finding['check']} {finding.get('cause_id', '')}".strip()
