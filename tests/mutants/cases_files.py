"""Faults of a Hugging Face folder that need no look at values: what is lost, renamed, misfiled or misdeclared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.mutants import hf
from tests.mutants.case import Case, refused
from tests.mutants.originals import LAYER_TYPES
from tests.mutants.values import fresh

INDEX_STYLE = ("glm4_moe", "deepseek_v3", "deepseek_v3_noq", "glm_moe_dsa")
NAME_STYLE = ("qwen3_mtp", "qwen2_mtp", "mimo")
ONE_OF_EACH = ("qwen3_mtp", "glm4_moe")
PROJECTION = r"{mtp}.*?(eh_proj|fc|input_proj)\.weight"
GONE = ("presence.missing dropped", "declaration.count")

LOST = [
    Case("M01", "every tensor named mtp is deleted, the config left as it is", hf.drop("{mtp}"), NAME_STYLE, GONE),
    Case("M02", "every tensor of the layer after the last is deleted", hf.drop("{mtp}"),
         (*INDEX_STYLE, "glm4_moe_nocopies"), GONE),
    Case("M04", "MTP keys get another prefix", hf.rename("({mtp})", r"model.\1"), ONE_OF_EACH,
         ("presence.missing renamed",)),
    Case("M05", "the file that the MTP layer lies in is deleted, with its entries", hf.lose("mtp.safetensors"),
         ("glm4_moe_nocopies",), ("presence.missing dropped|shard-lost", "declaration.count")),
    Case("M05b", "the file stays, without entries in the index",
         hf.unindex("{mtp}"), ("glm4_moe_nocopies",), ("structure.orphan_file", "presence.missing")),
    refused("M05c", "the file is deleted, and the index names it still", hf.lose("mtp.safetensors", named=True),
            ("glm4_moe_nocopies",), "verify hf MUTANT", r"mtp\.safetensors"),
    Case("M07", "a tensor stays in its shard and loses its entry in the index", hf.unindex(PROJECTION), ONE_OF_EACH,
         ("structure.unindexed",)),
    Case("M23", "one key gets a suffix that nobody knows", hf.rename(PROJECTION, "{layer}.projection.weight"),
         ("qwen3_mtp", "glm4_moe", "mimo"), ("presence.missing renamed",)),
    Case("M33", "the layer of a file of its own is numbered 0",
         hf.rename_in("mtp.safetensors", r"{layer}\.", "model.layers.0."), ("glm4_moe_nocopies",),
         ("structure.duplicate", "presence.missing")),
    Case("M33b", "the MTP layer's number is one too high", hf.rename(r"{layer}\.", "{layer}1."), ("deepseek_v3",),
         ("presence.missing renumbered",)),
    Case("M36", "a shard of trunk and MTP tensors is lost, with its entries",
         hf.lose("model-00002-of-00003.safetensors"), ("deepseek_v3", "glm4_moe"), ("presence.missing shard-lost",)),
    Case("M36b", "the shard with the embedding is lost, with its entries",
         hf.lose("model-00001-of-00002.safetensors"), ("mimo",), ("presence.missing shard-lost",)),
    Case("M37", "the index names MTP keys that no shard holds", hf.ghosts("{mtp}"),
         ("qwen3_mtp", "mimo", "glm_moe_dsa"), ("structure.ghost", "presence.missing dropped")),
    Case("M38", "the first of two MTP layers is dropped", hf.drop(r"mtp\.(?!layers\.1\.)"), ("llama_mtp",),
         ("presence.missing dropped", "declaration.count")),
    Case("M39", "the embedding stands in two shards, with equal bytes", hf.twice(r"model\.embed_tokens\.weight"),
         ONE_OF_EACH, ("structure.duplicate",)),
    Case("M39b", "the embedding stands in two shards, with different bytes",
         hf.twice(r"model\.embed_tokens\.weight", fresh), ONE_OF_EACH, ("structure.duplicate",)),
    Case("M41", "total_size is one too much", hf.index(lambda table: _larger(table)), ONE_OF_EACH, ("structure.size",)),
    Case("M42", "a shard of another run was left behind", hf.stale("model-00009-of-00009.safetensors"),
         ("qwen3_mtp", "glm4_moe"), ("structure.stale",)),
    Case("M43", "the index keeps the scales of a source in FP8", hf.index(lambda table: _scales(table)),
         ("deepseek_v3", "qwen3_mtp"), ("structure.ghost",)),
    Case("M47", "of the copies only that of the embedding is dropped", hf.drop(r"{layer}\.embed_tokens"),
         ("glm4_moe", "deepseek_v3"), ("presence.missing|presence.copy",)),
    Case("M49", "a copy of the embedding appears that the source never had",
         hf.add("{layer}.embed_tokens.weight", "model.embed_tokens.weight"), ("qwen3_mtp", "glm_moe_dsa"),
         ("presence.unclaimed",)),
    Case("M50", "the MTP head is saved under a name at the top",
         hf.rename(r"{layer}\.shared_head\.head", "head"), ("glm4_moe", "deepseek_v3"), ("presence.missing renamed",)),
    Case("M51", "a folder for drafting holds the MTP layer alone", hf.drop(r"(?!{mtp})"), ONE_OF_EACH,
         ("presence.missing dropped",)),
    Case("M53", "tied, and a head that differs from the embedding is stored",
         hf.add("lm_head.weight", "model.embed_tokens.weight", fresh), ("qwen3_mtp",), ("presence.tied",)),
    Case("M55", "the MTP layer's embedding is narrower than the model",
         hf.values(r"{layer}\.embed_tokens", lambda tensor: tensor[:, :32]), ("glm4_moe", "deepseek_v3"),
         ("presence.shape|values.shape",)),
    Case("X01", "the last decoder layer is dropped", hf.drop(r"model\.layers\.1\."), ("qwen3_mtp",),
         ("presence.missing dropped",)),
]  # fmt: skip


def _larger(table: dict[str, Any]) -> None:
    table["metadata"]["total_size"] += 1


def _scales(table: dict[str, Any]) -> None:
    names = table["weight_map"]
    names.update({name + "_scale_inv": file for name, file in list(names.items()) if name.endswith("o_proj.weight")})


def _text_config(table: dict[str, Any], key: str) -> None:
    table["text_config"] = {key: table.pop(key)}


def _other_family(table: dict[str, Any], key: str) -> None:
    table["mtp_num_hidden_layers" if key == "num_nextn_predict_layers" else "num_nextn_predict_layers"] = table.pop(key)


def _headless(folder: Path) -> None:
    """What an export is that knows nothing of an MTP layer."""
    hf.drop("{mtp}")(folder)
    hf.count(lambda table, key: table.pop(key))(folder)


EVERY = ("qwen3_mtp", "glm4_moe", "mimo")
EXPORT = "verify megatron MUTANT"

DECLARED = [
    Case("M08", "every MTP tensor is deleted, the config declares one layer", hf.drop("{mtp}"), ONE_OF_EACH,
         ("declaration.count",)),
    Case("M09", "a model without a head declares one",
         hf.config(lambda table: table.update(num_nextn_predict_layers=1)), ("qwen2_mtp without a head",),
         ("declaration.mtp", "declaration.count"), "verify hf MUTANT --allow-no-mtp"),
    refused("M09s", "a release that declares a layer and ships none, as the original", hf.drop("{mtp}"), ONE_OF_EACH,
            "verify MUTANT MUTANT", "declares 1 MTP layer and stores none"),
    Case("M11", "no layer is declared, one is stored", hf.count(lambda table, key: table.update({key: 0})), EVERY,
         ("declaration.mtp", "declaration.count")),
    Case("M12", "no key declares a layer", hf.count(lambda table, key: table.pop(key)), EVERY,
         ("declaration.mtp", "declaration.count")),
    Case("M13", "the key moves into text_config", hf.count(_text_config), EVERY, ("declaration.mtp",)),
    Case("M14", "the key takes the name of another family's", hf.count(_other_family), EVERY, ("declaration.mtp",)),
    Case("M15", "two layers are declared, one is stored", hf.count(lambda table, key: table.update({key: 2})), EVERY,
         ("declaration.count", "declaration.mtp")),
    Case("M16", "the count is null", hf.count(lambda table, key: table.update({key: None})), EVERY,
         ("declaration.mtp", "declaration.count")),
    Case("M11e", "as M11, in an export of Megatron", hf.count(lambda table, key: table.update({key: 0})),
         ("glm4_moe",), ("declaration.mtp", "declaration.count"), EXPORT),
    Case("M12e", "as M12, in an export of Megatron", hf.count(lambda table, key: table.pop(key)), ("glm4_moe",),
         ("declaration.mtp", "declaration.count"), EXPORT),
    Case("M15e", "as M15, in an export of Megatron", hf.count(lambda table, key: table.update({key: 2})),
         ("glm4_moe", "qwen2_mtp"), ("declaration.mtp", "declaration.count"), EXPORT),
    Case("M18", "a list with an entry for each layer loses that of the MTP layer",
         hf.config(lambda table: table.update(indexer_types=table["indexer_types"][:4])), ("glm_moe_dsa",),
         ("declaration.list",)),
    Case("M18b", "layer_types is cut to the decoder layers",
         hf.config(lambda table: table.update(layer_types=LAYER_TYPES[:2])), ("qwen3_mtp with layer_types",),
         ("declaration.list",)),
    Case("M18c", "mlp_layer_types is cut to the decoder layers",
         hf.config(lambda table: table.update(mlp_layer_types=table["mlp_layer_types"][:3])),
         ("glm4_moe with mlp_layer_types",), ("declaration.list",)),
    Case("M19", "Megatron has the layer, the export was made without it", _headless, ("glm4_moe", "qwen2_mtp"),
         ("presence.missing dropped", "declaration.mtp"), EXPORT),
    refused("M22", "a head on a family that has no spelling of one", hf.config(
        lambda table: table.update(model_type="phi3", architectures=["Phi3ForCausalLM"])), ("qwen2_mtp",),
        "roundtrip MUTANT", "phi3"),
    refused("M64", "the output is the input", hf.unchanged, ONE_OF_EACH, "convert MUTANT MUTANT", "exist"),
]  # fmt: skip

DTYPES = [
    Case("M65b", "the router's bias is stored as bf16", hf.values(
        r"{mtp}.*e_score_correction_bias", lambda tensor: tensor.to(torch.bfloat16)), ("glm4_moe", "deepseek_v3"),
        ("values.dtype cast",)),
]  # fmt: skip
