"""An honest pair of conversions, Hugging Face <-> Megatron, on plain torch: GLM-4.5, and Llama with MTP layers added.

    python converter.py to-megatron SRC DST
    python converter.py to-hf SRC DST ORIGINAL        # which lends config keys and the tokenizer, never a weight

Megatron's side is one file, as a run without parallelism saves it: release/mp_rank_00/model_optim_rng.pt.
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
COUNT = "num_nextn_predict_layers"


class Rule(NamedTuple):
    """One Megatron tensor, the Hugging Face tensors it is joined from, and how it is split again."""

    megatron: str
    hf: list[str]
    join: Callable[..., torch.Tensor] = lambda tensor: tensor
    split: Callable[[torch.Tensor], Any] = lambda tensor: [tensor]


def rules(config: Config) -> Iterator[Rule]:
    """The whole model, one tensor of Megatron after the other."""
    moe, layers = config["model_type"] == "glm4_moe", config["num_hidden_layers"]
    yield Rule("embedding.word_embeddings.weight", ["model.embed_tokens.weight"])
    yield Rule("decoder.final_layernorm.weight", ["model.norm.weight"])
    yield Rule("output_layer.weight", ["lm_head.weight"])
    for k in range(layers):
        sparse = moe and k >= config["first_k_dense_replace"]
        yield from layer(config, f"decoder.layers.{k}.", f"model.layers.{k}.", sparse)
    for i in range(config[COUNT]):
        hf = f"model.layers.{layers + i}." if moe else f"mtp.layers.{i}."
        own = "mtp." if i == 0 and not moe else hf  # the first added layer keeps its norms outside the list
        names = zip(("enorm", "hnorm", "eh_proj", "final_layernorm"), MTP_NAMES[config["model_type"]], strict=True)
        yield from (Rule(f"mtp.layers.{i}.{theirs}.weight", [f"{own}{name}.weight"]) for theirs, name in names)
        yield from layer(config, f"mtp.layers.{i}.transformer_layer.", hf, moe)


MTP_NAMES = {  # of Megatron's enorm, hnorm, eh_proj and final_layernorm
    "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "llama": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


def layer(config: Config, megatron: str, hf: str, moe: bool) -> Iterator[Rule]:
    """One decoder layer, below both of its names."""
    attention, groups = megatron + "self_attention.", config["num_key_value_heads"]
    sizes = [config["num_attention_heads"] // groups * config["head_dim"], config["head_dim"], config["head_dim"]]

    def join(*qkv: torch.Tensor) -> torch.Tensor:  # group by group: its queries, its key, its value
        return torch.cat([part.unflatten(0, (groups, -1)) for part in qkv], 1).flatten(0, 1)

    def split(joined: torch.Tensor) -> list[torch.Tensor]:
        return [part.flatten(0, 1) for part in joined.unflatten(0, (groups, -1)).split(sizes, 1)]

    for kind in ("weight", "bias"):
        yield Rule(f"{attention}linear_qkv.{kind}", [f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv"], join, split)
    yield Rule(attention + "linear_qkv.layer_norm_weight", [hf + "input_layernorm.weight"])
    for x in "qk":
        yield Rule(f"{attention}{x}_layernorm.weight", [f"{hf}self_attn.{x}_norm.weight"])
    yield Rule(attention + "linear_proj.weight", [hf + "self_attn.o_proj.weight"])
    norm = "pre_mlp_layernorm.weight" if moe else "mlp.linear_fc1.layer_norm_weight"
    yield Rule(megatron + norm, [hf + "post_attention_layernorm.weight"])
    if not moe:
        yield from mlp(megatron + "mlp.linear_fc{}.weight", hf + "mlp.")
        return
    yield Rule(megatron + "mlp.router.weight", [hf + "mlp.gate.weight"])
    yield Rule(megatron + "mlp.router.expert_bias", [hf + "mlp.gate.e_score_correction_bias"])
    yield from mlp(megatron + "mlp.shared_experts.linear_fc{}.weight", hf + "mlp.shared_experts.")
    for e in range(config["n_routed_experts"]):
        yield from mlp(f"{megatron}mlp.experts.linear_fc{{}}.weight{e}", f"{hf}mlp.experts.{e}.")


def mlp(megatron: str, hf: str) -> Iterator[Rule]:
    both = [hf + "gate_proj.weight", hf + "up_proj.weight"]
    yield Rule(megatron.format(1), both, lambda gate, up: torch.cat([gate, up]), lambda joined: joined.chunk(2))
    yield Rule(megatron.format(2), [hf + "down_proj.weight"])


def copies(config: Config) -> dict[str, str]:
    """Tensors of GLM's MTP layer that repeat the model's own, and that Megatron has no place for."""
    last = f"model.layers.{config['num_hidden_layers']}."
    own = {
        last + "embed_tokens.weight": "model.embed_tokens.weight",
        last + "shared_head.head.weight": "lm_head.weight",
    }
    return own if config["model_type"] == "glm4_moe" else {}


def to_megatron(hf: Tensors, config: Config) -> Tensors:
    return {r.megatron: r.join(*(hf[name] for name in r.hf)) for r in rules(config) if r.hf[0] in hf}


def to_hf(megatron: Tensors, config: Config, original: Path) -> Tensors:
    made: Tensors = {}
    for rule in rules(config):
        if rule.megatron in megatron:
            made.update(zip(rule.hf, (part.contiguous() for part in rule.split(megatron[rule.megatron])), strict=True))
    return made | {copy: made[name].clone() for copy, name in copies(config).items()}


def arguments(config: Config) -> Namespace:
    """What Megatron would have been started with."""
    args: Config = {
        "num_layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"], "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"], "kv_channels": config["head_dim"],
        "ffn_hidden_size": config["intermediate_size"], "add_qkv_bias": config["attention_bias"],
        "qk_layernorm": config.get("use_qk_norm", False), "add_bias_linear": False, "swiglu": True,
        "normalization": "RMSNorm", "norm_epsilon": config["rms_norm_eps"], "position_embedding_type": "rope",
        "rotary_base": config["rope_theta"], "rotary_percent": config.get("partial_rotary_factor", 1.0),
        "max_position_embeddings": config["max_position_embeddings"], "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"], "params_dtype": torch.bfloat16,
        "mtp_num_layers": config[COUNT], "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    }  # fmt: skip
    if config["model_type"] == "glm4_moe":
        dense = config["first_k_dense_replace"]
        args |= {
            "num_experts": config["n_routed_experts"], "moe_router_topk": config["num_experts_per_tok"],
            "moe_layer_freq": [int(k >= dense) for k in range(config["num_hidden_layers"])],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_grouped_gemm": True,
        }  # fmt: skip
    return Namespace(**args)


def hf_config(original: Config, args: Namespace) -> Config:
    """The config of the result: what was trained decides how many MTP layers there are."""
    return original | {COUNT: args.mtp_num_layers}


def main() -> None:
    way, src, dst, *original = sys.argv[1], *map(Path, sys.argv[2:])
    if way == "to-megatron":
        config = json.loads((src / "config.json").read_text())
        tensors = {name: own for shard in sorted(src.glob("*.safetensors")) for name, own in load_file(shard).items()}
        model = {
            "args": arguments(config),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "model": to_megatron(tensors, config),
        }
        (dst / "release" / "mp_rank_00").mkdir(parents=True)
        torch.save(model, dst / "release" / "mp_rank_00" / "model_optim_rng.pt")
        (dst / "latest_checkpointed_iteration.txt").write_text("release")
    else:
        with torch.serialization.safe_globals([Namespace]):
            saved = torch.load(src / "release" / "mp_rank_00" / "model_optim_rng.pt")
        config = hf_config(json.loads((original[0] / "config.json").read_text()), saved["args"])
        ignored = shutil.ignore_patterns("*.safetensors", "*.index.json")
        shutil.copytree(original[0], dst, ignore=ignored)
        (dst / "config.json").write_text(json.dumps(config, indent=2))
        save_file(to_hf(saved["model"], config, original[0]), dst / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
