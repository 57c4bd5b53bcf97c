"""Families and dialects are data: each is proved invertible on load, and tables that are not are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpcheck import data, dialect, dialects, family, model
from mtpcheck.dialects import dialect_names, load_dialect, prove_complete, read_dialect
from mtpcheck.errors import FamilyError, UnsupportedError
from mtpcheck.expr import evaluate, expand
from mtpcheck.facts import args_from_facts, config_from_facts, facts_from_args, facts_from_config
from mtpcheck.family import family_names, load_family, specimens
from mtpcheck.model import load_block


@pytest.fixture
def own_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of ``configs`` to break, with all caches emptied around the test."""
    folder = tmp_path / "configs"
    shutil.copytree(data.configs(), folder)

    def clear() -> None:
        for cached in (load_block, load_family, read_dialect, load_dialect, dialect_names, family_names):
            cached.cache_clear()

    clear()
    for module in (data, family, model, dialects):
        monkeypatch.setattr(module, "configs", lambda: folder)

    def edit(name: str, change: Any) -> None:
        path = folder / name
        table = yaml.safe_load(path.read_text())
        change(table)
        path.write_text(yaml.safe_dump(table))

    yield edit
    clear()


@pytest.mark.parametrize("name", family_names())
@pytest.mark.parametrize("spec", ["te", "local"])
def test_every_family_is_complete_in_every_spec(name: str, spec: dialect.Spec) -> None:
    for specimen in specimens(load_family(name)):
        for one in dialect_names():
            prove_complete(load_dialect(one), specimen, spec)


NORM, Q_PROJ = "input_layernorm.weight", "self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("blocks/gqa.yaml", lambda t: t["hf"].update({"self_attn.k_proj.weight": "attn.q"}), "stored twice"),
        ("blocks/dense_mlp.yaml", lambda t: t["parts"].update({"mlp.up": ["hidden", "ffn"]}), "do not fit together"),
        ("blocks/norms.yaml", lambda t: t["hf"].update({Q_PROJ: t["hf"].pop(NORM)}), "two rows spell"),
        ("blocks/gqa.yaml", lambda t: t["hf"].pop("self_attn.o_proj.weight"), "'layers.0.attn.o' is stored nowhere"),
        ("blocks/gqa.yaml", lambda t: t.update(colour=1), "unknown key 'colour'"),
        ("families/qwen2.yaml", lambda t: t.update(hf={}), "unknown key 'hf'"),
        ("blocks/moe.yaml", lambda t: t["parts"].update({"mlp.router": ["expert", "hidden"]}), "'expert' is not known"),
        ("blocks/moe.yaml", lambda t: t["parts"].update({"mlp.router": ["__import__('os')", "hidden"]}), "only names"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_injective_is_refused(own_configs: Any, file: str, change: Any, words: str) -> None:
    own_configs(file, change)
    with pytest.raises(FamilyError, match=words.replace("(", r"\(")):
        for name in family_names():
            load_family(name)
        load_dialect()


def role(table: Any, name: str) -> Any:
    """The first role of a layer whose name ends so."""
    return next(entry for entry in table["layer"] if str(entry["name"]).endswith(name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["layer"].remove(role(t, "linear_proj.weight")), "no row for"),
        (lambda t: role(t, "linear_qkv.bias").update(join=["attn.q_bias", "attn.k_bias", "attn.k_bias"]), "twice"),
        (lambda t: role(t, "linear_proj.weight").update(name="self_attention.linear_qkv.weight"), "two rows spell"),
        (lambda t: role(t, "linear_qkv.weight").update(axis=2), "do not fit together"),
        (lambda t: role(t, "linear_qkv.weight").update(colour=1), "unknown key 'colour'"),
    ],
)
def test_a_dialect_that_loses_or_doubles_a_part_is_refused(own_configs: Any, change: Any, words: str) -> None:
    own_configs("dialects/core.yaml", change)
    with pytest.raises(FamilyError, match=words):
        load_dialect()


def test_a_family_of_known_blocks_takes_one_file(own_configs: Any) -> None:
    folder = data.configs() / "families"
    (folder / "house.yaml").write_text(
        "extends: _dense_mtp\nmatch: {model_type: house, architectures: [HouseForCausalLM]}\n"
        "facts: {qkv_bias: true, qk_norm: true}\n"
    )
    assert "house" in family_names()
    prove_complete(load_dialect(), specimens(load_family("house"))[0], "te")


def test_unknown_families_name_the_nearest() -> None:
    with pytest.raises(FamilyError, match="nearest is 'glm4_moe'"):
        load_family("glm4moe")
    with pytest.raises(FamilyError, match="nearest known is 'qwen2'"):
        family.family_of_config({"model_type": "qwen2_vl"})


