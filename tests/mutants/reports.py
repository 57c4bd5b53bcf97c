"""Where each kind of damage was met in public: a repository, with the number of a thread or a commit."""

from __future__ import annotations

import re

_BRIDGE, _SWIFT = "NVIDIA-NeMo/Megatron-Bridge", "modelscope/ms-swift"
_REPORTS = {
    "M01": "huggingface/transformers#40968", "M02": "zai-org/GLM-OCR#119", "M03": f"{_SWIFT}#6436",
    "M04": "2U1/Qwen-VL-Series-Finetune#259", "M05": "NVIDIA/Model-Optimizer#750", "M06": "ml-explore/mlx-lm#1543",
    "M07": "NVIDIA/Model-Optimizer#2427", "M08": "unslothai/unsloth#11042", "M09": f"{_SWIFT}#7848",
    "M10": "MiniMax-AI/MiniMax-M2#47", "M11": "vllm-project/vllm#34888", "M12": "unslothai/unsloth-zoo#847",
    "M13": "unslothai/unsloth-zoo#1043", "M14": "ISEEKYAN/mbridge#136", "M15": f"{_BRIDGE}#5946",
    "M16": f"{_BRIDGE}#4960", "M18": f"{_BRIDGE}#4167", "M19": f"{_SWIFT}#9504", "M20": f"{_BRIDGE}#4819",
    "M21": f"{_BRIDGE}#5252", "M22": f"{_BRIDGE}#3348", "M23": "THUDM/slime#1496", "M24": "THUDM/slime#1575",
    "M25": "ISEEKYAN/mbridge#16", "M27": "THUDM/slime#2131", "M29": f"{_BRIDGE}#5140", "M30": f"{_BRIDGE}#4706",
    "M32": f"{_BRIDGE} 0e15d4d3b", "M33": "ggml-org/llama.cpp#27836", "M34": "sgl-project/sglang#35719",
    "M35": "vllm-project/vllm#53387", "M36": "areal-project/AReaL#1403", "M37": "redai-studio/Relax#148",
    "M38": f"{_BRIDGE}#5495", "M39": "ISEEKYAN/mbridge#137", "M40": "ggml-org/llama.cpp#16359",
    "M41": f"{_BRIDGE} 575c0e393", "M42": f"{_BRIDGE}#5154", "M43": "ISEEKYAN/mbridge f8dac26",
    "M44": "ISEEKYAN/mbridge b715d5b", "M46": "intel/auto-round#1650", "M47": f"{_BRIDGE} 039334524",
    "M48": f"{_BRIDGE}#5334", "M49": f"{_SWIFT}#7048", "M50": "vllm-project/vllm#43456",
    "M51": "sgl-project/sglang#21138", "M53": "ISEEKYAN/mbridge#56", "M54": "NVIDIA/Megatron-LM#7577",
    "M55": "spiritbuun/buun-llama-cpp#118", "M56": "THUDM/slime aa435b010", "M57": "THUDM/slime 833fbd46d",
    "M58": "ml-explore/mlx-lm#1469", "M59": "ISEEKYAN/mbridge#145", "M60": "waybarrios/vllm-mlx#400",
    "M62": "ml-explore/mlx-lm#1442", "M64": "youssofal/MTPLX#176", "M65": "sgl-project/sglang#31213",
    "M66": f"{_BRIDGE}#5851", "M67": "vllm-project/vllm-ascend#15346", "M69": "huggingface/transformers#46763",
    "M71": f"{_BRIDGE} 3e3cdf11b", "M72": f"{_BRIDGE} 2f33e3ff3", "M73": "waybarrios/vllm-mlx#471",
    "M74": "sgl-project/sglang#35797", "M75": "vllm-project/vllm#41994", "M76": "sgl-project/sglang#38870",
    "M77": "vllm-project/compressed-tensors#712", "M78": "vllm-project/vllm-ascend#5794",
    "M80": "NVIDIA/TensorRT-LLM#16196", "M81": "vllm-project/vllm#54556", "M82": f"{_SWIFT}#6812",
    "M84": f"{_SWIFT}#9823", "M85": "swiss-ai/Megatron-LM#116", "M89": "vllm-project/vime#351",
    "M90": "vllm-project/vllm#46725",
}  # fmt: skip


def reported(id: str) -> str:
    """The report of an entry and of its variants (M05b as M05); empty for entries of our own."""
    found = re.match(r"M\d+", id)
    return _REPORTS.get(found.group(), "") if found else ""
