"""One rank of two: the shapes that megatron-core gives every parameter of a gated model, cut by tensor parallelism.

    python gated_ranks_worker.py RANK INIT CHECKPOINT OUT

CHECKPOINT has the files of both ranks, whose `args` say how to build the model. OUT/RANK.json: parameter → shape.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gated_worker
import torch
import torch.distributed as dist
from megatron_worker import RecordedArgs, patch_for_cpu


def main(rank: int, init: str, checkpoint: Path, out: Path) -> None:
    torch.set_num_threads(1)
    patch_for_cpu()
    gated_worker.patch()
    from megatron.core import parallel_state as ps

    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    plain = gated_worker.transformer_config

    def cut(*args: Any, **more: Any) -> Any:
        return plain(*args, **more, tensor_model_parallel_size=2)

    gated_worker.transformer_config = cut
    saved = torch.load(checkpoint / f"mp_rank_0{rank}" / "model_optim_rng.pt", weights_only=False)
    model = gated_worker.build(RecordedArgs(saved["args"]))
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if value is not None}
    (out / f"{rank}.json").write_text(json.dumps(shapes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