def test_expressions_are_arithmetic_and_nothing_else() -> None:
    assert evaluate("layers + i", {"layers": 3, "i": 1}) == 4
    assert evaluate("k >= dense", {"k": 2, "dense": 2}) is True
    kinds = {"kinds": ["full", "shared"], "k": 1}
    assert [evaluate("kinds[k] != 'shared'", {**kinds, "k": k}) for k in (0, 1, 2)] == [True, False, True]
    assert expand("model.layers.{layers + i}.x", {"layers": 3, "i": 1}) == "model.layers.4.x"
    for bad in ("f()", "a.b", "a[0]", "a[0:1]", "f(a)[0]", "a if a else a", "1.5", "(lambda: 1)()"):
        with pytest.raises(FamilyError):
            evaluate(bad, {"a": 1})
    with pytest.raises(FamilyError, match="not a multiple"):
        evaluate("a/b", {"a": 7, "b": 2})


# ---- config rows


GLM = {
    "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "torch_dtype": "bfloat16", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "intermediate_size": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "attention_bias": True,
    "use_qk_norm": True, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_facts_survive_both_ways() -> None:
    glm = load_family("glm4_moe")
    rows = load_dialect().args
    facts = facts_from_config(glm.all_config, GLM, glm.all_fixed)
    args = args_from_facts(rows, facts)
    assert (args["mtp_num_layers"], args["moe_layer_freq"]) == (1, [0, 1, 1])
    assert (args["moe_shared_expert_intermediate_size"], args["untie_embeddings_and_output_weights"]) == (8, True)
    back = facts_from_args(rows, args)
    assert {k: back[k] for k in facts if k in back} == {k: v for k, v in facts.items() if k in back}
    assert config_from_facts(glm.all_config, {**facts, **back}, GLM) == GLM


@pytest.mark.parametrize(
    ("argument", "value", "key", "expected"),
    [
        ("mtp_num_layers", 2, "num_nextn_predict_layers", 2),
        ("mtp_num_layers", None, "num_nextn_predict_layers", 0),
        ("moe_layer_freq", [0, 0, 1], "first_k_dense_replace", 2),
        ("moe_shared_expert_intermediate_size", 4, "n_shared_experts", 1),
        ("untie_embeddings_and_output_weights", False, "tie_word_embeddings", True),
        ("rotary_base", 5.0, "rope_theta", 5.0),
    ],
)
def test_the_config_follows_megatron(argument: str, value: Any, key: str, expected: Any) -> None:
    glm = load_family("glm4_moe")
    args = {**args_from_facts(load_dialect().args, facts_from_config(glm.all_config, GLM, glm.all_fixed))}
    facts = {**glm.all_fixed, **facts_from_args(load_dialect().args, {**args, argument: value})}
    assert config_from_facts(glm.all_config, facts, GLM) == {**GLM, key: expected}


def test_spellings_of_the_original_are_kept() -> None:
    qwen = load_family("qwen2")
    config = {**{k: v for k, v in GLM.items() if k in (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps",
        "num_attention_heads", "num_key_value_heads", "intermediate_size")},
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "dtype": "bfloat16", "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    facts = facts_from_config(qwen.all_config, config, qwen.all_fixed)
    assert config_from_facts(qwen.all_config, facts, config) == config
    changed = config_from_facts(qwen.all_config, {**facts, "rope_theta": 2.0, "mtp_layers": 3}, config)
    assert changed["rope_parameters"] == {"rope_theta": 2.0, "rope_type": "default"}
    assert (changed["mtp_num_hidden_layers"], "num_nextn_predict_layers" in changed) == (3, False)


def test_a_value_goes_where_the_original_says_null() -> None:
    family = load_family("deepseek_v3")
    config = {"rope_scaling": None, "num_nextn_predict_layers": 1}
    made = config_from_facts(family.all_config, {"rope_scaling": "yarn", "rope_factor": 40}, config)
    assert made["rope_scaling"] == {"type": "yarn", "factor": 40} and config["rope_scaling"] is None


RIGHT = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False}


def test_what_megatron_cannot_say_is_refused() -> None:
    glm = load_family("glm4_moe")
    with pytest.raises(UnsupportedError, match="norm_topk_prob is False"):
        facts_from_config(glm.all_config, {**GLM, "norm_topk_prob": False}, glm.all_fixed)
    with pytest.raises(UnsupportedError, match="hidden_size is missing"):
        facts_from_config(glm.all_config, {k: v for k, v in GLM.items() if k != "hidden_size"}, glm.all_fixed)
    with pytest.raises(UnsupportedError, match="dense layers must come first"):
        facts_from_args(load_dialect().args, {**RIGHT, "num_layers": 3, "num_experts": 4, "moe_layer_freq": [1, 0, 1]})
