"""Every renderer on reports that no checkpoint made: what is told, what is escaped, and that limits are kept."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt  # rich brings it
from rich.console import Console

from mtpcheck.report.finding import Severity, failure, warning
from mtpcheck.report.formats import FORMATS
from mtpcheck.report.github import append, as_github
from mtpcheck.report.junit import as_junit
from mtpcheck.report.machine import as_json, error_json
from mtpcheck.report.markdown import as_markdown, code
from mtpcheck.report.report import Component, Report
from mtpcheck.report.terminal import render
from mtpcheck.report.words import ordered, verdict_line
from tests import reports
from tests.conftest import Outcome, fixture_path
from tests.schema import faults

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def huge() -> Report:
    return reports.huge()


def shown(report: Report, verbose: bool = False) -> str:
    """What a terminal of 80 columns gets."""
    stream = io.StringIO()
    render(report, Console(file=stream, width=80, highlight=False, soft_wrap=True), verbose)
    return stream.getvalue()


# ---- words


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        ([], "HOLDS"),
        ([("declaration.config", Severity.WARNING, False)], "HOLDS, 1 warning"),
        ([("declaration.count", Severity.WARNING, True)], "HOLDS; the source has 1 fault of its own"),
        ([("declaration.mtp", Severity.NOTE, True)], "HOLDS"),
        ([("declaration.mtp", Severity.FAILURE, True)], "FAILS: the source has 1 fault of its own"),
        ([("declaration.mtp", Severity.FAILURE, False)] * 2 + [("declaration.count", Severity.FAILURE, True)] * 2,
         "FAILS: 2 failures; the source has 2 faults of its own"),
    ],
)  # fmt: skip
def test_faults_of_the_source_have_words_of_their_own(findings: list[tuple[str, Severity, bool]], line: str) -> None:
    report = Report("roundtrip", ["a"])
    made = [failure(check, f"key {n}", "changed", source=own) for n, (check, _, own) in enumerate(findings)]
    graded = [type(f)(f.check, grade, f.subject, f.message, source=f.source)
              for f, (_, grade, _) in zip(made, findings, strict=True)]  # fmt: skip
    report.add("declaration", graded, "1")
    assert verdict_line(report) == line
    report.skip("files", "not looked at")
    assert verdict_line(report) == line + (":" if line == "FAILS" else "") + "; not judged: files"


def test_a_reference_and_what_could_not_be_judged() -> None:
    assert (
        verdict_line(reports.failing()) == "FAILS: 5 failures; the reference has 2 faults of its own; not judged: files"
    )
    report = Report("accept", ["a"])
    report.could_not("acceptance", "too few tokens")
    assert verdict_line(report) == "COULD NOT JUDGE: acceptance"


def test_what_explains_most_comes_first() -> None:
    first, *rest = ordered(reports.failing().findings)
    assert first == reports.joined()
    grades = [f.severity for f in rest]
    assert grades == sorted(grades, key=list(Severity).index)
    failures = [(f.check, f.source) for f in rest if f.severity is Severity.FAILURE]
    assert failures == [("presence.missing", False), ("presence.unclaimed", False), ("declaration.mtp", False),
                        ("acceptance.logits", False), ("presence.copy", True)]  # fmt: skip


# ---- terminal


def test_terminal_tells_members_causes_and_the_source_apart() -> None:
    brief, whole = shown(reports.failing()), shown(reports.failing(), verbose=True)
    assert "cause: gate and up stand in each other's place" in brief and "to do: join gate first, then up" in brief
    assert "128 in all:" in brief and reports.EXPERTS[3] in brief and reports.EXPERTS[4] not in brief
    assert "and 124 more" in brief
    assert all(name in whole for name in reports.EXPERTS) and "more" not in whole
    before, after = brief.split("Faults of the reference itself:")
    assert "mtp.0.copy.head" in after and "mtp.0.copy.head" not in before and "eh_proj" not in after
    assert brief.endswith("FAILS: 5 failures; the reference has 2 faults of its own; not judged: files\n")
    assert "\x1b" not in whole and "\u202e" not in whole


def test_terminal_is_brief_on_a_huge_report(huge: Report) -> None:
    assert len(shown(Report(huge.command, huge.subjects, findings=huge.findings)).splitlines()) < 120


# ---- JUnit


def suite(report: Report) -> ElementTree.Element:
    """The one suite, held to what consumers of JUnit expect."""
    root = ElementTree.fromstring(as_junit(report))
    (found,) = root
    cases = found.findall("testcase")
    assert root.tag == "testsuites" and found.tag == "testsuite" and len(cases) == len(found)
    for name, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert found.get(name) == str(sum(1 for case in cases if case.find(kind) is not None))
    assert found.get("tests") == str(len(cases))
    keys = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(keys)) == len(keys) and all(all(key) for key in keys)
    for case in cases:
        results = [inside.tag for inside in case if inside.tag != "system-out"]
        assert set(results) <= {"failure", "error", "skipped"} and len(results) <= 1
        assert all(len((inside.text or "").splitlines()) <= 80 for inside in case)
    return found


def test_junit_has_a_case_for_checks_components_and_failures() -> None:
    cases = {(case.get("classname"), case.get("name")): case for case in suite(reports.failing())}

    def result(classname: str, name: str) -> str:
        return "".join(
            inside.tag for inside in cases[f"mtpcheck.verify{classname}", name] if inside.tag != "system-out"
        )

    assert [result("", name) for name in ("structure", "values", "files")] == ["", "failure", "skipped"]
    assert [result(".component", name) for name in ("layers.3", "layers.4", "mtp.0")] == ["failure", "", "failure"]
    body = cases["mtpcheck.verify.values.bits", reports.joined().subject].findtext("failure", "")
    assert "cause: gate and up stand in each other's place" in body and reports.EXPERTS[0] in body
    assert body.endswith("and 79 more")
    assert ("mtpcheck.verify.source.presence.copy", "mtp.0.copy.head") in cases
    assert "warning: declaration.config  rope_scaling" in cases["mtpcheck.verify", "declaration"].findtext(
        "system-out", ""
    )


def test_junit_of_many_components_that_were_not_compared() -> None:
    report = Report("verify", ["a", "b"], components=[Component("embed", 1, 10)])
    assert suite(report).find("testcase/skipped") is not None


def test_junit_names_are_unique_even_where_subjects_are_not() -> None:
    report = Report("verify", ["a", "b"])
    report.add("values", [failure("values.bits", name, "differs") for name in ("x", "x", "x (2)", "x\0", "x\1")], "5")
    names = [case.get("name") for case in suite(report)]
    assert sorted(map(str, names)) == sorted(["values", "x", "x (2)", "x (2) (2)", "x\ufffd", "x\ufffd (2)"])


def test_junit_of_a_huge_report_stays_small(huge: Report) -> None:
    found = suite(huge)
    assert len(as_junit(huge).encode()) < 1_000_000
    assert [case.get("name") for case in found][-1] == "and 3,501 more failures"
    assert sum(case.get("classname") == "mtpcheck.verify.component" for case in found) == 121


# ---- GitHub


def commands(text: str) -> list[tuple[str, str, str]]:
    """Kind, title and message of workflow commands; every line has to be one."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"::(error|warning|notice) title=([^:,]*)::(.*)", line)
        assert match, line
        found.append((match[1], match[2], match[3]))
    return found


