"""What the tests of this folder share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpcheck.cli import run as cli

from .independent import Spec, Tensors

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[1] / "fixtures"
NAMES = (
    "glm4_moe",
    "glm4_moe_nocopies",
    "qwen2_mtp",
    "qwen3_mtp",
    "llama_mtp",
    "deepseek_v3",
    "deepseek_v3_noq",
    "glm_moe_dsa",
    "mimo",
    "kimi_k2",
    "glm4_moe_lite",
    "deepseek_v32",
    "hy_v3",
    "bailing_moe_v2",
)
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run(*command: str | Path, python_path: tuple[Path, ...] = ()) -> None:
    """Run with this Python; on failure show what the command said."""
    inherited = [p for p in [os.environ.get("PYTHONPATH")] if p]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([*map(str, python_path), *inherited]),
    }
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120)
    if done.returncode:
        shown = " ".join(map(str, command))
        pytest.fail(f"{shown}: exit {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)


def convert(name: str, root: Path, spec: Spec) -> Path:
    """Have mtpcheck convert a fixture, and give the folder that holds the checkpoint itself."""
    assert cli(["convert", str(FIXTURES / name), str(root), "--spec", spec, "--quiet"]) == 0
    assert (root / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    return root / "release"


def read_hf(name: str) -> Tensors:
    files = sorted((FIXTURES / name).glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compared as numbers, a NaN differs from itself and the sign of a zero is lost."""
    return tensor.contiguous().view(INTEGER[tensor.element_size()])


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(bits(actual[name]), bits(tensor)), name
