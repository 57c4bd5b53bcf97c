"""A DeepSeek-V3 in block-scaled FP8, as its release is, with every code there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import FIXTURES

BLOCK = (40, 24)  # ragged at both edges of every matrix


Scales = Literal["fp32", "powers", "bf16", "e8m0", "one", "one_renamed"]
"""fp32 or bf16 scales of any value, powers of two as fp32 or as exponents; or one a tensor, in two spellings."""


def make(folder: Path, scales: Scales = "fp32", finite: bool = False) -> Path:
    """Write the checkpoint. All 256 codes occur in every matrix: NaN, zeros, -0.0, subnormals and the largest.

    ``finite``: without NaN, and with scales that a model can be run with.
    """
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
                codes = torch.randint(0, 256, tensor.shape, generator=drawn, dtype=torch.uint8)
                codes.view(-1)[:256] = torch.arange(256)
                if finite:
                    codes[codes & 0x7F == 0x7F] = 0
                tensors[name] = codes.view(torch.float8_e4m3fn)
                own = scales_of(name, tensor.shape, scales, drawn)
                tensors.update({n: torch.full_like(t, 1e-3) for n, t in own.items()} if finite else own)
        save_file(tensors, folder / path.name, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    declared: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    if scales in ("one", "one_renamed"):
        declared["activation_scheme"] = "static"
    else:
        declared["weight_block_size"] = list(BLOCK)
    if scales in ("powers", "e8m0"):
        declared["scale_fmt"] = "ue8m0"
    config["quantization_config"] = declared
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    index_again(folder)
    return folder


def scales_of(name: str, shape: torch.Size, scales: Scales, drawn: torch.Generator) -> dict[str, torch.Tensor]:
    """What belongs to the codes of one matrix."""
    if scales in ("one", "one_renamed"):
        own, activation = ("_scale_inv", "activation_scale") if scales == "one" else ("_scale", "input_scale")
        one = torch.rand((), generator=drawn)
        return {name + own: one, name.removesuffix("weight") + activation: one + 1}
    grid = [-(-n // edge) for n, edge in zip(shape, BLOCK, strict=True)]
    values = torch.rand(grid, generator=drawn) * 10.0 ** torch.randint(-9, 9, grid, generator=drawn)
    if scales == "bf16":
        values = values.bfloat16()
    if scales in ("powers", "e8m0"):
        values = torch.exp2(torch.log2(values).round())
    return {name + "_scale_inv": values.to(torch.float8_e8m0fnu) if scales == "e8m0" else values}


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
