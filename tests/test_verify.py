"""Whatever changes between two checkpoints is named, and what is legal is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.errors import UnsupportedError
from mtpcheck.report.report import Report
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import read_tensor_map
from mtpcheck.verify import verify
from tests.megatron_edit import drop_keys, edit_args, flip_bit, load_pickled

FIXTURES = Path(__file__).parent.parent / "fixtures"
Tensors = dict[str, torch.Tensor]


def changed_tensors(name: str, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of an HF fixture in one file after ``change``."""
    target = folder / "candidate"
    shutil.copytree(FIXTURES / name, target)
    tensors: Tensors = {}
    for shard in target.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def changed_config(name: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    target = Path(shutil.copytree(FIXTURES / name, folder / "candidate"))
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def failures(report: Report) -> list[tuple[str, str]]:
    return [(f.check, f.subject) for f in report.failures]


EH = "model.layers.3.eh_proj.weight"
BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"


def test_other_shards_and_another_order_are_no_difference(tmp_path: Path) -> None:
    same = changed_tensors("glm4_moe", tmp_path, lambda tensors: None)
    report = verify(FIXTURES / "glm4_moe", same)
    assert report.findings == []
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(EH), ("presence.missing", EH)),
        (lambda t: t.update({"model.layers.3.new": torch.zeros(1)}), ("presence.unclaimed", "model.layers.3.new")),
        (lambda t: t.update({EH: t[EH].float()}), ("values.dtype", EH)),
        (lambda t: t.update({EH: t[EH].view(torch.float16)}), ("values.dtype", EH)),
        (lambda t: t.update({BIAS: t[BIAS][None]}), ("values.shape", BIAS)),
        (lambda t: t.update({EH: t[EH].T.contiguous()}), ("values.shape", EH)),
        (lambda t: t.update({EH: torch.cat(t[EH].chunk(2, 1)[::-1], 1)}), ("values.bits", EH)),
        (lambda t: t.update({BIAS: t[BIAS].bfloat16().float()}), ("values.bits", BIAS)),
        (lambda t: t.update({BIAS: t[BIAS].bfloat16()}), ("values.dtype", BIAS)),
    ],
)
def test_every_change_of_a_tensor_is_named(
    change: Callable[[Tensors], None], expected: tuple[str, str], tmp_path: Path
) -> None:
    report = verify(FIXTURES / "glm4_moe", changed_tensors("glm4_moe", tmp_path, change))
    assert (failures(report), report.exit_code) == ([expected], 1)


def test_nan_payloads_and_the_sign_of_zero_count(tmp_path: Path) -> None:
    def first(bits: int) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            tensors[EH].view(torch.int16)[0, 0] = bits

        return change

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    nan, zero = 0x7FC0, 0
    for before, after in ((nan, nan + 1), (zero, -0x8000)):
        for folder in ("a", "b"):
            shutil.rmtree(tmp_path / folder)
            (tmp_path / folder).mkdir()
        a = changed_tensors("glm4_moe", tmp_path / "a", first(before))
        b = changed_tensors("glm4_moe", tmp_path / "b", first(after))
        report = verify(a, b)
        assert failures(report) == [("values.bits", EH)]
        assert "1 of 8,192 elements differ, first at [0, 0]" in report.failures[0].message
        assert (tmp_path / "b" / "candidate" / "model.safetensors").name in report.failures[0].where
        assert verify(a, a).exit_code == 0
    assert (report.failures[0].expected, report.failures[0].got) == ("0x0000 (0.0)", "0x8000 (-0.0)")


@pytest.mark.parametrize(
    ("change", "check", "subject", "words"),
    [
        (lambda c: c.pop("num_nextn_predict_layers"), "declaration.mtp", "num_nextn_predict_layers", "is gone"),
        (lambda c: c.update(num_nextn_predict_layers=2), "declaration.mtp", "num_nextn_predict_layers", "changed"),
        (lambda c: c.update(text_config={"num_nextn_predict_layers": c.pop("num_nextn_predict_layers")}),
         "declaration.mtp", "num_nextn_predict_layers", "moved to text_config.num_nextn_predict_layers"),
        (lambda c: c.update(num_mtp_layers=c.pop("num_nextn_predict_layers")),
         "declaration.mtp", "num_nextn_predict_layers", "renamed to num_mtp_layers"),
        (lambda c: c.pop("pad_token_id"), "declaration.config", "pad_token_id", "is gone"),
        (lambda c: c.update(rope_theta=1), "declaration.config", "rope_theta", "changed"),
        (lambda c: c.update(rope_theta=float(c["rope_theta"])), "declaration.config", "rope_theta", "changed"),
    ],
)  # fmt: skip
def test_every_change_of_the_config_is_named(
    change: Callable[[dict[str, Any]], None], check: str, subject: str, words: str, tmp_path: Path
) -> None:
    report = verify(FIXTURES / "glm4_moe", changed_config("glm4_moe", tmp_path, change))
    found = [(f.check, f.subject, f.message + " " + f.cause) for f in report.failures]
    assert any(c == check and s == subject and words in text for c, s, text in found), found
    assert report.exit_code == 1


