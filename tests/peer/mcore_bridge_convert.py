"""A converter made of mcore_bridge and megatron-core, as a training script uses them: HF → torch_dist → HF.

    python mcore_bridge_convert.py to-megatron SRC DST [--mtp-from-config | --mtp-layers N]
    python mcore_bridge_convert.py to-hf SRC DST --original HF [--back-fill]

``--mtp-from-config`` passes the number of MTP layers that config.json declares, which mcore_bridge's own config does
not take over; ``--mtp-layers`` a number where no key declares one. ``--back-fill`` is mcore_bridge's
``save_missing_weights``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import on_cpu

on_cpu.patch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

ITERATION = "iter_0000001"


def build(hf: Path, mtp_layers: int | None) -> tuple[Any, Any]:
    """mcore_bridge's model of a Hugging Face folder, with its config."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from megatron.core import parallel_state
    from transformers import AutoConfig

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    source = AutoConfig.from_pretrained(hf)
    told = hf_to_mcore_config(source)
    if "linear_attention_freq" in told:  # one layer in four, whatever the config says
        linear = ",".join(str(int(kind == "linear_attention")) for kind in source.layer_types)
        told["linear_attention_freq"] = f"[{linear}]"
    config = ModelConfig(
        **told, mtp_num_layers=mtp_layers, params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    (model,) = get_mcore_model(config)
    return config, model


def arguments(config: Any, vocab: int) -> argparse.Namespace:
    """What a training script keeps beside the weights: the plain settings of the model under Megatron's names.

    mcore_bridge has the share of rotated dimensions in a field of its own and leaves ``rotary_percent`` at one.
    """
    plain = (bool, int, float, str, list, type(None))
    args = {name: value for name, value in vars(config).items() if isinstance(value, plain)}
    return argparse.Namespace(
        **{**args, "vocab_size": vocab, "norm_epsilon": config.layernorm_epsilon, "num_experts": config.num_moe_experts,
           "rotary_percent": config.partial_rotary_factor or 1.0,
           "moe_apply_probs_on_input": bool(config.moe_apply_probs_on_input),
           "group_query_attention": config.num_query_groups != config.num_attention_heads,
           "params_dtype": config.params_dtype, "ckpt_format": "torch_dist", "transformer_impl": "transformer_engine"}
    )  # fmt: skip


def to_megatron(src: Path, dst: Path, mtp_layers: int | None) -> None:
    from megatron.core import dist_checkpointing

    config, model = build(src, mtp_layers)
    config.bridge.load_weights([model], str(src))
    (dst / ITERATION).mkdir(parents=True)
    vocab = json.loads((src / "config.json").read_text())["vocab_size"]
    state = {"args": arguments(config, vocab), "checkpoint_version": 3.0, "iteration": 1}
    dist_checkpointing.save({**state, "model": model.sharded_state_dict()}, str(dst / ITERATION))
    (dst / "latest_checkpointed_iteration.txt").write_text("1")


def to_hf(src: Path, dst: Path, original: Path, back_fill: bool) -> None:
    from megatron.core import dist_checkpointing

    kept = dist_checkpointing.load_common_state_dict(str(src / ITERATION))["args"]
    config, model = build(original, kept.mtp_num_layers)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(src / ITERATION))
    model.load_state_dict(loaded["model"])
    dst.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {"save_missing_weights": str(original)} if back_fill else {}
    # the copy from the GPU takes apart what shares memory there; here nothing is copied, and safetensors refuses it
    config.bridge.save_weights([model], str(dst), converter=lambda name, tensor: (name, tensor.clone()), **more)
    for file in original.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copy(file, dst / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("direction", choices=["to-megatron", "to-hf"])
    parser.add_argument("src", type=Path)
    parser.add_argument("dst", type=Path)
    parser.add_argument("--original", type=Path)
    parser.add_argument("--mtp-from-config", action="store_true")
    parser.add_argument("--mtp-layers", type=int)
    parser.add_argument("--back-fill", action="store_true")
    given = parser.parse_args()
    if given.direction == "to-hf":
        to_hf(given.src, given.dst, given.original, given.back_fill)
        return
    declared = json.loads((given.src / "config.json").read_text()).get("num_nextn_predict_layers")
    to_megatron(given.src, given.dst, declared if given.mtp_from_config else given.mtp_layers)


if __name__ == "__main__":
    main()
