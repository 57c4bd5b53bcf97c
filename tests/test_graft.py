"""A lost MTP layer is put back: from the original, from an extract, into quantized checkpoints; or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.accept import accept
from mtpcheck.draft.probe import Probing
from mtpcheck.errors import CheckpointFails, MtpcheckError, UnsupportedError, UsageError
from mtpcheck.graft import extract, graft
from mtpcheck.inspect import inspect
from mtpcheck.report.finding import Severity
from mtpcheck.verify import verify
from tests import coded, packed
from tests.conftest import FIXTURES, Outcome, digest, edit_json, edit_tensors, fixture_path
from tests.packed import FORMS, Tensors, is_linear, stored
from tests.schema import faults

Cli = Callable[..., Outcome]
MTP = {
    "glm4_moe": "model.layers.3.",
    "glm4_moe_nocopies": "model.layers.4.",
    "deepseek_v3": "model.layers.3.",
    "deepseek_v3_noq": "model.layers.2.",
    "glm_moe_dsa": "model.layers.4.",
    "mimo": "model.mtp_layers.",
    "qwen2_mtp": "mtp.",
    "qwen3_mtp": "mtp.",
    "llama_mtp": "mtp.",
}
"""How the names of MTP layers begin."""
INDEX = "model.safetensors.index.json"


def lose(source: Path, target: Path, lead: str) -> Path:
    """A copy without its MTP layers, index included; the config still declares them."""
    shutil.copytree(source, target)
    for path in sorted(target.glob("*.safetensors")):
        tensors = {name: t for name, t in load_file(path).items() if not name.startswith(lead)}
        path.unlink()
        if tensors:
            save_file(tensors, path, {"format": "pt"})
    if (target / INDEX).is_file():
        index = json.loads((target / INDEX).read_text())
        index["weight_map"] = {n: file for n, file in index["weight_map"].items() if not n.startswith(lead)}
        index["metadata"]["total_size"] = sum(t.numel() * t.itemsize for t in stored(target).values())
        (target / INDEX).write_text(json.dumps(index, indent=2))
    return target


@pytest.fixture
def lost(tmp_path: Path) -> Callable[[str], Path]:
    """``lost(name)``: a fixture without its MTP layers."""
    return lambda name: lose(FIXTURES / name, tmp_path / f"lost-{name}", MTP[name])


def resaved(name: str, folder: Path) -> Path:
    """What transformers makes of a fixture by loading and saving it: the MTP layers are gone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / name / file, folder / file)
    return folder


def severities(report: Any, check: str) -> set[str]:
    return {f.severity for f in report.findings if f.check.startswith(check)}


# ---- lost and put back


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen3_mtp", "llama_mtp"])
def test_what_transformers_loses_is_put_back(name: str, tmp_path: Path) -> None:
    broken, out = resaved(name, tmp_path / "broken"), tmp_path / "out"
    before = digest(broken)
    with pytest.raises(MtpcheckError):
        accept(broken)
    report = graft(broken, FIXTURES / name, out)
    assert report.verdict == "holds" and digest(broken) == before
    assert severities(report, "declaration") == {Severity.NOTE}
    again = verify(FIXTURES / name, out, only_mtp=True)
    assert again.failures == [] and [c.status for c in again.checks if c.group == "values"] == ["passed"]
    for file, told in before.items():  # config and index alone are new
        if file not in ("config.json", "model.safetensors"):
            assert digest(out)[file] == told
    assert digest(out)["model-00001-of-00001.safetensors"] == before["model.safetensors"]


def test_acceptance_is_the_original_s(tmp_path: Path) -> None:
    report = graft(resaved("glm4_moe", tmp_path / "broken"), FIXTURES / "glm4_moe", probing=Probing("once"))
    (column,) = report.acceptance
    (original,) = accept(FIXTURES / "glm4_moe").acceptance
    assert report.verdict == "holds" and column.digests == original.digests
    assert column.overall.depths[0].accepted == original.overall.depths[0].accepted > 10_000