def test_the_version_of_transformers_is_no_part_of_the_model(tmp_path: Path) -> None:
    candidate = changed_config("glm4_moe", tmp_path, lambda c: c.update(transformers_version="9.9"))
    assert verify(FIXTURES / "glm4_moe", candidate).exit_code == 0


def test_another_known_spelling_is_a_note(tmp_path: Path) -> None:
    def respell(config: dict[str, Any]) -> None:
        config["dtype"] = config.pop("torch_dtype")
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}

    report = verify(FIXTURES / "qwen2_mtp", changed_config("qwen2_mtp", tmp_path, respell))
    assert report.exit_code == 0
    assert {f.subject for f in report.findings if f.severity == "note"} == {"torch_dtype", "rope_theta"}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_named(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = data.draw(st.sampled_from(["glm4_moe", "qwen2_mtp", "qwen3_mtp", "llama_mtp"]))
    folder = tmp_path_factory.mktemp("flip")
    candidate = Path(shutil.copytree(FIXTURES / name, folder / "candidate"))
    tensors = open_checkpoint(candidate).tensors
    tensor = data.draw(st.sampled_from(sorted(tensors)))
    box = tensors[tensor].plan.boxes[0]
    offset = data.draw(st.integers(0, tensors[tensor].nbytes - 1))
    flip_bit(Path(box.source.name), box.offset + offset, data.draw(st.integers(0, 7)))  # type: ignore[union-attr]
    report = verify(FIXTURES / name, candidate)
    assert failures(report) == [("values.bits", tensor)]
    assert f"byte {box.offset + offset - offset % tensors[tensor].plan.itemsize:,}" in report.failures[0].where
    shutil.rmtree(folder)


def test_megatron_against_megatron(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        convert(FIXTURES / "llama_mtp", tmp_path / folder)
    assert verify(tmp_path / "a", tmp_path / "b").findings == []
    edit_args(tmp_path / "b" / "release", rotary_base=7)
    assert failures(verify(tmp_path / "a", tmp_path / "b")) == [("declaration.config", "rope_theta / rotary_base")]


def test_only_mtp_leaves_the_trunk_alone(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"] += 1

    candidate = changed_tensors("glm4_moe", tmp_path, change)
    assert verify(FIXTURES / "glm4_moe", candidate).exit_code == 1
    assert verify(FIXTURES / "glm4_moe", candidate, only_mtp=True).exit_code == 0


def test_a_lost_mtp_layer_fails_against_its_reference(tmp_path: Path) -> None:
    """What transformers' own load and save does: the tensors go, the declaration stays."""
    candidate = changed_tensors(
        "glm4_moe", tmp_path, lambda t: [t.pop(k) for k in list(t) if k.startswith("model.layers.3.")]
    )
    report = verify(FIXTURES / "glm4_moe", candidate)
    assert ("declaration.count", "MTP layers") in failures(report)
    (gone,) = (f for f in report.failures if f.check == "presence.missing")
    assert (gone.cause_id, len(gone.members)) == ("dropped", 34)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "model_type", "n_routed_experts"])
def test_a_candidate_whose_config_lost_a_key_still_gets_a_verdict(key: str, tmp_path: Path) -> None:
    report = verify(FIXTURES / "glm4_moe", changed_config("glm4_moe", tmp_path, lambda c: c.pop(key)))
    assert failures(report) == [("declaration.config", key)]


@pytest.mark.parametrize(
    ("argument", "value", "subject"),
    [
        ("num_layers", 2, "num_hidden_layers / num_layers"),
        ("num_layers", None, "num_hidden_layers / num_layers"),
        ("normalization", "LayerNorm", "normalization"),
        ("qk_layernorm", False, "use_qk_norm / qk_layernorm"),
        ("moe_router_score_function", "softmax", "moe_router_score_function"),
        ("moe_layer_freq", [1, 0, 1], "moe_layer_freq"),
        ("mtp_num_layers", None, "num_nextn_predict_layers / mtp_num_layers"),
    ],
)
def test_a_changed_megatron_argument_is_named(argument: str, value: Any, subject: str, tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    edit_args(tmp_path / "megatron" / "release", **{argument: value})
    report = verify(FIXTURES / "glm4_moe", tmp_path / "megatron")
    assert subject in {f.subject for f in report.failures}
    assert all(f.check.startswith("declaration.") for f in report.failures)


# ---- an export by somebody else, held against the Megatron checkpoint it came from


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (lambda c: c.update(rope_theta=5), "rope_theta / rotary_base"),
        (lambda c: c.update(rms_norm_eps=0.5), "rms_norm_eps / norm_epsilon"),
        (lambda c: c.update(num_experts_per_tok=1), "num_experts_per_tok / moe_router_topk"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings / untie_embeddings_and_output_weights"),
        (lambda c: c.update(num_attention_heads=16, head_dim=8), "num_attention_heads / num_attention_heads"),
        (lambda c: c.update(num_nextn_predict_layers=0), "num_nextn_predict_layers / mtp_num_layers"),
        (lambda c: c.pop("num_nextn_predict_layers"), "num_nextn_predict_layers / mtp_num_layers"),
        (lambda c: c.update(model_type="qwen3"), "model_type"),
        (lambda c: c.update(rope_scaling={"type": "yarn", "factor": 4}), "rope_scaling"),
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (lambda c: c.update(text_config={"num_nextn_predict_layers": 0}), "num_nextn_predict_layers"),
        (lambda c: c.pop("hidden_size"), "hidden_size"),
    ],
)  # fmt: skip
def test_the_config_of_an_export_is_held_against_megatrons_arguments(
    change: Callable[[dict[str, Any]], None], subject: str, tmp_path: Path
) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    assert verify(tmp_path / "megatron", FIXTURES / "glm4_moe").verdict == "holds"
    report = verify(tmp_path / "megatron", changed_config("glm4_moe", tmp_path, change))
    expected = {subject, subject.replace("num_attention_heads / num_attention_heads", "num_attention_heads")}
    assert expected & {f.subject for f in report.failures}, report.failures
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("apply_layernorm_1p", True), ("rotary_interleaved", True), ("use_rope_scaling", True), ("squared_relu", True),
        ("attention_output_gate", True), ("window_size", (128, 0)), ("mtp_use_repeated_layer", True),
        ("moe_apply_probs_on_input", True), ("swiglu", False), ("add_bias_linear", True),
    ],
)  # fmt: skip
def test_arguments_that_give_the_weights_another_meaning_fail(argument: str, value: Any, tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    edit_args(tmp_path / "megatron" / "release", **{argument: value})
    report = verify(FIXTURES / "glm4_moe", tmp_path / "megatron")
    assert argument in {f.subject for f in report.failures}


def test_an_export_without_arguments_cannot_be_judged(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    path = tmp_path / "megatron/release/common.pt"
    state = load_pickled(path)
    del state["args"]
    torch.save(state, path)
    with pytest.raises(UnsupportedError, match="no training arguments"):
        verify(FIXTURES / "glm4_moe", tmp_path / "megatron")


def test_an_unknown_vocabulary_size_counts_all_rows(tmp_path: Path) -> None:
    convert(FIXTURES / "qwen3_mtp", tmp_path / "megatron")
    edit_args(tmp_path / "megatron" / "release", vocab_size=None)
    report = verify(FIXTURES / "qwen3_mtp", tmp_path / "megatron")
    assert report.verdict == "holds"
    assert read_tensor_map(open_checkpoint(tmp_path / "megatron")).facts["vocab"] == 384


def test_mtp_tensors_that_the_family_does_not_know_count_with_only_mtp(tmp_path: Path) -> None:
    unknown = EH.replace("weight", "gain")

    def with_gain(value: float) -> Callable[[Tensors], None]:
        return lambda t: t.update({unknown: torch.full((1,), value)})

    (tmp_path / "a").mkdir()
    a = changed_tensors("glm4_moe", tmp_path / "a", with_gain(1.0))
    b = changed_tensors("glm4_moe", tmp_path, with_gain(2.0))
    assert failures(verify(a, b, only_mtp=True)) == [("values.bits", unknown)]
    assert ("presence.unclaimed", unknown) in failures(verify(FIXTURES / "glm4_moe", b, only_mtp=True))


def test_only_mtp_across_layouts_leaves_the_trunk_alone(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    drop_keys(tmp_path / "megatron/release", lambda key: key == "decoder.layers.0.mlp.linear_fc2.weight")
    assert verify(FIXTURES / "glm4_moe", tmp_path / "megatron", only_mtp=True).verdict == "holds"
    drop_keys(tmp_path / "megatron/release", lambda key: key == "mtp.layers.0.hnorm.weight")
    assert verify(FIXTURES / "glm4_moe", tmp_path / "megatron", only_mtp=True).verdict == "fails"


def test_a_tensor_that_both_lack_is_missing_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a = changed_tensors("glm4_moe", tmp_path / "a", lambda t: t.pop(EH))
    b = changed_tensors("glm4_moe", tmp_path, lambda t: t.pop(EH))
    assert failures(verify(a, b)) == [("presence.missing", EH)]


def test_mtp_keys_have_no_other_spelling(tmp_path: Path) -> None:
    """A serving engine looks for one of them; another one, or true for 1, is another declaration."""

    def respell(config: dict[str, Any]) -> None:
        config["num_nextn_predict_layers"] = config.pop("mtp_num_hidden_layers")

    report = verify(FIXTURES / "qwen3_mtp", changed_config("qwen3_mtp", tmp_path, respell))
    assert failures(report) == [("declaration.mtp", "mtp_num_hidden_layers")]


def test_config_values_are_told_apart_by_type_and_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a = changed_config("glm4_moe", tmp_path / "a", lambda c: c.update(x=[1, {"y": 1}], **{"text_config.z": 1}))
    b = changed_config("glm4_moe", tmp_path, lambda c: c.update(x=[True, {"y": 1.0}], text_config={"z": 1}))
    assert {subject for _, subject in failures(verify(a, b))} == {"x", "text_config\\.z"}


def test_an_undeclared_layer_is_a_warning_that_shows(tmp_path: Path) -> None:
    source = changed_config("glm4_moe", tmp_path, lambda c: c.pop("num_nextn_predict_layers"))
    report = roundtrip(source)
    assert (report.verdict, [f.check for f in report.findings if f.severity == "warning"]) == (
        "holds",
        ["declaration.count"],
    )


def test_structure_of_a_candidate_counts(tmp_path: Path) -> None:
    candidate = Path(shutil.copytree(FIXTURES / "glm4_moe", tmp_path / "candidate"))
    path = candidate / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][EH]
    path.write_text(json.dumps(index))
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    for reference in (FIXTURES / "glm4_moe", tmp_path / "megatron"):
        assert ("structure.unindexed", EH) in failures(verify(reference, candidate))


def test_a_scaling_that_megatron_has_not_is_named(tmp_path: Path) -> None:
    """Null is a statement too: Megatron says that nothing is scaled."""
    convert(FIXTURES / "deepseek_v3_noq", tmp_path / "megatron")
    assert verify(tmp_path / "megatron", FIXTURES / "deepseek_v3_noq").verdict == "holds"
    yarn = {"type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0}
    candidate = changed_config("deepseek_v3_noq", tmp_path, lambda c: c.update(rope_scaling=yarn))
    assert "rope_scaling.type / rope_type" in {f.subject for f in verify(tmp_path / "megatron", candidate).failures}
    edit_args(tmp_path / "megatron" / "release", q_lora_rank=512)
    report = verify(FIXTURES / "deepseek_v3_noq", tmp_path / "megatron")
    assert "q_lora_rank" in {f.subject for f in report.failures}


def test_lists_of_layers_are_compared_whole(tmp_path: Path) -> None:
    convert(FIXTURES / "glm_moe_dsa", tmp_path / "megatron")
    assert verify(tmp_path / "megatron", FIXTURES / "glm_moe_dsa").verdict == "holds"
    for number, types in enumerate(([], ["full"], ["full", "full", "full", "shared"])):
        (tmp_path / str(number)).mkdir()
        candidate = changed_config("glm_moe_dsa", tmp_path / str(number), lambda c, t=types: c.update(indexer_types=t))
        assert any("indexer_types" in f.subject for f in verify(tmp_path / "megatron", candidate).failures), types


@pytest.mark.parametrize("declared", [["full"] * 5, ["full"] * 4, None])
def test_an_indexer_in_every_layer_is_said_in_three_ways(declared: list[str] | None, tmp_path: Path) -> None:
    def everywhere(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.") and ".indexer." in name]:
            for k in (2, 3):
                tensors[name.replace("layers.1.", f"layers.{k}.")] = tensors[name].clone()

    source = changed_tensors("glm_moe_dsa", tmp_path, everywhere)
    config = json.loads((source / "config.json").read_text())
    config.pop("indexer_types")
    config |= {"indexer_types": declared} if declared else {}
    (source / "config.json").write_text(json.dumps(config))
    assert roundtrip(source).failures == []


@pytest.mark.parametrize(
    ("argument", "value"),
    [("moe_shared_expert_intermediate_size", "x"), ("moe_layer_freq", {}), ("mtp_num_layers", "x")],
)
def test_an_argument_of_another_type_is_a_finding(argument: str, value: Any, tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    edit_args(tmp_path / "megatron" / "release", **{argument: value})
    report = verify(FIXTURES / "glm4_moe", tmp_path / "megatron")
    assert argument in " ".join(f.subject for f in report.failures)


def test_a_dtype_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    source = changed_config("glm4_moe", tmp_path, lambda c: c.update(torch_dtype="auto"))
    with pytest.raises(UnsupportedError, match="params_dtype cannot be told from, or as, 'auto'"):
        roundtrip(source)
