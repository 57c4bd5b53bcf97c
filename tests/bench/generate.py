"""Make a checkpoint of a given size with the shapes of a released one, filled with random bits.

    python tests/bench/generate.py DIR --gb 2 [--family glm4_moe|llama] [--hidden 2048] [--seed 0] [--fp8]
                                      [--numbers]

Random bits, not random numbers: NaNs with payloads, infinities and signed zeros occur, and a comparison that
stops at a NaN cannot look fast. With `--numbers` it can be run. The same arguments give the same bytes. Memory stays
at a few megabytes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 31_997  # no multiple of 128, so that Megatron's padding takes part
SHARD = 512 << 20
_BLOCK = 1 << 20

Config = dict[str, Any]
Shape = tuple[int, ...]
Tensor = tuple[str, str, Shape]  # name, dtype, shape
_CODES = "F8_E4M3"
_ITEMSIZE = {"BF16": 2, "F32": 4, _CODES: 1}
_SCALE = "_scale_inv"


def generate(
    folder: Path,
    gb: float,
    family: str = "glm4_moe",
    hidden: int = 2048,
    seed: int = 0,
    fp8: bool = False,
    numbers: bool = False,
) -> int:
    """Write the checkpoint into the new folder ``folder``; returns the bytes of its tensors, about ``gb`` * 10^9.

    With ``fp8`` the same model with its projections in blocks of FP8, at about half the bytes, and with every code but
    NaN, which no quantizer writes. With ``numbers`` its weights lie between 2^-7 and 2^-5, of either sign.
    """
    folder.mkdir(parents=True)
    config = _config(family, int(gb * 1e9), hidden)
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    shards = list(_shards(_coded(tensors_of(config)) if fp8 else tensors_of(config)))
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(2) as pool:  # numpy draws without the interpreter lock
        seeds = [(seed, n) for n in range(len(shards))]
        list(pool.map(partial(_write_shard, numbers=numbers), [folder / name for name in names], shards, seeds))
    total = sum(_nbytes(tensor) for shard in shards for tensor in shard)
    weight_map = {tensor[0]: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return total


# ---- shapes


def _config(family: str, nbytes: int, hidden: int) -> Config:
    """A config whose tensors come to about ``nbytes``: a layer for every 0.25 GB, and the rest by its width."""
    config = _common(hidden) | (_glm4_moe(hidden) if family == "glm4_moe" else _llama())
    width = "n_routed_experts" if family == "glm4_moe" else "intermediate_size"
    step = 2 if family == "glm4_moe" else 128
    config["num_hidden_layers"] = max(2, round(nbytes / 250e6))
    sizes = []
    for value in (step, 2 * step):
        config[width] = value
        sizes.append(sum(map(_nbytes, tensors_of(config))))
    config[width] = step * max(1, 1 + round((nbytes - sizes[0]) / (sizes[1] - sizes[0])))
    if family == "glm4_moe":  # no token is routed to more experts than there are
        config["num_experts_per_tok"] = min(8, config[width])
    return config


def _common(hidden: int) -> Config:
    return {
        "hidden_size": hidden,
        "vocab_size": VOCAB,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
    }


def _glm4_moe(hidden: int) -> Config:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden // 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }


def _llama() -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    }


def tensors_of(config: Config) -> Iterator[Tensor]:
    """Every tensor, in the order of the model."""
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    dense_layers = config.get("first_k_dense_replace") or layers
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for k in range(layers):
        yield from _layer(config, f"model.layers.{k}", dense=k < dense_layers)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)
    if config["model_type"] == "glm4_moe":
        names, layer = ("eh_proj", "enorm", "hnorm", "shared_head.norm"), f"model.layers.{layers}"
        own, dense = layer, False
    else:
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        own, layer, dense = "mtp", "mtp.layers.0", True
    yield f"{own}.{names[0]}.weight", "BF16", (hidden, 2 * hidden)
    for name in names[1:]:
        yield f"{own}.{name}.weight", "BF16", (hidden,)
    yield from _layer(config, layer, dense)


def _coded(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """Projections as codes, each followed by its scales."""
    for name, dtype, shape in tensors:
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            yield name, _CODES, shape
            yield name + _SCALE, "F32", (-(-shape[0] // 128), -(-shape[1] // 128))
        else:
            yield name, dtype, shape


def _layer(config: Config, at: str, dense: bool) -> Iterator[Tensor]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{name}.weight", "BF16", (hidden,)
    for name, n in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{at}.self_attn.{name}_proj.weight", "BF16", (n * head_dim, hidden)
        if config["attention_bias"]:
            yield f"{at}.self_attn.{name}_proj.bias", "BF16", (n * head_dim,)
    yield f"{at}.self_attn.o_proj.weight", "BF16", (hidden, heads * head_dim)
    if dense:
        yield from _mlp(f"{at}.mlp", hidden, config["intermediate_size"])
        return
    experts, ffn = config["n_routed_experts"], config["moe_intermediate_size"]
    yield f"{at}.mlp.gate.weight", "BF16", (experts, hidden)
    yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (experts,)
    for e in range(experts):
        yield from _mlp(f"{at}.mlp.experts.{e}", hidden, ffn)
    yield from _mlp(f"{at}.mlp.shared_experts", hidden, config["n_shared_experts"] * ffn)


def _mlp(at: str, hidden: int, ffn: int) -> Iterator[Tensor]:
    yield f"{at}.gate_proj.weight", "BF16", (ffn, hidden)
    yield f"{at}.up_proj.weight", "BF16", (ffn, hidden)
    yield f"{at}.down_proj.weight", "BF16", (hidden, ffn)


# ---- bytes


def _nbytes(tensor: Tensor) -> int:
    return prod(tensor[2]) * _ITEMSIZE[tensor[1]]


def _shards(tensors: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    size = 0
    for tensor in tensors:
        shard.append(tensor)
        size += _nbytes(tensor)
        if size >= SHARD:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _write_shard(path: Path, tensors: list[Tensor], seed: tuple[int, int], numbers: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + _nbytes((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    draw = np.random.SFC64(seed)
    with path.open("xb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(raw) + at)
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, at, _BLOCK):
            block = draw.random_raw(_BLOCK // 8).view(np.uint16)
            if numbers:  # the upper half of an fp32 number is a bf16 number
                block = block & 0x80FF | 0x3C00
            file.write(block.view(np.uint8)[: at - start].data)
        for name, dtype, shape in tensors:
            start = 8 + len(raw) + header[name]["data_offsets"][0]
            if name.endswith(_SCALE):  # random bits would be no scales
                file.seek(start)
                file.write(np.random.Generator(draw).uniform(1e-5, 1e-3, shape).astype(np.float32).data)
            elif dtype == _CODES:
                codes = np.memmap(path, np.uint8, "r+", start, shape)
                codes -= codes & 0x7F == 0x7F


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    parser.add_argument("--gb", type=float, default=2.0, help="size in 10^9 bytes (default 2)")
    parser.add_argument("--family", choices=("glm4_moe", "llama"), default="glm4_moe")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; 256 gives many small tensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fp8", action="store_true", help="projections in blocks of FP8")
    parser.add_argument("--numbers", action="store_true", help="ordinary numbers, so that the model can be run")
    options = parser.parse_args()
    total = generate(
        options.folder, options.gb, options.family, options.hidden, options.seed, options.fp8, options.numbers
    )
    print(f"{options.folder}: {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