@pytest.mark.parametrize("name", MTP)
def test_grafting_an_extract_gives_the_original_again(name: str, lost: Callable[[str], Path], tmp_path: Path) -> None:
    donor, broken = FIXTURES / name, lost(name)
    kept = digest(donor)
    taken, whole, again = tmp_path / "taken", tmp_path / "whole", tmp_path / "again"
    assert extract(donor, taken).verdict == "holds"
    assert graft(broken, donor, whole).verdict == "holds"
    assert graft(broken, taken, again).verdict == "holds"
    assert digest(again) == digest(whole) and digest(donor) == kept
    assert extract(again, tmp_path / "twice").verdict == "holds" and digest(tmp_path / "twice") == digest(taken)

    held = verify(donor, again)
    assert held.verdict == "holds" and held.findings == []
    original, made = stored(donor), stored(again)
    assert original.keys() == made.keys() and all(bits(original[n], made[n]) for n in original)
    assert json.loads((again / "config.json").read_text()) == json.loads((donor / "config.json").read_text())
    index = json.loads((again / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in original.values())
    assert {n for n, file in index["weight_map"].items() if file == "mtp.safetensors"} == {
        n for n in original if n.startswith(MTP[name])
    }


def bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_a_head_in_a_shard_of_its_own_comes_back_with_the_same_index(
    lost: Callable[[str], Path], tmp_path: Path
) -> None:
    donor = FIXTURES / "glm4_moe_nocopies"
    extract(donor, tmp_path / "taken")
    graft(lost("glm4_moe_nocopies"), tmp_path / "taken", tmp_path / "out")
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (donor, tmp_path / "out"))
    assert before == after and list(before["weight_map"]) == list(after["weight_map"])


