"""The catalogue of damage: every mutant is caught by its check, with its cause, and nothing legal is."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from mtpcheck.report.report import cause_table, check_table
from tests.conftest import Outcome, digest
from tests.mutants import catalogue, run
from tests.mutants.anatomy import FOLDERS, STORED
from tests.mutants.case import Case
from tests.mutants.cases_megatron import VALUES
from tests.mutants.catalogue import FAMILIES, LEFT, LEGAL, MUTANTS, PAIRS, applied, in_every_fixture
from tests.mutants.judge import Call, judge
from tests.mutants.originals import Originals

Cli = Callable[..., Outcome]
ALL = bool(os.environ.get("MTPCHECK_ALL"))
BLIND = [
    (case, name) for case, name in applied([*VALUES, *FAMILIES * ALL]) if case.blind and case.made.startswith("torch")
]


def ids(cases: list[tuple[Case, str]]) -> list[str]:
    return [f"{case.id} {name}" for case, name in cases]


def grouped(cases: list[tuple[Case, str]]) -> list[ParameterSet]:
    """Those of one fixture in one process, which converts it once."""
    marks = [pytest.mark.xdist_group(f"mutants of {name}") for _, name in cases]
    return [pytest.param(*case, id=id, marks=mark) for case, id, mark in zip(cases, ids(cases), marks, strict=True)]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"), lambda *arguments: run.call(*arguments)[0])


@pytest.fixture
def call(cli: Cli) -> Call:
    def called(*arguments: object) -> tuple[int, str, str]:
        outcome = cli(*arguments)
        return outcome.code, outcome.out, outcome.err

    return called


def check(case: Case, name: str, originals: Originals, at: Path, call: Call) -> None:
    judged = judge(case, name, originals, at, call)
    assert judged.ok, f"{case.id} {name}: missed {'; '.join(judged.missed)}\nfound {'; '.join(judged.found)}"


@pytest.mark.parametrize(("case", "name"), applied(MUTANTS), ids=ids(applied(MUTANTS)))
def test_every_mutant_is_caught(case: Case, name: str, originals: Originals, tmp_path: Path, call: Call) -> None:
    check(case, name, originals, tmp_path / "mutant", call)
    original = originals.megatron(name, case.made) if case.made else originals.hf(name)
    assert case.exit == 2 or digest(tmp_path / "mutant") != digest(original), "it differs"


@pytest.mark.parametrize(("case", "name"), applied(PAIRS), ids=ids(applied(PAIRS)))
def test_of_two_faults_both_are_told(case: Case, name: str, originals: Originals, tmp_path: Path, call: Call) -> None:
    check(case, name, originals, tmp_path / "mutant", call)


@pytest.mark.parametrize(("case", "name"), grouped(applied(FAMILIES)))
def test_in_every_family(case: Case, name: str, originals: Originals, tmp_path: Path, call: Call) -> None:
    check(case, name, originals, tmp_path / "mutant", call)
    original = originals.megatron(name, case.made) if case.made else originals.hf(name)
    assert case.exit != 1 or digest(tmp_path / "mutant") != digest(original), "it differs"


@pytest.mark.parametrize(("case", "name"), applied(LEGAL), ids=ids(applied(LEGAL)))
def test_what_is_legal_passes(case: Case, name: str, originals: Originals, tmp_path: Path, call: Call) -> None:
    check(case, name, originals, tmp_path / "variant", call)


@pytest.mark.parametrize(("case", "name"), BLIND, ids=ids(BLIND))
def test_a_byte_round_trip_is_blind_to_these(
    case: Case, name: str, originals: Originals, tmp_path: Path, cli: Cli
) -> None:
    """From the damaged Megatron checkpoint to Hugging Face and back not a bit changes: it is as sound as any."""
    mutant = originals.mutant(name, case.made, case.edit, tmp_path / "mutant")
    assert cli("roundtrip", mutant).code == 0
    assert cli("verify", originals.hf(name), mutant).code == 1


# ---- the catalogue itself


def test_every_expectation_is_a_check_and_a_cause_that_exist() -> None:
    checks = {f"{group}.{name}" for group, table in check_table().items() for name in table["ids"]}
    for case in [*MUTANTS, *PAIRS, *FAMILIES]:
        for expected in case.expects:
            names, _, causes = expected.partition(" ")
            assert set(names.split("|")) <= checks, expected
            assert set(filter(None, causes.split("|"))) <= cause_table().keys(), expected


def test_every_cause_has_a_mutant() -> None:
    expected = {cause for case in MUTANTS for e in case.expects for cause in e.partition(" ")[2].split("|")}
    elsewhere = {"back-filled", "other-dialect"}  # tests/test_gate.py, tests/test_dialects.py
    assert cause_table().keys() - elsewhere <= expected


def test_no_entry_is_there_twice_and_every_mutant_is_judged() -> None:
    names = [*(entry.id for entry in [*MUTANTS, *LEGAL, *LEFT, *PAIRS]), *dict.fromkeys(c.id for c in FAMILIES)]
    assert len(set(names)) == len(names)
    assert len({(case.id, name) for case, name in applied(FAMILIES)}) == sum(len(case.on) for case in FAMILIES)
    assert all(case.expects or case.exit == 2 for case in MUTANTS)
    assert all(case.exit == 0 and not case.expects for case in LEGAL)
    assert {case.made for case in MUTANTS if case.blind} >= {"torch_dist"} and len(PAIRS) >= 10
    assert not [case.id for case in MUTANTS if case.blind and not case.made], "blind faults are Megatron's"


def test_mutators_know_nothing_of_what_judges_them() -> None:
    for path in Path(inspect.getfile(catalogue)).parent.glob("*.py"):
        for module in re.findall(r"(?m)^\s*(?:from|import) (mtpcheck\S*)", path.read_text()):
            assert path.name == "run.py" and module == "mtpcheck.cli", f"{path.name} imports {module}"


def test_the_page_shows_the_catalogue() -> None:
    """docs/faults.md is made by `make mutants`; an entry that is new or gone has to be there or gone too."""
    text = run.PAGE.read_text()
    for name, cases in run.GROUPS.items():
        _, _, rest = text.partition(run.BEGIN.format(name))
        table, _, _ = rest.partition(run.END.format(name))
        shown = [line.split("|")[1].strip().removesuffix(" ◦") for line in table.splitlines()[3:] if "|" in line]
        assert shown == list(dict.fromkeys(case.id for case in cases))
    _, _, rest = text.partition(run.BEGIN.format("matrix"))
    matrix, _, _ = rest.partition(run.END.format("matrix"))
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in matrix.splitlines() if "|" in line]
    marks = {(name, id) for name, *own in rows for id, mark in zip(head[1:], own, strict=True) if mark == "✓"}
    assert marks == {(name, case.id) for case, name in in_every_fixture()}


def test_every_fixture_is_in_the_sample() -> None:
    """Whatever a family calls its parts: none slips through for want of a name that the sample knows."""
    applicable = {name: {case.id for case, on in applied(FAMILIES) if on == name} for name in FOLDERS}
    assert all(len(own) >= 12 for name, own in applicable.items() if name in STORED), applicable
    assert all(own == {"F50"} for name, own in applicable.items() if name not in STORED), applicable
