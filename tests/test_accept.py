"""Acceptance as users meet it: accept, columns of roundtrip and verify, floors, baselines, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpcheck.accept import accept
from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.checks.acceptance import check_alive, check_same
from mtpcheck.convert import convert
from mtpcheck.draft.probe import Column, Probing
from mtpcheck.errors import FormatError, UnsupportedError, UsageError
from mtpcheck.megatron import Options
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import read_tensor_map
from mtpcheck.topology import Topology
from mtpcheck.verify import verify
from tests import coded
from tests.conftest import FIXTURES, Outcome, edit_json, edit_tensors
from tests.defects import DEFECTS, Absent, agreement, drafts_of, with_defect

Cli = Callable[..., Outcome]
TRAINED = ("deepseek_v3", "deepseek_v3_noq", "glm4_moe", "glm4_moe_nocopies", "glm_moe_dsa", "mimo", "qwen2_mtp",
           "qwen3_mtp", "llama_mtp", "qwen3_next", "qwen3_5", "qwen3_5_moe")  # fmt: skip
DAMAGED = ("deepseek_v3", "glm4_moe", "qwen2_mtp")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def some(tmp_path_factory: pytest.TempPathFactory) -> Probing:
    """A quarter of the bundled text: enough to judge by, in less time."""
    folder = tmp_path_factory.mktemp("some")
    files = {}
    for name, path in Probing().files.items():
        lines = path.read_text().splitlines(keepends=True)
        files[name] = folder / path.name
        files[name].write_text("".join(lines[::4]))
    return Probing(files=files)


# ---- every fixture


@pytest.mark.parametrize("name", TRAINED)
def test_the_head_of_every_fixture_is_alive_on_held_out_text(name: str) -> None:
    report = accept(FIXTURES / name)
    assert report.verdict == "holds", report.findings
    (column,) = report.acceptance
    assert column.overall.depths[0].rate >= 0.6 and column.verdict.alive
    assert list(column.workloads) == ["prose", "code", "chat", "maths"]


@pytest.mark.parametrize(
    ("via", "options"),
    [("torch_dist", Options()), ("torch", Options("local", topology=Topology(tp=2, etp=2)))],
    ids=["torch_dist", "torch"],
)
def test_a_round_trip_has_three_equal_columns(via: Any, options: Options, some: Probing) -> None:
    report = roundtrip(FIXTURES / "glm4_moe", options=options, via=via, probing=some)
    assert report.verdict == "holds", report.findings
    assert [column.label for column in report.acceptance] == ["source", via, "result"]
    source, middle, result = report.acceptance
    assert source.digests == middle.digests == result.digests and result.same_as == "source"
    assert not middle.same_as


def test_a_source_in_fp8_drafts_as_megatron_s_bf16(tmp_path: Path, some: Probing) -> None:
    """Random codes draft nothing, but the same nothing: bit for bit, through value nodes."""
    made = coded.make(tmp_path / "hf", "fp32", finite=True)
    report = roundtrip(made, probing=some)
    source, middle, _ = report.acceptance
    assert source.digests == middle.digests
    assert {f.check for f in report.failures} == {"acceptance.dead"}


def test_columns_of_verify(tmp_path: Path, some: Probing) -> None:
    convert(FIXTURES / "qwen2_mtp", tmp_path / "megatron")
    report = verify(FIXTURES / "qwen2_mtp", tmp_path / "megatron", probing=some)
    assert report.verdict == "holds" and [c.label for c in report.acceptance] == ["reference", "candidate"]
    worse = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "worse"))
    edit_tensors(worse / "model.safetensors", lambda t: t["mtp.fc.weight"].mul_(1.5))
    report = verify(FIXTURES / "qwen2_mtp", worse, probing=some)
    assert ("acceptance.logits", "candidate") in {(f.check, f.subject) for f in report.failures}


# ---- defects


@pytest.fixture(scope="session")
def sound(some: Probing) -> dict[str, Column]:
    torch.set_num_threads(1)
    opened = {name: open_checkpoint(FIXTURES / name) for name in DAMAGED}
    return {name: drafts_of(checkpoint, read_tensor_map(checkpoint), some) for name, checkpoint in opened.items()}


@pytest.mark.parametrize("title", DEFECTS)
def test_every_defect_is_seen_against_the_source(title: str, sound: dict[str, Column], some: Probing) -> None:
    """Any draft logit that is not bit-equal; and without a reference those that leave no usable head."""
    defect, seen = DEFECTS[title], 0
    for name in DAMAGED if defect.alone else DAMAGED[:1] if title in _MLA else DAMAGED[1:2]:
        checkpoint = open_checkpoint(FIXTURES / name)
        try:
            bad = drafts_of(checkpoint, with_defect(read_tensor_map(checkpoint), defect), some)
        except Absent:
            continue
        seen += 1
        (found,) = check_same([sound[name], replace(bad, label="bad")])
        assert found.check == "acceptance.logits"
        assert agreement(bad, sound[name]) < 1
        if defect.alone:
            assert bad.verdict.alive is False and list(check_alive(bad))
    assert seen


_MLA = ("query heads reversed",)


# ---- the command


def test_accept_prints_a_table(cli: Cli) -> None:
    outcome = cli("accept", FIXTURES / "llama_mtp")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[-1] == "HOLDS" and all(len(line) <= 80 for line in lines[1:])
    for what in ("prose", "code", "chat", "maths", "all", "all, depth 2", "mean length", "without a head"):
        assert any(line.strip().startswith(what) for line in lines), what


def test_accept_as_json(cli: Cli) -> None:
    outcome = cli("accept", FIXTURES / "qwen3_mtp", "--json", "--decode", 8)
    document = json.loads(outcome.out)
    (column,) = document["acceptance"]
    assert document["verdict"] == "holds" and column["alive"] and len(column["rules"]) == 5
    own = column["all"]
    assert own["depths"][0]["accepted"] == sum(w["depths"][0]["accepted"] for w in column["workloads"].values())
    assert own["depths"][0]["low"] < own["acceptance_rate"] < own["depths"][0]["high"]
    assert own["mean_acceptance_length"] == pytest.approx(1 + own["acceptance_rate"])
    assert [w["workload"] for w in document["written"]] == ["prose", "code", "chat", "maths"]
    assert all(w["tokens"] == 16 and 1 < w["tokens_a_pass"] <= 2 for w in document["written"])


def test_own_workloads_of_text_and_ids(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_bytes(Probing().files["chat"].read_bytes())
    ids = tmp_path / "ids.jsonl"
    lines = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    ids.write_text("".join(json.dumps({"ids": list(line.encode())}) + "\n" for line in lines))
    outcome = cli("accept", FIXTURES / "qwen2_mtp", "--workload", f"a={text}", "--workload", f"b={ids}", "--json")
    own = json.loads(outcome.out)["acceptance"][0]["workloads"]
    assert own["a"] == own["b"] and outcome.code == 0


def test_a_floor_that_is_not_reached_fails(cli: Cli) -> None:
    outcome = cli("accept", FIXTURES / "qwen2_mtp", "--min-acceptance", 0.99)
    assert outcome.code == 1 and "acceptance.minimum" in outcome.out
    assert cli("accept", FIXTURES / "qwen2_mtp", "--min-acceptance", 0.5).code == 0


def test_a_baseline_is_recorded_once_and_held_against(cli: Cli, tmp_path: Path) -> None:
    file, good = tmp_path / "baseline.json", FIXTURES / "qwen2_mtp"
    assert cli("accept", good, "--baseline", file).code == 0
    recorded = file.read_bytes()
    again = cli("accept", good, "--baseline", file)
    assert again.code == 0 and "held against" in again.out
    worse = Path(shutil.copytree(good, tmp_path / "worse"))
    edit_tensors(worse / "model.safetensors", lambda t: t["mtp.layers.0.mlp.down_proj.weight"].mul_(0.6))
    outcome = cli("accept", worse, "--baseline", file)
    assert outcome.code == 1 and "acceptance.baseline" in outcome.out
    assert file.read_bytes() == recorded


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "dead"))
    edit_tensors(folder / "model.safetensors", lambda t: t["mtp.fc.weight"].zero_())
    return folder


def test_what_fails_is_no_baseline(dead: Path, tmp_path: Path, some: Probing) -> None:
    for source, minimum in ((dead, None), (FIXTURES / "qwen2_mtp", 0.99)):
        report = accept(source, probing=some, minimum=minimum, baseline=tmp_path / "baseline.json")
        assert report.exit_code == 1 and report.notes[-1].endswith("not recorded, since this does not hold")
        assert not (tmp_path / "baseline.json").exists()


def test_a_baseline_lies_in_no_checkpoint(cli: Cli, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen2_mtp")
    outcome = cli("accept", folder, "--baseline", folder / "base.json")
    assert outcome.code == 2 and "lies inside a checkpoint" in outcome.err
    assert cli("accept", folder, "--baseline", folder.parent).code == 2


def test_a_dead_second_head_is_found(tmp_path: Path, some: Probing) -> None:
    folder = Path(shutil.copytree(FIXTURES / "llama_mtp", tmp_path / "x"))
    for path in folder.glob("*.safetensors"):
        edit_tensors(path, lambda t: t["mtp.layers.1.fc.weight"].zero_() if "mtp.layers.1.fc.weight" in t else None)
    (found,) = accept(folder, probing=some).failures
    assert found.check == "acceptance.dead" and "depth 2" in found.message


def test_what_headers_tell_is_told_by_accept_too(tmp_path: Path, some: Probing) -> None:
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "x"))
    edit_json(folder / "config.json", num_nextn_predict_layers=2)
    assert {f.check for f in accept(folder, probing=some).failures} == {"declaration.count"}


def fill(value: float, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"].fill_(value)


def test_a_candidate_whose_model_chooses_nothing_is_not_judged(tmp_path: Path, some: Probing) -> None:
    for value in (0.0, float("nan")):
        folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / f"x{value}"))
        edit_tensors(folder / "model.safetensors", partial(fill, value))
        report = verify(FIXTURES / "qwen2_mtp", folder, values="changed", probing=some)
        assert report.exit_code == 2, report.findings


def test_a_model_without_a_head_has_no_acceptance(tmp_path: Path, cli: Cli) -> None:
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "x"))

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    edit_tensors(folder / "model.safetensors", without)
    edit_json(folder / "config.json", num_nextn_predict_layers=0)
    outcome = cli("roundtrip", folder, "--allow-no-mtp", acceptance=True)
    assert outcome.code == 0 and "there is no MTP layer that could draft" in outcome.out
    outcome = cli("verify", folder, folder, "--allow-no-mtp", "--acceptance")
    assert outcome.code == 0 and "there is no MTP layer that could draft" in outcome.out


def test_names_from_outside_are_text(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_bytes(Probing().files["chat"].read_bytes())
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "m[bold]x-with-a-name-that-is-long"))
    outcome = cli("accept", folder, "--workload", f"x[/b]={file}")
    assert outcome.code == 0 and "x[/b]" in outcome.out and "m[bold]x-wi…" in outcome.out


def test_json_is_json_even_where_nothing_was_drafted(cli: Cli, tmp_path: Path) -> None:
    """The second MTP layer drafts nothing for passages of two tokens."""
    file = tmp_path / "w.jsonl"
    file.write_text('{"ids": [65, 66]}\n' * 600)
    outcome = cli("accept", FIXTURES / "llama_mtp", "--workload", f"w={file}", "--json")
    json.loads(outcome.out, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("content", "told"),
    [("{}", "no baseline that mtpcheck wrote"), ("[", "no baseline"), ('{"schema_version": 2}', "knows 1"),
     ('{"schema_version": 1, "workloads": {}}', "KeyError"),
     ('{"schema_version": 1, "family": "llama", "workloads": {}}', "is of llama"),
     ('{"schema_version": 1, "family": "qwen2", "workloads": {}}', "was recorded on another prose")],
)  # fmt: skip
def test_what_is_no_baseline_of_this_is_refused(content: str, told: str, tmp_path: Path, some: Probing) -> None:
    (tmp_path / "b.json").write_text(content)
    with pytest.raises((FormatError, UsageError), match=told):
        accept(FIXTURES / "qwen2_mtp", probing=some, baseline=tmp_path / "b.json")


# ---- what cannot be judged


def test_a_model_that_transformers_lacks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpcheck.family import load_family

    unheard_of = replace(load_family("qwen2"), trunk_type="unheard_of")
    monkeypatch.setattr("mtpcheck.draft.trunk.load_family", lambda name: unheard_of)
    outcome = cli("roundtrip", FIXTURES / "qwen2_mtp", acceptance=True)
    assert outcome.code == 2 and outcome.out.splitlines()[-1] == "COULD NOT JUDGE: acceptance"
    assert "no language model of type 'unheard_of'" in outcome.out
    assert cli("roundtrip", FIXTURES / "qwen2_mtp", "--no-acceptance").code == 0
    outcome = cli("accept", FIXTURES / "qwen2_mtp")
    assert outcome.code == 2 and "could not judge: transformers" in outcome.err


def test_a_failure_counts_for_more_than_what_could_not_be_judged(tmp_path: Path, some: Probing) -> None:
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "x"))
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "config.json", num_nextn_predict_layers=2)
    report = roundtrip(folder, probing=some)
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("lines", "told"),
    [("", "the workload is empty"), ("{\"ids\": [" + "1, " * 5000 + "1]}", "expected at most 4,096: cut the passage"),
     ('{"ids": [1, 2]}\n' * 400 + '{"ids": [' + "1, " * 4000 + "1]}", "cut the longest, or use fewer"),
     ('{"text": "ab"}', "too short to judge draft acceptance"),
     ('{"ids": [1, 300]}', "id 300 is not in the model's vocabulary, 0 to 259"),
     ('{"texts": "ab"}', "expected {\"text\"")],
)  # fmt: skip
def test_workloads_that_are_no_use(lines: str, told: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(lines)
    outcome = cli("accept", FIXTURES / "qwen2_mtp", "--workload", f"own={file}")
    assert outcome.code == 2 and told in outcome.err and len(outcome.err.splitlines()) == 1


def test_flags_of_workloads(cli: Cli) -> None:
    for text in ("own", "=x", "own="):
        outcome = cli("accept", FIXTURES / "qwen2_mtp", "--workload", text)
        assert outcome.code == 2 and f"--workload {text}: expected NAME=FILE" in outcome.err


def test_workloads_for_what_is_not_run(cli: Cli) -> None:
    for command in (("verify", FIXTURES / "mimo", FIXTURES / "mimo"), ("roundtrip", FIXTURES / "mimo", "--plan")):
        outcome = cli(*command, "--workload", "a=b")
        assert outcome.code == 2 and "--workload says what to draft on" in outcome.err


def test_a_tokenizer_that_cannot_take_the_text(cli: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "x"))
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    edit_json(folder / "tokenizer.json", model=model, decoder=None, added_tokens=[])
    outcome = cli("accept", folder)
    assert outcome.code == 2 and "tokenizer cannot take this text" in outcome.err


def test_without_a_tokenizer_text_cannot_be_run(cli: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "x"))
    (folder / "tokenizer.json").unlink()
    outcome = cli("accept", folder)
    assert outcome.code == 2 and "tokenizer.json is missing" in outcome.err
    outcome = cli("roundtrip", folder, acceptance=True)
    assert outcome.code == 2 and "could not judge: " in outcome.out and "tokenizer.json is missing" in outcome.out


def test_a_megatron_checkpoint_of_others_takes_what_it_lacks_from_like(tmp_path: Path, some: Probing) -> None:
    convert(FIXTURES / "mimo", tmp_path / "made")
    (bare,) = tmp_path.glob("made/release")
    shutil.rmtree(bare / "mtpcheck")
    with pytest.raises((UnsupportedError, UsageError), match=r"tokenizer\.json is missing|does not tell"):
        accept(tmp_path / "made", "mimo", some)
    report = accept(tmp_path / "made", "mimo", some, like=FIXTURES / "mimo")
    straight = accept(FIXTURES / "mimo", probing=some)
    assert report.verdict == "holds" and report.acceptance[0].digests == straight.acceptance[0].digests


def test_once_runs_the_source_alone(cli: Cli) -> None:
    outcome = cli("roundtrip", FIXTURES / "qwen2_mtp", "--acceptance", "once", "--json", acceptance=True)
    assert [column["label"] for column in json.loads(outcome.out)["acceptance"]] == ["source"]


def test_not_run_is_said(cli: Cli) -> None:
    outcome = cli("roundtrip", FIXTURES / "qwen2_mtp", "--no-acceptance")
    assert outcome.code == 0 and "not run: --no-acceptance was given" in outcome.out
    assert outcome.out.splitlines()[-1] == "HOLDS; not judged: acceptance"
