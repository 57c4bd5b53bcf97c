"""Weights that legitimately changed: what moved is told, and a head that was lost on the way is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.errors import UsageError
from mtpcheck.verify import verify
from tests.megatron_edit import edit_args
from tests.test_roundtrip import sha256
from tests.test_verify import Tensors, changed_tensors, failures

FIXTURES = Path(__file__).parent.parent / "fixtures"
MTP = "model.layers.3."


def trained(*leads: str) -> Callable[[Tensors], None]:
    """Every tensor whose name starts so has moved, copies alike."""

    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.startswith(leads):
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.01
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        tensors[MTP + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[MTP + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    return change


def test_a_trained_checkpoint_holds_and_the_report_tells_what_moved(tmp_path: Path) -> None:
    after = changed_tensors("glm4_moe", tmp_path, trained("model.", "lm_head"))
    report = verify(FIXTURES / "glm4_moe", after, values="changed")
    assert (report.verdict, report.findings) == ("holds", [])
    told = {line.split()[0]: line for line in report.notes}
    assert set(told) == {"embed", "final_norm", "head", "trunk", "mtp.0"}
    assert told["trunk"].endswith("70 of 70 tensors moved")
    assert told["mtp.0"].endswith("35 of 35 tensors moved")
    assert verify(FIXTURES / "glm4_moe", after).verdict == "fails"


def test_a_head_that_stayed_while_the_trunk_moved_is_stale(tmp_path: Path) -> None:
    after = changed_tensors(
        "glm4_moe", tmp_path, trained("model.layers.0", "model.layers.1", "model.layers.2", "lm_head")
    )
    report = verify(FIXTURES / "glm4_moe", after, values="changed")
    assert [(f.check, f.subject, f.severity) for f in report.findings] == [("values.stale", "mtp.0", "warning")]
    assert "back" in report.findings[0].cause or "filled in" in report.findings[0].cause


def fresh(tensors: Tensors) -> None:
    trained("model.", "lm_head")(tensors)
    for name, tensor in tensors.items():
        if name.startswith(MTP) and not name.endswith(("embed_tokens.weight", "head.weight")):
            new = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.02
            tensors[name] = torch.ones_like(tensor) if "norm" in name else new.to(tensor.dtype)


def dead(tensors: Tensors) -> None:
    trained("model.", "lm_head")(tensors)
    tensors[MTP + "eh_proj.weight"].zero_()


def parted(tensors: Tensors) -> None:
    trained("model.", "lm_head")(tensors)
    tensors[MTP + "shared_head.head.weight"] += 1


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (fresh, "values.fresh"), (dead, "values.zero"), (parted, "presence.copy"),
        (lambda t: t.pop(MTP + "embed_tokens.weight"), "presence.copy"),
        (lambda t: t.pop(MTP + "eh_proj.weight"), "presence.missing"),
        (lambda t: t.update({MTP + "eh_proj.weight": t[MTP + "eh_proj.weight"].float()}), "values.dtype"),
    ],
)  # fmt: skip
def test_what_training_must_not_change(change: Callable[[Tensors], None], check: str, tmp_path: Path) -> None:
    report = verify(FIXTURES / "glm4_moe", changed_tensors("glm4_moe", tmp_path, change), values="changed")
    assert check in {f.check for f in report.failures}, report.findings


def test_like_gives_a_foreign_megatron_checkpoint_the_form_of_the_source(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron/release/mtpcheck")
    convert(tmp_path / "megatron", tmp_path / "plain")
    assert sha256(tmp_path / "plain") != sha256(FIXTURES / "glm4_moe")
    convert(tmp_path / "megatron", tmp_path / "hf", like=FIXTURES / "glm4_moe")
    assert sha256(tmp_path / "hf") == sha256(FIXTURES / "glm4_moe")
    convert(FIXTURES / "glm4_moe", tmp_path / "ours")
    convert(tmp_path / "megatron", tmp_path / "again", like=tmp_path / "ours")
    assert sha256(tmp_path / "again") == sha256(FIXTURES / "glm4_moe")


def test_like_lends_neither_weights_nor_the_declaration(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    release = tmp_path / "megatron/release"
    shutil.rmtree(release / "mtpcheck")
    edit_args(release, mtp_num_layers=None, rotary_base=7)
    converted = convert(tmp_path / "megatron", tmp_path / "hf", like=FIXTURES / "glm4_moe")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["rope_theta"]) == (0, 7)
    assert {f.check for f in converted.findings} == {"declaration.count"}
    found = {subject for _, subject in failures(verify(FIXTURES / "glm4_moe", tmp_path / "hf"))}
    assert found == {"num_nextn_predict_layers", "MTP layers", "rope_theta"}


def test_like_cannot_lend_a_copy_that_is_no_copy(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    reference = changed_tensors("glm4_moe", tmp_path, lambda t: t[MTP + "embed_tokens.weight"].add_(1))
    converted = convert(tmp_path / "megatron", tmp_path / "hf", like=reference)
    assert [f.check for f in converted.failures] == ["presence.copy"]
    assert MTP + "embed_tokens.weight" not in open_checkpoint(tmp_path / "hf").tensors


def test_like_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has a form of its own"):
        convert(FIXTURES / "glm4_moe", tmp_path / "megatron", like=FIXTURES / "glm4_moe")
    sample = FIXTURES / "megatron/core-0.16.1/moegqa_tp1/torch_dist"
    with pytest.raises(UsageError, match="has no form to lend"):
        convert(sample, tmp_path / "hf", like=sample)
    assert list(tmp_path.iterdir()) == []


def test_nothing_moved_is_not_stale(tmp_path: Path) -> None:
    same = changed_tensors("glm4_moe", tmp_path, lambda t: None)
    report = verify(FIXTURES / "glm4_moe", same, values="changed")
    assert report.findings == []
    assert all(" 0 of " in line for line in report.notes)


def test_only_mtp_of_a_trained_checkpoint_leaves_the_trunk_alone(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        trained("model.", "lm_head")(tensors)
        del tensors["model.layers.0.mlp.down_proj.weight"]

    after = changed_tensors("glm4_moe", tmp_path, change)
    assert verify(FIXTURES / "glm4_moe", after, values="changed").verdict == "fails"
    assert verify(FIXTURES / "glm4_moe", after, values="changed", only_mtp=True).verdict == "holds"


def test_a_layer_full_of_nan_fails(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for tensor in tensors.values():
            tensor.mul_(1.01)
        tensors["mtp.fc.weight"].fill_(float("nan"))

    report = verify(FIXTURES / "qwen3_mtp", changed_tensors("qwen3_mtp", tmp_path, change), values="changed")
    assert failures(report) == [("values.nonfinite", "mtp.fc.weight")]


def test_a_head_that_repeated_a_tied_embedding_must_do_so_still(tmp_path: Path) -> None:
    """The main head is not stored; what the copy repeats is the embedding."""
    head = MTP + "shared_head.head.weight"

    def tied(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors[head] = tensors["model.embed_tokens.weight"].clone()

    def broken(tensors: Tensors) -> None:
        tied(tensors)
        tensors[head] *= 3

    checkpoints = []
    for name, change in (("a", tied), ("b", broken)):
        (tmp_path / name).mkdir()
        made = changed_tensors("glm4_moe", tmp_path / name, change)
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        checkpoints.append(made)
    report = verify(*checkpoints, values="changed")
    assert ("presence.copy", head) in failures(report)
