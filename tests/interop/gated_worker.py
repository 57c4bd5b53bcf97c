"""As megatron_worker.py, for models of megatron-core's experimental layer spec: gated attention and gated delta nets.

    python gated_worker.py CHECKPOINT OUT

That spec exists for Transformer Engine alone, and gated delta nets want kernels of flash-linear-attention. Here
megatron-core's own plain linear layers stand in for the first, with the norm before them that Transformer Engine fuses,
and megatron-core's own plain rule for the second, so that the model computes on a CPU. OUT gets `weights.safetensors`
and `logits.safetensors` as there, and `keys.json`: every key of the distributed state, with its shape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_worker import RecordedArgs, load, logits, start_megatron, transformer_config, weights
from safetensors.torch import save_file
from torch import Tensor, nn

LINEAR = [
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
]


def gain_from_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as Transformer Engine computes it with a zero-centered gamma."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


class Norm(nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **other: Any) -> None:
        super().__init__()
        assert config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm"
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return gain_from_one(x, self.weight, self.eps)


def backend() -> Any:
    """megatron-core's local modules, arranged as its provider for Transformer Engine arranges that one's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **other: Any) -> None:
            super().__init__(input_size, output_size, config=config, **other)
            self.layer_norm_weight = nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
            self.eps = config.layernorm_epsilon

        def forward(self, x: Tensor) -> Any:
            return super().forward(gain_from_one(x, self.layer_norm_weight, self.eps))

    class Plain(LocalSpecProvider):  # type: ignore[misc]
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return NormedLinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return Norm

    return Plain


def patch() -> None:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm import gated_delta_net

    gpt_layer_specs.TESpecProvider = variants.TESpecProvider = backend()
    gated_delta_net.HAVE_FLA = True
    # flash-linear-attention's, as transformers has it too
    gated_delta_net.l2norm = lambda x, eps=1e-6: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def build(args: Any) -> Any:
    """Megatron-LM's `gpt_builder` with `experimental_attention_variant`."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    own: dict[str, Any] = {name: getattr(args, name) for name in LINEAR}
    if args.num_experts is not None:
        own["moe_shared_expert_gate"] = args.moe_shared_expert_gate
    config = transformer_config(
        args,
        "local",
        experimental_attention_variant=args.experimental_attention_variant,
        attention_output_gate=args.attention_output_gate,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        transformer_impl="transformer_engine",
        deterministic_mode=True,
        **own,
    )
    block = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=True),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    ).eval()


def keys(model: Any) -> dict[str, list[int]]:
    """Every tensor of the distributed state and its whole shape."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_base, nested_values

    state, _ = extract_sharded_base(model.sharded_state_dict())
    apply_factories(state)
    return {t.key: list(t.global_shape) for t in nested_values(state) if isinstance(t, ShardedTensor)}


def record(checkpoint: str, build: Callable[[Any], Any], out: Path) -> None:
    """Fill OUT from the model that ``build`` makes of a checkpoint's arguments."""
    from megatron.core import dist_checkpointing

    args = RecordedArgs(dist_checkpointing.load_common_state_dict(checkpoint)["args"])
    model = build(args)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(args.params_dtype)
    out.mkdir(parents=True)
    (out / "keys.json").write_text(json.dumps(keys(model)))
    load(model, checkpoint, "assume_ok_unexpected")  # norms that stand in leave no `_extra_state`
    save_file({name: value.detach().clone() for name, value in weights(model).items()}, out / "weights.safetensors")
    ids = torch.arange(24).reshape(2, 12) * 7
    save_file({"ids": ids, **logits(model, ids)}, out / "logits.safetensors")
    dist.destroy_process_group()


def main(checkpoint: str, out: Path) -> None:
    start_megatron()
    patch()
    record(checkpoint, build, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
