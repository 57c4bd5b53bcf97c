"""The Python API: what can be imported, how light that is, and how a failing assertion reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mtpcheck
from mtpcheck import MtpcheckError, Probing, Report, accept, graft, roundtrip, verify
from mtpcheck.report.finding import failure
from tests.conftest import FIXTURES
from tests.test_graft import lose

GOOD = FIXTURES / "qwen2_mtp"


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    return lose(GOOD, tmp_path / "lost", "mtp.")


def test_a_verdict_is_true_if_everything_holds(tmp_path: Path) -> None:
    assert verify(GOOD, GOOD)
    assert roundtrip(GOOD)
    assert str(verify(GOOD, GOOD)).endswith("HOLDS; not judged: files, acceptance")
    assert repr(verify(GOOD, GOOD)) == "<HOLDS; not judged: files, acceptance>"


def test_a_failing_assertion_tells_why(lost: Path) -> None:
    verdict = verify(GOOD, lost)
    assert not verdict and isinstance(verdict, Report) and verdict.failures
    with pytest.raises(AssertionError) as caught:
        assert verdict
    told = str(caught.value)
    assert (
        "<FAILS: 2 failures" in told and "presence.missing 16 tensors of MTP layer 0: mtp.fc.weight: is gone>" in told
    )
    assert "..." not in told  # pytest shows it whole
    with pytest.raises(AssertionError) as caught:
        assert verdict, str(verdict)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0].startswith("mtpcheck verify ") and "FAILS: " in lines[0]
    assert "FAILURE presence.missing 16 tensors of MTP layer 0: mtp.fc.weight: is gone" in lines
    assert any(line.startswith("cause: MTP layer 0: 16 tensors") for line in lines)
    assert any(line.startswith("FAILURE declaration.count MTP layers: declares 1") for line in lines)


def test_of_many_findings_the_first_are_told() -> None:
    report = Report("verify", ["a", "b"])
    report.add("values", [failure("values.bits", f"tensor {i}", "differs") for i in range(7)], "")
    lines = str(report).splitlines()
    assert lines[0] == "mtpcheck verify a b: FAILS: 7 failures" and lines[-1] == "and 2 more findings"
    assert len(lines) == 7


def test_arguments_that_make_no_sense_raise_a_sentence() -> None:
    with pytest.raises(MtpcheckError, match="values is 'change', expected 'exact' or 'changed'"):
        verify(GOOD, GOOD, values="change")  # type: ignore[arg-type]
    with pytest.raises(MtpcheckError, match="via is 'dist', expected 'hf' or 'torch_dist' or 'torch'"):
        roundtrip(GOOD, via="dist")  # type: ignore[arg-type]
    with pytest.raises(MtpcheckError, match="columns is 'first', expected 'all' or 'once'"):
        Probing(columns="first")  # type: ignore[arg-type]
    with pytest.raises(MtpcheckError, match=r"none\.jsonl cannot be read: No such file"):
        accept(GOOD, probing=Probing(files={"chat": "none.jsonl"}))  # type: ignore[dict-item]


def test_what_could_not_be_judged_is_not_true() -> None:
    report = Report("verify", ["a", "b"])
    report.could_not("acceptance", "there is no\ntokenizer")
    assert not report and repr(report) == r"<COULD NOT JUDGE: acceptance: there is no\ntokenizer>"
    assert r"acceptance: could not judge: there is no\ntokenizer" in str(report)


def test_errors_have_one_base(lost: Path) -> None:
    with pytest.raises(MtpcheckError, match="stores none"):
        accept(lost, probing=Probing("once"))


def test_graft_is_there_too(lost: Path, tmp_path: Path) -> None:
    assert graft(lost, GOOD, tmp_path / "out")
    assert verify(GOOD, tmp_path / "out")


def test_a_submodule_does_not_take_the_place_of_a_function() -> None:
    script = (
        "import mtpcheck.verify, mtpcheck.accept, sys; from mtpcheck import verify, accept\n"
        "from mtpcheck.verify import verify as same\n"
        "assert callable(accept) and verify is same is mtpcheck.verify and 'mtpcheck.verify' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_importing_the_package_is_light() -> None:
    script = "import sys, mtpcheck; print({'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", mtpcheck.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(mtpcheck, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        mtpcheck.nothing  # type: ignore[attr-defined]  # noqa: B018
