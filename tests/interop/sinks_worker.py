"""One rank of two: megatron-core's attention with a sink for every head, and how it would be saved.

    python sinks_worker.py RANK INIT OUT

OUT/RANK.json has, for every parameter, its key, its shape on this rank and whole, and the axes that it is cut along.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_worker import patch_for_cpu

HEADS, GROUPS, HEAD_DIM, HIDDEN = 4, 2, 8, 16  # as in test_sinks.py


def main(rank: int, init: str, out: Path) -> None:
    torch.set_num_threads(1)
    patch_for_cpu()
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=HEAD_DIM,
        tensor_model_parallel_size=2, softmax_type="learnable", add_bias_linear=False, use_cpu_initialization=True,
        perform_initialization=False,
        window_size=(8, 0),
    )  # fmt: skip
    layer = build_module(get_gpt_layer_local_spec(), config=config, layer_number=1)
    found = {}
    for key, own in layer.self_attention.sharded_state_dict("self_attention.").items():
        if hasattr(own, "axis_fragmentations") and own.axis_fragmentations:
            cut = [axis for axis, pieces in enumerate(own.axis_fragmentations) if pieces > 1]
            found[key] = {"own": list(own.local_shape), "whole": list(own.global_shape), "cut": cut}
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
