"""As gated_worker.py, for MiniMax-M3 without its indexers: zero-centered norms, a clamped quick_gelu.

    python minimax_worker.py CHECKPOINT OUT

OUT gets what it gets there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gated_worker import backend, record
from megatron_worker import start_megatron, transformer_config


def build(args: Any) -> Any:
    """Megatron-LM's `gpt_builder` and `core_transformer_config_from_args` with `--quick-geglu`."""
    from megatron.core.activations import quick_gelu
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    assert args.quick_geglu and not args.swiglu
    config = transformer_config(
        args,
        "local",
        activation_func=quick_gelu,
        glu_linear_offset=args.glu_linear_offset,
        activation_func_clamp_value=args.activation_func_clamp_value,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        transformer_impl="transformer_engine",
    )
    provider = backend()
    gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm = provider, provider().layer_norm()
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
    ).eval()


def main(checkpoint: str, out: Path) -> None:
    start_megatron()
    record(checkpoint, build, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
