"""Every family: its fixture goes there and back, transformers spells its trunk so too, what cannot be run says so."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtpcheck.accept import accept
from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.dialects import load_dialect
from mtpcheck.draft.run import Engine, run
from mtpcheck.errors import CheckpointFails, FamilyError, FormatError, MtpcheckError, UnsupportedError
from mtpcheck.facts import facts_from_args, facts_from_config
from mtpcheck.family import family_names, family_of_config, load_family, not_yet
from mtpcheck.listing import listed, markdown
from mtpcheck.megatron import Options
from mtpcheck.proof import prove
from mtpcheck.tensormap import is_mtp, read_tensor_map
from mtpcheck.topology import Topology
from mtpcheck.verify import verify
from tests.conftest import FIXTURES
from tests.megatron_edit import flip_bit, payload_of
from tests.test_roundtrip import sha256

NEW = (
    "bailing_moe_v2", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe_lite", "glm_ocr", "hy_v3", "kimi_k2",
    "mimo_v2_flash", "minimax_m2", "minimax_m3", "pangu_ultra_moe",
)  # fmt: skip
NO_HEAD = ("minimax_m2", "minimax_m3")  # which their configs declare
UNTRAINED = {"bailing_moe_v2", "pangu_ultra_moe", *NO_HEAD}
WITH_IMAGES = ("glm_ocr", "minimax_m3", "qwen3_5", "qwen3_5_moe")
IDS = [(7 * i * i + 3 * i + 5) % 260 for i in range(90)]  # longer than the windows and what an indexer chooses
RANKS = {name: Topology(tp=2, pp=2, ep=2, etp=1) for name in NEW} | {
    "minimax_m2": Topology(tp=1, pp=2, ep=2, etp=1),  # has norms over all heads
    "glm_ocr": Topology(tp=2, pp=2),  # has no experts
}


def test_every_family_has_a_fixture_and_a_row() -> None:
    families = {read_tensor_map(open_checkpoint(path.parent)).family for path in FIXTURES.glob("*/config.json")}
    # a Qwen3.5 fixture is a model of images; those of Qwen3-Next and Qwen3.5 have tests of their own
    assert set(family_names()) - families <= {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
    assert [family.name for family in listed()] == list(family_names())
    assert all(family.models and family.sources and family.megatron for family in listed())


def test_the_page_is_what_the_tables_say() -> None:
    page = Path(__file__).parent.parent / "docs" / "families.md"
    assert page.read_text() == markdown(), "mtpcheck families --markdown > docs/families.md"


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("layout", ["torch_dist", "local", "torch"])
def test_there_and_back(name: str, layout: str, tmp_path: Path) -> None:
    ranks, source = layout == "torch", as_stored(name, tmp_path)
    options = replace(
        options_of(name, RANKS[name] if ranks else Topology()), spec="local" if layout == "local" else "te"
    )
    convert(source, tmp_path / "megatron", "torch" if ranks else "torch_dist", options=options)
    report = verify(source, tmp_path / "megatron", allow_no_mtp=True)
    assert report.verdict == "holds", report.findings
    convert(tmp_path / "megatron", tmp_path / "hf", "hf")
    assert sha256(tmp_path / "hf") == sha256(source)


def options_of(name: str, topology: Topology) -> Options:
    return Options(topology=topology, text_only=name in WITH_IMAGES)


def as_stored(name: str, folder: Path) -> Path:
    """A fixture; MiniMax's without the declaration of layers that it does not hold, which is refused (below)."""
    if name not in NO_HEAD:
        return FIXTURES / name
    source = Path(shutil.copytree(FIXTURES / name, folder / "source"))
    path = source / "config.json"
    config = json.loads(path.read_text())
    for table in (config, config.get("text_config", {})):
        for key in {"num_mtp_modules", "num_nextn_predict_layers"} & table.keys():
            table[key] = None
    path.write_text(json.dumps(config))
    return source


@pytest.mark.parametrize("name", [name for name in NEW if name not in NO_HEAD])
def test_the_round_trip_is_proved_from_headers(name: str) -> None:
    assert prove(FIXTURES / name, options=options_of(name, Topology())).verdict == "holds"


@pytest.mark.parametrize("name", [name for name in NEW if name not in UNTRAINED])
def test_ranks_draft_what_the_source_drafts(name: str, tmp_path: Path) -> None:
    convert(FIXTURES / name, tmp_path / "torch", "torch", options=options_of(name, RANKS[name]))
    passages = []
    for folder in (FIXTURES / name, tmp_path / "torch"):
        checkpoint = open_checkpoint(folder)
        passages += run(Engine(checkpoint, read_tensor_map(checkpoint)), [IDS]).passages
    assert passages[0].logits_digest == passages[1].logits_digest


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bailing_moe_v2", "no language model of type 'bailing_moe_v2'"),
        ("pangu_ultra_moe", "no language model of type 'pangu_ultra_moe'"),
        ("minimax_m2", "declares 3 MTP layers and stores none"),
        ("minimax_m3", "declares 7 MTP layers and stores none"),
    ],
)
def test_what_cannot_be_run_says_why(name: str, why: str) -> None:
    with pytest.raises(MtpcheckError, match=why):
        accept(FIXTURES / name)


