"""Faults that the original has itself, as its faithful copy does: told apart from what a conversion does."""

from __future__ import annotations

import torch

from tests.mutants import hf
from tests.mutants import values as v
from tests.mutants.case import Case, Edit
from tests.mutants.values import fresh

DENSE_AND_MOE = ("qwen2_mtp", "glm4_moe")
COPY = "verify MUTANT MUTANT"


def _source(id: str, what: str, edit: Edit, on: tuple[str, ...], expected: str, exit: int = 0) -> Case:
    return Case(id, what, edit, on, (expected,), COPY, exit=exit, source=True)


def _two_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(tensor)).remainder(2).to(tensor.dtype)


CASES = [
    _source("M10o", "every MTP tensor of the original is zero", hf.values("{mtp}", v.zeros), DENSE_AND_MOE,
            "values.zero", exit=1),
    _source("M06o", "the original's MTP layer is as initialised", hf.values("{mtp}", v.fresh), DENSE_AND_MOE,
            "values.fresh"),
    _source("X30", "a matrix of the original's MTP layer is one value throughout", hf.values(
        r"{layer}\.self_attn\.o_proj\.weight", v.constant(0.5)), DENSE_AND_MOE, "values.constant"),
    _source("X05o", "all experts of the original's MTP layer are the first", hf.experts(lambda e: 0),
            ("glm4_moe", "deepseek_v3"), "values.experts"),
    _source("M65o", "the original's router bias has two values", hf.values(
        r"model\.layers\.12\.mlp\.gate\.e_score_correction_bias", _two_values), ("12 layers, 2 MTP",),
        "values.distinct"),
    _source("M41o", "the original's total_size is one too much", hf.index(
        lambda table: table["metadata"].update(total_size=table["metadata"]["total_size"] + 1)),
        ("qwen3_mtp", "glm4_moe"), "structure.size"),
    _source("M42o", "a shard of another run lies beside the original's", hf.stale("model-00009-of-00009.safetensors"),
            ("qwen3_mtp", "glm4_moe"), "structure.stale"),
    _source("M39o", "the original's embedding stands in two shards", hf.twice(r"model\.embed_tokens\.weight"),
            ("qwen3_mtp", "glm4_moe"), "structure.duplicate"),
    _source("M07o", "a tensor of the original has no entry in the index", hf.unindex(
        r"{mtp}.*?(eh_proj|fc|input_proj)\.weight"), ("qwen3_mtp", "glm4_moe"), "structure.unindexed"),
    _source("M43o", "the original's index keeps scales that no shard holds", hf.index(
        lambda table: table["weight_map"].update({"lm_head.weight_scale_inv": min(table["weight_map"].values())})),
        ("qwen3_mtp", "glm4_moe"), "structure.ghost"),
    _source("M53o", "the original is tied and stores another head", hf.add(
        "lm_head.weight", "model.embed_tokens.weight", fresh), ("qwen3_mtp",), "presence.tied", exit=1),
    _source("M15o", "the original declares two layers and stores one", hf.count(
        lambda table, key: table.update({key: 2})), ("qwen3_mtp", "glm4_moe"), "declaration.count"),
]  # fmt: skip
