"""What has to pass: other forms of the same checkpoint, and what releases legitimately leave out or repeat."""

from __future__ import annotations

from typing import Any

from tests.mutants import forms, hf, megatron
from tests.mutants import values as v
from tests.mutants.anatomy import STORED
from tests.mutants.case import Case, legal
from tests.mutants.originals import FP8

ALL = STORED
ROUNDTRIP, SAME = "roundtrip MUTANT --no-acceptance", "verify MUTANT MUTANT"
COPIES = r"{layer}\.(embed_tokens|shared_head\.head)"


def _other_dtype_key(table: dict[str, Any]) -> None:
    table["dtype"] = table.pop("torch_dtype")


def _rope_parameters(table: dict[str, Any]) -> None:
    table["rope_parameters"] = {"rope_theta": table.pop("rope_theta"), "rope_type": "default"}


FILES = [
    legal("L01", "another shard for every tensor", forms.many_shards, ALL),
    legal("M44", "one shard and no index", forms.one_shard, ALL),
    legal("L02", "config keys in another order, other white space", forms.config_spelled_otherwise, ALL),
    legal("L03", "dtype for torch_dtype", hf.config(_other_dtype_key), ("qwen2_mtp", "glm4_moe")),
    legal("L04", "rope_parameters for rope_theta", hf.config(_rope_parameters), ("qwen2_mtp", "llama_mtp")),
    legal("L05", "another version of transformers wrote the config",
          hf.config(lambda table: table.update(transformers_version="9.9")), ("glm4_moe", "mimo")),
    legal("L06", "copies of embedding and head are there and equal", hf.unchanged, ("glm4_moe", "deepseek_v3"),
          ROUNDTRIP),
    legal("M40", "a source without copies of embedding and head", hf.drop(COPIES), ("glm4_moe", "deepseek_v3"),
          ROUNDTRIP),
    legal("M40b", "as M40, held against itself", hf.drop(COPIES), ("glm4_moe", "deepseek_v3"), SAME),
    legal("L07", "a head of its own, kept", hf.unchanged, ("glm4_moe with a head of its own",)),
    legal("L08", "tied, and an equal head is stored", hf.add("lm_head.weight", "model.embed_tokens.weight"),
          ("qwen3_mtp",), ROUNDTRIP),
    legal("L08b", "as L08, held against itself", hf.add("lm_head.weight", "model.embed_tokens.weight"), ("qwen3_mtp",),
          SAME),
    legal("L09", "a source that declares no layer with 0 and stores one",
          hf.count(lambda table, key: table.update({key: 0})), ("glm4_moe", "qwen3_mtp"), ROUNDTRIP),
    legal("L10", "a source without a key that declares the layer", hf.count(lambda table, key: table.pop(key)),
          ("glm4_moe", "qwen3_mtp"), ROUNDTRIP),
    legal("L11", "a source whose count is null", hf.count(lambda table, key: table.update({key: None})),
          ("glm4_moe", "qwen3_mtp"), ROUNDTRIP),
    legal("L13", "one stored layer that is run for two steps", hf.config(
        lambda table: table.update(mtp_num_speculative_steps=2)), ("glm4_moe", "qwen3_mtp"), ROUNDTRIP),
    legal("L14", "lists that count the MTP layer", hf.unchanged, (
        "glm_moe_dsa", "qwen3_mtp with layer_types", "glm4_moe with mlp_layer_types"), ROUNDTRIP),
    legal("L15", "trained on: trunk and head moved", hf.values(r".*_proj\.weight", v.times(1.5)),
          ("qwen2_mtp", "glm4_moe"), "verify hf MUTANT --values changed"),
    legal("L16", "every FP8 code and scale", hf.unchanged, ("deepseek_v3 in FP8, scales of any value",), ROUNDTRIP),
    legal("M76", "of the MTP layer only the experts are packed, and that is declared", hf.unchanged,
          ("glm4_moe in AWQ, MTP attention plain",), SAME),
]  # fmt: skip

MEGATRON = [
    legal("L20", "torch_dist with the Transformer Engine spec", hf.unchanged, ALL, made="torch_dist"),
    legal("L28", "the source, held against what Megatron has of it", hf.unchanged, ALL, "verify megatron MUTANT"),
    legal("L21", "torch_dist with the local spec", hf.unchanged, ("deepseek_v3", "qwen2_mtp"),
          made="torch_dist --spec local"),
    legal("L22", "the names of core 0.19", hf.unchanged, ("glm4_moe", "qwen3_mtp"), made="torch_dist --mcore 0.19"),
    legal("L23", "a vocabulary padded to 512", hf.unchanged, ("glm4_moe", "qwen3_mtp"),
          made="torch_dist --vocab-multiple 512"),
    legal("L24", "two tensor-parallel ranks", hf.unchanged, ("deepseek_v3", "llama_mtp"), made="torch --tp 2 --etp 1"),
    legal("L25", "two expert-parallel ranks, two stages", hf.unchanged, ("glm4_moe",),
          made="torch --pp 2 --ep 2 --first-layers 1"),
    legal("M20", "all keys use the other name of the inner layer", megatron.rename(
        r"(mtp\.layers\.\d+\.)transformer_layer", r"\1mtp_model_layer"), ("qwen2_mtp", "glm4_moe", "llama_mtp"),
        made="torch_dist"),
    legal("M21", "MTP keys begin with language_model.", megatron.rename(r"(mtp\.)", r"language_model.\1"),
          ("qwen2_mtp", "glm4_moe"), made="torch_dist"),
    legal("M21b", "all keys begin with language_model.", megatron.rename(r"(.*)", r"language_model.\1"),
          ("qwen2_mtp", "glm4_moe"), made="torch_dist"),
    legal("M29", "grouped experts are spelled as local_experts", megatron.rename(
        r"(.*\.mlp\.experts\.)(linear_fc\d\.weight)(\d+)$", r"\1local_experts.\3.\2"), ("glm4_moe", "deepseek_v3"),
        made="torch"),
    legal("M84", "the MTP layer alone on a virtual stage", hf.unchanged, ("qwen2_mtp",),
          made="torch --pp 2 --vpp 2 --mcore 0.19 --pipeline-layout Ett|tt|m|L"),
    legal("M84b", "the MTP layer with the head on a stage", hf.unchanged, ("qwen2_mtp",),
          made="torch --pp 3 --mcore 0.19 --pipeline-layout Ett|tt|mL"),
    legal("L26", "FP8 in bf16", hf.unchanged, (FP8,), made="torch_dist"),
    legal("L27", "FP8 kept as codes", hf.unchanged, (FP8,), made="torch_dist --fp8 keep"),
]  # fmt: skip
LEGAL: list[Case] = [*FILES, *MEGATRON]