def test_an_extract_is_all_that_a_draft_needs(tmp_path: Path) -> None:
    extract(FIXTURES / "glm4_moe_nocopies", tmp_path / "taken")
    names = set(stored(tmp_path / "taken"))
    own = {n for n in stored(FIXTURES / "glm4_moe_nocopies") if n.startswith("model.layers.4.")}
    assert names == own | {"model.embed_tokens.weight", "lm_head.weight"}
    files = {path.name for path in (tmp_path / "taken").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", INDEX} <= files


def test_a_tied_model_s_extract_has_the_embedding_alone(tmp_path: Path) -> None:
    extract(FIXTURES / "qwen3_mtp", tmp_path / "taken")
    assert {n for n in stored(tmp_path / "taken") if not n.startswith("mtp.")} == {"model.embed_tokens.weight"}


# ---- copies


def test_copies_follow_the_model_that_they_are_put_into(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken = lost("glm4_moe")
    files = [path for path in broken.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path)]
    edit_tensors(files[0], lambda t: t["model.embed_tokens.weight"].mul_(2))
    report = graft(broken, FIXTURES / "glm4_moe", tmp_path / "out")
    made, donor = stored(tmp_path / "out"), stored(FIXTURES / "glm4_moe")
    assert bits(made["model.layers.3.embed_tokens.weight"], made["model.embed_tokens.weight"])
    assert not bits(made["model.layers.3.embed_tokens.weight"], donor["model.embed_tokens.weight"])
    assert bits(made["model.layers.3.shared_head.head.weight"], donor["lm_head.weight"])
    assert report.verdict == "holds" and severities(report, "graft.trunk") == {Severity.WARNING}


def test_an_own_head_stays_the_donor_s(lost: Callable[[str], Path], copy_of: Callable[[str], Path],
                                       tmp_path: Path) -> None:  # fmt: skip
    donor, name = copy_of("glm4_moe"), "model.layers.3.shared_head.head.weight"
    file = next(path for path in donor.glob("*.safetensors") if name in load_file(path))
    edit_tensors(file, lambda t: t[name].mul_(2))
    graft(lost("glm4_moe"), donor, tmp_path / "out")
    assert bits(stored(tmp_path / "out")[name], stored(donor)[name])
    assert not bits(stored(tmp_path / "out")[name], stored(donor)["lm_head.weight"])


# ---- what is said


def test_another_trunk_is_said(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken = lost("llama_mtp")
    packed.edit(broken, lambda t: t["model.layers.1.self_attn.q_proj.weight"].mul_(2)
                if "model.layers.1.self_attn.q_proj.weight" in t else None)  # fmt: skip
    report = graft(broken, FIXTURES / "llama_mtp", tmp_path / "out")
    (finding,) = [f for f in report.findings if f.check == "graft.trunk"]
    assert finding.severity is Severity.WARNING and "drafts worse" in finding.message
    assert finding.subject == "model.layers.1.self_attn.q_proj.weight"


def test_the_same_trunk_needs_no_word_and_an_extract_cannot_tell(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken = lost("llama_mtp")
    assert graft(broken, FIXTURES / "llama_mtp", tmp_path / "out").findings == []
    extract(FIXTURES / "llama_mtp", tmp_path / "taken")
    (finding,) = graft(broken, tmp_path / "taken", tmp_path / "again").findings
    assert (finding.check, finding.severity) == ("graft.trunk", Severity.NOTE)


def test_another_dtype_is_kept_and_said(lost: Callable[[str], Path], copy_of: Callable[[str], Path],
                                        tmp_path: Path) -> None:  # fmt: skip
    donor = copy_of("llama_mtp")
    packed.edit(donor, lambda t: t.update({n: v.float() for n, v in t.items() if n.startswith("mtp.")}))
    report = graft(lost("llama_mtp"), donor, tmp_path / "out")
    (finding,) = report.findings
    assert (finding.check, finding.expected, finding.got) == ("graft.dtype", "BF16", "F32")
    assert stored(tmp_path / "out")["mtp.fc.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_mtp"])
def test_the_declaration_comes_back_where_the_donor_has_it(
    name: str, lost: Callable[[str], Path], tmp_path: Path
) -> None:
    broken, donor = lost(name), json.loads((FIXTURES / name / "config.json").read_text())
    (key,) = {"num_nextn_predict_layers", "mtp_num_hidden_layers"} & donor.keys()
    edit_json(broken / "config.json", **{key: None, "num_mtp_modules": 0})
    report = graft(broken, FIXTURES / name, tmp_path / "out")
    assert report.verdict == "holds" and severities(report, "declaration") <= {Severity.NOTE}
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made == {name: value for name, value in donor.items() if value is not None}  # as edit_json leaves it


def test_the_entry_of_the_mtp_layer_comes_back_to_a_cut_list(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken = lost("glm_moe_dsa")
    whole = json.loads((broken / "config.json").read_text())["indexer_types"]
    edit_json(broken / "config.json", indexer_types=whole[:4])
    assert graft(broken, FIXTURES / "glm_moe_dsa", tmp_path / "out").verdict == "holds"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["indexer_types"] == whole


def test_ghosts_of_the_lost_layer_leave_the_index(copy_of: Callable[[str], Path], lost: Callable[[str], Path],
                                                  tmp_path: Path) -> None:  # fmt: skip
    broken = lost("glm4_moe")
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"]["model.layers.3.eh_proj.weight"] = next(iter(index["weight_map"].values()))
    (broken / INDEX).write_text(json.dumps(index))
    assert any(f.check == "structure.ghost" for f in inspect(broken).findings)
    assert graft(broken, FIXTURES / "glm4_moe", tmp_path / "out").verdict == "holds"
    assert inspect(tmp_path / "out").findings == ()


# ---- quantized


SOME = ("compressed-tensors int4", "modelopt nvfp4", "gptq", "auto-round", "modelslim", "fp8")


@pytest.mark.parametrize(
    "name, form",
    [*(("glm4_moe", form) for form in FORMS), *((n, form) for n in ("deepseek_v3", "qwen3_mtp") for form in SOME)],
)
def test_a_quantized_checkpoint_leaves_a_plain_head_alone(name: str, form: str, tmp_path: Path) -> None:
    lead = MTP[name]
    whole = packed.make(tmp_path / "whole", name, form, lambda n: is_linear(n) and not n.startswith(lead))
    broken = lose(whole, tmp_path / "broken", lead)
    if form == "modelslim":
        packed.describe(broken)
    report = graft(broken, FIXTURES / name, tmp_path / "out")
    assert report.verdict == "holds" and inspect(tmp_path / "out").findings == ()
    assert all(bits(t, stored(tmp_path / "out")[n]) for n, t in stored(FIXTURES / name).items() if n.startswith(lead))
    if form not in SOME:
        return
    extract(FIXTURES / name, tmp_path / "taken")
    graft(broken, tmp_path / "taken", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(tmp_path / "out")


@pytest.mark.parametrize("form", FORMS)
def test_a_head_that_is_packed_alike_is_carried_as_it_is(form: str, tmp_path: Path) -> None:
    donor = packed.make(tmp_path / "donor", "deepseek_v3", form)
    broken = lose(donor, tmp_path / "broken", MTP["deepseek_v3"])
    graft(broken, donor, tmp_path / "out")
    made, theirs = stored(tmp_path / "out"), stored(donor)
    assert made.keys() == theirs.keys() and all(bits(made[name], theirs[name]) for name in theirs)
    assert inspect(tmp_path / "out").findings == ()
    extract(donor, tmp_path / "taken")
    graft(broken, tmp_path / "taken", tmp_path / "again")
    assert digest(tmp_path / "again") == digest(tmp_path / "out")


def test_a_packed_head_comes_off_the_list(tmp_path: Path) -> None:
    donor = packed.make(tmp_path / "donor", "glm4_moe", "compressed-tensors int4")
    lead, names = MTP["glm4_moe"], stored(FIXTURES / "glm4_moe")
    listed = [n.removesuffix(".weight") for n in names if is_linear(n) and n.startswith(lead)]
    broken = lose(donor, tmp_path / "broken", lead)
    quantization = json.loads((broken / "config.json").read_text())["quantization_config"]
    edit_json(broken / "config.json", quantization_config={**quantization, "ignore": ["lm_head", *listed]})
    assert graft(broken, donor, tmp_path / "out").verdict == "holds"
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["quantization_config"]["ignore"] == ["lm_head"] and inspect(tmp_path / "out").findings == ()


def test_fp8_codes_become_values_in_a_plain_model(lost: Callable[[str], Path], tmp_path: Path) -> None:
    donor = coded.make(tmp_path / "donor", finite=True)
    report = graft(lost("deepseek_v3"), donor, tmp_path / "out")
    assert report.verdict == "holds" and severities(report, "graft.decoded") == {Severity.WARNING}
    assert inspect(tmp_path / "out").findings == ()
    theirs = stored(donor)
    for name in theirs:
        if name.startswith(MTP["deepseek_v3"]) and coded.is_coded(name):
            assert stored(tmp_path / "out")[name].dtype == torch.bfloat16 and name + "_scale_inv" in theirs
    assert not any(name.endswith("_scale_inv") for name in stored(tmp_path / "out"))


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors nvfp4"])
def test_a_packed_head_is_refused_where_its_codes_mean_nothing(
    form: str, lost: Callable[[str], Path], tmp_path: Path
) -> None:
    donor = packed.make(tmp_path / "donor", "glm4_moe", form)
    with pytest.raises(UnsupportedError, match=r"cannot be unpacked here, while .* is plain"):
        graft(lost("glm4_moe"), donor, tmp_path / "out")
    awq = packed.make(
        tmp_path / "awq", "glm4_moe", "awq", lambda n: is_linear(n) and not n.startswith("model.layers.3")
    )
    with pytest.raises(UnsupportedError, match="packed otherwise"):
        graft(lose(awq, tmp_path / "broken", MTP["glm4_moe"]), donor, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_that_would_fail(tmp_path: Path) -> None:
    """bitsandbytes without a list that can be written would leave plain weights where packed ones are built."""
    trunk = lambda n: is_linear(n) and not n.startswith("model.layers.3")  # noqa: E731
    broken = lose(packed.make(tmp_path / "whole", "glm4_moe", "awq", trunk), tmp_path / "broken", MTP["glm4_moe"])
    edit_json(broken / "config.json", quantization_config={"quant_method": "modelslim"})
    with pytest.raises(UnsupportedError, match=r"grafted, this would fail: .* nothing was written"):
        graft(broken, FIXTURES / "glm4_moe", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "broken"}


# ---- refused


def test_a_donor_without_mtp_layers_is_refused(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken = lost("glm4_moe")
    with pytest.raises(UnsupportedError, match="stores no MTP layer, so there is none to take"):
        graft(broken, broken, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="stores no MTP layer"):
        extract(broken, tmp_path / "out")


def test_a_checkpoint_that_has_its_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"still stores an MTP layer \(mtp.*nothing is replaced"):
        graft(FIXTURES / "llama_mtp", FIXTURES / "llama_mtp", tmp_path / "out")


def test_another_family_is_refused(lost: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"is qwen3, and .* is llama"):
        graft(lost("llama_mtp"), FIXTURES / "qwen3_mtp", tmp_path / "out")


@pytest.mark.parametrize(
    "edit, told",
    [
        (lambda t: t.update({n: v[:200].clone() for n, v in t.items() if v.shape[:1] == (260,)}), "vocab_size is 260"),
        (lambda t: t.update({n: narrower(n, v) for n, v in t.items()}), "num_key_value_heads is 4 there and 2 here"),
    ],
    ids=["vocabulary", "shapes"],
)
def test_other_sizes_are_refused(
    edit: Callable[[Tensors], Any], told: str, lost: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = packed.edit(lost("llama_mtp"), edit)
    change = {"vocab_size": 200} if "vocab" in told else {"num_key_value_heads": 2}
    edit_json(broken / "config.json", **change)
    with pytest.raises(UnsupportedError, match=told):
        graft(broken, FIXTURES / "llama_mtp", tmp_path / "out")


def narrower(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:32].clone() if name.endswith(("k_proj.weight", "v_proj.weight")) else tensor


def test_a_trunk_or_head_that_is_not_whole_is_refused(lost: Callable[[str], Path], copy_of: Callable[[str], Path],
                                                      tmp_path: Path) -> None:  # fmt: skip
    broken, donor = lost("llama_mtp"), copy_of("llama_mtp")
    packed.edit(broken, lambda t: t.pop("model.norm.weight", None))
    with pytest.raises(CheckpointFails, match=r"model\.norm\.weight: a tensor of the model is missing"):
        graft(broken, donor, tmp_path / "out")
    packed.edit(donor, lambda t: t.pop("mtp.norm.weight", None))
    with pytest.raises(CheckpointFails, match=r"mtp\.norm\.weight: a tensor of the MTP layer is missing"):
        extract(donor, tmp_path / "out")


def test_megatron_checkpoints_are_to_be_converted_first(lost: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"is a Megatron checkpoint \(torch_dist\).*convert it first"):
        graft(lost("glm4_moe"), fixture_path("moe_tp1"), tmp_path / "out")


# ---- the command


def test_nothing_lies_beside_the_root(cli: Cli) -> None:
    outcome = cli("graft", "/", "--from", FIXTURES / "llama_mtp")
    assert (outcome.code, outcome.out) == (2, "") and "name the new folder with --out" in outcome.err


def test_the_command_writes_beside_what_it_was_given(lost: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    broken, donor = lost("qwen3_mtp"), FIXTURES / "qwen3_mtp"
    done = cli("graft", broken, "--from", donor, "--no-acceptance", "-q")
    assert done.code == 0 and done.out.startswith("HOLDS") and "acceptance" in done.out
    assert verify(donor, tmp_path / "lost-qwen3_mtp-grafted").verdict == "holds"
    again = cli("graft", broken, "--from", donor, "--no-acceptance")
    assert again.code == 2 and "exists already; nothing is ever overwritten" in again.err
    taken = cli("graft", donor, "--extract", "--out", tmp_path / "taken", "--json")
    assert taken.code == 0 and json.loads(taken.out)["verdict"] == "holds" and faults(json.loads(taken.out)) == []
    failed = cli("graft", donor, "--from", donor, "--json")
    assert failed.code == 2 and faults(json.loads(failed.out)) == []


def test_keys_that_no_model_has_do_no_harm(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken, donor = lost("llama_mtp"), tmp_path / "donor"
    shutil.copytree(FIXTURES / "llama_mtp", donor)
    edit_json(donor / "config.json", **{"hidden_size.mtp": 1, "mtp_": {"nextn": [1]}, "text_config": 3})
    assert graft(broken, donor, tmp_path / "out")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["mtp_"] == {"nextn": [1]} and made["hidden_size"] == 64 and "text_config" not in made


def test_a_declaration_under_text_config_comes_back_there(lost: Callable[[str], Path], tmp_path: Path) -> None:
    broken, donor = lost("llama_mtp"), tmp_path / "donor"
    shutil.copytree(FIXTURES / "llama_mtp", donor)
    edit_json(donor / "config.json", text_config={"num_mtp_layers": 2, "other": 1})
    edit_json(broken / "config.json", text_config={"other": 2})
    graft(broken, donor, tmp_path / "out")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["text_config"] == {"other": 2, "num_mtp_layers": 2}


@pytest.mark.parametrize(
    "more, told",
    [
        ([], "graft needs one of --from DONOR"),
        (["--from", FIXTURES / "llama_mtp", "--extract"], "graft needs one of --from DONOR"),
        (["--from", FIXTURES / "llama_mtp", "--no-acceptance", "--workload", "a=b"], "nothing is run"),
        (["--from", FIXTURES / "nowhere"], "no such folder"),
        (["--from", FIXTURES / "llama_mtp", "--out", FIXTURES / "llama_mtp" / "in"], "lies inside the source"),
    ],
    ids=["neither", "both", "workload", "nowhere", "inside"],
)
def test_usage(more: list[object], told: str, lost: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    broken = lost("llama_mtp")
    before = digest(tmp_path)
    done = cli("graft", broken, *more)
    assert done.code == 2 and told in done.err and digest(tmp_path) == before
