"""What the Hugging Face fixtures must have for a fault to show in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import FIXTURES

NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))

FP32 = ("e_score_correction_bias", "expert_bias")
FP32_OF = {
    "qwen3_5": ("A_log", "linear_attn.norm.weight"),
    "minimax_m3": ("block_sparse_moe.gate.weight", "patch_embedding.weight"),
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", NAMES)
def test_norms_biases_and_signs_show_when_they_are_lost(name: str) -> None:
    tensors = tensors_of(FIXTURES / name)
    for key, tensor in tensors.items():
        values = tensor.float()
        assert values.isfinite().all(), key
        wide = key.endswith((*FP32, *FP32_OF.get(name, ())))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), key
        if "norm" in key and key.endswith("weight"):
            assert values.std() > 0.2, f"{key} could be exchanged with another and nobody would see it"
        if key.endswith("bias"):
            assert values.std() > 0.01, f"{key} could be lost and nobody would see it"
    negative = [key for key, t in tensors.items() if ((t == 0) & t.signbit()).any()]
    assert len(negative) >= 2 and all("mtp" in key or ".layers." in key for key in negative), negative


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_copies_are_copies(name: str) -> None:
    tensors = tensors_of(FIXTURES / name)
    assert torch.equal(tensors["model.layers.3.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors["model.layers.3.shared_head.head.weight"], tensors["lm_head.weight"])


def test_fixtures_stay_small() -> None:
    out = subprocess.run(["git", "ls-files", "-z", "."], cwd=FIXTURES, capture_output=True)
    if out.returncode:
        pytest.skip("not a git checkout")
    assert sum((FIXTURES / name).stat().st_size for name in out.stdout.decode().split("\0") if name) < 40_000_000
