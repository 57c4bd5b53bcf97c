"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated attention, gated delta nets, packed experts, norms as distances from one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.draft.run import Engine, run
from mtpcheck.errors import CheckpointFails, UnsupportedError
from mtpcheck.facts import config_from_facts, facts_from_config
from mtpcheck.family import family_of_config, load_family
from mtpcheck.megatron import Options
from mtpcheck.offset import Offset
from mtpcheck.plan import Plan
from mtpcheck.proof import prove
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import TensorRef, read_like, read_tensor_map
from mtpcheck.topology import Topology
from mtpcheck.verify import verify
from tests.conftest import FIXTURES, edit_json, edit_tensors
from tests.megatron_edit import edit_metadata, edit_rank

NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TEXT = Options(text_only=True)
IDS = [(7 * i * i + 3 * i + 5) % 260 for i in range(24)]
every_name = pytest.mark.parametrize("name", NAMES)


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return config


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def ranks_of(name: str, folder: Path) -> Path:
    """The fixture as one rank's file, which tests can edit."""
    convert(FIXTURES / name, folder, "torch", options=TEXT)
    return folder


# ---- there and back


@every_name
@pytest.mark.parametrize("via", ["torch_dist", "torch"])
def test_every_file_comes_back_byte_for_byte(name: str, via: Any) -> None:
    experts = 1 if name == "qwen3_5" else 2
    topology = Topology(tp=2, pp=2, ep=experts, etp=2) if via == "torch" else Topology()
    options = Options(topology=topology, text_only=True)
    report = roundtrip(FIXTURES / name, options=options, via=via)
    assert report.verdict == "holds", report.findings
    told = next(check.detail for check in report.checks if check.group == "result")
    assert told.endswith("files byte-identical") and len(set(told.split()[:3:2])) == 1
    assert prove(FIXTURES / name, options=options, via=via).failures == []


def test_a_megatron_source_goes_through_hugging_face_and_back(tmp_path: Path) -> None:
    convert(FIXTURES / "qwen3_5_moe", tmp_path / "megatron", options=TEXT)
    for via in ("hf", "torch"):
        report = roundtrip(tmp_path / "megatron", via=via)  # type: ignore[arg-type]
        assert report.verdict == "holds", report.findings


def test_experts_of_an_mtp_layer_may_be_packed_too(tmp_path: Path, copy_of: Callable[[str], Path]) -> None:
    """As in Qwen3.6; Qwen3.5 packs those of the trunk alone, and the fixture with it."""
    folder = copy_of("qwen3_5_moe")
    apart = [name for name in tensors_of(folder) if name.startswith("mtp.layers.0.mlp.experts.")]
    assert len(apart) == 12
    tensors = tensors_of(folder)
    own = {name: tensors.pop(name) for name in apart}
    lead = "mtp.layers.0.mlp.experts"
    halves = ("gate", "up")
    both = [torch.cat([own[f"{lead}.{e}.{half}_proj.weight"] for half in halves]) for e in range(4)]
    tensors[f"{lead}.gate_up_proj"] = torch.stack(both)
    tensors[f"{lead}.down_proj"] = torch.stack([own[f"{lead}.{e}.down_proj.weight"] for e in range(4)])
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert roundtrip(folder, options=TEXT).verdict == "holds"
    before, after = (read_tensor_map(open_checkpoint(each)) for each in (FIXTURES / "qwen3_5_moe", folder))
    assert {part: ref.read() for part, ref in before.parts.items()} == {
        part: ref.read() for part, ref in after.parts.items()
    }


@every_name
def test_without_the_form_of_a_source_the_parts_are_the_same(name: str, tmp_path: Path) -> None:
    """What an export looks like that knows nothing but Megatron: other files, the same tensors and the same config."""
    convert(FIXTURES / name, tmp_path / "megatron", options=TEXT)
    shutil.rmtree(tmp_path / "megatron" / "release" / "mtpcheck")
    convert(tmp_path / "megatron", tmp_path / "hf", family=name)
    ours, own = tensors_of(tmp_path / "hf"), tensors_of(FIXTURES / name)
    packed = name == "qwen3_5_moe"  # the usual form of such an MTP layer
    names = {key for key in own if "visual" not in key and not (packed and "mtp.layers.0.mlp.experts" in key)}
    assert names <= ours.keys()
    assert all(torch.equal(ours[key], own[key]) for key in names if not key.endswith("linear_attn.norm.weight"))
    made = json.loads((tmp_path / "hf" / "config.json").read_text())
    family = family_of_config(made)
    before, after = (facts_from_config(family.all_config, c, family.all_fixed) for c in (config_of(name), made))
    assert before | {"mtp_layers": 1} == after | {"mtp_layers": 1}


