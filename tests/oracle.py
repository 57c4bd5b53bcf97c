"""A plain fp32 forward of a model and its MTP layers from the parts of a tensor map.

It knows nothing of Hugging Face or Megatron names, so where it meets the logits that megatron-core computed,
the parts mean what their names say. Follows megatron-core 0.16.1: `transformer/multi_token_prediction.py`,
`transformer/moe/moe_utils.py` (router), `transformer/multi_latent_attention.py` and `models/common/embeddings`; for
the indexer of sparse attention, which megatron-core cannot run on a CPU, transformers' `glm_moe_dsa`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, linear, scaled_dot_product_attention, silu

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

    hidden, seen = embedding(ids, parts["embed"]), None
    for k in range(facts["layers"]):
        hidden, seen = block(hidden, under(parts, f"layers.{k}."), facts, rope, seen)
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
        fed = rms_norm(block(mixed, layer, facts, rope)[0], layer["final_norm"], eps)
        mtp.append(linear(fed, head))
    return Logits(main, mtp)


def next_ids(ids: Tensor) -> Tensor:
    """Each position gets the id after it; Megatron fills the last with id 0."""
    return torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)


def under(parts: Parts, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def block(
    x: Tensor, layer: Parts, facts: Mapping[str, Any], rope: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The layer's output, and what sparse attention lets each position see, for layers without an indexer."""
    eps: float = facts["norm_eps"]
    inner, attn = rms_norm(x, layer["pre_attn_norm"], eps), under(layer, "attn.")
    if "kv_a" in attn:
        attended, seen = latent_attention(inner, attn, facts, rope, seen)
    else:
        attended = attention(inner, attn, rope, eps)
    x = x + attended
    inner = rms_norm(x, layer["pre_mlp_norm"], eps)
    mlp = under(layer, "mlp.")
    return x + (experts(inner, mlp, facts) if "router" in mlp else gated(inner, mlp)), seen


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


def latent_attention(
    x: Tensor, attn: Parts, facts: Mapping[str, Any], rope: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Multi-head latent attention. All heads share one rotated key; the other dimensions come from the latent."""
    # transformers fixes this one, Megatron does not tell it from the other norms'
    eps: float = facts.get("latent_norm_eps", facts["norm_eps"])
    widths = [facts["nope_dim"], facts["rope_dim"]]
    low = rms_norm(linear(x, attn["q_a"]), attn["q_a_norm"], eps) if "q_a" in attn else x
    q = torch.einsum("bsi,hdi->bhsd", low, attn["q_b" if "q_a" in attn else "q"])
    latent, key = linear(x, attn["kv_a"]).split([facts["kv_lora"], facts["rope_dim"]], dim=-1)
    kv = torch.einsum("bsi,hdi->bhsd", rms_norm(latent, attn["kv_a_norm"], eps), attn["kv_b"])
    k, v = kv.split([facts["nope_dim"], facts["v_dim"]], dim=-1)
    plain, rotated = q.split(widths, dim=-1)
    q = torch.cat([plain, rotate(halves(rotated), rope)], dim=-1)
    key = rotate(halves(key), rope)[:, None].expand(-1, q.shape[1], -1, -1)
    k = torch.cat([k, key], dim=-1)

    indexer = under(attn, "indexer.")
    if indexer:
        seen = indexed(x, low, indexer, facts, rope)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask = causal if seen is None else causal & seen[:, None]
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=yarn_gain(facts) ** 2 / math.sqrt(sum(widths)))
    return linear(y.transpose(1, 2).flatten(2), attn["o"]), seen


def indexed(x: Tensor, low: Tensor, indexer: Parts, facts: Mapping[str, Any], rope: Tensor) -> Tensor:
    """Which positions each position may see: those whose weighted sum of scores is among the largest."""
    heads, size = indexer["q_b"].shape[:2]
    q = torch.einsum("bsi,hdi->bhsd", low, indexer["q_b"])
    k = layer_norm(linear(x, indexer["k"]), (size,), indexer["k_norm"], indexer["k_norm_bias"], eps=1e-6)
    q, k = (
        torch.cat([rotate(halves(y[..., : 2 * rope.shape[-1]]), rope), y[..., 2 * rope.shape[-1] :]], -1)
        for y in (q, k)
    )
    scores = torch.einsum("bhsd,btd->bhst", q, k).relu() / math.sqrt(size * heads)
    total = torch.einsum("bhst,bsh->bst", scores, linear(x, indexer["weights"]))
    total = total.masked_fill(torch.ones(total.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    chosen = total.topk(min(facts["index_topk"], total.shape[-1]), dim=-1).indices
    return torch.zeros_like(total, dtype=torch.bool).scatter(-1, chosen, True)


def rotary_angles(length: int, facts: Mapping[str, Any]) -> Tensor:
    rotated = facts["rope_dim"] if facts["mla"] else int(facts["head_dim"] * facts["rope_fraction"])
    frequencies = facts["rope_theta"] ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if facts.get("rope_scaling") == "yarn":
        assert facts["rope_mscale"] == facts["rope_mscale_all_dim"], "else the rotated dimensions grow or shrink"

        def dimension_that_turns(times: float) -> float:
            wavelength = facts["rope_original_positions"] / (times * 2 * math.pi)
            return float(rotated * math.log(wavelength) / (2 * math.log(facts["rope_theta"])))

        low = max(math.floor(dimension_that_turns(facts["rope_beta_fast"])), 0)
        high = min(math.ceil(dimension_that_turns(facts["rope_beta_slow"])), rotated - 1)
        slow = ((torch.arange(rotated // 2) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (1 - slow) + frequencies / facts["rope_factor"] * slow
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def yarn_gain(facts: Mapping[str, Any]) -> float:
    if facts.get("rope_scaling") != "yarn":
        return 1.0
    return float(0.1 * facts["rope_mscale_all_dim"] * math.log(facts["rope_factor"]) + 1)


def halves(x: Tensor) -> Tensor:
    """Latent attention stores the two dimensions of a rotated pair side by side; `rotate` wants them in halves."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


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
    wanted = scores + mlp["router_bias"]
    groups, topk_groups = facts["router_groups"], facts["router_topk_groups"]
    by_group = wanted.unflatten(-1, (groups, -1))
    # transformers always adds up two; Megatron's rule is the same as long as this is two
    best = by_group.topk(min(facts["topk"] // topk_groups, by_group.shape[-1]), dim=-1).values.sum(-1)
    kept_groups = torch.zeros_like(best).scatter(-1, best.topk(topk_groups, dim=-1).indices, 1).bool()
    wanted = by_group.masked_fill(~kept_groups[..., None], -torch.inf).flatten(-2)
    chosen = wanted.topk(facts["topk"], dim=-1).indices
    kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * facts["routed_scaling"]
    y = gated(x, under(mlp, "shared.")) if "shared.gate" in mlp else torch.zeros_like(x)
    for e in range(weights.shape[-1]):
        y = y + weights[..., e, None] * gated(x, under(mlp, f"experts.{e}."))
    return y
