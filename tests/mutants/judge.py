"""Whether a case was judged as it has to be: exit code, checks and causes, from the JSON of one command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.case import Case
from tests.mutants.originals import Originals

Call = Callable[..., tuple[int, str, str]]
"""Runs mtpcheck with arguments; exit code, stdout, stderr."""


@dataclass(frozen=True)
class Judged:
    """``missed``: what had to be said and was not; empty if all was."""

    code: int
    found: tuple[str, ...]
    missed: tuple[str, ...]
    text: str

    @property
    def ok(self) -> bool:
        return not self.missed


def judge(case: Case, name: str, originals: Originals, at: Path, call: Call) -> Judged:
    """Make the mutant at ``at`` and hold what its command says against what is expected."""
    mutant = originals.mutant(name, case.made, case.edit, at)
    words: list[object] = []
    for word in case.command.split():
        if word == "megatron":
            words.append(originals.megatron(name))
        else:
            words.append({"MUTANT": mutant, "hf": originals.hf(name)}.get(word, word))
    code, out, err = call(*words, *["--json"] * (words[0] != "convert"))
    document: dict[str, Any] = json.loads(out) if out.startswith("{") else {"error": err}
    findings = document.get("findings", [])
    found = dict.fromkeys(f"{f['check']} {f.get('cause_id', '')}".strip() for f in findings)
    return Judged(code, tuple(found), tuple(_missed(case, code, document, findings)), out + err)


def _missed(case: Case, code: int, document: dict[str, Any], findings: list[dict[str, Any]]) -> list[str]:
    missed = [] if code == case.exit else [f"exit {case.exit}, got {code}: {document.get('error', '')}".strip(" :")]
    if case.exit == 2 and not re.search(case.says, document.get("error", "")):
        missed.append(f"a complaint with {case.says}")
    if case.exit == 0:
        missed += [f"no failure, got {f['check']} of {f['subject']}" for f in findings if f["severity"] == "failure"]
    for number, expected in enumerate(case.expects):
        fitting = [f for f in findings if _fits(expected, f)]
        if number == 0 and case.exit == 1:
            fitting = [f for f in fitting if f["severity"] == "failure"]
        if case.says and number == 0:
            fitting = [f for f in fitting if re.search(case.says, f.get("cause", ""))]
        if not fitting:
            missed.append(expected)
    return missed


def _fits(expected: str, finding: dict[str, Any]) -> bool:
    checks, _, causes = expected.partition(" ")
    return finding["check"] in checks.split("|") and (not causes or finding.get("cause_id", "") in causes.split("|"))
