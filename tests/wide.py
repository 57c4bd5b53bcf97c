"""A GLM-4.5 of 12 layers, 8 query groups, 8 experts and 2 MTP layers: enough to cut in a hundred ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtpcheck.facts import facts_from_config
from mtpcheck.family import load_family

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 2,
    "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64,
    "num_attention_heads": 16, "num_key_value_heads": 8, "torch_dtype": "bfloat16", "vocab_size": 67,
    "partial_rotary_factor": 0.5, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "num_hidden_layers": 12, "num_nextn_predict_layers": 2, "rms_norm_eps": 1e-05,
    "rope_theta": 10000, "tie_word_embeddings": False, "use_qk_norm": True,
}  # fmt: skip


def make(folder: Path) -> Path:
    """Write the checkpoint. Every bit is random, so that no two tensors are alike."""
    family = load_family("glm4_moe")
    facts = {**facts_from_config(family.all_config, CONFIG, family.all_fixed), "mtp_stored": 2}
    model = family.model(facts)
    drawn = torch.Generator().manual_seed(12)
    tensors = {}
    for row in model.rows:
        if row.parts[0] not in model.copies:
            dtype = torch.float32 if row.name.endswith("e_score_correction_bias") else torch.bfloat16
            shape = row.shape(model.shapes)
            bits = torch.randint(-(1 << 15), 1 << 15, (*shape, dtype.itemsize // 2), generator=drawn, dtype=torch.int16)
            tensors[row.name] = bits.view(dtype).reshape(shape)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
