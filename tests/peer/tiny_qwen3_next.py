"""A Qwen3-Next of a few hundred weights, every one of them told by its place: the source of fixtures/megatron's sample
that mcore_bridge wrote, made anew wherever it is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, EXPERTS, FFN = 8, 16, 2, 4
HEADS, GROUPS, HEAD = 8, 2, 4
KEY_HEADS, VALUE_HEADS, KEY, VALUE, KERNEL = 4, 8, 4, 2, 4

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "partial_rotary_factor": 0.5,
    "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE, "linear_conv_kernel_dim": KERNEL, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": FFN, "shared_expert_intermediate_size": FFN, "intermediate_size": 4 * HIDDEN,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    yield "mtp.fc.weight", (HIDDEN, 2 * HIDDEN)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (HIDDEN,)
    for layer in ("model.layers.0", "model.layers.1", "mtp.layers.0"):
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        attention = _linear() if layer == "model.layers.0" else _full()
        yield from ((f"{layer}.{name}", shape) for name, shape in attention.items())
        yield f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN)
        yield f"{layer}.mlp.shared_expert_gate.weight", (1, HIDDEN)
        for mlp in ("shared_expert", *(f"experts.{e}" for e in range(EXPERTS))):
            yield f"{layer}.mlp.{mlp}.gate_proj.weight", (FFN, HIDDEN)
            yield f"{layer}.mlp.{mlp}.up_proj.weight", (FFN, HIDDEN)
            yield f"{layer}.mlp.{mlp}.down_proj.weight", (HIDDEN, FFN)


def _full() -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (HEADS * 2 * HEAD, HIDDEN),
        "self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
        "self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "self_attn.q_norm.weight": (HEAD,),
        "self_attn.k_norm.weight": (HEAD,),
    }


def _linear() -> dict[str, tuple[int, ...]]:
    keys, values = KEY_HEADS * KEY, VALUE_HEADS * VALUE
    return {
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, HIDDEN),
        "linear_attn.in_proj_ba.weight": (2 * VALUE_HEADS, HIDDEN),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, KERNEL),
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.norm.weight": (VALUE,),
        "linear_attn.out_proj.weight": (HIDDEN, values),
    }


def tensors() -> dict[str, torch.Tensor]:
    """Stored name → bf16 values, of which no two within one tensor have the same bits, and none is NaN."""
    found = {}
    for number, (name, shape) in enumerate(_shapes()):
        bits = 0x3800 + (311 * number + torch.arange(torch.Size(shape).numel())) % 0x0900
        found[name] = bits.to(torch.int16).view(torch.bfloat16).reshape(shape)
    return found


def write(folder: Path) -> Path:
    """The Hugging Face folder. Its bytes are the same ones each time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder
