"""The parts of real Megatron checkpoints, run by a forward of our own, give megatron-core's own logits.

A byte round trip cannot see a mistake that undoes itself on the way back; these tests can.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.tensormap import read_tensor_map
from tests.oracle import Logits, forward, read_parts

FIXTURES = Path(__file__).parent.parent / "fixtures"
SAMPLES = FIXTURES / "megatron" / "core-0.16.1"
CASES = ("dense_tp1", "tied_tp1", "dense2_tp1", "moegqa_tp1", "moeall_tp1", "moe_tp1")
# Attention, rope and routing that none of these cases has, with a part that is the poorer for another order.
OF_HUGGING_FACE = {
    "deepseek_v3": "layers.1.attn.kv_b",
    "deepseek_v3_noq": "layers.1.attn.q",
    "glm_moe_dsa": "layers.1.attn.indexer.q_b",
}
SAME, DIFFERENT = 1e-5, 1e-3


@dataclass(frozen=True)
class Sample:
    parts: dict[str, Tensor]
    facts: dict[str, Any]
    recorded: dict[str, Tensor]

    def run(self, parts: dict[str, Tensor] | None = None, **wrong: bool) -> Logits:
        return forward(self.parts if parts is None else parts, self.facts, self.recorded["input_ids"], **wrong)

    def errors(self, logits: Logits) -> dict[str, float]:
        """Largest difference from the recorded logits: of the model, and of each MTP layer."""
        return {
            name: (self.recorded[f"fp32.{name}"][..., : ours.shape[-1]] - ours).abs().max().item()
            for name, ours in [
                ("logits", logits.main),
                *((f"mtp{i}.logits", mtp) for i, mtp in enumerate(logits.mtp)),
            ]
        }


@pytest.fixture(scope="module", params=CASES)
def sample(request: pytest.FixtureRequest) -> Sample:
    folder = SAMPLES / request.param
    tensor_map = read_tensor_map(
        open_checkpoint(folder / "torch_dist"), "qwen2" if request.param == "dense_tp1" else None
    )
    return Sample(read_parts(tensor_map), dict(tensor_map.facts), load_file(folder / "oracle.safetensors"))


def exchanged(parts: dict[str, Tensor], a: str, b: str) -> dict[str, Tensor]:
    """The parts with every `…a` and `…b` in each other's place."""
    other = {name: name.removesuffix(a) + b for name in parts if name.endswith(a)}
    assert other, f"no part is called …{a}"
    return parts | {a: parts[b] for a, b in other.items()} | {b: parts[a] for a, b in other.items()}


def test_logits_are_those_of_megatron(sample: Sample) -> None:
    errors = sample.errors(sample.run())
    mtp_layers = sum(name.startswith("fp32.mtp") and name.endswith(".logits") for name in sample.recorded)
    assert len(errors) == 1 + mtp_layers
    assert max(errors.values()) < SAME, errors


def test_exchanged_projection_halves_show(sample: Sample) -> None:
    errors = sample.errors(sample.run(exchanged(sample.parts, ".proj.embed", ".proj.hidden")))
    assert errors.pop("logits") < SAME
    assert min(errors.values()) > DIFFERENT, errors


def test_hidden_from_before_the_final_norm_shows(sample: Sample) -> None:
    errors = sample.errors(sample.run(feed_prenorm=True))
    assert errors.pop("logits") < SAME
    assert min(errors.values()) > DIFFERENT, errors


def test_exchanged_gate_and_up_show(sample: Sample) -> None:
    errors = sample.errors(sample.run(exchanged(sample.parts, ".gate", ".up")))
    assert min(errors.values()) > DIFFERENT, errors


def test_exchanged_gate_and_up_of_mtp_alone_show(sample: Sample) -> None:
    mtp = {name: part for name, part in sample.parts.items() if name.startswith("mtp.")}
    errors = sample.errors(sample.run(sample.parts | exchanged(mtp, ".gate", ".up")))
    assert errors.pop("logits") < SAME
    assert min(errors.values()) > DIFFERENT, errors


@pytest.mark.parametrize("name", OF_HUGGING_FACE)
def test_logits_are_those_of_transformers(name: str) -> None:
    """The indexer above all, which megatron-core cannot run on a CPU."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(2 * 80).reshape(2, 80) * 7 % 260  # more tokens than an indexer chooses
    with torch.no_grad():
        expected = model(ids).logits
    tensor_map = read_tensor_map(open_checkpoint(FIXTURES / name))
    parts, facts = read_parts(tensor_map), {**tensor_map.facts, "latent_norm_eps": 1e-6}

    def error(parts: dict[str, Tensor]) -> float:
        """Of the largest logit."""
        return ((forward(parts, facts, ids).main - expected).abs().max() / expected.abs().max()).item()

    assert error(parts) < SAME
    part = OF_HUGGING_FACE[name]
    disordered = parts | {part: parts[part].flip(0)}
    assert error(disordered) > DIFFERENT
