"""Real megatron-core, one process a rank, loads the files we wrote for it; what it then saves is the source again."""

from __future__ import annotations

import os
import subprocess
import sys
from math import lcm
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mtpcheck.convert import convert
from mtpcheck.megatron import Options
from mtpcheck.roles import Spec
from mtpcheck.topology import Topology
from mtpcheck.verify import verify
from tests import coded, wide
from tests.test_roundtrip import sha256

from .support import FIXTURES, HERE

CASES = [
    ("qwen2_mtp", "local", Topology(tp=2, etp=2, pp=2)),
    ("glm4_moe", "te", Topology(tp=2, etp=1, pp=2, ep=2, first=1)),
]
"""One dense and one MoE topology; with MTPCHECK_ALL (`make test-all`) the rest."""

if os.environ.get("MTPCHECK_ALL"):
    CASES += [
        ("wide", "local", Topology(tp=4, etp=2, pp=1, ep=2)),
        ("wide", "te", Topology(tp=4, etp=1, pp=1, ep=4)),
        ("wide", "te", Topology(tp=2, etp=2, pp=3, vpp=2, ep=1)),
        ("wide", "local", Topology(tp=1, pp=2, vpp=3, ep=2, layout="Et|t*3|t*2|t*2|t*3|tmmL")),
        ("wide", "te", Topology(tp=2, etp=1, pp=3, ep=2, first=2, last=4)),
        ("wide", "te", Topology(tp=8, etp=2, ep=4)),
        ("wide", "local", Topology(tp=2, etp=2, pp=4, layout="Et*4|t*8|mm|L")),
        ("deepseek_v3", "local", Topology(tp=2, etp=2, pp=3, ep=2)),
        ("deepseek_v3", "te", Topology(tp=2, etp=1, pp=3, ep=2)),
        ("deepseek_v3_noq", "local", Topology(tp=4, etp=2, ep=2)),
        ("mimo", "te", Topology(tp=2, etp=2, pp=3)),
        ("qwen2_mtp", "local", Topology(tp=4, etp=4, pp=2, vpp=2)),
        ("qwen3_mtp", "local", Topology(tp=2, etp=2, pp=2)),
        ("llama_mtp", "te", Topology(tp=2, etp=2, pp=2)),
        ("qwen2_mtp", "local", Topology(tp=8, etp=8)),  # a query group for two ranks
        ("glm4_moe", "te", Topology(tp=8, etp=2, ep=2)),
    ]


def case_id(value: object) -> str:
    return str(value).replace(" · ", "-").replace(" ", "")


@pytest.mark.parametrize(("name", "spec", "topology"), CASES, ids=case_id)
def test_megatron_core_loads_every_rank_and_saves_the_source(
    name: str, spec: Spec, topology: Topology, tmp_path: Path
) -> None:
    source = wide.make(tmp_path / "hf") if name == "wide" else FIXTURES / name
    convert(source, tmp_path / "ranks", "torch", options=Options(spec, 16, topology=topology))
    run_ranks(tmp_path, spec, lcm(topology.tp, topology.ep * topology.etp) * topology.pp)
    if name == "qwen3_mtp":  # 0.16.1 cannot save a tied model with MTP layers on a stage without the embedding
        assert not (tmp_path / "saved").exists()
        return
    report = verify(source, tmp_path / "saved")
    assert report.verdict == "holds", report.findings


def test_what_megatron_rounds_or_decodes_comes_back_through_the_import(tmp_path: Path) -> None:
    """FP8 in blocks and an fp32 norm, loaded into bf16 modules, saved by Megatron into a folder of its own."""
    source = coded.make(tmp_path / "hf")
    norm = "model.layers.1.post_attention_layernorm.weight"
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        if norm in tensors:
            tensors[norm] = tensors[norm].float() * 1.0001
            save_file(tensors, path, {"format": "pt"})
    coded.index_again(source)
    convert(source, tmp_path / "ranks", "torch", options=Options("local", 16, topology=Topology(tp=2, etp=2)))
    run_ranks(tmp_path, "local", 2)
    back = convert(tmp_path / "saved", tmp_path / "back", like=tmp_path / "ranks")
    assert [f.subject for f in back.findings if f.check == "values.kept"] == [norm]
    assert sha256(tmp_path / "back") == sha256(source)


def run_ranks(work: Path, spec: Spec, world: int) -> None:
    te = [str(FIXTURES / "megatron" / "fake_te")] if spec == "te" else []
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([*te, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    init = f"file://{work / 'meet'}"
    command = [sys.executable, str(HERE / "ranks_worker.py"), str(work / "ranks" / "release"), spec]
    logs = [work / f"log{rank}" for rank in range(world)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            call = [*command, str(rank), init, str(work / "saved")]
            running.append(subprocess.Popen(call, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(codes):  # the one that failed first is the one whose peers were there
        said = [log.read_text()[-4000:] for log in logs]
        pytest.fail(next((text for text in said if text and "closed by peer" not in text), said[0]), pytrace=False)
