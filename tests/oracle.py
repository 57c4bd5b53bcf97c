"""A plain fp32 forward of a model and its MTP layers from the parts of a tensor map.

It knows nothing of Hugging Face or Megatron names, so where it meets the logits that megatron-core computed,
the parts mean what their names say. Follows megatron-core 0.16.1: `transformer/multi_token_prediction.py`,
`transformer/moe/moe_utils.py` (router) and `models/common/embeddings/rope_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from mtpcheck.tensormap import TensorMap

TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Logits:
    main: Tensor
    mtp: list[Tensor]


def read_parts(tensor_map: TensorMap) -> dict[str, Tensor]:
    """Every part in fp32, which holds bf16 values exactly."""
    return {
        name: torch.frombuffer(bytearray(ref.read()), dtype=TORCH_DTYPES[ref.dtype]).view(ref.shape).float()
        for name, ref in tensor_map.parts.items()
    }


def forward(parts: Parts, facts: Mapping[str, Any], ids: Tensor, *, feed_prenorm: bool = False) -> Logits:
    """Logits for `ids` [batch, sequence]. `feed_prenorm` is the mistake of skipping the norm before MTP."""
    eps: float = facts["norm_eps"]
    head = parts.get("head", parts["embed"])
    rope = rotary_angles(ids.shape[1], facts)

    hidden = embedding(ids, parts["embed"])
    for k in range(facts["layers"]):
        hidden = block(hidden, under(parts, f"layers.{k}."), facts, rope)
    normed = rms_norm(hidden, parts["final_norm"], eps)
    main = linear(normed, head)

    mtp: list[Tensor] = []
    fed = hidden if feed_prenorm else normed
    for i in range(facts["mtp_layers"]):
        layer = under(parts, f"mtp.{i}.")
        ids = next_ids(ids)
        coming = rms_norm(embedding(ids, parts["embed"]), layer["embed_norm"], eps)
        so_far = rms_norm(fed, layer["hidden_norm"], eps)
        mixed = linear(coming, layer["proj.embed"]) + linear(so_far, layer["proj.hidden"])
        fed = rms_norm(block(mixed, layer, facts, rope), layer["final_norm"], eps)
        mtp.append(linear(fed, head))
    return Logits(main, mtp)


def next_ids(ids: Tensor) -> Tensor:
    """Each position gets the id after it; Megatron fills the last with id 0."""
    return torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)


def under(parts: Parts, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def block(x: Tensor, layer: Parts, facts: Mapping[str, Any], rope: Tensor) -> Tensor:
    eps: float = facts["norm_eps"]
    x = x + attention(rms_norm(x, layer["pre_attn_norm"], eps), under(layer, "attn."), rope, eps)
    inner = rms_norm(x, layer["pre_mlp_norm"], eps)
    mlp = under(layer, "mlp.")
    return x + (experts(inner, mlp, facts) if "router" in mlp else gated(inner, mlp))


def attention(x: Tensor, attn: Parts, rope: Tensor, eps: float) -> Tensor:
    def project(name: str) -> Tensor:  # [batch, group, head in group, sequence, head_dim]
        y = torch.einsum("bsi,ghdi->bghsd", x, attn[name])
        if f"{name}_bias" in attn:
            y = y + attn[f"{name}_bias"][:, :, None]
        return rms_norm(y, attn[f"{name}_norm"], eps) if f"{name}_norm" in attn else y

    q, k, v = rotate(project("q"), rope), rotate(project("k"), rope), project("v")
    k, v = k.expand_as(q), v.expand_as(q)
    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(y.permute(0, 3, 1, 2, 4).flatten(2), attn["o"])


def rotary_angles(length: int, facts: Mapping[str, Any]) -> Tensor:
    rotated = int(facts["head_dim"] * facts["rope_fraction"])
    frequencies = facts["rope_theta"] ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Not interleaved: the first half of the rotated dimensions pairs with the second."""
    half = angles.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def gated(x: Tensor, mlp: Parts) -> Tensor:
    return linear(silu(linear(x, mlp["gate"])) * linear(x, mlp["up"]), mlp["down"])


def experts(x: Tensor, mlp: Parts, facts: Mapping[str, Any]) -> Tensor:
    """Sigmoid scores; the bias takes part in the choice of experts, not in their weights."""
    scores = torch.sigmoid(linear(x, mlp["router"]))
    chosen = (scores + mlp["router_bias"]).topk(facts["topk"], dim=-1).indices
    kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * facts["routed_scaling"]
    y = gated(x, under(mlp, "shared.")) if "shared.gate" in mlp else torch.zeros_like(x)
    for e in range(weights.shape[-1]):
        y = y + weights[..., e, None] * gated(x, under(mlp, f"experts.{e}."))
    return y
