"""Load a checkpoint with the real megatron-core, in a process of its own, and save what the model then holds.

    python megatron_worker.py CHECKPOINT {local,te} OUT

The model is built from nothing but the `args` inside CHECKPOINT. Every parameter is NaN before each load, so
that one which the load leaves alone shows. OUT gets
- `<strictness>.safetensors` for each strictness: all that the model holds after such a load;
- `args.json`: the arguments that were read;
- `logits.safetensors` (local spec only, since the stand-in for TE computes nothing): token ids and what the
  decoder (`logits`) and each MTP layer (`mtp0` …) make of them in fp32.

A process of its own, because megatron-core wants CUDA, and the patches below are global.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

STRICTNESS = ("assume_ok_unexpected", "raise_all")


class RecordedArgs:
    """The checkpoint's arguments, noting which were read. None has a default."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        self.read[name] = getattr(self._args, name)
        return self.read[name]


def patch_for_cpu() -> None:
    """Answer the few questions that megatron-core asks of CUDA or of Transformer Engine."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = type("Stream", (), {"__init__": lambda self, *args, **kwargs: None})
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    # Without Transformer Engine these are mocks, which isinstance() refuses.
    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        if not isinstance(getattr(multi_latent_attention, name, int), type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    # Without Transformer Engine, 0.16.1 leaves this name undefined and reads it all the same.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def transformer_config(args: Any, spec: str, **parallel: Any) -> Any:
    """Megatron-LM's `core_transformer_config_from_args` for the settings that say what model this is."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    assert args.swiglu or args.quick_geglu
    settings: dict[str, Any] = {
        "num_layers": args.num_layers,
        "mtp_num_layers": args.mtp_num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "add_bias_linear": args.add_bias_linear,
        "add_qkv_bias": args.add_qkv_bias,
        "qk_layernorm": args.qk_layernorm,
        "normalization": args.normalization,
        "layernorm_epsilon": args.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "rotary_interleaved": getattr(args, "rotary_interleaved", False),
    }
    if args.multi_latent_attention:
        settings |= latent_settings(args)
    else:
        settings |= {
            "num_query_groups": args.num_query_groups if args.group_query_attention else None,
            "kv_channels": args.kv_channels,
        }
    if args.num_experts is not None:
        settings |= {
            "num_moe_experts": args.num_experts,
            "moe_layer_freq": args.moe_layer_freq,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "moe_router_topk": args.moe_router_topk,
            "moe_router_num_groups": args.moe_router_num_groups,
            "moe_router_group_topk": args.moe_router_group_topk,
            "moe_router_score_function": args.moe_router_score_function,
            "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
            "moe_router_topk_scaling_factor": args.moe_router_topk_scaling_factor,
            # From here on: how to run it, not what it is.
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": spec == "te",
        }
        if args.moe_router_score_function == "softmax":
            settings["moe_router_pre_softmax"] = args.moe_router_pre_softmax
    settings |= {
        "params_dtype": args.params_dtype,
        "pipeline_dtype": args.params_dtype,
        "bf16": args.params_dtype is torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        **parallel,
    }
    return (MLATransformerConfig if args.multi_latent_attention else TransformerConfig)(**settings)


# What an MLA model takes from its config: always, under YaRN, and with sparse attention. `rotary_base` and
# `rotary_percent` stand here because MLA does not read them from the model's arguments.
LATENT = [
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "experimental_attention_variant",
]
YARN = [
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
]
SPARSE = ["dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"]


def latent_settings(args: Any) -> dict[str, Any]:
    names = LATENT + YARN * (args.rope_type == "yarn") + SPARSE * (args.experimental_attention_variant == "dsa")
    return {name: getattr(args, name) for name in names}


def sparse_layers(args: Any, layers: list[Any]) -> list[Any]:
    """The decoder's layers and one for MTP, with sparse attention as Megatron-LM's main branch builds it.

    0.16.1 has all the modules, but `get_experimental_attention_variant_module_spec` refuses the word "dsa", its spec
    gives every layer an indexer, and it feeds the indexer before the norm. What main changed is done here.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    config, backend = transformer_config(args, "te"), TESpecProvider()
    out = []
    for number, layer in enumerate([*layers, layers[-1]], start=1):
        attention = variants.get_dsa_module_spec_for_backend(config, backend)
        own = attention.submodules
        own.linear_q_up_proj = own.linear_kv_up_proj = backend.column_parallel_linear()
        own.q_layernorm = own.kv_layernorm = backend.layer_norm(rms_norm=True, for_qk=True)
        offset = max(args.dsa_indexer_skip_topk_offset, 1)
        if max(number - offset, 0) % args.dsa_indexer_topk_freq:  # takes over what an earlier layer chose
            own.core_attention = plain_attention()
        made = copy.deepcopy(layer)
        made.submodules.self_attention = attention
        out.append(made)
    return out


def plain_attention() -> type:
    """The core of attention for MLA, without parameters: megatron-core's own takes no width of keys and values."""
    from megatron.core.transformer.module import MegatronModule

    class PlainAttention(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, softmax_scale: float, **other: Any) -> None:
            super().__init__(config=config)
            self.scale = softmax_scale

        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **other: Any
        ) -> Any:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(mask, -torch.inf)
            return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)

    return PlainAttention


