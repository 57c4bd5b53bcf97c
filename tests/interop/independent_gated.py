"""What megatron-core must hold for Qwen3-Next, Qwen3.5 and Qwen3.6, worked out head by head. As independent.py: plain
loops, and not one line or table shared with mtpcheck."""

from __future__ import annotations

import torch

from .independent import Config, Take, Tensors, convert_mlp, pad_vocabulary


def rows(tensor: torch.Tensor, first: int, count: int) -> list[torch.Tensor]:
    return [tensor[row : row + 1] for row in range(first, first + count)]


def gated_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: Config) -> torch.Tensor:
    """For each query group: its queries, then their gates, its key and its value; HF has each gate beside its query."""
    groups, size = config["num_key_value_heads"], config["head_dim"]
    own, out = config["num_attention_heads"] // groups, []
    for group in range(groups):
        for half in (0, 1):
            for head in range(group * own, (group + 1) * own):
                out += rows(q, (2 * head + half) * size, size)
        out += rows(k, group * size, size) + rows(v, group * size, size)
    return torch.cat(out)


def delta_projection(take: Take, hf: str, config: Config) -> torch.Tensor:
    """All queries, then all keys, values, output gates, betas and alphas."""
    if f"{hf}.in_proj_qkv.weight" in take.left:
        return torch.cat([take(f"{hf}.in_proj_{own}.weight") for own in ("qkv", "z", "b", "a")])
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // heads
    width = each * config["linear_value_head_dim"]
    wide, narrow = take(f"{hf}.in_proj_qkvz.weight"), take(f"{hf}.in_proj_ba.weight")
    out = []
    for first, count in ((0, size), (size, size), (2 * size, width), (2 * size + width, width)):
        for head in range(heads):
            out += rows(wide, head * 2 * (size + width) + first, count)
    for half in (0, 1):
        for head in range(heads):
            out += rows(narrow, (2 * head + half) * each, each)
    return torch.cat(out)


def convert_attention(take: Take, hf: str, megatron: str, config: Config) -> Tensors:
    own, delta = f"{hf}.self_attn", f"{hf}.linear_attn"
    first = take(f"{hf}.input_layernorm.weight")
    if f"{own}.q_proj.weight" in take.left:
        q, k, v = (take(f"{own}.{letter}_proj.weight") for letter in "qkv")
        return {
            f"{megatron}.linear_qkv.layer_norm_weight": first,
            f"{megatron}.linear_qkv.weight": gated_heads(q, k, v, config),
            f"{megatron}.q_layernorm.weight": take(f"{own}.q_norm.weight"),
            f"{megatron}.k_layernorm.weight": take(f"{own}.k_norm.weight"),
            f"{megatron}.linear_proj.weight": take(f"{own}.o_proj.weight"),
        }
    return {
        f"{megatron}.in_proj.layer_norm_weight": first,
        f"{megatron}.in_proj.weight": delta_projection(take, delta, config),
        f"{megatron}.conv1d.weight": take(f"{delta}.conv1d.weight"),
        f"{megatron}.A_log": take(f"{delta}.A_log"),
        f"{megatron}.dt_bias": take(f"{delta}.dt_bias"),
        f"{megatron}.out_norm.weight": take(f"{delta}.norm.weight") - 1,
        f"{megatron}.out_proj.weight": take(f"{delta}.out_proj.weight"),
    }


def convert_experts(take: Take, hf: str, megatron: str, config: Config) -> Tensors:
    out = {
        f"{megatron}.router.weight": take(f"{hf}.gate.weight"),
        f"{megatron}.shared_experts.gate_weight": take(f"{hf}.shared_expert_gate.weight"),
    } | convert_mlp(take, f"{hf}.shared_expert", f"{megatron}.shared_experts")
    packed = f"{hf}.experts.gate_up_proj" in take.left
    both, down = (take(f"{hf}.experts.{own}_proj") if packed else None for own in ("gate_up", "down"))
    for expert in range(config["num_experts"]):
        local = f"{megatron}.experts.local_experts.{expert}"
        if both is None or down is None:
            out |= convert_mlp(take, f"{hf}.experts.{expert}", local)
        else:
            out |= {f"{local}.linear_fc1.weight": both[expert], f"{local}.linear_fc2.weight": down[expert]}
    return out


def convert_layer(take: Take, hf: str, megatron: str, config: Config) -> Tensors:
    out = convert_attention(take, hf, f"{megatron}.self_attention", config)
    second = take(f"{hf}.post_attention_layernorm.weight")
    if "num_experts" in config:
        out[f"{megatron}.pre_mlp_layernorm.weight"] = second
        return out | convert_experts(take, f"{hf}.mlp", f"{megatron}.mlp", config)
    out[f"{megatron}.mlp.linear_fc1.layer_norm_weight"] = second
    return out | convert_mlp(take, f"{hf}.mlp", f"{megatron}.mlp")


def hf_to_megatron(hf: Tensors, config: Config) -> Tensors:
    """All that `GPTModel.state_dict()` holds of the text model, but for `_extra_state`. ``config`` is the text's."""
    take = Take({name: tensor for name, tensor in hf.items() if not name.startswith("model.visual.")})
    text = "model" if config["model_type"] == "qwen3_next" else "model.language_model"
    out = {
        "embedding.word_embeddings.weight": pad_vocabulary(take(f"{text}.embed_tokens.weight")),
        "decoder.final_layernorm.weight": take(f"{text}.norm.weight"),
        "mtp.layers.0.enorm.weight": take("mtp.pre_fc_norm_embedding.weight"),
        "mtp.layers.0.hnorm.weight": take("mtp.pre_fc_norm_hidden.weight"),
        "mtp.layers.0.eh_proj.weight": take("mtp.fc.weight"),
        "mtp.layers.0.final_layernorm.weight": take("mtp.norm.weight"),
    }
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = pad_vocabulary(take("lm_head.weight"))
    for k in range(config["num_hidden_layers"]):
        out |= convert_layer(take, f"{text}.layers.{k}", f"decoder.layers.{k}", config)
    out |= convert_layer(take, "mtp.layers.0", "mtp.layers.0.transformer_layer", config)
    assert not take.left, f"not converted: {sorted(take.left)}"
    return out
