"""The proof from headers: it holds for what converts, and fails, naming the row, for what would not come back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtpcheck.megatron import Options
from mtpcheck.plan import Plan, concat
from mtpcheck.proof import prove
from mtpcheck.roundtrip import roundtrip
from mtpcheck.rows import PartShape, Row

FIXTURES = Path(__file__).parent.parent / "fixtures"
# MiniMax's fixture holds no MTP layer, so there is nothing to judge
NO_HEAD = ("minimax_m2", "minimax_m3")
HF = sorted(path.parent for path in FIXTURES.glob("*/config.json") if path.parent.name not in NO_HEAD)
MEGATRON = sorted(path for path in FIXTURES.glob("megatron/core-*/*/torch_dist") if "/dense_" not in str(path))


def family_of_sample(source: Path) -> str | None:
    """What Megatron cannot tell: its files of several families look alike."""
    case = source.parent.name
    return {"moe": "deepseek_v3", "moegqa": "glm4_moe", "moeall": "glm4_moe"}.get(case.split("_")[0])


@pytest.mark.parametrize("source", HF + MEGATRON, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_what_converts_is_proved_and_nothing_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpcheck.move._copy", lambda *args: pytest.fail("a weight was read"))
    report = prove(source, family_of_sample(source), Options(text_only=True))
    assert report.failures == []
    assert {c.group for c in report.checks if c.status == "skipped"} == {"values", "acceptance"}
    assert next(c for c in report.checks if c.group == "plan").status == "passed"


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("glm4_moe", "linear_qkv.weight"),
        ("mimo", "eh_proj"),
        ("deepseek_v3", "experts.linear_fc1"),
        ("glm4_moe", "up_proj"),
    ],
)
def test_a_wrong_inverse_is_found_and_its_row_named(name: str, fragment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of equal shape exchanged on the way back, or, where a row has one part, its rows reversed."""
    right = Row.split

    def wrong(self: Row, stored: Plan, shapes: Mapping[str, PartShape]) -> dict[str, Plan]:
        parts = right(self, stored, shapes)
        if fragment in self.name and len(parts) > 1:
            a, b = list(parts)[-2:]
            parts[a], parts[b] = parts[b], parts[a]
        elif fragment in self.name:
            (part,) = parts
            n = parts[part].shape[0]
            halves = [parts[part].slice(0, n // 2, n), parts[part].slice(0, 0, n // 2)]
            parts[part] = concat(halves, 0)
        return parts

    monkeypatch.setattr(Row, "split", wrong)
    report = prove(FIXTURES / name)
    assert report.exit_code == 1
    assert all(f.check == "plan.identity" for f in report.failures)
    assert any(fragment in f.where for f in report.failures), [f.where for f in report.failures]


def test_what_a_round_trip_refuses_the_proof_refuses(tmp_path: Path) -> None:
    from tests.test_verify import changed_tensors

    def drop(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.3.eh_proj.weight"]

    broken = changed_tensors("glm4_moe", tmp_path, drop)
    proof, run = prove(broken), roundtrip(broken)
    assert [f.subject for f in proof.failures] == [f.subject for f in run.failures] == ["model.layers.3.eh_proj.weight"]


MEASURE = """
import json, sys, threading, time
from mtpcheck.cli import run
import mtpcheck.proof, mtpcheck.roundtrip
def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous"))
before, peak, done = anonymous(), 0, threading.Event()
def sample():
    global peak
    while not done.wait(0.05):
        peak = max(peak, anonymous() - before)
thread = threading.Thread(target=sample)
thread.start()
code = run(["roundtrip", sys.argv[1], "--plan", "-q"])
done.set(); thread.join()
print(json.dumps({"code": code, "peak": peak}))
"""


at_length = pytest.mark.skipif(not os.environ.get("MTPCHECK_ALL"), reason="half a minute each: make test-all")


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [
        # 671 B, the MTP layer 11.5 B, copies of embedding and head
        pytest.param("DeepSeek-V3", "46,183", "684,489,845,504", marks=at_length),
        pytest.param("GLM-4.5", "44,691", "358,337,791,296", marks=at_length),  # 355 B without the MTP layer
        ("MiMo-7B", "451", "7,833,409,536"),
        ("Qwen3-Next", "75,944", "81,324,862,720"),  # 80 B, the MTP layer 1.65 B
    ],
)
def test_other_releases_at_full_size(model: str, tensors: str, elements: str, tmp_path: Path) -> None:
    script = [sys.executable, FIXTURES / "full_size.py", tmp_path / "model", model]
    made = subprocess.run(script, capture_output=True, text=True, check=True)
    assert f"{tensors} tensors, {elements} elements" in made.stdout
    assert prove(tmp_path / "model").failures == []


def test_glm_5_2_at_full_size(tmp_path: Path) -> None:
    """Sparse files with real headers: 59,585 tensors and 753,329,940,480 elements, in under 1 GB of memory."""
    made = subprocess.run(
        [sys.executable, FIXTURES / "full_size.py", tmp_path / "glm", "GLM-5.2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "59,585 tensors, 753,329,940,480 elements" in made.stdout
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "glm"], capture_output=True, text=True, check=True, timeout=300
    )
    verdict, measured = ran.stdout.strip().split("\n")
    assert verdict.startswith("HOLDS")
    assert '"code": 0' in measured
    assert int(measured.split('"peak": ')[1].rstrip("}")) < 1_000_000_000, measured
