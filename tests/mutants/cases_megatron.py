"""Faults of a Megatron checkpoint, held against the Hugging Face checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path

import torch

from tests import coded, packed
from tests.mutants import megatron as m
from tests.mutants import values as v
from tests.mutants.case import Case
from tests.mutants.originals import FP8

DENSE_AND_MOE = ("qwen2_mtp", "glm4_moe")
EVERY_MOE = ("glm4_moe", "deepseek_v3")
DRAFT = "verify hf MUTANT --acceptance --workload some=TEXT"
DIST, ONE_RANK, TWO_STAGES = "torch_dist", "torch", "torch --pp 2"
BLOCK = "mtp.layers.0.transformer_layer."
NORMS = r"mtp\.layers\.\d+\.(.*norm\.weight|.*layer_norm_weight)$"


def _in_block(name: str) -> str:
    return (BLOCK + name).replace(".", r"\.") + "$"


EXPERTS = (BLOCK + "mlp.experts.experts.linear_fc").replace(".", r"\.") + r"\d\.weight$"


def _raw_codes(folder: Path) -> None:
    """The output projection of the MTP layer holds the codes of its source as they are."""
    source = packed.stored(coded.make(folder.parent / f"{folder.name} source", "fp32", finite=True))
    codes = source["model.layers.3.self_attn.o_proj.weight"]
    m.values(_in_block("self_attention.linear_proj.weight"), lambda tensor: codes.to(tensor.dtype))(folder)


NAMES = [
    Case("M03", "every key of the MTP layers is dropped", m.drop(r"mtp\."), ("qwen2_mtp", "glm4_moe", "deepseek_v3"),
         ("presence.missing dropped",), made=DIST),
    Case("M03r", "as M03, in rank files", m.drop(r"mtp\."), DENSE_AND_MOE, ("presence.missing dropped",),
         made=ONE_RANK),
    Case("M19b", "arguments say nothing of the MTP layer that is there", m.args(mtp_num_layers=None), DENSE_AND_MOE,
         ("declaration.mtp", "declaration.count"), made=DIST),
    Case("M20b", "half of the keys use the other name of the inner layer", m.rename(
        r"(mtp\.layers\.0\.)transformer_layer(\.self_attention)", r"\1mtp_model_layer\2"), DENSE_AND_MOE,
        ("presence.missing renamed",), made=DIST),
    Case("M23m", "one key gets a suffix that nobody knows", m.rename(
        r"(mtp\.layers\.0\.)eh_proj\.weight", r"\1projection.weight"), DENSE_AND_MOE, ("presence.missing renamed",),
        made=DIST),
    Case("M23r", "as M23m, in rank files", m.rename(r"(mtp\.layers\.0\.)eh_proj\.weight", r"\1projection.weight"),
         DENSE_AND_MOE, ("presence.missing renamed",), made=ONE_RANK),
    Case("M38m", "the first of two MTP layers is dropped", m.drop(r"mtp\.layers\.0\."), ("llama_mtp",),
         ("presence.missing dropped",), made=DIST),
    Case("M54", "a head of noise in a tied model", m.args(untie_embeddings_and_output_weights=False),
         ("qwen3_mtp with a head of its own",), ("presence.tied",), "verify qwen3_mtp MUTANT", made=DIST),
    Case("M54r", "a head of noise in a tied model, in rank files", m.add(
        "output_layer.weight", "embedding.word_embeddings.weight", v.fresh), ("qwen3_mtp",),
        ("presence.tied|topology.replica",), made=ONE_RANK),
    Case("M72", "a dense and an MoE decoder layer are exchanged",
         m.swap_names("decoder.layers.0.", "decoder.layers.1."), EVERY_MOE,
         ("values.bits layers-exchanged", "presence.missing renumbered|layers-exchanged"), made=DIST, blind=True),
]  # fmt: skip

VALUES = [
    Case("M06m", "MTP matrices are as initialised, norms are one", m.values(m.MTP + r"(?!.*_extra_state)", v.fresh),
         ("qwen2_mtp", "glm4_moe", "deepseek_v3"), ("values.bits random", "values.bits constant"), made=DIST),
    Case("M25m", "the MTP layer's QKV is that of decoder layer 0", m.take(
        BLOCK + "self_attention.linear_qkv.weight", "decoder.layers.0.self_attention.linear_qkv.weight"),
        ("glm4_moe",), ("values.bits taken-from",), made=DIST),
    Case("M25n", "as M25m, where decoder layers are stacked", m.take(
        BLOCK + "self_attention.linear_qkv.weight", "decoder.layers.self_attention.linear_qkv.weight",
        lambda stack: stack[0]), ("qwen2_mtp",), ("values.bits taken-from",), made=DIST),
    Case("M27", "two MTP layers are exchanged", m.swap_names("mtp.layers.0.", "mtp.layers.1."), ("llama_mtp",),
         ("values.bits layers-exchanged",), made=DIST, blind=True),
    Case("M32m", "one norm is one throughout", m.values(
        _in_block("self_attention.linear_qkv.layer_norm_weight"), v.ones), DENSE_AND_MOE, ("values.bits constant",),
        made=DIST),
    Case("M56", "the halves of the projection are exchanged", m.values(r"mtp\.layers\.0\.eh_proj\.weight", v.halves(1)),
         ("qwen2_mtp", "glm4_moe", "deepseek_v3"), ("values.bits halves-exchanged",), made=DIST, blind=True),
    Case("M56r", "as M56, in rank files", m.values(r"mtp\.layers\.0\.eh_proj\.weight", v.halves(1)),
         ("qwen3_mtp", "glm_moe_dsa"), ("values.bits halves-exchanged",), made="torch --tp 2 --etp 1", blind=True),
    Case("M57", "MiMo's halves are taken over in its own order", m.values(
        r"mtp\.layers\.0\.eh_proj\.weight", v.halves(1)), ("mimo",), ("values.bits halves-exchanged",), made=DIST,
        blind=True),
    Case("M59", "MTP experts are off by one", m.values(
        EXPERTS, v.rolled(-1)), EVERY_MOE,
        ("values.bits experts-rolled",), made=DIST, blind=True),
    Case("M60", "one is added to all MTP norms", m.values(NORMS, v.plus(1.0)), DENSE_AND_MOE,
         ("values.bits offset",), made=DIST, says=r"\b1(\.0)?\b", blind=True),
    Case("M62", "one is added to all norms of the trunk", m.values(
        r"decoder\..*(norm\.weight|layer_norm_weight)$", v.plus(1.0)), DENSE_AND_MOE, ("values.bits offset",),
        made=DIST, says=r"\b1(\.0)?\b", blind=True),
    Case("M65m", "the router's bias was rounded to bf16", m.values(
        _in_block("mlp.router.expert_bias"), v.through(torch.bfloat16)), EVERY_MOE, ("values.bits cast",), made=DIST),
    Case("M66", "FP8 codes were taken for values, without scales", _raw_codes, (FP8,), ("values.bits raw-codes",),
         made=DIST, blind=True),
    Case("M71", "gate and up are interleaved in blocks of 32 rows", m.values(
        _in_block("mlp.linear_fc1.weight"), v.interleaved(32)), ("qwen2_mtp", "mimo"),
        ("values.bits gate-up-interleaved",), made=DIST, blind=True),
    Case("M71b", "gate and up of experts are interleaved in blocks of 16 rows", m.values(
        _in_block("mlp.experts.experts.linear_fc1.weight"), v.interleaved(16)), EVERY_MOE,
        ("values.bits gate-up-interleaved",), made=DIST, blind=True),
    Case("X02m", "gate and up are exchanged", m.values(_in_block("mlp.linear_fc1.weight"), v.halves(0)),
         ("qwen2_mtp", "llama_mtp"), ("values.bits gate-up-exchanged",), made=DIST, blind=True),
    Case("X02n", "gate and up of all MTP experts are exchanged", m.values(
        _in_block("mlp.experts.experts.linear_fc1.weight"), v.halves(1)), EVERY_MOE,
        ("values.bits gate-up-exchanged",), made=DIST, blind=True),
    Case("X04m", "MTP experts stand in another order", m.values(
        EXPERTS, v.reordered(2, 0, 3, 1)),
        EVERY_MOE, ("values.bits experts-permuted",), made=DIST, blind=True),
    Case("X05m", "the last two MTP experts hold the first two", m.values(
        EXPERTS, v.reordered(0, 1, 0, 1)),
        EVERY_MOE, ("values.bits experts-duplicated",), made=DIST),
    Case("X15", "every decoder layer stands one place too far", m.values(
        r"decoder\.layers\.(?!.*_extra_state)", v.rolled(1)), ("qwen2_mtp",), ("values.bits layers-shifted",),
        made=DIST, blind=True),
    Case("X22m", "two decoder layers are exchanged", m.values(
        r"decoder\.layers\.(?!.*_extra_state)", v.reordered(0, 2, 1)), ("mimo",), ("values.bits layers-exchanged",),
        made=DIST, blind=True),
    Case("X23", "queries, keys and values are joined one after the other", m.values(
        _in_block("self_attention.linear_qkv.weight"), v.regrouped(4, 32, 16, 16)), DENSE_AND_MOE,
        ("values.bits qkv-regrouped",), made=DIST, blind=True),
    Case("X24", "the final norm is lost, and the MTP layer's stands in its place", m.take(
        "decoder.final_layernorm.weight", "mtp.layers.0.final_layernorm.weight"), DENSE_AND_MOE,
        ("values.bits taken-from",), made=DIST),
    Case("X25", "the MTP layer's projection is zero", m.values(r"mtp\.layers\.0\.eh_proj\.weight", v.zeros),
         DENSE_AND_MOE, ("values.bits zeroed",), made=DIST),
]  # fmt: skip

DRAFTS = [
    Case("M56d", "as M56, and both models are run", m.values(r"mtp\.layers\.0\.eh_proj\.weight", v.halves(1)),
         ("qwen2_mtp",), ("acceptance.logits", "values.bits halves-exchanged"), DRAFT, made=DIST, blind=True),
    Case("M59d", "as M59, and both models are run", m.values(
        EXPERTS, v.rolled(-1)), ("glm4_moe",), ("acceptance.logits", "values.bits experts-rolled"), DRAFT, made=DIST,
        blind=True),
    Case("M60d", "as M60, and both models are run", m.values(NORMS, v.plus(1.0)), ("qwen3_mtp",),
         ("acceptance.logits", "values.bits offset"), DRAFT, made=DIST, blind=True),
]  # fmt: skip

RANKS = [
    Case("M82", "the embedding on the last pipeline stage is random", m.values(
        r"embedding\.word_embeddings\.weight", v.fresh, "mp_rank_00_001"), ("qwen2_mtp", "glm4_moe_nocopies"),
        ("topology.replica",),
        made=TWO_STAGES, blind=True),
    Case("M85", "the layers of one pipeline stage are numbered one too far", m.renumber(
        "model", lambda number: (number + 1) % 2, "mp_rank_00_001"), ("qwen2_mtp",),
        ("topology.turned",), made=TWO_STAGES, blind=True),
    Case("M85b", "as M85, in the second virtual stage of a rank", m.renumber(
        "model1", lambda number: (number + 1) % 2, "mp_rank_00_000"), ("12 layers, 2 MTP",),
        ("topology.turned",),
        made="torch --pp 2 --vpp 3 --vocab-multiple 8", blind=True),
    Case("M85c", "the numbers of one virtual stage begin at 1", m.renumber(
        "model1", lambda number: number + 1, "mp_rank_00_001"), ("qwen2_mtp",), ("topology.layers",),
        made="torch --pp 2 --vpp 2"),
    Case("X26", "gate and up of one MTP layer are exchanged on every rank", m.values(
        r"mtp\.layers\.\d\.transformer_layer\.mlp\.linear_fc1\.weight", v.halves(0)), ("llama_mtp",),
        ("values.bits gate-up-exchanged",), made="torch --tp 2", blind=True),
]  # fmt: skip
