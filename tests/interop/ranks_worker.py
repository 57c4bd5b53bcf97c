"""One rank of a real Megatron run: load the file that is this rank's, strictly, and save with the others.

    python ranks_worker.py FOLDER {local,te} RANK INIT OUT

The process group and every size come from the `args` in FOLDER's files, the file's name from megatron-core's own
ranks, as Megatron-LM's get_checkpoint_name has it. All weights are NaN before the load. OUT becomes an iteration folder
of a distributed checkpoint, so that what is in it has gone through Megatron's own idea of which layer, expert and
shard each tensor is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_worker import build, patch_for_cpu, weights


def main(folder: Path, spec: str, rank: int, init: str, out: Path) -> None:
    torch.set_num_threads(1)
    patch_for_cpu()
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    args = torch.load(next(folder.glob("mp_rank_*")) / "model_optim_rng.pt", weights_only=False)["args"]
    sizes = {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": args.virtual_pipeline_model_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
    }
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world(args))
    ps.initialize_model_parallel(**sizes)
    layout = args.pipeline_model_parallel_layout
    parallel = sizes | {
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "pipeline_model_parallel_layout": layout
        and PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size),
        "sequence_parallel": spec == "te" and args.tensor_model_parallel_size > 1,
    }
    chunks: list[int | None] = [None]
    if args.virtual_pipeline_model_parallel_size:
        chunks = list(range(args.virtual_pipeline_model_parallel_size))
    models = [build(args, spec, chunk, **parallel) for chunk in chunks]
    state = torch.load(folder / own_name(ps) / "model_optim_rng.pt", weights_only=False)
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    assert [name for name in state if name.startswith("model")] == names
    for name, model in zip(names, models, strict=True):
        load(model, state[name])
    tied = not args.untie_embeddings_and_output_weights
    if tied and args.pipeline_model_parallel_size > 1:  # language_module.py asserts that such a model has no head
        dist.destroy_process_group()
        return
    if rank == 0:
        out.mkdir(parents=True)
    dist.barrier()
    meta = {"singleton_local_shards": False, "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    sharded: dict[str, Any] = {n: m.sharded_state_dict(metadata=meta) for n, m in zip(names, models, strict=True)}
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save({**common, **sharded}, str(out))
    dist.destroy_process_group()


def world(args: Any) -> int:
    from math import lcm

    expert = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return lcm(args.tensor_model_parallel_size, expert) * int(args.pipeline_model_parallel_size)


def own_name(ps: Any) -> str:
    pp, ep = ps.get_pipeline_model_parallel_world_size(), ps.get_expert_model_parallel_world_size()
    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    return name + (f"_{ps.get_expert_model_parallel_rank():03d}" if ep > 1 else "")


def load(model: Any, state: dict[str, Any]) -> None:
    for value in weights(model).values():
        value.fill_(float("nan"))
    model.load_state_dict(state, strict=True)
    for name, value in weights(model).items():
        width = torch.int16 if value.element_size() == 2 else torch.int32
        given = state[name].to(value.dtype)  # modules round what is wider than they are
        assert torch.equal(value.view(width), given.view(width)), name


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
