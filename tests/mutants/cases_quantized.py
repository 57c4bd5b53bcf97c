"""Faults of a quantization declaration: what is packed, against what the config says is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import packed
from tests.conftest import FIXTURES, edit_json
from tests.mutants import hf
from tests.mutants.case import Case, Edit
from tests.mutants.originals import head_modules

GLM = "glm4_moe in AWQ, head plain"
QWEN = "qwen3_mtp in int4, head plain"
DEEPSEEK = "deepseek_v3 in GPTQ, head plain"


def excluding(fixture: str, method: str, left_out: str = "", wanted: str = "") -> Edit:
    """Declare the MTP modules of a fixture excluded, but for those with ``left_out`` in their names."""
    names = [n for n in head_modules(fixture) if wanted in n and not (left_out and left_out in n)]

    def change(table: dict[str, Any]) -> None:
        table["quantization_config"] = {**packed.CONFIG[method], **packed.excluding(method, names)}

    return hf.config(change)


def bare(method: str) -> Edit:
    return hf.config(lambda table: table.update(quantization_config=packed.CONFIG[method]))


def _plain_too(folder: Path) -> None:
    """The query projection of the MTP layer is stored plain beside its codes."""
    name = "model.layers.3.self_attn.q_proj.weight"
    plain = packed.stored(FIXTURES / "glm4_moe")[name]
    hf.edit(folder, lambda tensors: tensors.update({name: plain}))


def _undescribed(folder: Path) -> None:
    packed.describe(folder, lambda name: name.startswith("model.layers.3."))


def _contradict(folder: Path) -> None:
    table = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text("{}")
    edit_json(folder / "hf_quant_config.json", **table)


CASES = [
    Case("M35", "the MTP layer is plain, and nothing says so", bare("awq"), (GLM,), ("quantization.undeclared",)),
    Case("M35b", "as M35", bare("compressed-tensors"), (QWEN,), ("quantization.undeclared",)),
    Case("M35c", "as M35", bare("gptq"), (DEEPSEEK,), ("quantization.undeclared",)),
    Case("M46", "one projection is stored plain and packed", _plain_too, ("glm4_moe in AWQ",), ("quantization.both",)),
    Case("M74", "of q, k and v one is not on the list", excluding("glm4_moe", "awq", "v_proj"), (GLM,),
         ("quantization.fused",)),
    Case("M74b", "of gate and up one is not on the list", excluding("qwen3_mtp", "compressed-tensors", "up_proj"),
         (QWEN,), ("quantization.fused",)),
    Case("M75", "the list lacks the MTP layer's experts", excluding("glm4_moe", "awq", ".experts."), (GLM,),
         ("quantization.undeclared",)),
    Case("M75b", "as M75", excluding("deepseek_v3", "gptq", ".experts."), (DEEPSEEK,), ("quantization.undeclared",)),
    Case("M77", "the MTP layer is on the list and packed", excluding("glm4_moe", "awq"), ("glm4_moe in AWQ",),
         ("quantization.excluded",)),
    Case("M78", "the description of every tensor lacks the MTP layer", _undescribed,
         ("deepseek_v3 in int8, described",), ("quantization.description",)),
    Case("M80", "the projection is on the list and stored in FP8", hf.config(lambda table: table.update(
        quantization_config={**packed.CONFIG["modelopt"], "exclude_modules": ["model.layers.3.eh_proj"]})),
        ("deepseek_v3 in FP8, projection too",), ("quantization.excluded",)),
    Case("X27", "two declarations exclude different modules", _contradict, ("glm4_moe in NVFP4, head plain",),
         ("quantization.contradiction",)),
    Case("X28", "quantization is declared and nothing is packed", bare("fp8"), ("deepseek_v3", "glm4_moe"),
         ("quantization.declared",)),
    Case("X29", "codes without their scales", hf.drop(r"{layer}\.self_attn\.o_proj\.scales"), ("glm4_moe in AWQ",),
         ("quantization.scale",)),
]  # fmt: skip