def test_github_of_a_failing_report() -> None:
    found = commands(as_github(reports.failing()))
    assert [kind for kind, _, _ in found] == ["error"] * 7 + ["warning"] * 2
    assert found[0][1] == "mtpcheck verify" and "%0AFAILS: 5 failures" in found[0][2]
    assert found[1][1].startswith("values.bits gate and up of 128 experts")
    hostile = next(own for own in found if "onclick" in own[1])
    assert "%3A%3Aerror%3A%3Ax%25" in hostile[1] and "\x1b" not in "".join(map("".join, found))


@pytest.mark.parametrize("warnings", [0, 10, 11])
def test_github_of_a_sound_report(warnings: int) -> None:
    report = Report("verify", ["a", "b"])
    report.add("declaration", [warning("declaration.config", f"key{n}", "changed") for n in range(warnings)], "1")
    kinds = [kind for kind, _, _ in commands(as_github(report))]
    assert kinds == ["notice"] + ["warning"] * min(warnings, 10)


def test_github_shows_ten_of_a_kind(huge: Report) -> None:
    found = commands(as_github(huge))
    assert [kind for kind, _, _ in found] == ["error"] * 10 + ["warning"] * 10
    assert found[10][2] == "999 warnings" and len("".join(map("".join, found))) < 20_000


