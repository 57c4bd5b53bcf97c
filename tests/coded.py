"""A DeepSeek-V3 in block-scaled FP8, as its release is, with every code there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import FIXTURES

BLOCK = (40, 24)  # ragged at both edges of every matrix


def make(folder: Path, powers_of_two: bool = False) -> Path:
    """Write the checkpoint. Codes are random, all 256 of them, NaN and -0.0 included; scales are fp32."""
    source = FIXTURES / "deepseek_v3"
    drawn = torch.Generator().manual_seed(8)
    folder.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            tensors[name] = tensor
            if is_coded(name):
                rows, columns = tensor.shape
                codes = torch.randint(0, 256, (rows, columns), generator=drawn, dtype=torch.uint8)
                codes.view(-1)[:256] = torch.arange(256)
                grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
                scales = torch.rand(grid, generator=drawn) * 10.0 ** torch.randint(-9, 9, grid, generator=drawn)
                tensors[name] = codes.view(torch.float8_e4m3fn)
                tensors[name + "_scale_inv"] = torch.exp2(torch.log2(scales).round()) if powers_of_two else scales
        save_file(tensors, folder / path.name, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    index_again(folder)
    return folder


def is_coded(name: str) -> bool:
    """As in the release: the matrices of attention, MLP and experts, those of the MTP layer too, and nothing else."""
    return name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name


def index_again(folder: Path) -> None:
    """Write the index for what is in the shards."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update({name: (path.name, t.numel() * t.itemsize) for name, t in load_file(path).items()})
    index = {
        "metadata": {"total_size": sum(n for _, n in found.values())},
        "weight_map": {k: v[0] for k, v in found.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
