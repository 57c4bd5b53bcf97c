"""Tiny quantized checkpoints: a fixture with some of its modules packed, with made-up codes of the right form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.coded import index_again
from tests.conftest import FIXTURES, edit_json

Tensors = dict[str, torch.Tensor]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits but NaN's."""
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.rand(shape, generator=random).to(dtype)
    top = 127 if dtype.is_floating_point or dtype == torch.int8 else 255 if dtype == torch.uint8 else 1 << 30
    wide = torch.randint(0, top, shape, generator=random)
    return wide.to(torch.uint8).view(dtype) if dtype.is_floating_point else wide.to(dtype)


F8, U8, I8, I32, I64, F32 = (
    torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32
)  # fmt: skip
HALF = torch.float16


def forms(rows: int, columns: int) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Every form: ends of names, with shape and dtype."""
    groups, grid = columns // 8, (-(-rows // 40), -(-columns // 24))
    gptq = {
        ".qweight": ((columns // 8, rows), I32), ".qzeros": ((groups, rows // 8), I32),
        ".scales": ((groups, rows), HALF), ".g_idx": ((columns,), I32),
    }  # fmt: skip
    awq = {
        ".qweight": ((columns, rows // 8), I32), ".qzeros": ((groups, rows // 8), I32),
        ".scales": ((groups, rows), HALF),
    }  # fmt: skip
    return {
        "compressed-tensors int4": {
            ".weight_packed": ((rows, columns // 8), I32), ".weight_scale": ((rows, groups), HALF),
            ".weight_shape": ((2,), I64),
        },
        "compressed-tensors int8": {".weight": ((rows, columns), I8), ".weight_scale": ((rows, 1), F32)},
        "compressed-tensors fp8": {".weight": ((rows, columns), F8), ".weight_scale": ((rows, 1), F32)},
        "compressed-tensors nvfp4": {
            ".weight_packed": ((rows, columns // 2), U8), ".weight_scale": ((rows, columns // 16), F8),
            ".weight_global_scale": ((1,), F32), ".input_global_scale": ((1,), F32),
        },
        "gptq": gptq, "auto-round": gptq, "awq": awq,
        "modelopt fp8": {".weight": ((rows, columns), F8), ".weight_scale": ((), F32), ".input_scale": ((), F32)},
        "modelopt nvfp4": {
            ".weight": ((rows, columns // 2), U8), ".weight_scale": ((rows, columns // 16), F8),
            ".weight_scale_2": ((), F32), ".input_scale": ((), F32),
        },
        "mxfp4": {"_blocks": ((rows, columns // 32, 16), U8), "_scales": ((rows, columns // 32), U8)},
        "bitsandbytes": {
            ".weight": ((rows * columns // 2, 1), U8), ".weight.absmax": ((rows * columns // 64,), F32),
            ".weight.quant_map": ((16,), F32), ".weight.quant_state.bitsandbytes__nf4": ((64,), U8),
        },
        "fp8": {".weight": ((rows, columns), F8), ".weight_scale_inv": (grid, F32)},
        "fp8 tensor": {
            ".weight": ((rows, columns), F8), ".weight_scale_inv": ((), F32), ".activation_scale": ((), F32),
        },
        "modelslim": {
            ".weight": ((rows, columns), I8), ".weight_scale": ((rows, 1), F32), ".weight_offset": ((rows, 1), F32),
        },
    }  # fmt: skip


FORMS = tuple(forms(64, 64))
CONFIG: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 8},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [40, 24]},
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "static"},
}  # fmt: skip
LISTS = {
    "compressed-tensors": "ignore", "awq": "modules_to_not_convert", "modelopt": "exclude_modules",
    "mxfp4": "modules_to_not_convert", "fp8": "modules_to_not_convert", "fp8 tensor": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
}  # fmt: skip


def excluding(method: str, names: list[str]) -> dict[str, Any]:
    """What a method's config says to leave these modules alone."""
    if method == "gptq":
        return {"dynamic": {"-:" + name.replace(".", r"\.") + "$": {} for name in names}}
    if method == "auto-round":
        return {"extra_config": {name: {"bits": 16} for name in names}}
    return {LISTS[method]: names}


def method_of(form: str) -> str:
    return form if form in CONFIG else form.split()[0]


def is_linear(name: str) -> bool:
    """The matrices that are packed in releases, the MTP layer's too."""
    return name.endswith(("_proj.weight", "_mqa.weight", "mtp.fc.weight")) and "eh_proj" not in name


def packs(tensors: Tensors, name: str, form: str) -> None:
    """Replace one weight by its packed form."""
    module, weight = name.removesuffix(".weight"), tensors.pop(name)
    for number, (end, (shape, dtype)) in enumerate(forms(*weight.shape)[form].items()):
        tensors[module + end] = drawn(shape, dtype, hash_of(name) + number)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-6:], "big") % 10_000_019


def make(
    folder: Path,
    fixture: str,
    form: str,
    chosen: Callable[[str], bool] = is_linear,
    excluded: list[str] | None = None,
    declared: bool = True,
) -> Path:
    """Write a packed copy of a fixture. ``excluded``: module names on the list; ``chosen``: weights that are packed."""
    source = FIXTURES / fixture
    folder.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            for name in sorted(filter(chosen, tensors)):
                packs(tensors, name, form)
            save_file(tensors, folder / path.name, {"format": "pt"})
        elif path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    method = method_of(form)
    if declared and method in CONFIG:
        lists = excluding(method, excluded) if excluded is not None else {}
        edit_json(folder / "config.json", quantization_config={**CONFIG[method], **lists})
    if method == "modelslim":
        describe(folder)
    index_again(folder)
    return folder


def describe(folder: Path, leave_out: Callable[[str], bool] = lambda name: False) -> None:
    """ModelSlim's side file: every tensor with its kind."""
    kinds = {name: "W8A8_DYNAMIC" if t.dtype == I8 else "FLOAT" for name, t in stored(folder).items()}
    kinds |= {n: "W8A8_DYNAMIC" for n in kinds if n.endswith(("_scale", "_offset"))}
    kinds = {name: kind for name, kind in kinds.items() if not leave_out(name)}
    text = json.dumps({"model_quant_type": "W8A8_DYNAMIC", **kinds})
    (folder / "quant_model_description.json").write_text(text)


def stored(folder: Path) -> Tensors:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change every shard's tensors by ``change``, which sees one shard at a time, and write the index anew."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})
    index_again(folder)
    return folder
