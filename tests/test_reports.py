"""Reports for machines: one JSON document, sound JUnit, the same again for the same input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.conftest import Outcome, Yard, edit_tensors, fixture_path, flip_byte, read_shard, write_shard

Cli = Callable[..., Outcome]
MakeYard = Callable[[str], Yard]

SINGLE = "model.safetensors"
GOOD = fixture_path("qwen2_mtp")


def document(outcome: Outcome) -> dict[str, Any]:
    """The one JSON document on stdout."""
    found: dict[str, Any] = json.loads(outcome.out)
    assert found["schema_version"] == 1
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


@pytest.mark.parametrize("command", ["roundtrip", "verify", "inspect"])
def test_json_is_the_same_again(command: str, damaged: Yard, cli: Cli) -> None:
    arguments = {
        "verify": [GOOD, damaged.source],
        "roundtrip": [fixture_path("glm4_moe")],
        "inspect": [fixture_path("glm4_moe")],
    }
    first, second = (document(cli(command, *arguments[command], "--json")) for _ in range(2))
    first.pop("run", None), second.pop("run", None)
    assert json.dumps(first) == json.dumps(second)


@pytest.mark.parametrize("command", ["roundtrip", "verify", "inspect"])
def test_could_not_judge(command: str, yard: MakeYard, cli: Cli, tmp_path: Path) -> None:
    place = yard("qwen2_mtp")
    (place.source / SINGLE).write_bytes(b"")
    second = [place.source] if command == "verify" else []
    reports = [] if command == "inspect" else ["--report", f"junit={tmp_path}/r.xml", "--report", f"json={tmp_path}/r"]
    outcome = cli(command, place.source, *second, "--json", *reports)
    found = document(outcome)
    assert (outcome.code, found["verdict"], found["command"]) == (2, "could not judge", command)
    assert SINGLE in found["error"] and found["error"] in outcome.err
    if reports:
        assert json.loads((tmp_path / "r").read_text()) == found
        (case,) = suite(tmp_path / "r.xml")
        error = case.find("error")
        assert error is not None and error.get("message") == found["error"]


def test_crash_is_an_error_in_the_reports(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpcheck.normalise._claim", lambda *_, **__: 1 // 0)
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
