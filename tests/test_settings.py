"""Settings: found, read, and refused with the line of what is wrong; differences that they accept."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mtpcheck.accepted import Known
from mtpcheck.errors import UsageError
from mtpcheck.report.finding import Severity, failure, note, warning
from mtpcheck.report.report import Report
from mtpcheck.settings import Accepted, find_settings, read_settings
from mtpcheck.topology import Topology
from tests.conftest import Outcome, Yard, edit_tensors, fixture_path

Cli = Callable[..., Outcome]
GOOD = """\
gate:
  to_megatron: convert '{src}' {dst} --tp {tp}
  timeout: 60
  cases:
    - source: glm4_moe
    - name: two ranks
      source: ./tiny
      tp: 2
      to_hf: [back, "{src}", "{dst}"]
accept:
  - check: values.bits
    tensor: "*.bias"
    reason: we round it
    expires: 2999-01-31
"""
TOML = """\
[project]
name = "theirs"

[tool.mtpcheck.gate]
to_megatron = "convert {src} {dst}"

[[tool.mtpcheck.gate.cases]]
source = "glm4_moe"

[[tool.mtpcheck.gate.cases]]
source = "mimo"
tp = 2

[[tool.mtpcheck.accept]]
check = "values.bits"
tensor = "*"
reason = "known"
expires = 2999-01-31
"""


def written(folder: Path, text: str, name: str = "mtpcheck.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as error:
        read_settings(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_stands_in_settings(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    settings = read_settings(path)
    first, second = settings.cases
    assert (first.name, second.name) == ("glm4_moe", "two ranks")
    assert second.where == f"{path}:6"
    assert [list(case.commands) for case in settings.cases] == [["to_megatron"], ["to_megatron", "to_hf"]]
    assert first.commands["to_megatron"].arguments == ("convert", "{src}", "{dst}", "--tp", "{tp}")
    assert (first.timeout, first.topology, second.topology) == (60, Topology(), Topology(tp=2, etp=2))
    assert first.cwd == tmp_path
    own = Accepted("values.bits", "*.bias", "we round it", datetime.date(2999, 1, 31), f"{path}:11")
    assert settings.accepted == (own,)


def test_toml_says_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, TOML, "pyproject.toml")
    settings = read_settings(path)
    assert [(case.name, case.where, case.topology.tp) for case in settings.cases] == [
        ("glm4_moe", f"{path}:8", 1), ("mimo", f"{path}:11", 2)
    ]  # fmt: skip
    assert settings.accepted[0].where == f"{path}:15"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("timeout", "tmieout", ":3: gate: unknown key 'tmieout'; did you mean 'timeout'?"),
        ("gate:", "gates:", ":1: unknown key 'gates'; did you mean 'gate'?"),
        ("tp: 2", "tpp: 2", ":8: gate.cases: unknown key 'tpp'; did you mean 'tp'?"),
        ("reason", "raeson", ":13: accept: unknown key 'raeson'; did you mean 'reason'?"),
        ("tp: 2", "tp: two", ":8: tp is the text 'two', expected a whole number from 1 on"),
        ("tp: 2", "tp: 0", ":8: tp is 0, expected a whole number from 1 on"),
        ("tp: 2", "tp: true", ":8: tp is True, expected a whole number from 1 on"),
        ("tp: 2", "layout: hf", ":8: layout is 'hf', expected torch_dist or torch"),
        ("tp: 2", "cwd: nowhere", ":8: cwd 'nowhere': no such folder"),
        ("tp: 2", "acceptance: 1", ":8: acceptance is 1, expected true or false"),
        ("timeout: 60", "timeout: .inf", ":3: timeout is inf, expected seconds"),
        ("timeout: 60", "timeout: -1", ":3: timeout is -1, expected seconds"),
        ("timeout: 60", "timeout: 60\n  timeout: 61", ":4: key 'timeout' stands twice"),
        ("{dst} --tp", "--tp", ":2: to_megatron: {dst} is missing"),
        ('"{src}", "{dst}"', '"{dst}"', ":9: to_hf: {src} is missing"),
        ("--tp {tp}", "--tp {to}", ":2: to_megatron: unknown placeholder {to}; did you mean {tp}?"),
        ("--tp {tp}", "{orignal}", ":2: to_megatron: unknown placeholder {orignal}; did you mean {original}?"),
        ("'{src}'", "'{src}", ":2: to_megatron: No closing quotation"),
        ('[back, "{src}", "{dst}"]', "[back, 1]", ":9: to_hf: expected a command line, or a list of arguments"),
        ('[back, "{src}", "{dst}"]', "[]", ":9: to_hf: expected a command line"),
        ("source: glm4_moe", "name: nothing", ":5: source is missing"),
        ("two ranks", "glm4_moe", ":6: a case named 'glm4_moe' stands above"),
        ("two ranks", "a/b", ":6: name 'a/b' cannot be that of a folder"),
        (
            "check: values.bits",
            "check: values.bit",
            ":11: no finding 'values.bit' can be accepted; did you mean 'values.bits'?",
        ),
        ("check: values.bits", "check: commands.failed", ":11: no finding 'commands.failed' can be accepted"),
        ("2999-01-31", "soon", ":14: expires is 'soon', expected a date such as 2027-01-31"),
        ("2999-01-31", "2999-01-31 10:00:00", ":14: expires is datetime"),
        ("    expires: 2999-01-31\n", "", ":11: expires is missing"),
        ("2999-01-31", "2999-02-30", ":14: expires is '2999-02-30', expected a date such as 2027-01-31"),
        ("two ranks", "n" * 201, ":6: name 'nnn"),
        ("two ranks", '"a\\nb"', ":6: name 'a\\nb' cannot be that of a folder"),
        ("two ranks", '"\\ud800"', ":6: name '\\ud800' cannot be that of a folder"),
        ("[back, ", '["\\ud800", ', ":9: to_hf: expected a command line"),
        ("tp: 2", "tp: 0b_", ": not valid YAML: invalid literal"),
        ("GOOD", "a: " + "[" * 1000, ": not valid YAML: nested too deeply"),
        ("GOOD", "gate: {<<: 3}", ":1: not valid YAML: expected a mapping"),
        ("gate:\n", "gate: 3\nx:\n", ":2: unknown key 'x'"),
        ("GOOD", "- 1", ":1: expected keys with values, got list"),
        ("GOOD", "gate: 3", ":1: gate is 3, expected keys with values"),
        ("GOOD", "gate: {}", ":1: gate: cases is missing or empty"),
        ("GOOD", "gate: {cases: [1]}", ":1: cases is a list, expected a list of entries"),
        ("GOOD", "gate: {cases: [{source: mimo}]}", ":1: neither to_megatron nor to_hf says what to run"),
        ("GOOD", "gate: [", ":1: not valid YAML"),
        ("GOOD", "a: &a [*a]", ":1: not valid YAML"),
        ("GOOD", "1: 2", ":1: key 1 is no text"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    text = new if old == "GOOD" else GOOD.replace(old, new, 1)
    assert text != GOOD
    path = written(tmp_path, text)
    assert refused(path).startswith(f"{path}{told}")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tp = 2", "tpp = 2", ":12: gate.cases: unknown key 'tpp'; did you mean 'tp'?"),
        ("to_megatron", "to_megtron", ":5: gate: unknown key 'to_megtron'; did you mean 'to_megatron'?"),
        ("tp = 2", 'to_hf = "back {src}"', ":12: to_hf: {dst} is missing"),
        ('reason = "known"', "reason = 1", ":17: reason is 1, expected text"),
        ('name = "theirs"', "name = ", ": not valid TOML"),
    ],
)
def test_toml_knows_lines_too(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = written(tmp_path, TOML.replace(old, new, 1), "pyproject.toml")
    assert refused(path).startswith(f"{path}{told}")


MERGED = """\
gate:
  cases:
    - &first
      source: mimo
      tp: 2
      to_hf: back {src} {dst}
    - &second {<<: *first, name: two, tp: 3}
    - {<<: *second, name: three}
