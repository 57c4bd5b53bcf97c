"""A tiny Qwen3-Next on two tensor-parallel ranks of mcore_bridge: fixtures/megatron/mcore_bridge-1.6.5.

    python tests/peer/make_sample.py DIR                  # in mcore_bridge's environment, see `make peer`

Saved as Megatron's format "torch" is: the state dict of each rank, with the arguments beside it. To keep it small,
``_extra_state`` entries are left out, and arguments that are false by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import on_cpu

on_cpu.patch()

import mcore_bridge_convert  # noqa: E402
import tiny_qwen3_next  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

RANKS = 2


def write_rank(rank: int, source: str, target: str, store: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="29578"
    )
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from transformers import AutoConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    settings = hf_to_mcore_config(AutoConfig.from_pretrained(source))
    settings["linear_attention_freq"] = tiny_qwen3_next.CONFIG["full_attention_interval"]
    config = ModelConfig(
        **settings, mtp_num_layers=1, tensor_model_parallel_size=RANKS, params_dtype=torch.bfloat16, bf16=True,
        use_cpu_initialization=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    (model,) = get_mcore_model(config)
    config.bridge.load_weights([model], source)
    folder = Path(target) / "iter_0000001" / f"mp_rank_{rank:02d}"
    folder.mkdir(parents=True)
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    args = vars(mcore_bridge_convert.arguments(config, tiny_qwen3_next.VOCAB))
    default = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    told = {name: value for name, value in args.items() if value is not False or default.get(name)}
    torch.save(
        {"args": argparse.Namespace(**told), "checkpoint_version": 3.0, "iteration": 1, "model": state},
        folder / "model_optim_rng.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        source = tiny_qwen3_next.write(Path(name) / "hf")
        mp.spawn(write_rank, (str(source), str(target), f"{name}/store"), nprocs=RANKS)
    (target / "latest_checkpointed_iteration.txt").write_text("1")


if __name__ == "__main__":
    main()
