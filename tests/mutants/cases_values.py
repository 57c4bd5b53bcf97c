"""Faults of values: every key is there, and holds something else."""

from __future__ import annotations

import torch

from tests.mutants import hf
from tests.mutants import values as v
from tests.mutants.case import Case
from tests.mutants.originals import FP8

DRAFT = "accept MUTANT --workload some=TEXT"
DENSE_AND_MOE = ("qwen2_mtp", "glm4_moe")
EVERY_MOE = ("glm4_moe", "deepseek_v3")

HF = [
    Case("M06", "MTP matrices are as initialised, norms are one", hf.values("{mtp}", v.fresh),
         ("qwen2_mtp", "glm4_moe", "glm_moe_dsa"), ("values.bits random", "values.bits constant")),
    Case("M06s", "as M06, in the source", hf.values("{mtp}", v.fresh), DENSE_AND_MOE, ("acceptance.dead",),
         DRAFT),
    Case("M06t", "as M06, after training on the original", hf.both(
        hf.values("{mtp}", v.fresh), hf.values(r"model\.layers\.0\..*_proj\.weight", v.times(1.5))), DENSE_AND_MOE,
        ("values.fresh",), "verify hf MUTANT --values changed"),
    Case("M10", "every MTP tensor is zero", hf.values("{mtp}", v.zeros), ("qwen2_mtp", "glm4_moe", "mimo"),
         ("values.bits zeroed",)),
    Case("M10s", "as M10, in the source", hf.values("{mtp}", v.zeros), DENSE_AND_MOE, ("acceptance.dead",),
         DRAFT),
    Case("M10t", "as M10, after training on the original", hf.both(
        hf.values("{mtp}", v.zeros), hf.values(r"model\.layers\.0\..*_proj\.weight", v.times(1.5))), DENSE_AND_MOE,
        ("values.zero",), "verify hf MUTANT --values changed"),
    Case("M25", "MTP attention is that of decoder layer 0",
         hf.take(r"{layer}\.(self_attn\..*)", r"model.layers.0.\1"), DENSE_AND_MOE, ("values.bits taken-from",)),
    Case("M27h", "two MTP layers are exchanged", hf.both(
        hf.exchange(r"mtp\.layers\.0\.", "mtp.layers.1."),
        hf.exchange(r"mtp\.(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.", r"mtp.layers.1.\1.")),
        ("llama_mtp",), ("values.bits layers-exchanged",)),
    Case("M32", "one norm is one throughout", hf.values(r"{layer}\.input_layernorm", v.ones),
         ("qwen3_mtp", "deepseek_v3"), ("values.bits constant",)),
    Case("M34", "the MTP shared expert is zero", hf.values(r"{layer}\..*shared_experts", v.zeros), EVERY_MOE,
         ("values.bits zeroed",)),
    Case("M48", "an MTP head of its own is overwritten with the model's",
         hf.take(r"{layer}\.shared_head\.head", "lm_head"), ("glm4_moe with a head of its own",),
         ("values.bits taken-from",)),
    Case("M59h", "MTP experts are off by one", hf.experts(lambda e: (e + 1) % 4), EVERY_MOE,
         ("values.bits experts-rolled",)),
    Case("M60h", "one is added to all MTP norms", hf.values(r"{mtp}.*norm\.weight", v.plus(1.0)), DENSE_AND_MOE,
         ("values.bits offset",), says=r"\b1(\.0)?\b"),
    Case("M65", "the router's bias was rounded to bf16", hf.values(
        r"{mtp}.*e_score_correction_bias", v.through(torch.bfloat16)), EVERY_MOE, ("values.bits cast",)),
    Case("M73", "MTP matrices were rounded to 4 bits in groups of 64", hf.values("{mtp}", v.four_bits),
         ("qwen2_mtp", "deepseek_v3"), ("values.bits quantized",)),
    Case("M89", "the trunk is of a later step, the head of the first",
         hf.values(r"(?!{mtp}).*_proj\.weight", v.times(1.5)), DENSE_AND_MOE, ("values.stale",),
         "verify hf MUTANT --values changed", exit=0),
    Case("M90", "of two checkpoints one decoder layer differs and the head does not",
         hf.values(r"model\.layers\.1\.self_attn\..*_proj\.weight", v.permuted(0)), ("qwen3_mtp",), ("values.stale",),
         "verify hf MUTANT --values changed", exit=0),
    Case("X02", "gate and up are exchanged", hf.exchange(r"{layer}\.(.*)\.gate_proj", r"{layer}.\1.up_proj"),
         ("qwen3_mtp", "glm4_moe"), ("values.bits gate-up-exchanged",)),
    Case("X03", "query heads stand in reverse order", hf.values(
        r"{layer}\.self_attn\.(q_proj|q_b_proj)\.weight", v.reversed_heads(8)), ("qwen3_mtp", "deepseek_v3"),
        ("values.bits heads-reversed",)),
    Case("X04", "MTP experts stand in another order", hf.experts(lambda e: (2, 0, 3, 1)[e]), EVERY_MOE,
         ("values.bits experts-permuted",)),
    Case("X05", "all MTP experts hold the first", hf.experts(lambda e: 0), EVERY_MOE,
         ("values.bits experts-duplicated",)),
    Case("X06", "a square matrix is transposed", hf.values(r"{layer}\.self_attn\.k_proj\.weight", v.transposed),
         DENSE_AND_MOE, ("values.bits transposed",)),
    Case("X07", "queries and keys are ordered for the other rotary form", hf.both(
        hf.values(r"{layer}\.self_attn\.q_proj\.weight", v.rope_interleaved(8)),
        hf.values(r"{layer}\.self_attn\.k_proj\.weight", v.rope_interleaved(4))), ("qwen2_mtp", "llama_mtp"),
        ("values.bits rope-permuted",)),
    Case("X08", "the head is padded to a multiple of 128 rows", hf.values(r"lm_head\.weight", v.padded(124)),
         DENSE_AND_MOE, ("values.shape rows-padded",)),
    Case("X09", "the last rows of the head are cut off", hf.values(r"lm_head\.weight", v.cut(4)), DENSE_AND_MOE,
         ("values.shape rows-cut",)),
    Case("X10", "a norm is doubled", hf.values(r"{layer}\.post_attention_layernorm", v.times(2)), DENSE_AND_MOE,
         ("values.bits scaled",)),
    Case("X11", "the second of two shards of columns is missing", hf.values(
        r"{layer}\.self_attn\.o_proj\.weight", v.second_half_zero(1)), DENSE_AND_MOE, ("values.bits shard-missing",)),
    Case("X11b", "the second of two shards of rows is missing", hf.values(
        r"{layer}\.self_attn\.(q_proj|q_b_proj)\.weight", v.second_half_zero(0)), ("qwen3_mtp", "deepseek_v3"),
        ("values.bits shard-missing",)),
    Case("X12", "two shards of columns are exchanged", hf.values(r"{layer}\.self_attn\.o_proj\.weight", v.halves(1)),
         DENSE_AND_MOE, ("values.bits shards-exchanged",)),
    Case("X12b", "two shards of rows are exchanged", hf.values(r"lm_head\.weight", v.halves(0)), DENSE_AND_MOE,
         ("values.bits shards-exchanged",)),
    Case("X16", "one matrix is as initialised", hf.values(r"{layer}\.self_attn\.o_proj\.weight", v.fresh),
         ("qwen3_mtp", "glm_moe_dsa"), ("values.bits random",)),
    Case("X17", "rows stand in another order", hf.values(r"{layer}\.self_attn\.o_proj\.weight", v.permuted(0)),
         ("qwen3_mtp", "deepseek_v3"), ("values.bits rows-permuted",)),
    Case("X18", "columns stand in another order", hf.values(r"{layer}\.self_attn\.o_proj\.weight", v.permuted(1)),
         ("qwen3_mtp", "deepseek_v3"), ("values.bits columns-permuted",)),
    Case("X19", "two norms are exchanged",
         hf.exchange(r"{layer}\.input_layernorm", "{layer}.post_attention_layernorm"), ("qwen3_mtp", "deepseek_v3"),
         ("values.bits exchanged",)),
    Case("X19b", "keys and values are exchanged", hf.exchange(
        r"{layer}\.self_attn\.k_proj\.weight", "{layer}.self_attn.v_proj.weight"), DENSE_AND_MOE,
        ("values.bits exchanged",)),
    Case("X20", "matrices went through FP8 without scales", hf.values(
        r"{layer}\..*_proj\.weight", v.through(torch.float8_e4m3fn)), ("qwen3_mtp", "deepseek_v3"),
        ("values.bits cast",)),
    Case("X21", "a decoder layer is as initialised", hf.values(r"model\.layers\.1\.", v.fresh), ("qwen2_mtp",),
         ("values.bits random", "values.bits constant")),
    Case("X22", "two decoder layers are exchanged", hf.exchange(r"model\.layers\.1\.", "model.layers.2."),
         ("mimo", "glm4_moe"), ("values.bits layers-exchanged",)),
]  # fmt: skip