"""


def test_keys_of_another_entry(tmp_path: Path) -> None:
    cases = read_settings(written(tmp_path, MERGED)).cases
    assert [(case.name, case.topology.tp, case.source) for case in cases] == [
        ("mimo", 2, "mimo"), ("two", 3, "mimo"), ("three", 3, "mimo")
    ]  # fmt: skip
    assert ":4: gate.cases: unknown key 'sorce'" in refused(written(tmp_path, MERGED.replace("source", "sorce")))
    assert ":7: tp is 0" in refused(written(tmp_path, MERGED.replace("tp: 3", "tp: 0")))
    assert ":7: key 'tp' stands twice" in refused(written(tmp_path, MERGED.replace("tp: 3", "tp: 3, tp: 4")))


def test_lines_of_lists_on_one_line(tmp_path: Path) -> None:
    text = '[tool.mtpcheck]\ngate.to_hf = "b {src} {dst}"\ngate.cases = [{source = "mimo"}, {sorce = "mimo"}]\n'
    path = written(tmp_path, text, "pyproject.toml")
    assert refused(path).startswith(f"{path}:3: gate.cases: unknown key 'sorce'; did you mean 'source'?")


def test_the_nearest_file_counts_up_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "repo" / "a" / "b"
    inner.mkdir(parents=True)
    written(tmp_path, GOOD)
    (tmp_path / "repo" / ".git").mkdir()
    with pytest.raises(UsageError, match=r"no mtpcheck\.yaml, and no \[tool\.mtpcheck\]"):
        find_settings(inner)
    written(inner, '[project]\nname = "other"\n', "pyproject.toml")
    root = written(tmp_path / "repo", TOML, "pyproject.toml")
    assert (inner / find_settings(inner)).resolve() == root
    near = written(tmp_path / "repo" / "a", GOOD)
    assert (inner / find_settings(inner)).resolve() == near
    written(tmp_path / "repo" / "a", TOML, "pyproject.toml")
    with pytest.raises(UsageError, match="both hold settings; keep one"):
        find_settings(inner)


def test_a_file_that_is_not_there(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    assert "nothing.yaml: no such file" in cli("gate", "--config", "nothing.yaml").err
    outcome = cli("gate", "--json")
    assert outcome.code == 2
    assert '"verdict": "could not judge"' in outcome.out and "no mtpcheck.yaml" in outcome.err
    assert "has no [tool.mtpcheck]" in cli("gate", "--config", written(tmp_path, "[x]\n", "a.toml")).err
    assert "has no gate" in cli("gate", "--config", written(tmp_path, "")).err


# ---- differences that are known

TODAY = datetime.date(2027, 1, 31)
KNOWN = Accepted("values.bits", "mtp.*", "rounded, issue 12", TODAY, "mtpcheck.yaml:3")


def report_of(*findings: tuple[str, tuple[str, ...]]) -> Report:
    report = Report("verify", ["a", "b"])
    made = [failure("values.bits", subject, "differ", members=members) for subject, members in findings]
    report.add("values", made, "compared")
    return report


def test_a_known_difference_is_a_note() -> None:
    report, known = report_of(("mtp.fc.weight", ())), Known([KNOWN], TODAY)
    known.accept(report)
    assert (report.verdict, report.checks[0].status) == ("holds", "passed")
    assert report.findings[0].severity is Severity.NOTE
    assert report.findings[0].message == "accepted until 2027-01-31: rounded, issue 12 (differ)"
    assert known.findings() == []


def test_only_what_the_pattern_names_is_known() -> None:
    names = ("mtp.fc.weight", "lm_head.weight", "mtp.norm.weight", "model.norm.weight")
    report, known = report_of(("4 tensors", names), ("MTP.x", ())), Known([KNOWN], TODAY)
    known.accept(report)
    assert [(f.severity, f.subject, f.members) for f in report.findings] == [
        ("note", "mtp.fc.weight and 1 more", ("mtp.fc.weight", "mtp.norm.weight")),
        ("failure", "lm_head.weight and 1 more", ("lm_head.weight", "model.norm.weight")),
        ("failure", "MTP.x", ()),
    ]
    assert (report.verdict, report.checks[0].status) == ("fails", "failed")


def test_another_check_is_not_known() -> None:
    report, known = report_of(("mtp.fc.weight", ())), Known([replace(KNOWN, check="values.dtype")], TODAY)
    known.accept(report)
    assert report.verdict == "fails"
    assert known.findings() == [
        warning("accepted.unused", "values.dtype mtp.*", "nothing was found that it accepts (rounded, issue 12)",
                where="mtpcheck.yaml:3", todo="remove it, if what it stood for is repaired")
    ]  # fmt: skip
    assert known.findings(all_was_judged=False) == []


def test_an_expired_entry_accepts_nothing_and_fails() -> None:
    report, known = report_of(("mtp.fc.weight", ())), Known([KNOWN], TODAY + datetime.timedelta(days=1))
    known.accept(report)
    assert report.verdict == "fails"
    (found,) = known.findings()
    assert (found.check, found.severity, found.where) == ("accepted.expired", Severity.FAILURE, "mtpcheck.yaml:3")
    assert "expired on 2027-01-31" in found.message


def test_a_note_needs_no_acceptance() -> None:
    report, known = Report("verify", ["a"]), Known([KNOWN], TODAY)
    report.findings = [note("values.bits", "mtp.fc.weight", "differ")]
    known.accept(report)
    assert known.used == set()


def entry(expires: str, tensor: str = "mtp.norm.weight") -> dict[str, str]:
    return {"check": "values.bits", "tensor": tensor, "reason": "known", "expires": expires}


def test_verify_and_roundtrip_accept_what_a_file_that_is_named_says(
    cli: Cli, yard: Callable[[str], Yard], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = yard("qwen2_mtp")
    edit_tensors(place.source / "model.safetensors", lambda tensors: tensors["mtp.norm.weight"].add_(1))
    config = place.source.parent / "mtpcheck.yaml"
    monkeypatch.chdir(place.source.parent)  # a file that lies near is not enough

    def verified(*entries: dict[str, str]) -> Outcome:
        config.write_text(yaml.safe_dump({"accept": list(entries)}))
        return cli("verify", fixture_path("qwen2_mtp"), place.source, "--config", config, "-v")

    good = verified(entry("2999-01-01"))
    assert good.code == 0, good.out
    assert "accepted until 2999-01-01: known" in good.out and "1 of 1 known differences met" in good.out
    assert ", 1 known difference accepted" in good.out
    assert cli("verify", fixture_path("qwen2_mtp"), place.source).code == 1
    old = verified(entry("2020-01-01"))
    assert old.code == 1 and "accepted.expired" in old.out
    unused = verified(entry("2999-01-01"), entry("2999-01-01", "nothing"))
    assert unused.code == 0 and "accepted.unused" in unused.out
    assert cli("roundtrip", place.source, "--config", config).code == 0


def test_the_gate_tells_of_entries_apart(cli: Cli, tmp_path: Path) -> None:
    lost = {"name": "lost", "source": "qwen3_mtp", "to_megatron": ["sh", "-c", "exit 1", "{src}", "{dst}"]}
    path = tmp_path / "mtpcheck.yaml"
    path.write_text(yaml.safe_dump({"gate": {"cases": [lost]}, "accept": [entry("2999-01-01"), entry("2020-01-01")]}))
    outcome = cli("gate", "--config", path)
    assert outcome.code == 1
    assert "accepted.expired" in outcome.out and "accepted.unused" in outcome.out
    assert "known differences" in outcome.out and outcome.out.endswith("FAILS: 2 of 2 cases\n")
    assert "accepted.unused" not in cli("gate", "--config", path, "--case", "lost").out
