"""Take one optimizer step with the real megatron-core, and save as Megatron-LM saves.

    python training_worker.py CHECKPOINT OUT

It is done twice from the same weights, once with every parameter trained and once with the MTP layers frozen. For
each of `trained` and `frozen`, OUT gets
- `<case>/`: a Megatron checkpoint, written by megatron-core into `iter_0000001/`;
- `<case>.safetensors`: all that the model holds after the step;
- `<case>.json`: the names of what the step changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_worker import build, load, start_megatron, weights
from safetensors.torch import save_file


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in weights(model).items()}


def step(model: Any, trained: list[Any], vocabulary: int) -> None:
    """The loss of GPTModel.forward, in which each MTP layer has its share, and what Megatron-LM does after it."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    ids = torch.randint(vocabulary, (2, 24), generator=torch.Generator().manual_seed(5))
    future = torch.triu(torch.ones(24, 24, dtype=torch.bool), 1)[None, None]
    loss = model(ids, torch.arange(24).expand_as(ids), future, labels=ids.roll(-1, 1))
    loss.mean().backward()
    # Adam's first step is as long for every element that has a gradient, and this one is more than bf16 has at 1.
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0).step()
    with torch.no_grad():
        _update_router_expert_bias(trained, model.config)


def save(model: Any, args: argparse.Namespace, root: Path) -> None:
    from megatron.core import dist_checkpointing

    folder = root / "iter_0000001"
    folder.mkdir(parents=True)
    state = {
        "args": argparse.Namespace(**vars(args) | {"iteration": 1, "consumed_train_samples": 2}),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "num_floating_point_operations_so_far": 0,
        "model": model.sharded_state_dict(),
    }
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})
    (root / "latest_checkpointed_iteration.txt").write_text("1")


def main(checkpoint: str, out: Path) -> None:
    start_megatron()
    from megatron.core import dist_checkpointing

    args = dist_checkpointing.load_common_state_dict(checkpoint)["args"]
    out.mkdir(parents=True)
    for case in ("trained", "frozen"):
        model = build(args, "local").train()
        load(model, checkpoint, "raise_all")
        model.mtp.requires_grad_(case == "trained")
        before = held(model)
        step(model, [model] if case == "trained" else [model.decoder], args.vocab_size)
        after = held(model)
        save(model, args, out / case)
        save_file(after, out / f"{case}.safetensors")
        moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
        (out / f"{case}.json").write_text(json.dumps(moved, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":  # saving starts processes that import this file
    main(sys.argv[1], Path(sys.argv[2]))