def build(args: Any, spec: str, chunk: int | None = None, **parallel: Any) -> Any:
    """Megatron-LM's `gpt_builder`: a GPTModel with its MTP block, or one chunk of it on this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    te = spec == "te"
    config = transformer_config(args, spec, **parallel)
    stage = {"ignore_virtual": False, "vp_stage": chunk}
    if args.num_experts is not None:
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=te, normalization=args.normalization, vp_stage=chunk
        )
        if args.multi_latent_attention and not te:
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = plain_attention()
    elif te:
        block = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    else:
        block = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    mtp_block = block
    if args.num_experts is not None and not block.layer_specs:  # a stage without decoder layers has none to copy
        experts = {"num_experts": args.num_experts, "moe_grouped_gemm": te, "qk_layernorm": args.qk_layernorm}
        mtp_block = (
            gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts)
            if te
            else gpt_layer_specs.get_gpt_layer_local_spec(normalization=args.normalization, **experts)
        )
    if args.multi_latent_attention and args.experimental_attention_variant == "dsa":
        *block.layer_specs, last = sparse_layers(args, block.layer_specs)
        mtp_block = dataclasses.replace(block, layer_specs=[last])
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(
            config, mtp_block, use_transformer_engine=te, vp_stage=chunk
        ),
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=chunk,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(args.params_dtype)
    return model.eval()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that the model would save, but for the `_extra_state` of its modules."""
    return {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}


def load(model: Any, checkpoint: str, strictness: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    for value in weights(model).values():
        value.fill_(float("nan"))
    # The default is left to the library, so that its own idea of a default is what gets tested.
    strict = {} if strictness == "assume_ok_unexpected" else {"strict": StrictHandling(strictness)}
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint, **strict)
    model.load_state_dict(state["model"], strict=True)


def logits(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The way of GPTModel.forward, which in 0.16.1 insists on labels as soon as there is an MTP block."""
    model.float()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.params_dtype = torch.float32
            module.config.bf16 = False
        # The softmax remembers the dtype that it was built for.
        if hasattr(module, "input_in_bf16"):
            module.input_in_bf16 = module.input_in_float16 = False
    length = ids.shape[1]
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(length).expand_as(ids)
    tied = model.share_embeddings_and_output_weights
    with torch.no_grad():
        embedded, rotary, *_ = model._preprocess(input_ids=ids, position_ids=positions)
        hidden = model.decoder(hidden_states=embedded, attention_mask=future, rotary_pos_emb=rotary)
        head = model.shared_embedding_or_output_weight() if tied else None
        chained = hidden
        if model.config.mtp_num_layers:
            chained = model.mtp(
                input_ids=ids,
                position_ids=positions,
                hidden_states=hidden,
                attention_mask=future,
                rotary_pos_emb=rotary,
                embedding=model.embedding,
            )
        depths = torch.chunk(chained, 1 + (model.config.mtp_num_layers or 0))
        scored = [model.output_layer(depth, weight=head)[0].transpose(0, 1).contiguous() for depth in depths]
    return {"logits": scored[0]} | {f"mtp{i}": own for i, own in enumerate(scored[1:])}


def start_megatron() -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    patch_for_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    parallel_state.initialize_model_parallel()


def main(checkpoint: str, spec: str, out: Path) -> None:
    start_megatron()
    from megatron.core import dist_checkpointing

    args = RecordedArgs(dist_checkpointing.load_common_state_dict(checkpoint)["args"])
    model = build(args, spec)
    out.mkdir(parents=True)
    for strictness in STRICTNESS:
        load(model, checkpoint, strictness)
        tensors = {name: value.detach().clone() for name, value in weights(model).items()}
        save_file(tensors, out / f"{strictness}.safetensors")
    (out / "args.json").write_text(json.dumps(args.read, default=str, indent=1))
    if spec == "local":
        ids = torch.arange(24).reshape(2, 12) * 7
        save_file({"ids": ids, **logits(model, ids)}, out / "logits.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
