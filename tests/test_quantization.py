"""Packed weights: every way to store them is known, and held to what the checkpoint declares of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpcheck.convert import convert
from mtpcheck.declared import Declaration, runs
from mtpcheck.declared import _declaration as read_declaration
from mtpcheck.errors import CheckpointFails, FormatError, UnsupportedError
from mtpcheck.inspect import Packed, inspect
from mtpcheck.report.finding import Finding, Severity
from mtpcheck.verify import verify
from tests import packed
from tests.conftest import FIXTURES, Outcome, edit_json, flip_byte
from tests.packed import FORMS, Tensors, is_linear, make

Cli = Callable[..., Outcome]
FIXTURES_OF = {"deepseek_v3": (68, 20, 4), "glm4_moe": (64, 19, 4), "qwen3_mtp": (22, 8, 0)}
QUIET = {"deepseek_v3": "model.layers.3.", "glm4_moe": "model.layers.3.", "qwen3_mtp": "mtp."}
"""How the names of MTP layers begin."""


def found_in(folder: Path) -> list[tuple[str, str]]:
    """(check, subject) of all findings."""
    return [(f.check, f.subject) for f in inspect(folder).findings]


def only(folder: Path) -> Finding:
    (finding,) = inspect(folder).findings
    return finding


def is_trunk(fixture: str) -> Callable[[str], bool]:
    return lambda name: is_linear(name) and not name.startswith(QUIET[fixture])


def modules(fixture: str, *words: str) -> list[str]:
    """Modules of the MTP layer whose weight would be packed, and in whose name one of ``words`` stands."""
    names = [name for name in packed.stored(FIXTURES / fixture) if is_linear(name) and name.startswith(QUIET[fixture])]
    names = [name.removesuffix(".weight") for name in names]
    return sorted(name for name in names if not words or any(word in name for word in words))


# ---- legal


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fixture", FIXTURES_OF)
def test_every_packing_is_known_and_raises_no_alarm(fixture: str, form: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", fixture, form)
    found, plain = inspect(folder), inspect(FIXTURES / fixture)
    assert found.findings == ()
    names = {"fp8": "fp8 blocks", "fp8 tensor": "fp8"}
    assert found.packed == Packed(names.get(form, packed.method_of(form)), *FIXTURES_OF[fixture])
    assert (found.mtp_parts, found.mtp_elements, found.elements) == (
        plain.mtp_parts,
        plain.mtp_elements,
        plain.elements,
    )
    assert plain.packed is None


@pytest.mark.parametrize("form", FORMS)
def test_packed_checkpoints_are_compared_code_by_code(form: str, tmp_path: Path) -> None:
    a, b = (make(tmp_path / side, "glm4_moe", form) for side in "ab")
    report = verify(a, b)
    assert report.verdict == "holds" and [f for f in report.findings if not f.source] == []
    assert verify(a, b, only_mtp=True).verdict == "holds"
    flip_byte(b / "model-00003-of-00003.safetensors")
    (finding,) = verify(a, b).failures
    assert finding.check == "values.bits"


def test_what_both_lack_is_missing(tmp_path: Path) -> None:
    def forget(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.1.mlp.experts.2.up_proj" in name]:
            del tensors[name]

    folder = packed.edit(make(tmp_path / "hf", "glm4_moe", "gptq"), forget)
    (finding,) = verify(folder, folder).failures
    assert (finding.check, finding.subject) == ("presence.missing", "model.layers.1.mlp.experts.2.up_proj.weight")


EXCLUDED = [form for form in FORMS if form != "modelslim"]


@pytest.mark.parametrize("form", EXCLUDED)
@pytest.mark.parametrize("fixture", FIXTURES_OF)
def test_a_plain_mtp_layer_that_is_declared_so(fixture: str, form: str, tmp_path: Path) -> None:
    """By the names of components, as they are stored: correct, whatever an engine fuses."""
    folder = make(tmp_path / "hf", fixture, form, is_trunk(fixture), modules(fixture))
    assert found_in(folder) == []


@pytest.mark.parametrize("form", ["compressed-tensors int4", "modelopt nvfp4", "awq"])
def test_only_the_experts_of_the_mtp_layer_are_packed(form: str, tmp_path: Path) -> None:
    def chosen(name: str) -> bool:
        return is_linear(name) and (not name.startswith("model.layers.3.") or ".experts." in name)

    attention = [name for name in modules("glm4_moe") if ".experts." not in name]
    assert found_in(make(tmp_path / "hf", "glm4_moe", form, chosen, attention)) == []


def test_only_experts_are_packed_as_the_targets_say(tmp_path: Path) -> None:
    """What no target names is left alone: 4-bit experts, and all else in bf16."""
    folder = make(tmp_path / "hf", "glm4_moe", "compressed-tensors nvfp4", lambda name: ".experts." in name)
    config = packed.CONFIG["compressed-tensors"]
    groups = {"group_0": {"targets": [r"re:.*mlp\.experts\..*"]}}
    edit_json(folder / "config.json", quantization_config={**config, "config_groups": groups})
    assert found_in(folder) == []


LISTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a regex": ("qwen3_mtp", "compressed-tensors int4", {"ignore": ["lm_head", "re:.*mtp.*"]}),
    "a layer's number in a regex": ("glm4_moe", "compressed-tensors int4", {"ignore": [r"re:model\.layers\.3\..*"]}),
    "a parent": ("qwen3_mtp", "awq", {"modules_to_not_convert": ["mtp"]}),
    "a layer with its dot": ("glm4_moe", "awq", {"modules_to_not_convert": ["model.layers.3."]}),
    "a star": ("qwen3_mtp", "modelopt nvfp4", {"exclude_modules": ["mtp*"]}),
    "a star after a number": ("glm4_moe", "modelopt fp8", {"ignore": ["model.layers.3*"]}),
    "a negative regex": ("glm4_moe", "gptq", {"dynamic": {r"-:.*layers\.3\..*": {}}}),
    "blocks to quantize": ("qwen3_mtp", "auto-round", {"block_name_to_quantize": "model.layers"}),
    "lists of modules": ("qwen3_mtp", "gptq", {"modules_in_block_to_quantize": [["model.layers"]]}),
    "under text_config": ("qwen3_mtp", "awq", {"modules_to_not_convert": ["mtp"]}),
}


@pytest.mark.parametrize("what", LISTS)
def test_every_way_to_name_what_is_left_alone(what: str, tmp_path: Path) -> None:
    fixture, form, lists = LISTS[what]
    folder = make(tmp_path / "hf", fixture, form, is_trunk(fixture), declared=False)
    declared = {**packed.CONFIG[packed.method_of(form)], **lists}
    nested = {"text_config": {"quantization_config": declared}}
    edit_json(folder / "config.json", **(nested if "text_config" in what else {"quantization_config": declared}))
    assert found_in(folder) == []


def test_modelopt_may_declare_in_its_own_file_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", "modelopt nvfp4", is_trunk("glm4_moe"), declared=False)
    own = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.3*", "lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    assert found_in(folder) == []


def test_deepseeks_projection_may_be_plain_without_a_word_and_qwens_may_not(tmp_path: Path) -> None:
    """Engines build eh_proj as a plain linear whatever the config says, and fc as the config says."""
    assert found_in(make(tmp_path / "ds", "deepseek_v3", "fp8")) == []
    finding = only(
        make(tmp_path / "qw", "qwen3_mtp", "compressed-tensors int4", lambda n: is_linear(n) and ".fc." not in n)
    )
    assert (finding.check, finding.subject) == ("quantization.undeclared", "mtp.fc.weight")
    listed = make(tmp_path / "ok", "qwen3_mtp", "awq", lambda n: is_linear(n) and ".fc." not in n, ["mtp.fc"])
    assert found_in(listed) == []


def test_a_quantized_cache_alone_declares_no_packed_weights(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", "gptq", lambda name: False, declared=False)
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    edit_json(folder / "config.json", quantization_config=config)
    assert found_in(folder) == []


# ---- damage


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fixture", FIXTURES_OF)
def test_a_plain_mtp_layer_that_is_not_declared(fixture: str, form: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", fixture, form, is_trunk(fixture))
    if form == "modelslim":
        text = (folder / "quant_model_description.json").read_text()
        kinds = json.loads(text)
        names = {name for name in kinds if name.startswith(QUIET[fixture]) and is_linear(name)}
        (folder / "quant_model_description.json").write_text(
            json.dumps({name: "W8A8_DYNAMIC" if name in names else kind for name, kind in kinds.items()})
        )
    finding = only(folder)
    assert finding.check == "quantization.undeclared" and finding.severity is Severity.FAILURE
    count = FIXTURES_OF[fixture][1]
    assert finding.subject.startswith(QUIET[fixture]) and finding.subject.endswith(f" and {count - 1} more")
    assert f"{count} weights of MTP layer 0" in finding.message


@pytest.mark.parametrize("form", EXCLUDED)
def test_a_list_that_lacks_the_experts_of_the_mtp_layer(form: str, tmp_path: Path) -> None:
    listed = [name for name in modules("glm4_moe") if ".experts." not in name]
    finding = only(make(tmp_path / "hf", "glm4_moe", form, is_trunk("glm4_moe"), listed))
    assert finding.check == "quantization.undeclared"
    assert finding.subject.startswith("model.layers.3.mlp.experts.0.") and finding.subject.endswith(" and 11 more")


@pytest.mark.parametrize("form", EXCLUDED)
def test_excluded_and_packed_all_the_same(form: str, tmp_path: Path) -> None:
    finding = only(make(tmp_path / "hf", "glm4_moe", form, excluded=modules("glm4_moe")))
    assert finding.check == "quantization.excluded" and finding.subject.startswith("model.layers.3.mlp.experts.0.down")
    assert "leaves 19 weights of MTP layer 0 alone" in finding.message


def test_a_projection_that_is_excluded_and_stored_in_fp8(tmp_path: Path) -> None:
    def chosen(name: str) -> bool:
        return is_linear(name) or "eh_proj" in name

    folder = make(tmp_path / "hf", "deepseek_v3", "modelopt fp8", chosen, ["model.layers.3.eh_proj"])
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.excluded", "model.layers.3.eh_proj.weight")


def test_described_as_float_and_stored_packed(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "deepseek_v3", "modelslim")
    name = "model.layers.3.self_attn.o_proj.weight"
    edit_json(folder / "quant_model_description.json", **{name: "FLOAT"})
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.excluded", name)


FUSED = {
    "q and k, not v": ("glm4_moe", ("q_proj", "k_proj"), "model.layers.3.self_attn.v_proj", "qkv_proj"),
    "gate, not up": ("qwen3_mtp", ("gate_proj",), "mtp.layers.0.mlp.up_proj", "gate_up_proj"),
    "q_a, not kv_a": (
        "deepseek_v3", ("q_a_proj",), "model.layers.3.self_attn.kv_a_proj_with_mqa", "fused_qkv_a_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FUSED)
@pytest.mark.parametrize("form", ["compressed-tensors int4", "gptq", "awq", "fp8", "modelopt nvfp4"])
def test_part_of_what_engines_fuse_is_excluded(what: str, form: str, tmp_path: Path) -> None:
    """All of it is stored plain."""
    fixture, listed, odd, fused = FUSED[what]
    parent = odd.rpartition(".")[0] + "."
    rest = [n for n in modules(fixture) if not n.startswith(parent) or n.endswith(("o_proj", "b_proj", "down_proj"))]
    rest += [parent + name for name in listed]
    finding = only(make(tmp_path / "hf", fixture, form, is_trunk(fixture), rest))
    assert (finding.check, finding.subject) == ("quantization.fused", odd + ".weight")
    assert f"one {fused}" in finding.cause and "alone, and not" in finding.message


@pytest.mark.parametrize("what", FUSED)
def test_part_of_what_engines_fuse_is_packed(what: str, tmp_path: Path) -> None:
    fixture, listed, odd, _ = FUSED[what]
    names = [odd.rpartition(".")[0] + f".{name}" for name in listed]
    folder = make(tmp_path / "hf", fixture, "awq", lambda n: is_linear(n) and n[: -len(".weight")] not in names, names)
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.fused", odd + ".qweight")
    assert "stored plain" in finding.message


def test_a_list_that_names_fused_modules_covers_them_with_a_warning(tmp_path: Path) -> None:
    names = ["model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.o_proj"]

    def chosen(name: str) -> bool:
        return is_linear(name) and not name.startswith("model.layers.3.self_attn.")

    finding = only(make(tmp_path / "hf", "glm4_moe", "compressed-tensors int4", chosen, names))
    assert (finding.check, finding.severity) == ("quantization.fused", Severity.WARNING)
    assert finding.subject == "model.layers.3.self_attn.qkv_proj" and "q_proj, k_proj, v_proj" in finding.message


def test_plain_and_packed_at_once(tmp_path: Path) -> None:
    for form in ("compressed-tensors int4", "gptq", "awq", "mxfp4"):
        name = "model.layers.3.self_attn.q_proj.weight"
        plain = packed.stored(FIXTURES / "glm4_moe")[name]

        def add(tensors: Tensors, name: str = name, plain: Any = plain) -> None:
            if any(n.startswith("model.layers.3.self_attn.q_proj") for n in tensors):
                tensors[name] = plain

        folder = packed.edit(make(tmp_path / form, "glm4_moe", form), add)
        finding = only(folder)
        assert (finding.check, finding.subject) == ("quantization.both", name)


SCALES = [
    ("compressed-tensors int4", "_proj.weight_scale", "weight_packed"),
    ("compressed-tensors fp8", "_proj.weight_scale", "weight"),
    ("compressed-tensors nvfp4", "_proj.weight_global_scale", "weight_packed"),
    ("gptq", "_proj.scales", "qweight"), ("gptq", "_proj.qzeros", "qweight"), ("awq", "_proj.scales", "qweight"),
    ("modelopt nvfp4", "_proj.weight_scale_2", "weight"), ("bitsandbytes", "_proj.weight.absmax", "weight"),
    ("fp8", "_proj.weight_scale_inv", "weight"), ("fp8 tensor", "_proj.weight_scale_inv", "weight"),
    ("modelslim", "_proj.weight_scale", "weight"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "end", "codes"), SCALES)
def test_codes_without_a_scale(form: str, end: str, codes: str, tmp_path: Path) -> None:
    module = "model.layers.3.mlp.experts.2.up"
    folder = packed.edit(make(tmp_path / "hf", "glm4_moe", form), lambda tensors: tensors.pop(module + end, None))
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.scale", f"{module}_proj.{codes}")
    assert f"{module}{end} is missing" in finding.message
    with pytest.raises(CheckpointFails, match="is missing"):
        convert(folder, tmp_path / "megatron")


@pytest.mark.parametrize(("form", "end"), [("fp8", "weight_scale_inv"), ("compressed-tensors fp8", "weight_scale")])
def test_a_renamed_scale_is_named(form: str, end: str, tmp_path: Path) -> None:
    other = "weight_scale" if end.endswith("_inv") else "weight_scale_inv"
    name = "model.layers.3.self_attn.o_proj."

    def rename(tensors: Tensors) -> None:
        if name + end in tensors:
            tensors[name + other] = tensors.pop(name + end)

    folder = packed.edit(make(tmp_path / "hf", "deepseek_v3", form), rename)
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.scale", name + "weight")
    assert (finding.expected, finding.got) == (end, other) and "renamed" in finding.cause


def test_a_scale_of_nothing(tmp_path: Path) -> None:
    import torch

    name = "model.layers.3.eh_proj.weight_scale"

    def add(tensors: Tensors) -> None:
        if "model.layers.3.eh_proj.weight" in tensors:
            tensors[name] = torch.ones(1)

    assert only(packed.edit(make(tmp_path / "hf", "glm4_moe", "compressed-tensors fp8"), add)).subject == name


def test_declared_and_nothing_packed_and_the_other_way_round(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", "glm4_moe", "gptq", lambda name: False)
    assert found_in(folder) == [("quantization.declared", "quantization_config")]
    bare = make(tmp_path / "b", "glm4_moe", "gptq", declared=False)
    finding = only(bare)
    assert finding.check == "quantization.declared" and finding.subject.endswith(".qweight")


def test_a_description_that_lacks_the_mtp_layer(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "deepseek_v3", "modelslim")
    packed.describe(folder, lambda name: name.startswith("model.layers.3."))
    finding = only(folder)
    assert finding.check == "quantization.description" and finding.severity is Severity.FAILURE
    assert finding.subject.startswith("model.layers.3.") and "weights of MTP layer 0" in finding.message


def test_two_declarations_that_contradict_each_other(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", "modelopt nvfp4", is_trunk("glm4_moe"), modules("glm4_moe"))
    own = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    finding = only(folder)
    assert finding.check == "quantization.contradiction" and finding.where.endswith("hf_quant_config.json")
    assert finding.message == "config.json leaves it alone, hf_quant_config.json does not"
    own["quantization"]["exclude_modules"] = ["model.layers.3*"]
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert found_in(folder) == []


@pytest.mark.parametrize(
    "entry", ["mtp", "model.layers.4.self_attn.q_proj", r"re:mtp\.layers\.1\..*", "mtp.layers.0.fc"]
)
def test_an_exclusion_of_the_mtp_layer_that_matches_nothing(entry: str, tmp_path: Path) -> None:
    finding = only(make(tmp_path / "hf", "qwen3_mtp", "compressed-tensors int4", excluded=["lm_head", entry]))
    assert (finding.check, finding.severity) == ("quantization.unmatched", Severity.WARNING)
    assert finding.subject == entry


UNREADABLE: dict[str, Any] = {
    "a name": "awq",
    "a list": ["awq"],
    "a number for a list": {**packed.CONFIG["awq"], "modules_to_not_convert": 5},
    "numbers in a list": {**packed.CONFIG["awq"], "modules_to_not_convert": [5]},
    "lists in lists in lists": {**packed.CONFIG["awq"], "modules_to_not_convert": [[["a"]]]},
    "no mapping of groups": {**packed.CONFIG["compressed-tensors"], "config_groups": [1]},
    "a broken regex": {**packed.CONFIG["compressed-tensors"], "ignore": ["re:.*(mtp"]},
    "a regex without end": {**packed.CONFIG["compressed-tensors"], "ignore": ["re:(a|a)*b(.*)*c"]},
    "a broken negative regex": {**packed.CONFIG["gptq"], "dynamic": {"-:[": {}}},
    "a list for a mapping": {**packed.CONFIG["gptq"], "dynamic": ["-:mtp"]},
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_declaration_that_makes_no_sense_is_one_finding(what: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "qwen3_mtp", "gptq", declared=False)
    edit_json(folder / "config.json", quantization_config=UNREADABLE[what])
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.unreadable", "quantization_config")
    assert finding.where.endswith("config.json")


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quant_model_description.json"])
@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_side_file_that_makes_no_sense_is_one_finding(name: str, text: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "qwen3_mtp", "awq")
    (folder / name).write_text(text)
    finding = only(folder)
    assert (finding.check, finding.subject) == ("quantization.unreadable", name)


# ---- commands


def test_convert_and_roundtrip_refuse_with_the_reason(tmp_path: Path, cli: Cli) -> None:
    for form in FORMS:
        if form in ("fp8", "fp8 tensor"):  # which convert
            continue
        folder = make(tmp_path / form, "glm4_moe", form)
        for command in (("convert", folder, tmp_path / "new"), ("roundtrip", folder), ("roundtrip", "--plan", folder)):
            outcome = cli(*command)
            assert outcome.code == 2 and "quantized weights cannot be converted" in outcome.err, (form, outcome)
            assert not (tmp_path / "new").exists()


def test_what_cannot_be_compared_by_values_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", "awq")
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    for a, b in ((folder, tmp_path / "megatron"), (tmp_path / "megatron", folder)):
        with pytest.raises(UnsupportedError, match="compared code by code"):
            verify(a, b)
    with pytest.raises(UnsupportedError, match="code by code"):
        verify(folder, folder, values="changed")


def test_findings_block_a_conversion_of_fp8(tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", "deepseek_v3", "fp8", is_trunk("deepseek_v3"))
    with pytest.raises(CheckpointFails, match="20 weights of MTP layer 0 are plain"):
        convert(folder, tmp_path / "megatron")


def test_verify_names_the_side(tmp_path: Path) -> None:
    """A fault that both have is told of both; one that the candidate alone has, of it alone."""
    good, bad = make(tmp_path / "good", "glm4_moe", "awq"), make(tmp_path / "bad", "glm4_moe", "awq")
    edit_json(
        bad / "config.json", quantization_config={**packed.CONFIG["awq"], "modules_to_not_convert": ["model.layers.3"]}
    )
    (one,) = (f for f in verify(good, bad).failures if f.check.startswith("quantization."))
    assert one.check == "quantization.excluded" and one.where.startswith(str(bad))
    both = [f for f in verify(bad, bad).failures if f.check.startswith("quantization.")]
    assert [f.check for f in both] == ["quantization.excluded"] * 2
    (a, b) = (f for f in verify(bad, good).failures + verify(good, bad).failures if f.check == "quantization.excluded")
    assert a.where.startswith(str(bad)) and b.where.startswith(str(bad))


def test_the_terminal_says_what_is_packed(tmp_path: Path, cli: Cli) -> None:
    folder = make(tmp_path / "hf", "glm4_moe", "compressed-tensors int4")
    outcome = cli("inspect", folder)
    assert outcome.code == 0
    assert "packed       compressed-tensors: 64 modules (19 MTP); 4 MTP matrices plain" in outcome.out
    assert json.loads(cli("inspect", folder, "--json").out)["packed"] == {
        "method": "compressed-tensors", "modules": 64, "mtp_modules": 19, "mtp_plain": 4,
    }  # fmt: skip
    report = cli("verify", folder, folder)
    assert report.code == 0 and "quantization 64 packed weights (compressed-tensors)\n" in report.out


# ---- entries


def declared(**table: Any) -> Declaration:
    made = read_declaration("config.json", "quantization_config", table)
    assert made is not None
    return made


ENTRIES = [
    ("compressed-tensors", {"ignore": ["a.b"]}, "a.b", True),
    ("compressed-tensors", {"ignore": ["a"]}, "a.b", False),
    ("compressed-tensors", {"ignore": ["re:a"]}, "a.b", True),
    ("compressed-tensors", {"ignore": ["re:b"]}, "a.b", False),
    ("compressed-tensors", {"ignore": ["l.mlp.experts"]}, "l.mlp.experts.3.up_proj", True),
    ("fp8", {"modules_to_not_convert": ["model.layers.1"]}, "model.layers.1.mlp.up_proj", True),
    ("fp8", {"modules_to_not_convert": ["model.layers.1"]}, "model.layers.10.mlp.up_proj", False),
    ("fp8", {"modules_to_not_convert": ["mlp.gate"]}, "model.layers.1.mlp.gate_proj", False),
    ("fp8", {"modules_to_not_convert": ["o_proj"]}, "model.layers.1.self_attn.o_proj", True),
    ("fp8", {"ignored_layers": ["x.qkv_proj"]}, "x.k_proj", True),
    ("modelopt", {"ignore": ["model.layers.1*"]}, "model.layers.10.mlp.up_proj", False),
    ("modelopt", {"ignore": ["model.layers.1*"]}, "model.layers.1.mlp.up_proj", True),
    ("modelopt", {"ignore": ["*.attn.*"]}, "m.attn.q", True),
    ("modelopt", {"quantized_layers": {"m.a": {}}}, "m.b", True),
    ("modelopt", {"quantized_layers": {"m.a": {}}}, "m.a", False),
    ("modelopt", {"config_groups": {"g": {"targets": ["Linear"]}}}, "m.b", False),
    ("modelopt", {"config_groups": {"g": {"weights": {}}}, "quantized_layers": {}, "ignore": [""]}, "m.b", False),
    ("modelopt", {"config_groups": {"g": {"targets": ["m.a"]}, "h": {"targets": ["m.c"]}}}, "m.b", True),
    ("gptq", {"dynamic": {"+:.*a": {}, "-:.*": {}}}, "m.a", False),
    ("gptq", {"dynamic": {"+:.*a": {}, "-:.*": {}}}, "m.b", True),
    ("auto-round", {"extra_config": {"m.a": {"bits": 16}}}, "m.a", True),
    ("auto-round", {"extra_config": {"m.a": {"bits": 8}}, "block_name_to_quantize": "x, y"}, "m.a", False),
    ("auto-round", {"extra_config": {r".*\.a$": {"bits": 16}}}, "m.a", True),
    ("auto-round", {"to_quant_block_names": ["x", "y"]}, "m.a", True),
    ("bitsandbytes", {"llm_int8_skip_modules": ["fc"]}, "mtp.fc", True),
    ("mxfp4", {"modules_to_not_convert": ["model.layers.*.self_attn"]}, "model.layers.3.self_attn.q_proj", True),
    ("nobody knows", {"modules_to_not_convert": ["m"]}, "m.a", True),
]


@pytest.mark.parametrize(("method", "lists", "module", "excluded"), ENTRIES)
def test_how_entries_name_modules(method: str, lists: dict[str, Any], module: str, excluded: bool) -> None:
    assert declared(quant_method=method, **lists).left_alone([module]) == ({module} if excluded else set())


def test_runs() -> None:
    assert sorted(runs("a.b.c")) == ["a", "a.b", "a.b.c", "b", "b.c", "c"]


def test_a_regex_that_would_never_end_is_refused_at_once() -> None:
    started = time.monotonic()
    for regex in ("re:(a+)+$", "re:" + ".*a" * 30, "re:" + "a" * 2000):
        with pytest.raises(FormatError, match="the regex"):
            declared(quant_method="compressed-tensors", ignore=[regex])
    assert time.monotonic() - started < 1
