"""megatron-core's gated attention and gated delta nets, on what mtpcheck wrote: names, shapes, bits, and logits."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.cli import run as cli
from mtpcheck.draft.run import Engine, run
from mtpcheck.tensormap import read_tensor_map

from .independent import Config, Tensors
from .independent_gated import hf_to_megatron
from .support import FIXTURES, HERE, assert_same_bits
from .support import run as start

NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True)
class Case:
    source: Path
    written: Path
    config: Config
    hf: Tensors
    keys: dict[str, list[int]]
    loaded: Tensors
    logits: Tensors


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.xdist_group(f"gated-{n}")) for n in NAMES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A fixture whose values Megatron holds as they are, converted, and loaded by megatron-core."""
    work = tmp_path_factory.mktemp(request.param)
    source = shutil.copytree(FIXTURES / request.param, work / "hf")
    hf: Tensors = {}
    for file in source.glob("*.safetensors"):
        tensors = {name: representable(name, tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
        hf |= tensors
    assert cli(["convert", str(source), str(work / "megatron"), "--text-only", "--quiet"]) == 0
    written = work / "megatron" / "release"
    start(HERE / "gated_worker.py", written, work / "out")
    config = json.loads((source / "config.json").read_text())
    return Case(
        source=source,
        written=written,
        config=config.get("text_config", config),
        hf=hf,
        keys=json.loads((work / "out" / "keys.json").read_text()),
        loaded=load_file(work / "out" / "weights.safetensors"),
        logits=load_file(work / "out" / "logits.safetensors"),
    )


def representable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """bf16 values, and gains from which one can be taken without rounding."""
    gain = tensor.clamp(min=0.5) if name.endswith("linear_attn.norm.weight") else tensor
    return gain.to(torch.bfloat16)


def test_keys_and_shapes_are_those_of_megatron_core(case: Case) -> None:
    ours = {name: list(ref.shape) for name, ref in open_checkpoint(case.written).tensors.items()}
    assert {name: shape for name, shape in case.keys.items() if not name.endswith("_extra_state")} == ours


def test_every_parameter_bit_for_bit(case: Case) -> None:
    assert_same_bits(case.loaded, hf_to_megatron(case.hf, case.config))


def test_megatron_computes_and_drafts_what_the_engine_does(case: Case) -> None:
    """Main logits are those of transformers' trunk, which the engine runs; so orders within tensors are right too."""
    checkpoint = open_checkpoint(case.source)
    engine = Engine(checkpoint, read_tensor_map(checkpoint))
    ours = run(engine, case.logits["ids"].tolist(), ablate=False, keep_logits=True).passages
    theirs = {name: own for name, own in case.logits.items() if name != "ids"}
    assert [*theirs] == ["logits", "mtp0"]
    for depth, own in enumerate(theirs.values()):
        for passage, expected in zip(ours, own, strict=True):
            count, vocabulary = passage.logits[depth].shape
            actual = torch.from_numpy(passage.logits[depth])
            torch.testing.assert_close(actual, expected[:count, :vocabulary], rtol=1e-5, atol=1e-4)
