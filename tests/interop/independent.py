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


def plainly(hf: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Tensors and sizes under GLM's names, where a family has names of its own for the same."""
    respelled: list[tuple[str, str]] = []
    if config["model_type"] == "hy_v3":
        respelled = [
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
            (".final_layernorm.", ".shared_head.norm."),
        ]
        config = config | {"routed_scaling_factor": config["router_scaling_factor"], "n_group": 1, "topk_group": 1}
    elif config["model_type"] == "bailing_moe_v2":
        respelled = [
            ("model.word_embeddings.", "model.embed_tokens."),
            (".attention.dense.", ".self_attn.o_proj."),
            (".attention.query_layernorm.", ".self_attn.q_norm."),
            (".attention.key_layernorm.", ".self_attn.k_norm."),
            (".gate.expert_bias", ".gate.e_score_correction_bias"),
            (".final_layernorm.", ".shared_head.norm."),
        ]
    else:
        return hf, config
    out: Tensors = {}
    for name, tensor in hf.items():
        if name.endswith(".attention.query_key_value.weight"):
            layer, size = name.removesuffix(".attention.query_key_value.weight"), head_dim(config)
            queries, others = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
            for letter, rows in zip("qkv", tensor.split([queries, others, others]), strict=True):
                out[f"{layer}.self_attn.{letter}_proj.weight"] = rows
            continue
        for theirs, plain in respelled:
            name = name.replace(theirs, plain)
        out[name] = tensor
    sizes = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    return out, config | sizes


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


def exchange_halves(columns: torch.Tensor) -> torch.Tensor:
    """MiMo's projection takes the hidden state in its first columns, Megatron's the embedding."""
    width = columns.shape[1] // 2
    out = []
    for column in range(width):
        out.append(columns[:, width + column : width + column + 1])
    for column in range(width):
        out.append(columns[:, column : column + 1])
    return torch.cat(out, dim=1)


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


def convert_latent_attention(take: Take, hf: str, megatron: str, config: Config, spec: Spec) -> Tensors:
    """The same matrices under other names.

    Transformer Engine fuses each latent's norm into the layer after it, but not where an indexer wants its output.
    """
    out = {
        f"{megatron}.linear_proj.weight": take(f"{hf}.o_proj.weight"),
        f"{megatron}.linear_kv_down_proj.weight": take(f"{hf}.kv_a_proj_with_mqa.weight"),
        f"{megatron}.linear_kv_up_proj.weight": take(f"{hf}.kv_b_proj.weight"),
    }
    fused = spec == "te" and "index_topk" not in config
    norm = f"{megatron}.linear_kv_up_proj.layer_norm_weight" if fused else f"{megatron}.kv_layernorm.weight"
    out[norm] = take(f"{hf}.kv_a_layernorm.weight")
    if config["q_lora_rank"] is None:
        out[f"{megatron}.linear_q_proj.weight"] = take(f"{hf}.q_proj.weight")
    else:
        out[f"{megatron}.linear_q_down_proj.weight"] = take(f"{hf}.q_a_proj.weight")
        out[f"{megatron}.linear_q_up_proj.weight"] = take(f"{hf}.q_b_proj.weight")
        norm = f"{megatron}.linear_q_up_proj.layer_norm_weight" if fused else f"{megatron}.q_layernorm.weight"
        out[norm] = take(f"{hf}.q_a_layernorm.weight")
    if f"{hf}.indexer.wq_b.weight" in take.left:
        indexer = f"{megatron}.core_attention.indexer"
        for own in ("wq_b", "wk", "weights_proj"):
            out[f"{indexer}.linear_{own}.weight"] = take(f"{hf}.indexer.{own}.weight")
        for kind in ("weight", "bias"):
            out[f"{indexer}.k_norm.{kind}"] = take(f"{hf}.indexer.k_norm.{kind}")
    return out


def convert_grouped_attention(take: Take, hf: str, megatron: str, config: Config) -> Tensors:
    out = {f"{megatron}.linear_proj.weight": take(f"{hf}.o_proj.weight")}
    for kind in ("weight", "bias"):
        if kind == "bias" and f"{hf}.q_proj.bias" not in take.left:
            continue
        q, k, v = (take(f"{hf}.{letter}_proj.{kind}") for letter in "qkv")
        out[f"{megatron}.linear_qkv.{kind}"] = interleave_heads(q, k, v, config)
    if f"{hf}.q_norm.weight" in take.left:
        out[f"{megatron}.q_layernorm.weight"] = take(f"{hf}.q_norm.weight")
        out[f"{megatron}.k_layernorm.weight"] = take(f"{hf}.k_norm.weight")
    return out


def convert_layer(take: Take, hf: str, megatron: str, config: Config, spec: Spec, moe: bool) -> Tensors:
    attention, mlp = f"{megatron}.self_attention", f"{megatron}.mlp"
    latent = "kv_lora_rank" in config
    if latent:
        out = convert_latent_attention(take, f"{hf}.self_attn", attention, config, spec)
    else:
        out = convert_grouped_attention(take, f"{hf}.self_attn", attention, config)

    # Transformer Engine fuses a norm into the linear layer after it. An MoE layer begins with a router, and latent
    # attention with two linear layers.
    te = spec == "te"
    fused = te and not latent
    first = f"{attention}.linear_qkv.layer_norm_weight" if fused else f"{megatron}.input_layernorm.weight"
    fused = te and not moe
    second = f"{mlp}.linear_fc1.layer_norm_weight" if fused else f"{megatron}.pre_mlp_layernorm.weight"
    out[first] = take(f"{hf}.input_layernorm.weight")
    out[second] = take(f"{hf}.post_attention_layernorm.weight")

    if moe:
        return out | convert_moe(take, f"{hf}.mlp", mlp, config, spec)
    return out | convert_mlp(take, f"{hf}.mlp", mlp)


def convert_mtp(take: Take, index: int, config: Config, spec: Spec) -> Tensors:
    if config["model_type"] not in ("mimo", "qwen2", "qwen3", "llama"):
        layer = f"model.layers.{config['num_hidden_layers'] + index}"
        names = [f"{layer}.{own}.weight" for own in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
        # Megatron has no place for these; they may only repeat the model's own.
        for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            if f"{layer}.{copy}.weight" in take.left:
                assert torch.equal(take(f"{layer}.{copy}.weight"), take.all[f"{original}.weight"])
    elif config["model_type"] == "mimo":
        layer = f"model.mtp_layers.{index}"
        own_names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        names = [f"{layer}.{own}.weight" for own in own_names]
    else:
        layer = f"mtp.layers.{index}"
        prefix = "mtp" if index == 0 else layer
        own_names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        names = [f"{prefix}.{own}.weight" for own in own_names]
    megatron = f"mtp.layers.{index}"
    moe = dense_layers(config) < config["num_hidden_layers"]
    projection = take(names[2])
    if config["model_type"] == "mimo":
        projection = exchange_halves(projection)
    return {
        f"{megatron}.enorm.weight": take(names[0]),
        f"{megatron}.hnorm.weight": take(names[1]),
        f"{megatron}.eh_proj.weight": projection,
        f"{megatron}.final_layernorm.weight": take(names[3]),
    } | convert_layer(take, layer, f"{megatron}.transformer_layer", config, spec, moe)


def hf_to_megatron(hf: Tensors, config: Config, spec: Spec) -> Tensors:
    """All that `GPTModel.state_dict()` holds, but for `_extra_state`."""
    hf, config = plainly(hf, config)
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
    hf, config = plainly(hf, config)
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
        "add_bias_linear": False,
        "add_qkv_bias": "model.layers.0.self_attn.q_proj.bias" in hf,
        "qk_layernorm": any(name.startswith("model.layers.0.self_attn.") and "norm" in name for name in hf),
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
        "multi_latent_attention": "kv_lora_rank" in config,
        "num_experts": config.get("n_routed_experts"),
        "params_dtype": str(hf["model.embed_tokens.weight"].dtype),
    }
    if "kv_lora_rank" in config:
        args |= latent_args(config)
    else:
        args |= {
            "group_query_attention": True,
            "num_query_groups": config["num_key_value_heads"],
            "kv_channels": head_dim(config),
        }
    if "n_routed_experts" in config:
        groups, topk_groups = config["n_group"], config["topk_group"]
        dense, width = dense_layers(config), config["moe_intermediate_size"]
        args |= {
            "moe_layer_freq": [0] * dense + [1] * (config["num_hidden_layers"] - dense),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * width,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": topk_groups if groups > 1 else None,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        }
    return args


def latent_args(config: Config) -> Config:
    args = {
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "rope",
        "experimental_attention_variant": None,
    }
    scaling = config.get("rope_scaling")
    if scaling:
        args |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": scaling["beta_fast"],
            "beta_slow": scaling["beta_slow"],
            "mscale": scaling["mscale"],
            "mscale_all_dim": scaling["mscale_all_dim"],
        }
    if "index_topk" in config:
        args |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": config["index_n_heads"],
            "dsa_indexer_head_dim": config["index_head_dim"],
            "dsa_indexer_topk": config["index_topk"],
            "dsa_indexer_topk_freq": config.get("index_topk_freq", 1),
            "dsa_indexer_skip_topk_offset": config.get("index_skip_topk_offset", 1),
        }
    return args