def test_norms_over_all_heads_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no norm over all heads"):
        convert(as_stored("minimax_m2", tmp_path), tmp_path / "x", "torch", options=Options(topology=Topology(tp=2)))


# ---- released sizes

# What a published figure counts. ``layers`` are those of the decoder with the final norm, ``mtp`` what MTP layers have
# for themselves, ``copies`` the embedding and the head in them, ``scales`` one number for every block of FP8 codes.
MAIN = {"layers", "embed", "head"}
STORED = MAIN | {"mtp", "copies"}
ONE, B = 1, 10**9
PUBLISHED = [
    # the Hub counts the elements of all tensors in the headers of a repository
    ("GLM-5.2", 753_329_940_480, ONE, STORED),
    ("DeepSeek-V3", 684_531_386_000, ONE, STORED | {"scales"}),
    ("GLM-4.5", 358_337_791_296, ONE, STORED),
    ("GLM-4.5-Air", 110_468_824_832, ONE, STORED),
    ("Qwen3-Next", 81_324_862_720, ONE, STORED),
    # README_WEIGHTS.md of DeepSeek-V3: the main model; its README: all of what is on the Hub. Without the scales that
    # would be 684.49, and the 14 that it gives the MTP module is the difference of the two: 13.46, copies included.
    ("DeepSeek-V3", 671 * B, B, MAIN),
    ("DeepSeek-V3", 685 * B, B, STORED | {"scales"}),
    # Table 1 of the GLM-4.5 report (arXiv 2508.06471): "we include the parameters of MTP layers but not word embeddings
    # and the output layer". So it is for GLM-4.5. For Air that makes 107.99; its 106 is the layers alone.
    ("GLM-4.5", 355 * B, B, {"layers", "mtp"}),
    ("GLM-4.5-Air", 106 * B, B, {"layers"}),
    # the model card: 80 in total, 79 without embeddings; neither has the MTP layer
    ("Qwen3-Next", 80 * B, B, MAIN),
    ("Qwen3-Next", 79 * B, B, {"layers"}),
    # no more than the name of the model: all of the main model is 7.62, and 7.00 without the table of embeddings
    ("MiMo-7B", 7 * B, B, {"layers", "head"}),
    # "a GLM-0.5B language decoder" (README of GLM-OCR)
    ("GLM-OCR", B // 2, B // 10, {"layers"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published", "digit", "counted"), PUBLISHED, ids=[f"{name}-{figure}" for name, figure, *_ in PUBLISHED]
)
def test_released_sizes(name: str, published: int, digit: int, counted: set[str]) -> None:
    """Each figure within half of its last digit."""
    sizes, tensors = elements(name)
    ours, of_mtp = sum(sizes[group] for group in counted), sizes["mtp"] + sizes["copies"]
    stored = sum(sizes[group] for group in STORED)
    print(f"{name}: {stored:,} elements in {tensors:,} tensors, {of_mtp / stored:.2%} of them in MTP layers")
    assert abs(ours - published) < digit / 2
    assert name != "GLM-5.2" or tensors == 59_585
    assert 0 < sizes["mtp"] < stored / 20


def test_the_mtp_layer_of_glm_ocr_has_the_size_that_is_stored() -> None:
    """The header of the release has 217,852,416 elements at layer 16, most of them copies."""
    sizes, _ = elements("GLM-OCR")
    assert (sizes["mtp"], sizes["mtp"] + sizes["copies"]) == (35_400_192, 217_852_416)


def test_minimax_m3_has_what_the_hub_counts() -> None:
    """427,040,140,160 elements, of which 865,567,232 belong to what sees images, by the shapes in the headers. The card
    says "~428B", which no way of counting gives."""
    sizes, _ = elements("MiniMax-M3")
    assert (sum(sizes[group] for group in STORED), sizes["mtp"]) == (427_040_140_160 - 865_567_232, 0)


@lru_cache
def elements(name: str) -> tuple[dict[str, int], int]:
    """Elements of a released model by what they are, and the number of its tensors, by its family file alone."""
    import sys

    sys.path.insert(0, str(FIXTURES))
    from full_size import CONFIGS

    family = family_of_config(CONFIGS[name])
    facts = facts_from_config(family.all_config, CONFIGS[name], family.all_fixed)
    model = family.model({**facts, "mtp_stored": facts["mtp_layers"]})
    sizes = dict.fromkeys(("layers", "embed", "head", "mtp", "copies", "scales"), 0)
    for row in model.rows:
        shape, part = row.shape(model.shapes), row.parts[0]
        group = ("copies" if part in model.copies else "mtp") if is_mtp(part) else part if part in sizes else "layers"
        sizes[group] += prod(shape)
        if len(shape) == 2 and {"attn", "mlp"} & {*part.split(".")} and not part.endswith(".router"):
            sizes["scales"] += prod(-(-side // 128) for side in shape)
    return sizes, len(model.rows)


# ---- transformers


TRUNKS = {"kimi_k2": "deepseek_v3"}
NATIVE = sorted(
    path.parent.name
    for path in FIXTURES.glob("*/config.json")
    if path.parent.name not in {"mimo", "bailing_moe_v2", "pangu_ultra_moe"}
)


@pytest.mark.parametrize("name", NATIVE)
def test_transformers_saves_what_the_family_reads(name: str, tmp_path: Path) -> None:
    """A model that transformers made from the same config and saved: its names, shapes and config keys."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads((FIXTURES / name / "config.json").read_text())
    own = {key: deepcopy(value) for key, value in config.items() if key not in ("model_type", "transformers_version")}
    known = AutoConfig.for_model(TRUNKS.get(name, config["model_type"]), **own)
    auto: Any = AutoModelForImageTextToText if name in WITH_IMAGES else AutoModelForCausalLM
    auto.from_config(known).save_pretrained(tmp_path)
    saved, fixture = (read_tensor_map(open_checkpoint(folder)) for folder in (tmp_path, FIXTURES / name))
    assert [f for f in saved.findings if f.check.startswith("presence.")] == []
    assert {part for part in fixture.parts if not part.startswith("mtp.")} == set(saved.parts)
    counts = {"mtp_layers", "mtp_stored", "mtp_steps", "dtype"}
    assert {k: v for k, v in saved.facts.items() if k not in counts} == {
        k: v for k, v in fixture.facts.items() if k not in counts
    }


# ---- what is special


def test_a_norm_that_a_family_lacks_has_to_be_one(tmp_path: Path) -> None:
    convert(FIXTURES / "ernie4_5_moe", tmp_path / "megatron")
    flip_bit(*payload_of(tmp_path / "megatron" / "release", "mtp.layers.0.final_layernorm.weight"))
    report = verify(FIXTURES / "ernie4_5_moe", tmp_path / "megatron")
    assert [f.check for f in report.failures] == ["values.bits"], report.findings
    converted = convert(tmp_path / "megatron", tmp_path / "hf")
    assert [f.check for f in converted.failures] == ["presence.constant"]


def test_steps_are_not_layers(tmp_path: Path) -> None:
    convert(FIXTURES / "exaone_moe", tmp_path / "megatron")
    opened = open_checkpoint(tmp_path / "megatron")
    assert opened.args is not None
    assert (opened.args["mtp_num_layers"], opened.args["mtp_use_repeated_layer"]) == (3, True)
    facts = read_tensor_map(opened).facts
    assert (facts["mtp_layers"], facts["mtp_stored"], facts["mtp_steps"]) == (1, 1, 3)


def test_a_decoder_within_a_model_of_images_is_run_as_that_runs_it() -> None:
    """transformers has GLM-OCR's text model with a head only there."""
    from transformers import AutoModelForImageTextToText

    folder = FIXTURES / "glm_ocr"
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = whole(torch.tensor([IDS])).logits[0]
    checkpoint = open_checkpoint(folder)
    (passage,) = run(Engine(checkpoint, read_tensor_map(checkpoint)), [IDS], keep_logits=True).passages
    assert np.array_equal(passage.logits[0], expected.numpy())


def test_norms_after_attention_and_mlp_come_back_without_the_form_of_a_source(tmp_path: Path) -> None:
    convert(FIXTURES / "glm_ocr", tmp_path / "megatron", options=Options(text_only=True))
    shutil.rmtree(tmp_path / "megatron" / "release" / "mtpcheck")
    convert(tmp_path / "megatron", tmp_path / "hf")  # no other family fits
    own, made = (read_tensor_map(open_checkpoint(folder)) for folder in (FIXTURES / "glm_ocr", tmp_path / "hf"))
    assert made.family == "glm_ocr"
    assert {part for part in own.parts if not part.startswith("beside.")} - made.parts.keys() == {
        "mtp.0.embed", "mtp.0.head",
    }  # fmt: skip
    assert all(ref.read() == own.parts[part].read() for part, ref in made.parts.items())


def test_a_gate_with_a_clamp_is_told_to_megatron(tmp_path: Path) -> None:
    convert(as_stored("minimax_m3", tmp_path), tmp_path / "megatron", options=Options(text_only=True))
    args = open_checkpoint(tmp_path / "megatron").args
    assert args is not None
    said = [args[key] for key in ("swiglu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value")]
    assert said == [False, True, 1.0, 7.0]
    facts = facts_from_args(load_dialect().args, args)
    fitting = [name for name in family_names() if load_family(name).all_fixed["quick_gate"] == facts["quick_gate"]]
    assert (fitting, facts["gate_limit"]) == (["minimax_m3"], 7.0)


def test_indexers_that_no_config_tells_are_not_lost(tmp_path: Path) -> None:
    """Megatron has no word for which layers have one; without the form of a source they have no place."""
    convert(as_stored("minimax_m3", tmp_path), tmp_path / "megatron", options=Options(text_only=True))
    shutil.rmtree(tmp_path / "megatron" / "release" / "mtpcheck")
    with pytest.raises(CheckpointFails, match=r"index_q_proj.*no place for it and 3 more; nothing was written"):
        convert(tmp_path / "megatron", tmp_path / "hf", family="minimax_m3")


@pytest.mark.parametrize("model_type", list(not_yet()))
def test_what_is_not_here_yet_is_told_by_name(model_type: str) -> None:
    with pytest.raises(FamilyError, match=f"{model_type} is not supported yet: "):
        family_of_config({"model_type": model_type})


def test_a_family_of_one_s_own_is_one_file(tmp_path: Path) -> None:
    """No file of mtpcheck is touched: known blocks, spelled in the house's way."""
    house = tmp_path / "house.yaml"
    house.write_text(
        "extends: glm4_moe\nmatch: {model_type: house, architectures: [HouseForCausalLM]}\ntrunk: glm4_moe\n"
        "spelled: {mlp.gate: mlp.router, mlp.gate.e_score_correction_bias: mlp.router.bias}\n"
        "modules: {mlp.gate: mlp.router, mlp.gate.e_score_correction_bias: mlp.router.bias}\n"
    )
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    source.mkdir()
    tensors = {n: t for file in (FIXTURES / "glm4_moe").glob("*.safetensors") for n, t in load_file(file).items()}
    respelled = [(".mlp.gate.e_score_correction_bias", ".mlp.router.bias"), (".mlp.gate.weight", ".mlp.router.weight")]
    for theirs, own in respelled:
        tensors = {name.replace(theirs, own): tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((FIXTURES / "glm4_moe" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "house"}))
    convert(source, tmp_path / "megatron", family=str(house))
    assert load_family("house").name == "house"
    convert(tmp_path / "megatron", tmp_path / "hf")
    assert sha256(tmp_path / "hf") == sha256(source)
    other = tmp_path / "glm4_moe.yaml"
    other.write_text(house.read_text())
    with pytest.raises(FamilyError, match="give the file another name"):
        load_family(str(other))
    with pytest.raises(FamilyError, match="no such family file"):
        load_family(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    "table",
    ["outside: 3", "mtp: {declared: 3}", "mtp: {declared: []}", "text: 3", "specimen: {layers: x}", "facts: [1]"],
)
def test_a_family_of_one_s_own_that_is_none_is_told_so(table: str, tmp_path: Path) -> None:
    house = tmp_path / "house_that_is_none.yaml"
    house.write_text(f"extends: glm4_moe\nmatch: {{model_type: house, architectures: [HouseForCausalLM]}}\n{table}\n")
    with pytest.raises(FamilyError, match=r"house_that_is_none\.yaml: "):
        load_family(str(house))


def test_two_families_of_one_s_own_do_not_share_a_name(tmp_path: Path) -> None:
    """A family is found by its name from then on, and would be another one than the file says."""
    files = [tmp_path / folder / "house_of_two.yaml" for folder in ("first", "second")]
    for file, router in zip(files, ("router", "gates"), strict=True):
        file.parent.mkdir()
        file.write_text(
            "extends: glm4_moe\nmatch: {model_type: house, architectures: [HouseForCausalLM]}\n"
            f"spelled: {{mlp.gate: mlp.{router}}}\n"
        )
    assert load_family(str(files[0])).spelled == load_family("house_of_two").spelled == {"mlp.gate": "mlp.router"}
    with pytest.raises(FamilyError, match="known as house_of_two by now"):
        load_family(str(files[1]))


@pytest.mark.parametrize("told", [float("inf"), float("nan"), 10**400, True, "8"])
def test_a_share_that_makes_no_sense(told: Any) -> None:
    family, config = load_family("minimax_m2"), json.loads((FIXTURES / "minimax_m2" / "config.json").read_text())
    with pytest.raises(FormatError, match="expected a share of head_dim"):
        facts_from_config(family.all_config, {**config, "rotary_dim": told}, family.all_fixed)


def test_family_files_stay_short() -> None:
    folder = Path(__file__).parent.parent / "configs" / "families"
    assert max(len(path.read_text().splitlines()) for path in folder.glob("*.yaml")) <= 80