# ---- what transformers says


@every_name
def test_names_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForCausalLM if name == "qwen3_next" else AutoModelForImageTextToText
    kind.from_pretrained(FIXTURES / name, dtype=torch.bfloat16).save_pretrained(tmp_path)
    saved = open_checkpoint(tmp_path)
    tensor_map = read_tensor_map(saved)
    assert not [f for f in tensor_map.findings if f.check.startswith("presence")]
    theirs = {row.name for row in tensor_map.model.rows} - ({"lm_head.weight"} if name == "qwen3_5" else set())
    assert theirs == saved.tensors.keys()
    assert tensor_map.facts["mtp_stored"] == 0  # which it drops without a word


@every_name
def test_streamed_is_whole_bit_for_bit(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForCausalLM if name == "qwen3_next" else AutoModelForImageTextToText
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(FIXTURES / name, dtype=torch.float32, **kinds)
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    checkpoint = open_checkpoint(FIXTURES / name)
    (passage,) = run(Engine(checkpoint, read_tensor_map(checkpoint)), [IDS], keep_logits=True).passages
    assert np.array_equal(passage.logits[0], expected.numpy())


@every_name
def test_every_layout_drafts_the_same(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FIXTURES / name)
    (expected,) = run(Engine(checkpoint, read_tensor_map(checkpoint)), [IDS]).passages
    for layout, topology in (("torch_dist", Topology()), ("torch", Topology(tp=2, etp=2))):
        options = Options(topology=topology, text_only=True)
        convert(FIXTURES / name, tmp_path / layout, layout, options=options)  # type: ignore[arg-type]
        made = open_checkpoint(tmp_path / layout)
        (found,) = run(Engine(made, read_tensor_map(made)), [IDS]).passages
        assert found.logits_digest == expected.logits_digest


# ---- tensors of no text model


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_what_sees_images_is_carried_beside_or_refused(to: Any, tmp_path: Path) -> None:
    source = FIXTURES / "qwen3_5"
    with pytest.raises(UnsupportedError, match=r"model\.visual\..* and 20 more belong to no text model.*--text-only"):
        convert(source, tmp_path / "refused", to)
    with pytest.raises(UnsupportedError, match="--text-only"):
        prove(source)
    assert not (tmp_path / "refused").exists()
    made = convert(source, tmp_path / "megatron", to, options=TEXT)
    assert any("belong to no text model" in f.message for f in made.findings)
    assert verify(source, tmp_path / "megatron").verdict == "holds"
    convert(tmp_path / "megatron", tmp_path / "hf")
    assert verify(source, tmp_path / "hf").verdict == "holds"


def test_a_changed_tensor_beside_the_text_model_shows(tmp_path: Path, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3_5")
    name = "model.visual.merger.norm.bias"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    edit_tensors(file, lambda tensors: tensors[name].neg_())
    convert(folder, tmp_path / "megatron", options=TEXT)
    report = verify(FIXTURES / "qwen3_5", tmp_path / "megatron")
    assert {(f.check, f.subject) for f in report.failures} == {("values.bits", name)}


def test_what_is_not_beside_the_text_model_is_told(tmp_path: Path) -> None:
    """As after training, which saves the text model alone; or when only a part of it is left."""
    convert(FIXTURES / "qwen3_5", tmp_path / "megatron", options=TEXT)
    without = Path(shutil.copytree(tmp_path / "megatron", tmp_path / "without"))
    aside = tmp_path / "megatron" / "release" / "mtpcheck" / "aside.safetensors"
    edit_tensors(aside, lambda tensors: tensors.pop("model.visual.merger.norm.bias"))
    report = verify(FIXTURES / "qwen3_5", tmp_path / "megatron")
    assert {(f.check, f.subject) for f in report.failures} == {("presence.missing", "model.visual.merger.norm.bias")}
    shutil.rmtree(without / "release" / "mtpcheck")
    report = verify(FIXTURES / "qwen3_5", without)
    assert report.failures == [] and [f.check for f in report.findings] == ["presence.beside"]


def test_a_reference_is_not_changed_by_what_is_held_against_it(tmp_path: Path) -> None:
    convert(FIXTURES / "qwen3_5", tmp_path / "megatron", options=TEXT)
    without = Path(shutil.copytree(tmp_path / "megatron", tmp_path / "without"))
    shutil.rmtree(without / "release" / "mtpcheck")
    reference = read_tensor_map(open_checkpoint(without), "qwen3_5")
    before = list(reference.model.rows), dict(reference.model.shapes)
    assert len(read_like(open_checkpoint(tmp_path / "megatron"), reference).model.rows) > len(before[0])
    assert (reference.model.rows, reference.model.shapes) == before


# ---- norms as distances from one


def values(dtype: str, numbers: torch.Tensor) -> TensorRef:
    raw = numbers.contiguous().view(torch.uint8).numpy().tobytes()

    class Bytes:
        name, size = "numbers", len(raw)

        def mapped(self, offset: int, length: int) -> memoryview:
            return memoryview(raw)[offset : offset + length]

        def place_of(self, offset: int) -> str:
            return self.name

        def read_into(self, buffer: memoryview, offset: int) -> None:
            buffer[:] = raw[offset : offset + len(buffer)]

    return TensorRef(dtype, Plan.region(Bytes(), 0, tuple(numbers.shape), numbers.element_size()))


def read(source: Offset) -> torch.Tensor:
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    plan = Plan.region(source, 0, source.ref.shape, 4 if source.dtype == "F32" else 2)
    return torch.frombuffer(bytearray(TensorRef(source.dtype, plan).read()), dtype=kinds[source.dtype])


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_sums_are_those_of_torch(dtype: str, kind: torch.dtype) -> None:
    """Over all bf16 values that are finite, and as many of fp32."""
    if kind is torch.bfloat16:
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        numbers = numbers[numbers.isfinite()]
    else:
        numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * 3
    for by in (-1, 1):
        assert torch.equal(read(Offset(values(dtype, numbers), by)), numbers + by)


def test_kept_values_are_used_where_they_still_give_what_is_held() -> None:
    kept = torch.tensor([0.1, 0.3, 0.7, 3.0, 0.05], dtype=torch.bfloat16)
    held = kept - 1
    assert (held + 1 != kept).any()
    held[3] += 0.5
    found = read(Offset(values("BF16", held), 1, values("BF16", kept)))
    assert found.tolist() == [*kept[:3].tolist(), 3.5, kept[4].item()]


def test_kept_fp32_values_are_used_under_bf16_ones() -> None:
    kept = torch.tensor([0.1234567, 1.7654321, 0.9])
    held = (kept - 1).to(torch.bfloat16)
    found = read(Offset(values("BF16", held), 1, values("F32", kept)))
    assert torch.equal(found, kept)
    held[1] = 0.25
    assert read(Offset(values("BF16", held), 1, values("F32", kept))).tolist() == [kept[0], 1.25, kept[2]]


def test_a_gain_that_was_trained_comes_out_of_megatron(tmp_path: Path) -> None:
    name, hf = "decoder.layers.0.self_attention.out_norm.weight", "model.layers.0.linear_attn.norm.weight"
    source = ranks_of("qwen3_next", tmp_path / "megatron")
    before = tensors_of(FIXTURES / "qwen3_next")[hf]

    def train(root: dict[str, Any]) -> None:
        root["model"][name][2] = 0.5

    edit_rank(source / "release" / "mp_rank_00", train)
    convert(source, tmp_path / "hf")
    after = tensors_of(tmp_path / "hf")[hf]
    assert after[2] == 1.5
    assert torch.equal(after[[0, 1, *range(3, 12)]], before[[0, 1, *range(3, 12)]])


def test_a_gain_too_near_to_one_is_said_to_be_rounded(tmp_path: Path) -> None:
    source = ranks_of("qwen3_next", tmp_path / "megatron")
    name = "decoder.layers.0.self_attention.out_norm.weight"

    def train(root: dict[str, Any]) -> None:
        root["model"][name][2] = 0.001

    edit_rank(source / "release" / "mp_rank_00", train)
    made = convert(source, tmp_path / "hf")
    assert [(f.check, f.subject) for f in made.findings if f.check == "values.rounded"] == [("values.rounded", name)]


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    options = Options(topology=Topology(tp=8, etp=4), text_only=True)
    with pytest.raises(UnsupportedError, match="number of key heads of linear attention 4 cannot be cut into TP 8"):
        convert(FIXTURES / "qwen3_next", tmp_path / "new", "torch", options=options)


# ---- other orders under the same names and shapes


def interleaved(root: dict[str, Any]) -> None:
    """As mcore-bridge has them: each gate behind its query, and the delta net's projection by key heads."""
    for name, tensor in root["model"].items():
        if name.endswith("linear_qkv.weight"):
            groups = tensor.view(4, 6, 16, 64)
            order = [0, 2, 1, 3, 4, 5]  # two queries, two gates, key, value
            root["model"][name] = groups[:, order].reshape(tensor.shape).clone()


def plain_gain(root: dict[str, Any]) -> None:
    for name, tensor in root["model"].items():
        if name.endswith("out_norm.weight"):
            root["model"][name] = tensor + 1


def by_key_head(root: dict[str, Any]) -> None:
    for name, tensor in root["model"].items():
        if name.endswith("self_attention.in_proj.weight"):
            parts = torch.split(tensor, [64, 64, 96, 96, 8, 8])
            heads = [part.view(4, -1, 64) for part in parts]
            root["model"][name] = torch.cat(heads, dim=1).reshape(tensor.shape).clone()


@pytest.mark.parametrize(
    ("change", "subjects"),
    [
        (interleaved, {"model.layers.1.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.weight"}),
        (plain_gain, {"model.layers.0.linear_attn.norm.weight"}),
        (by_key_head, {"model.layers.0.linear_attn.in_proj_qkvz.weight"}),
    ],
)
def test_another_order_is_not_taken_for_megatron_core_s(change: Any, subjects: set[str], tmp_path: Path) -> None:
    source = ranks_of("qwen3_next", tmp_path / "megatron")
    edit_rank(source / "release" / "mp_rank_00", change)
    report = verify(FIXTURES / "qwen3_next", source)
    assert report.verdict == "fails"
    found = [f for f in report.failures if f.check == "values.bits"]
    assert subjects <= {name for f in found for name in f.members or (f.subject,)}


# ---- declarations


def test_an_undeclared_head_is_counted_and_stays_undeclared(tmp_path: Path, copy_of: Callable[[str], Path]) -> None:
    source = FIXTURES / "qwen3_next"
    assert not [key for key in config_of("qwen3_next") if "mtp" in key or "nextn" in key]
    facts = read_tensor_map(open_checkpoint(source)).facts
    assert (facts["mtp_layers"], facts["mtp_stored"]) == (1, 1)
    made = convert(source, tmp_path / "megatron")
    assert made.failures == []
    assert (open_checkpoint(tmp_path / "megatron").args or {})["mtp_num_layers"] == 1
    declared = copy_of("qwen3_next")
    edit_json(declared / "config.json", num_nextn_predict_layers=1)
    assert roundtrip(declared).verdict == "holds"
    edit_json(declared / "config.json", num_nextn_predict_layers=2)
    assert roundtrip(declared).verdict == "fails"


def test_a_stripped_head_is_not_one_that_was_declared(tmp_path: Path, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3_next")
    tensors = {name: t for name, t in tensors_of(folder).items() if not name.startswith("mtp.")}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert read_tensor_map(open_checkpoint(folder)).facts["mtp_layers"] == 0
    report = verify(FIXTURES / "qwen3_next", folder)
    missing = [f for f in report.failures if f.check == "presence.missing"]
    assert "mtp.fc.weight" in {name for f in missing for name in f.members or (f.subject,)}
    nested = copy_of("qwen3_5")
    tensors = {name: t for name, t in tensors_of(nested).items() if not name.startswith("mtp.")}
    for file in nested.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, nested / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointFails, match="declares 1 MTP layer, stores 0"):
        convert(nested, tmp_path / "lost", options=TEXT)


def qwen_facts(config: dict[str, Any]) -> dict[str, Any]:
    family = load_family("qwen3_next")
    return facts_from_config(family.all_config, config, family.all_fixed)


def test_kinds_of_layers_are_told_in_two_ways() -> None:
    config = config_of("qwen3_next")
    rows = load_family("qwen3_next").all_config
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    listed = {key: value for key, value in config.items() if key != "full_attention_interval"} | {"layer_types": kinds}
    for own in (config, listed, config | {"layer_types": kinds}):
        facts = qwen_facts(own)
        assert facts["linear_layers"] == [1, 0, 1, 0]
        assert config_from_facts(rows, facts, own) == own
        other = config_from_facts(rows, {**facts, "linear_layers": [0, 1, 1, 0]}, own)
        assert "full_attention_interval" not in other
        assert other["layer_types"] == [kinds[1], kinds[0], kinds[0], kinds[1]]
    short = {key: value for key, value in config.items() if key != "full_attention_interval"}
    assert qwen_facts(short)["linear_layers"] == [1, 1, 1, 0]  # every fourth has full attention


@pytest.mark.parametrize("told", [0, -1, "4", True, ["full_attention"], ["sliding_attention"] * 4, 4.0])
def test_kinds_of_layers_that_make_no_sense(told: Any) -> None:
    key = "layer_types" if isinstance(told, list) else "full_attention_interval"
    with pytest.raises(UnsupportedError, match="layers have the attention"):
        qwen_facts(config_of("qwen3_next") | {key: told})


def test_arguments_that_would_mean_another_model_are_found(tmp_path: Path) -> None:
    source = ranks_of("qwen3_next", tmp_path / "megatron")
    for argument, value in (
        ("attention_output_gate", False),
        ("apply_layernorm_1p", False),
        ("linear_attention_freq", 4),
        ("linear_num_key_heads", 8),
        ("moe_shared_expert_gate", False),
        ("moe_shared_expert_intermediate_size", 32),
    ):

        def change(root: dict[str, Any], argument: str = argument, value: Any = value) -> None:
            setattr(root["args"], argument, value)

        edited = Path(shutil.copytree(source, tmp_path / argument))
        edit_rank(edited / "release" / "mp_rank_00", change)
        report = verify(FIXTURES / "qwen3_next", edited)
        assert any(argument in f.subject for f in report.failures if f.check == "declaration.config"), argument


def test_a_gated_projection_under_another_name_is_missed(tmp_path: Path) -> None:
    """As in a fork of Megatron, which has a name of its own for queries that are joined with their gate."""
    convert(FIXTURES / "qwen3_next", tmp_path / "megatron", options=TEXT)
    name = "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight"
    other = name.replace("linear_qkv", "linear_qgkv")

    def rename(metadata: Any) -> None:
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata.pop(name)
        metadata.storage_data = {
            dataclasses.replace(key, fqn=other) if key.fqn == name else key: value
            for key, value in metadata.storage_data.items()
        }

    edit_metadata(tmp_path / "megatron" / "release", rename)
    report = verify(FIXTURES / "qwen3_next", tmp_path / "megatron")
    assert [(f.check, f.cause_id) for f in report.failures] == [("presence.missing", "renamed")]


def test_rows_of_a_gate_that_are_gone_are_missed(copy_of: Callable[[str], Path]) -> None:
    candidate = copy_of("qwen3_next")
    name = "mtp.layers.0.self_attn.q_proj.weight"
    shard = next(p for p in sorted(candidate.glob("*.safetensors")) if name in load_file(p))
    edit_tensors(shard, lambda tensors: tensors.update({name: tensors[name][: len(tensors[name]) // 2].clone()}))
    report = verify(FIXTURES / "qwen3_next", candidate)
    assert report.exit_code == 1
    assert name in {subject for f in report.failures for subject in (f.subject, *f.members)}