def test_github_collects_summary_and_outputs(tmp_path: Path, huge: Report) -> None:
    environment = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "GITHUB_OUTPUT": str(tmp_path / "outputs")}
    append(reports.sound(), environment)
    append(reports.ENDED, environment)
    rate = reports.sound().acceptance[0].overall.depths[0].rate
    expected = ["verdict=holds", f"acceptance={rate:.4f}", "verdict=could not judge", "acceptance="]
    assert (tmp_path / "outputs").read_text().splitlines() == expected
    heads = [line for line in (tmp_path / "summary").read_text().splitlines() if line.startswith("## ")]
    assert heads == ["## mtpcheck roundtrip: HOLDS", "## mtpcheck roundtrip: COULD NOT JUDGE"]
    for _ in range(3):
        append(huge, environment)
    assert (tmp_path / "summary").stat().st_size < 1 << 20
    append(huge, {})


def test_annotations_follow_the_result(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "outputs"))
    good = fixture_path("qwen2_mtp")
    outcome = cli("verify", good, good, "-q", "--report", "github=-")
    line, command = outcome.out.splitlines()
    assert (outcome.code, line) == (0, "HOLDS; not judged: files, acceptance") and command.startswith("::notice title=")
    assert cli("verify", good, good, "-q", "--report", f"github={tmp_path / 'a'}").out == line + "\n"
    assert (tmp_path / "a").read_text() == command + "\n"
    assert (tmp_path / "outputs").read_text() == "verdict=holds\nacceptance=\n" * 2
    outcome = cli("verify", good, tmp_path, "--report", "github=-")
    assert outcome.code == 2 and outcome.out.startswith("::error title=mtpcheck verify%3A could not judge::")
    assert (tmp_path / "summary").read_text().count("## mtpcheck verify") == 3
    refused = cli("verify", good, good, "--json", "--report", "github=-")
    assert refused.code == 2 and "--json keeps stdout for one document" in refused.err
    assert json.loads(refused.out)["verdict"] == "could not judge"


# ---- Markdown


def test_markdown_has_everything() -> None:
    found = as_markdown(reports.failing())
    for told in ("## mtpcheck verify: FAILS", "| `values` | ✗ **failed** |", "cause: gate and up", "### Acceptance",
                 "### Faults of the reference itself", "| `num_nextn_predict_layers` | `1` | not there | **changed** |",
                 "| `mtp.0` | 405 | 128 | 1 |", "and 109 more", "### Written with drafts", "### Notes"):  # fmt: skip
        assert told in found, told
    assert "`num_hidden_layers` | `46` | `46` |  |" in found


def test_names_are_no_markup() -> None:
    assert code("a`b|c") == "``a`b\\|c``" and code("`") == "`` ` ``" and code("a\nb") == "`a\\nb`"
    page = MarkdownIt("commonmark").enable("table").render(as_markdown(reports.failing()))
    tags = set(re.findall(r"</?([a-z0-9]+)", page))
    table = {"table", "thead", "tbody", "tr", "th", "td"}
    assert tags == table | {"h2", "h3", "p", "ul", "li", "pre", "code", "strong"}
    assert page.count("onclick") == 3 and "\u202e" not in page
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    assert {row.count("<t") for row in rows} == {3, 4}


def test_markdown_of_a_huge_report_is_cut(huge: Report) -> None:
    found = as_markdown(huge)
    assert 800_000 < len(found.encode()) <= 900_000 and re.search(r"and [\d,]+ more findings", found)
    assert len(as_markdown(huge, 100_000).encode()) <= 100_000


# ---- all of them


@pytest.mark.parametrize("name", FORMATS)
def test_empty_reports_and_long_names_have_every_form(name: str) -> None:
    assert FORMATS[name].report(Report("verify", ["a", "b"]))
    report = Report("verify", ["a", "b"])
    report.add("values", [failure("values.bits", "x" * 5_000_000, "differs", members=("y" * 10**6,))], "1")
    if name != "json":
        assert len(FORMATS[name].report(report)) < 100_000
    assert reports.ENDED.sentence.split(":")[0].split("/")[-1] in FORMATS[name].error(reports.ENDED)


def test_json_of_synthetic_reports_fits_the_schema(huge: Report) -> None:
    for made in (reports.sound(), reports.failing(), huge):
        assert list(faults(json.loads(as_json(made)))) == []
    assert list(faults(json.loads(error_json(reports.ENDED)))) == []
