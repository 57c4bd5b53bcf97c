"""What megatron-core must hold for a given Hugging Face checkpoint, worked out head by head.

The second opinion: plain loops, and not one line or table shared with mtpcheck. Keep it that way.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

Spec = Literal["local", "te"]
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

VOCABULARY_MULTIPLE = 128


class Take:
    """Hands out each tensor once, so that what nobody asked for is known at the end."""

    def __init__(self, tensors: Tensors) -> None:
        self.all = tensors
        self.left = set(tensors)

    def __call__(self, name: str) -> torch.Tensor:
        self.left.remove(name)
        return self.all[name]


def mtp_count(config: Config) -> int:
    return int(config.get("num_nextn_predict_layers", 0) or config.get("mtp_num_hidden_layers", 0))


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def dense_layers(config: Config) -> int:
    """How many of the first layers have a plain MLP."""
    return int(config["first_k_dense_replace" if "n_routed_experts" in config else "num_hidden_layers"])


def pad_vocabulary(rows: torch.Tensor) -> torch.Tensor:
    pieces = [rows]
    count = rows.shape[0]
    while count % VOCABULARY_MULTIPLE:
        pieces.append(torch.zeros_like(rows[:1]))
        count += 1
    return torch.cat(pieces)


def interleave_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: Config) -> torch.Tensor:
    """For each query group: the rows of its query heads, then of its key head, then of its value head."""
    groups = config["num_key_value_heads"]
    heads_per_group = config["num_attention_heads"] // groups
    size = head_dim(config)
    rows = []
    for group in range(groups):
        for head in range(group * heads_per_group, (group + 1) * heads_per_group):
            for row in range(head * size, (head + 1) * size):
                rows.append(q[row : row + 1])
        for row in range(group * size, (group + 1) * size):
            rows.append(k[row : row + 1])
        for row in range(group * size, (group + 1) * size):
            rows.append(v[row : row + 1])
    return torch.cat(rows)


def convert_mlp(take: Take, hf: str, megatron: str) -> Tensors:
    gate, up = take(f"{hf}.gate_proj.weight"), take(f"{hf}.up_proj.weight")
    return {
        f"{megatron}.linear_fc1.weight": torch.cat([gate, up]),
        f"{megatron}.linear_fc2.weight": take(f"{hf}.down_proj.weight"),
    }


def convert_moe(take: Take, hf: str, megatron: str, config: Config, spec: Spec) -> Tensors:
    out = {
        f"{megatron}.router.weight": take(f"{hf}.gate.weight"),
        f"{megatron}.router.expert_bias": take(f"{hf}.gate.e_score_correction_bias").float(),
    }
    for expert in range(config["n_routed_experts"]):
        made = convert_mlp(take, f"{hf}.experts.{expert}", "expert")
        for linear in ("linear_fc1", "linear_fc2"):
            name = {
                "te": f"{megatron}.experts.{linear}.weight{expert}",
                "local": f"{megatron}.experts.local_experts.{expert}.{linear}.weight",
            }[spec]
            out[name] = made[f"expert.{linear}.weight"]
    return out | convert_mlp(take, f"{hf}.shared_experts", f"{megatron}.shared_experts")


def convert_layer(take: Take, hf: str, megatron: str, config: Config, spec: Spec, moe: bool) -> Tensors:
    attention, mlp = f"{megatron}.self_attention", f"{megatron}.mlp"
    out = {f"{attention}.linear_proj.weight": take(f"{hf}.self_attn.o_proj.weight")}
    for kind in ("weight", "bias"):
        if kind == "bias" and f"{hf}.self_attn.q_proj.bias" not in take.left:
            continue
        q, k, v = (take(f"{hf}.self_attn.{letter}_proj.{kind}") for letter in "qkv")
        out[f"{attention}.linear_qkv.{kind}"] = interleave_heads(q, k, v, config)
    if f"{hf}.self_attn.q_norm.weight" in take.left:
        out[f"{attention}.q_layernorm.weight"] = take(f"{hf}.self_attn.q_norm.weight")
        out[f"{attention}.k_layernorm.weight"] = take(f"{hf}.self_attn.k_norm.weight")

    # Transformer Engine fuses a norm into the linear layer after it. An MoE layer begins with a router.
    te = spec == "te"
    first = f"{attention}.linear_qkv.layer_norm_weight" if te else f"{megatron}.input_layernorm.weight"
    fused = te and not moe
    second = f"{mlp}.linear_fc1.layer_norm_weight" if fused else f"{megatron}.pre_mlp_layernorm.weight"
    out[first] = take(f"{hf}.input_layernorm.weight")
    out[second] = take(f"{hf}.post_attention_layernorm.weight")

    if moe:
        return out | convert_moe(take, f"{hf}.mlp", mlp, config, spec)
    return out | convert_mlp(take, f"{hf}.mlp", mlp)


def convert_mtp(take: Take, index: int, config: Config, spec: Spec) -> Tensors:
    if config["model_type"] == "glm4_moe":
        layer = f"model.layers.{config['num_hidden_layers'] + index}"
        names = [f"{layer}.{own}.weight" for own in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
        # Megatron has no place for these; they may only repeat the model's own.
        for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            if f"{layer}.{copy}.weight" in take.left:
                assert torch.equal(take(f"{layer}.{copy}.weight"), take.all[f"{original}.weight"])
    else:
        layer = f"mtp.layers.{index}"
        prefix = "mtp" if index == 0 else layer
        own_names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        names = [f"{prefix}.{own}.weight" for own in own_names]
    megatron = f"mtp.layers.{index}"
    moe = dense_layers(config) < config["num_hidden_layers"]
    return {
        f"{megatron}.enorm.weight": take(names[0]),
        f"{megatron}.hnorm.weight": take(names[1]),
        f"{megatron}.eh_proj.weight": take(names[2]),
        f"{megatron}.final_layernorm.weight": take(names[3]),
    } | convert_layer(take, layer, f"{megatron}.transformer_layer", config, spec, moe)


def hf_to_megatron(hf: Tensors, config: Config, spec: Spec) -> Tensors:
    """All that `GPTModel.state_dict()` holds, but for `_extra_state`."""
    take = Take(hf)
    out = {
        "embedding.word_embeddings.weight": pad_vocabulary(take("model.embed_tokens.weight")),
        "decoder.final_layernorm.weight": take("model.norm.weight"),
    }
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = pad_vocabulary(take("lm_head.weight"))
    for k in range(config["num_hidden_layers"]):
        moe = k >= dense_layers(config)
        out |= convert_layer(take, f"model.layers.{k}", f"decoder.layers.{k}", config, spec, moe)
    for index in range(mtp_count(config)):
        out |= convert_mtp(take, index, config, spec)
    assert not take.left, f"not converted: {sorted(take.left)}"
    return out


def expected_args(hf: Tensors, config: Config) -> Config:
    """Megatron's arguments that say what model this is, as far as config.json and the tensors decide them."""
    rope = config.get("rope_parameters") or config
    vocabulary = config["vocab_size"]
    while vocabulary % VOCABULARY_MULTIPLE:
        vocabulary += 1
    args = {
        "num_layers": config["num_hidden_layers"],
        "mtp_num_layers": mtp_count(config),
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": head_dim(config),
        "add_bias_linear": False,
        "add_qkv_bias": "model.layers.0.self_attn.q_proj.bias" in hf,
        "qk_layernorm": "model.layers.0.self_attn.q_norm.weight" in hf,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "padded_vocab_size": vocabulary,
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)),
        "rotary_interleaved": False,
        "multi_latent_attention": False,
        "num_experts": config.get("n_routed_experts"),
        "params_dtype": str(hf["model.embed_tokens.weight"].dtype),
    }
    if config["model_type"] == "glm4_moe":
        dense, width = dense_layers(config), config["moe_intermediate_size"]
        args |= {
            "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * width,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        }
    return args
