"""Reports of real checkpoints: JSON as the schema has it, every format in a file, the same again for the same input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mtpcheck.draft.probe import Probing
from tests.conftest import Outcome, Yard, edit_tensors, fixture_path, flip_byte, read_shard, write_shard
from tests.schema import faults

Cli = Callable[..., Outcome]
MakeYard = Callable[[str], Yard]

SINGLE = "model.safetensors"
GOOD = fixture_path("qwen2_mtp")


def document(outcome: Outcome) -> dict[str, Any]:
    """The one JSON document on stdout, which the schema describes."""
    found: dict[str, Any] = json.loads(outcome.out)
    assert list(faults(found)) == []
    return found


def suite(path: Path) -> ElementTree.Element:
    """The test suite of a JUnit file, its counts checked against its cases."""
    found = ElementTree.parse(path).getroot().find("testsuite")
    assert found is not None
    cases = found.findall("testcase")
    counted = {
        kind: sum(1 for case in cases if case.find(kind) is not None) for kind in ("failure", "error", "skipped")
    }
    stated = {kind: int(found.get(plural, "-1")) for kind, plural in
              (("failure", "failures"), ("error", "errors"), ("skipped", "skipped"))}  # fmt: skip
    assert (stated, int(found.get("tests", "-1"))) == (counted, len(cases))
    return found


@pytest.fixture
def damaged(yard: MakeYard) -> Yard:
    """A copy in which one element differs and one tensor is gone."""
    place = yard("qwen2_mtp")
    edit_tensors(place.source / SINGLE, lambda tensors: tensors.pop("mtp.norm.weight"))
    flip_byte(place.source / SINGLE)
    return place


def test_json_of_a_sound_checkpoint(cli: Cli) -> None:
    outcome = cli("roundtrip", GOOD, "--json")
    found = document(outcome)
    assert (outcome.code, outcome.err) == (0, "")
    assert (found["command"], found["verdict"], found["subjects"]) == ("roundtrip", "holds", [str(GOOD)])
    statuses = {check["group"]: check["status"] for check in found["checks"]}
    assert statuses == {"structure": "passed", "presence": "passed", "declaration": "passed", "values": "passed",
                        "result": "passed", "acceptance": "skipped"}  # fmt: skip
    assert found["counts"]["failure"] == 0


def test_json_of_a_damaged_checkpoint(damaged: Yard, cli: Cli) -> None:
    outcome = cli("verify", GOOD, damaged.source, "--json")
    found = document(outcome)
    assert (outcome.code, found["verdict"]) == (1, "fails")
    assert found["counts"]["failure"] == len(found["findings"]) == 2
    assert {f["check"] for f in found["findings"]} == {"presence.missing", "values.bits"}
    bits = next(f for f in found["findings"] if f["check"] == "values.bits")
    assert bits["where"].startswith(str(damaged.source / SINGLE)) and "byte" in bits["where"]
    assert bits["expected"].startswith("0x") and bits["got"].startswith("0x")


FORMATS = {"json": "r.json", "junit": "r.xml", "markdown": "r.md", "html": "r.html", "github": "r.txt"}


def in_every_format(folder: Path) -> list[str]:
    """``--report`` for every format, into ``folder``."""
    folder.mkdir()
    return [text for format, name in FORMATS.items() for text in ("--report", f"{format}={folder / name}")]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("case", ["sound", "failing", "unjudged"])
@pytest.mark.parametrize("command", ["roundtrip", "verify", "accept", "inspect"])
def test_only_run_may_differ(command: str, case: str, damaged: Yard, cli: Cli, tmp_path: Path) -> None:
    """Every report of the same input has the same bytes, ``run`` aside."""
    workload = tmp_path / "few.jsonl"
    workload.write_bytes(b"".join(Probing().files["chat"].read_bytes().splitlines(keepends=True)[:6]))
    given: dict[tuple[str, str], list[object]] = {
        ("verify", "sound"): [GOOD, fixture_path("qwen2_mtp")],
        ("verify", "failing"): [GOOD, damaged.source],
        ("accept", "sound"): [GOOD, "--workload", f"few={workload}"],
        ("accept", "failing"): [GOOD, "--workload", f"few={workload}", "--min-acceptance", 1],
        ("roundtrip", "failing"): [damaged.source],
    }
    broken = [damaged.tmp] * (2 if command == "verify" else 1)
    arguments = broken if case == "unjudged" else given.get((command, case), [fixture_path("glm4_moe")])
    code = {"sound": 0, "failing": 0 if command == "inspect" else 1, "unjudged": 2}[case]
    documents, files = [], []
    for number in range(2):
        folder = tmp_path / f"reports{number}"
        reports = [] if command == "inspect" else in_every_format(folder)
        outcome = cli(command, *arguments, "--json", *reports)
        assert outcome.code == code, outcome.err
        found = document(outcome)
        assert isinstance(found.pop("run"), dict)
        documents.append(json.dumps(found))
        files.append(files_of(folder) if reports else {})
    assert documents[0] == documents[1]
    assert files[0] == files[1] and set(files[0]) == (set() if command == "inspect" else set(FORMATS.values()))


def test_the_schema_refuses_what_it_does_not_describe(damaged: Yard, cli: Cli) -> None:
    found = document(cli("verify", GOOD, damaged.source, "--json"))
    inspection = document(cli("inspect", GOOD, "--json"))
    first, *rest = found["findings"]
    wrong = [
        {**found, "verdict": "pass"},
        {**found, "schema_version": 2},
        {**found, "more": 1},
        {key: value for key, value in found.items() if key != "declared"},
        {**found, "findings": [{**first, "check": "presence"}, *rest]},
        {**found, "findings": [{**first, "source": False}, *rest]},
        {**found, "findings": [{**first, "members": "all"}, *rest]},
        {**found, "counts": {**found["counts"], "note": -1}},
        {**found, "components": [{"name": "embed"}]},
        {**inspection, "tensors": True},
        {**inspection, "copies": {"head": "lost"}},
    ]
    assert [own for own in wrong if not list(faults(own))] == []


@pytest.mark.parametrize("command", ["roundtrip", "verify", "accept", "inspect"])
def test_could_not_judge(command: str, yard: MakeYard, cli: Cli, tmp_path: Path) -> None:
    place = yard("qwen2_mtp")
    (place.source / SINGLE).write_bytes(b"")
    second = [place.source] if command == "verify" else []
    folder = tmp_path / "reports"
    reports = [] if command == "inspect" else in_every_format(folder)
    outcome = cli(command, place.source, *second, "--json", *reports)
    found = document(outcome)
    assert (outcome.code, found["verdict"], found["command"]) == (2, "could not judge", command)
    assert SINGLE in found["error"] and found["error"] in outcome.err
    if reports:
        files = files_of(folder)
        assert json.loads(files.pop("r.json")) == found
        (case,) = suite(folder / "r.xml")
        error = case.find("error")
        assert error is not None and error.get("message") == found["error"]
        assert all(SINGLE.encode() in file for file in files.values())
        assert files["r.txt"].startswith(b"::error title=") and files["r.txt"].count(b"\n") == 1


def test_crash_is_an_error_in_the_reports(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpcheck.claim.claim", lambda *_, **__: 1 // 0)
    outcome = cli("roundtrip", GOOD, "--json", "--report", f"junit={tmp_path}/r.xml")
    assert (outcome.code, document(outcome)["verdict"]) == (2, "could not judge")
    assert "ZeroDivisionError" in document(outcome)["error"]
    assert suite(tmp_path / "r.xml").get("errors") == "1"


def test_early_failure_is_a_verdict(damaged: Yard, cli: Cli, tmp_path: Path) -> None:
    """A conversion that stops at a missing tensor fails the checkpoint; it is no error."""
    outcome = cli("roundtrip", damaged.source, "--json", "--report", f"junit={tmp_path}/r.xml")
    found = document(outcome)
    assert (outcome.code, found["verdict"]) == (1, "fails")
    assert [f["subject"] for f in found["findings"]] == ["mtp.norm.weight"]
    found_suite = suite(tmp_path / "r.xml")
    assert (found_suite.get("errors"), found_suite.get("failures")) == ("0", "2")


def test_reports_beside_the_terminal(damaged: Yard, cli: Cli, tmp_path: Path) -> None:
    reports = ["--report", f"junit={tmp_path}/r.xml", "--report", f"json={tmp_path}/r.json"]
    outcome = cli("verify", GOOD, damaged.source, *reports)
    assert outcome.code == 1 and "FAILS: 2 failures" in outcome.out
    assert json.loads((tmp_path / "r.json").read_text()) == document(cli("verify", GOOD, damaged.source, "--json"))
    cases = {case.get("name"): case for case in suite(tmp_path / "r.xml")}
    assert set(cases) >= {"structure", "presence", "declaration", "values", "acceptance", "mtp.norm.weight"}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert {"presence", "values", "mtp.norm.weight"} < failed
    assert cases["acceptance"].find("skipped") is not None
    assert len(cases["structure"]) == 0


def test_skipped_acceptance_says_why(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("verify", GOOD, GOOD, "--no-acceptance", "--json", "--report", f"junit={tmp_path}/r.xml")
    check = [c for c in document(outcome)["checks"] if c["group"] == "acceptance"]
    assert [(c["status"], c["detail"]) for c in check] == [("skipped", "--no-acceptance was given")]
    skipped = [s.get("message") for s in suite(tmp_path / "r.xml").iter("skipped")]
    assert skipped == ["tokenizer and other files were not looked at", "--no-acceptance was given"]


@pytest.mark.parametrize("target", ["config.json", "new.json"])
def test_no_report_into_a_checkpoint(target: str, yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    before = (place.source / "config.json").read_bytes()
    outcome = cli("verify", GOOD, place.source, "--report", f"json={place.source / target}")
    assert (outcome.code, outcome.out) == (2, "")
    assert "inside a checkpoint" in outcome.err
    assert (place.source / "config.json").read_bytes() == before
    assert not (place.source / "new.json").exists()


NAMES = [
    "bell\a",
    "escape\x1b[31m",
    "nul\0",
    "tag <b>&amp;\"'",
    "line\nbreak",
    "no character\uffff",
    "é→漢\U0001f600",
    "]]>",
]


def test_odd_names(yard: MakeYard, cli: Cli, tmp_path: Path) -> None:
    """Names from untrusted files: true in JSON, harmless in XML."""
    place = yard("qwen2_mtp")
    table, data = read_shard(place.source / SINGLE)
    for number, name in enumerate(NAMES):
        at = len(data) + number
        table[name] = {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
    write_shard(place.source / SINGLE, table, data + bytes(len(NAMES)))
    outcome = cli("verify", GOOD, place.source, "--json", "--report", f"junit={tmp_path}/r.xml")
    assert outcome.code == 1
    assert {f["subject"] for f in document(outcome)["findings"]} == set(NAMES)
    cases = {case.get("name") for case in suite(tmp_path / "r.xml")}
    assert {"tag <b>&amp;\"'", "é→漢\U0001f600", "]]>", "bell\ufffd", "nul\ufffd", "no character\ufffd"} <= cases