SCALES = [
    Case("M67", "the last row of scales is missing", hf.values(
        r"{layer}\.self_attn\.q_b_proj\.weight_scale_inv", lambda tensor: tensor[:-1]), (FP8,),
        ("quantization.scale",)),
    Case("M69", "one scale of many is doubled", hf.values(
        r"{layer}\.self_attn\.q_b_proj\.weight_scale_inv", v.only(1, v.only(0, v.times(2)))),
        ("deepseek_v3 in FP8, scales of any value",), ("values.bits scales-scaled",)),
    Case("M69b", "all scales are doubled", hf.values(r"{layer}\..*_scale_inv", v.times(2)),
         ("deepseek_v3 in FP8, scales of any value",), ("values.bits scales-scaled",)),
    Case("M81", "the scales of one weight have another name", hf.rename(
        r"({layer}\.self_attn\.o_proj\.weight_scale)_inv", r"\1"), (FP8,), ("quantization.scale",)),
    Case("X13", "a square grid of scales is transposed", hf.values(
        r"{layer}\.mlp\.experts\.0\.down_proj\.weight_scale_inv", v.transposed),
        ("deepseek_v3 in FP8, scales of any value",), ("values.bits scales-transposed",)),
    Case("X14", "the scales are those of another expert", hf.take(
        r"{layer}\.mlp\.experts\.0\.down_proj\.weight_scale_inv", "{layer}.mlp.experts.1.down_proj.weight_scale_inv"),
        ("deepseek_v3 in FP8, scales of any value",), ("values.bits scales-taken",)),
]  # fmt: skip
