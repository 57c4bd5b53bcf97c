"""Per-rank files: what megatron-core wrote reads as its torch_dist twin, and what we write is what it would have."""

from __future__ import annotations

import enum
import json
import pickle
import shutil
import types
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.errors import CheckpointFails, FormatError, MtpcheckError, UnsupportedError, UsageError
from mtpcheck.megatron import Options, dealer
from mtpcheck.proof import prove
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import TensorMap, read_tensor_map
from mtpcheck.topology import Topology, indivisible, topology_of_args
from mtpcheck.verify import verify
from tests import wide
from tests.conftest import FIXTURES
from tests.megatron_edit import edit_rank as edit
from tests.test_samples import FAMILIES, SAMPLES, group, open_map, parent, read

CASES = sorted(path.parent for path in SAMPLES.glob("core-*/*/torch"))
FILE = "model_optim_rng.pt"


def name_of(case: Path) -> str:
    return f"{case.parent.name}-{case.name}"


class _Unpickler(pickle.Unpickler):
    """As torch.load does, but without importing Megatron for an enum in the arguments."""

    def find_class(self, module: str, name: str) -> Any:
        return enum.Enum(name, {"auto": 5}) if module.startswith("megatron.") else super().find_class(module, name)


def load(path: Path) -> Any:
    module = types.SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    return torch.load(path, weights_only=False, pickle_module=module)


def rank_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Folder of a rank → what torch itself loads from its file."""
    return {path.parent.name: load(path) for path in sorted(folder.rglob(FILE))}


def twin_of(case: Path) -> Path:
    own = case / "torch_dist"
    return own if own.is_dir() else parent(case)


# ---- reading


def test_there_are_samples() -> None:
    assert len(CASES) >= 18
    topologies = {str(open_checkpoint(case / "torch").ranks.ranks.topology) for case in CASES}  # type: ignore[union-attr]
    assert topologies == {"TP 1", "TP 2", "TP 1 · PP 2", "TP 1 · PP 2 · VPP 2", "TP 1 · PP 3", "TP 1 · EP 2",
                          "TP 1 · PP 2 · EP 2"}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_rank_sample_reads_as_its_twin(case: Path) -> None:
    found = open_map(case / "torch")
    assert found.findings == ()
    assert (found.family, found.facts["mtp_layers"]) == FAMILIES[group(case)]
    assert read(found) == read(open_map(twin_of(case)))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_rank_sample_verifies_against_its_twin(case: Path) -> None:
    report = verify(twin_of(case), case / "torch", FAMILIES[group(case)][0])
    assert report.verdict == "holds", report.findings
    (topology,) = (check for check in report.checks if check.group == "topology")
    assert topology.status == "passed"


# ---- writing


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_we_write_is_what_megatron_core_had(case: Path, tmp_path: Path) -> None:
    theirs = rank_files(case / "torch")
    args = vars(next(iter(theirs.values()))["args"])
    topology = topology_of_args(args)
    spec = "te" if "_te_" in case.name else "local"
    mcore = case.parent.name.removeprefix("core-").rpartition(".")[0]
    options = Options(spec, args["padded_vocab_size"] // topology.tp, mcore, topology)  # type: ignore[arg-type]
    convert(twin_of(case), tmp_path / "new", "torch", FAMILIES[group(case)][0], options)
    ours = rank_files(tmp_path / "new")
    assert ours.keys() == theirs.keys()
    for rank, root in theirs.items():
        chunks = [key for key in root if key.startswith("model")]
        assert chunks == [key for key in ours[rank] if key.startswith("model")]
        for chunk in chunks:
            assert ours[rank][chunk].keys() == root[chunk].keys()
            for name, tensor in root[chunk].items():
                same(ours[rank][chunk][name], tensor, f"{rank} {name}")


def same(ours: Any, theirs: Any, what: str) -> None:
    if theirs is None:
        assert ours is None, what
        return
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), what


def test_args_tell_the_topology_and_keep_what_training_said(tmp_path: Path) -> None:
    source = SAMPLES / "core-0.16.1" / "moe_tp2" / "torch"
    options = Options(topology=Topology(tp=2, pp=3, ep=2, etp=1), spec="local")
    converted = convert(source, tmp_path / "new", "torch", options=options)
    (tracker,) = (tmp_path / "new").glob("latest*")
    assert tracker.read_text() == "1"
    assert [f.subject for f in converted.findings if f.check == "topology.args"] == ["attention_backend"]
    for root in rank_files(tmp_path / "new").values():
        args = vars(root["args"])
        assert topology_of_args(args) == options.topology
        assert (args["bias_dropout_fusion"], args["iteration"], args["params_dtype"]) == (False, 1, torch.bfloat16)
        assert root["iteration"] == 1
    assert verify(source, tmp_path / "new").verdict == "holds"


# ---- there and back


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide.make(tmp_path_factory.mktemp("wide") / "hf")


MATRIX = [Topology(*sizes) for sizes in product((1, 2, 4, 8), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2))]


def refusal(tensor_map: TensorMap, topology: Topology) -> str:
    """Why a topology is refused; empty if it is not."""
    try:
        dealer(tensor_map, Options(vocab_multiple=8, topology=topology))
    except (UsageError, UnsupportedError) as error:
        return str(error)
    return ""


def test_the_matrix_has_enough_topologies_and_names_why_others_are_refused(wide_model: Path, tmp_path: Path) -> None:
    tensor_map = read_tensor_map(open_checkpoint(wide_model))
    refused = {topology: why for topology in MATRIX if (why := refusal(tensor_map, topology))}
    assert (len(MATRIX), len(refused)) == (144, 39)  # 105 are run below
    for topology, why in refused.items():
        if topology.vpp > 1 and topology.pp == 1:
            assert why == "VPP 2 needs more than one pipeline stage" or "ETP 2 is no divisor of TP 1" in why
        else:
            assert (topology.tp, topology.etp) == (1, 2)
            assert "two expert shards would take one name" in why
        with pytest.raises((UsageError, UnsupportedError)):
            roundtrip(wide_model, options=Options(topology=topology), via="torch", workdir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_topology_of_the_matrix_round_trips(wide_model: Path, tmp_path: Path, tp: int, pp: int, ep: int) -> None:
    tensor_map = read_tensor_map(open_checkpoint(wide_model))
    ran = 0
    for topology in MATRIX:
        if (topology.tp, topology.pp, topology.ep) == (tp, pp, ep) and not refusal(tensor_map, topology):
            spec, mcore = (("te", "0.16"), ("local", "0.19"))[ran % 2]
            options = Options(spec, 8, mcore, topology)  # type: ignore[arg-type]
            report = roundtrip(wide_model, options=options, via="torch", workdir=tmp_path)
            assert report.verdict == "holds", (topology, report.findings)
            ran += 1
    assert ran == (1 if pp == 1 else 2) * (1 if tp == 1 else 2)


UNEVEN = [
    Topology(tp=2, etp=2, pp=3, first=2, last=4),
    Topology(pp=2, first=11),
    Topology(pp=2, vpp=3, layout="Et|t*3|t*2|t*2|(t)*3|tmmL"),
    Topology(pp=3, layout="Et*6|t*6|mmL"),
    Topology(pp=4, layout="E|t*12||mmL"),
    Topology(tp=2, etp=1, pp=4, ep=2, layout="Et*4|t*8|mm|L"),
    Topology(pp=2, vpp=2, layout="Et*4|t*4|t*4|mmL"),
    Topology(pp=2, vpp=7, account_for_embedding=True, account_for_loss=True),
]


@pytest.mark.parametrize("topology", UNEVEN, ids=str)
def test_uneven_pipelines_and_mtp_on_a_stage_of_its_own(wide_model: Path, tmp_path: Path, topology: Topology) -> None:
    options = Options("local", 8, "0.19", topology)
    report = roundtrip(wide_model, options=options, via="torch", keep=tmp_path / "kept")
    assert report.verdict == "holds", report.findings
    again = open_checkpoint(tmp_path / "kept" / "torch").ranks
    assert again is not None and again.ranks.topology == topology


@pytest.mark.parametrize("name, tp", [("qwen2_mtp", 8), ("glm4_moe", 8), ("glm_ocr", 4), ("mimo_v2_flash", 4)])
def test_a_query_group_may_go_to_several_ranks(name: str, tp: int, tmp_path: Path) -> None:
    """megatron-core 0.16.1 cuts the joined rows evenly then too (tests/interop loads the first two)."""
    for own in (1, tp):
        topology = Topology(tp=own, etp=1)
        options = Options("local", 8, topology=topology, text_only=True)
        convert(FIXTURES / name, tmp_path / f"tp{own}", "torch", options=options)
    report = verify(FIXTURES / name, tmp_path / f"tp{tp}")
    assert report.verdict == "holds", report.findings
    (whole,) = rank_files(tmp_path / "tp1").values()
    ranks = [root["model"] for _, root in sorted(rank_files(tmp_path / f"tp{tp}").items())]
    cut = [key for key in whole["model"] if "linear_qkv" in key and key.endswith((".weight", ".bias"))]
    assert cut and len(ranks) == tp
    for key in cut:
        same(torch.cat([model[key] for model in ranks]), whole["model"][key], key)


@pytest.mark.parametrize("heads, groups, tp, more, why", [
    (12, 4, 6, {}, "number of query groups 4 cannot be cut into TP 6"), (12, 6, 4, {}, "number of query groups 6"),
    (12, 4, 4, {"window_groups": 6}, "number of query groups 6"), (8, 2, 4, {}, None), (8, 4, 2, {}, None),
    (4, 1, 4, {}, "6 rows of a query group's key and value cannot be cut into 4 ranks"), (4, 4, 4, {}, None),
    (4, 1, 4, {"value_dim": 5}, None), (4, 1, 4, {"value_dim": 4}, "7 rows"), (4, 1, 4, {"mla": True}, None),
    (8, 2, 4, {"output_gate": True}, "megatron-core 0.16 cannot run gates of a query group on 2 ranks"),
    (8, 4, 4, {"output_gate": True}, None), (8, 2, 4, {"output_gate": True, "mcore": "0.19"}, None),
])  # fmt: skip
def test_which_query_groups_can_be_cut(heads: int, groups: int, tp: int, more: dict[str, Any], why: str | None) -> None:
    facts = {"hidden": 12, "heads": heads, "ffn": 24, "groups": groups, "head_dim": 3, **more}
    reasons = "; ".join(indivisible(Topology(tp=tp, etp=tp), facts, 24, facts.pop("mcore", "0.16")))
    assert reasons.startswith(why) if why else not reasons


@pytest.mark.parametrize("experts, spec", [("legacy", "local"), ("sequential", "te"), ("grouped", "te")])
def test_every_form_of_experts_round_trips(wide_model: Path, tmp_path: Path, experts: Any, spec: Any) -> None:
    options = Options(spec, 8, topology=Topology(tp=2, etp=2, pp=2, ep=2), experts=experts)
    report = roundtrip(wide_model, options=options, via="torch", keep=tmp_path / "kept")
    assert report.verdict == "holds", report.findings
    names = {name for root in rank_files(tmp_path / "kept").values() for name in root["model"]}
    assert any(
        {"legacy": "experts.weight1", "sequential": "local_experts.3", "grouped": "weight3"}[experts] in n
        for n in names
    )


def test_legacy_experts_lie_as_megatron_core_views_them(wide_model: Path, tmp_path: Path) -> None:
    """GroupedMLP views weight1 as (experts, hidden, gate + up) and weight2 as (experts, down, hidden)."""
    from safetensors.torch import load_file

    topology = Topology(tp=2, etp=2, ep=2)
    convert(wide_model, tmp_path / "new", "torch", options=Options("local", 8, topology=topology, experts="legacy"))
    hf = load_file(wide_model / "model.safetensors")
    model = rank_files(tmp_path / "new")["mp_rank_01_001"]["model"]
    prefix = "decoder.layers.3.mlp.experts"
    first = model[f"{prefix}.weight1"].view(4, 16, 8)
    second = model[f"{prefix}.weight2"].view(4, 4, 16)
    for local in range(4):
        lead = f"model.layers.3.mlp.experts.{local + 4}"
        gate, up, down = (hf[f"{lead}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        same(first[local], torch.cat([gate[4:], up[4:]]).T.contiguous(), "weight1")
        same(second[local], down[:, 4:].T.contiguous(), "weight2")


@pytest.mark.parametrize(
    "name",
    ["glm4_moe", "deepseek_v3", "deepseek_v3_noq", "glm_moe_dsa", "mimo", "qwen2_mtp", "qwen3_mtp",
     "qwen3_next", "qwen3_5", "qwen3_5_moe"],
)  # fmt: skip
@pytest.mark.parametrize("spec", ["te", "local"])
def test_every_family_goes_through_ranks(name: str, spec: Any) -> None:
    moe = name.startswith(("glm", "deep", "qwen3_next", "qwen3_5_moe"))
    topology = Topology(tp=2, etp=2 if moe else 1, pp=2, ep=2 if moe else 1, first=1)
    options = Options(spec, topology=topology, text_only=True)
    report = roundtrip(FIXTURES / name, options=options, via="torch")
    assert report.verdict == "holds", report.findings


def test_mtp_layers_that_nobody_declares_are_where_they_belong(wide_model: Path, tmp_path: Path) -> None:
    """Whether they are declared is judged once, and alike in every layout."""
    source = Path(shutil.copytree(wide_model, tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (source / "config.json").write_text(json.dumps(config))
    told = {}
    for via in ("torch_dist", "torch"):
        options = Options("local", 8, topology=Topology(pp=2) if via == "torch" else Topology())
        report = roundtrip(source, options=options, via=via)  # type: ignore[arg-type]
        assert report.verdict == "holds", report.findings
        told[via] = {f.check for f in report.findings if f.check != "presence.copy"}
    assert told["torch"] == told["torch_dist"] == {"declaration.count"}


@pytest.mark.parametrize("source", ["torch", "torch_dist"])
@pytest.mark.parametrize("via", ["torch", "torch_dist", None])
def test_megatron_sources_round_trip_through_every_layout(source: str, via: Any) -> None:
    report = roundtrip(
        SAMPLES / "core-0.16.1" / "moegqa_pp2_ep2" / source, via=via,
        options=Options("local", topology=Topology(tp=4, etp=4, pp=2)),
    )  # fmt: skip
    assert report.verdict == "holds", report.findings


def test_a_round_trip_through_ranks_is_proved_by_plan(wide_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(topology=Topology(tp=4, etp=2, pp=3, vpp=2, ep=2), vocab_multiple=8)
    report = prove(wide_model, options=options, via="torch")
    assert report.verdict == "holds"
    assert "TP 4 · PP 3 · VPP 2 · EP 2 · ETP 2" in report.summary
    import mtpcheck.gather as module

    right = module._cut

    def unpaired(*args: Any) -> Any:
        cut = right(*args)
        return cut and module.Cut(cut.axis)

    monkeypatch.setattr(module, "_cut", unpaired)
    report = prove(wide_model, options=options, via="torch")
    assert report.verdict == "fails"
    assert {f.check for f in report.failures} == {"plan.identity"}
    assert "linear_fc1" in report.failures[0].where


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_vocabulary_is_padded_for_every_tp(wide_model: Path, tmp_path: Path, tp: int) -> None:
    options = Options(vocab_multiple=8, topology=Topology(tp=tp, etp=1))
    convert(wide_model, tmp_path / "new", "torch", options=options)
    padded = -(-67 // (8 * tp)) * 8 * tp
    roots = rank_files(tmp_path / "new")
    embedding = torch.cat([root["model"]["embedding.word_embeddings.weight"] for root in roots.values()])
    assert embedding.shape == (padded, 16)
    assert all(root["args"].padded_vocab_size == padded for root in roots.values())
    assert not embedding[67:].view(torch.int16).any()
    assert verify(wide_model, tmp_path / "new").findings == []
    last = max((tmp_path / "new").rglob(FILE))
    root = load(last)
    root["model"]["output_layer.weight"][-1, 3] = 1.0
    torch.save(root, last)
    converted = convert(tmp_path / "new", tmp_path / "hf")
    assert [(f.check, f.subject) for f in converted.findings] == [("values.padding", "output_layer.weight")]
    assert verify(wide_model, tmp_path / "hf").verdict == "holds"


# ---- what lies beside the weights


def test_optimizer_and_rng_state_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(SAMPLES / "core-0.16.1" / "moe_ep2" / "torch", tmp_path / "copy"))
    big = torch.zeros(1 << 22)
    for path in folder.rglob(FILE):
        root = load(path)
        root["args"].attention_backend = None
        root["optimizer"] = {"state": {i: {"exp_avg": big.clone()} for i in range(3)}, "param_groups": [{"lr": 0.1}]}
        root["rng_state"] = [{"torch_rng_state": torch.get_rng_state(), "np_rng_state": ("MT19937", [1, 2], 3)}]
        torch.save(root, path)
    from mtpcheck.files import LocalFile

    right, nbytes = LocalFile.read_into, []

    def counted(self: LocalFile, buffer: memoryview, offset: int) -> None:
        nbytes.append(len(buffer))
        right(self, buffer, offset)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    found = open_checkpoint(folder)
    assert found.passed_over["optimizer and training state"][0] == 4
    assert found.passed_over["optimizer and training state"][1] > 6 * big.nbytes
    assert verify(twin_of(SAMPLES / "core-0.16.1" / "moe_ep2"), folder).verdict == "holds"
    assert sum(nbytes) < 2_000_000, "of 100 MB"


# ---- damage


@pytest.fixture
def ranks(wide_model: Path, tmp_path: Path) -> Path:
    """The wide model on 12 ranks."""
    options = Options("te", 8, topology=Topology(tp=2, etp=1, pp=3, ep=2))
    convert(wide_model, tmp_path / "ranks", "torch", options=options)
    return tmp_path / "ranks" / "release"


def judged(reference: Path, candidate: Path) -> dict[str, str]:
    """Failures: check → subject."""
    report = verify(reference, candidate)
    assert report.exit_code == 1
    return {f.check: f.subject for f in report.failures}


def test_ranks_of_this_topology_hold(wide_model: Path, ranks: Path) -> None:
    assert sorted(path.name for path in ranks.glob("mp_*")) == [
        f"mp_rank_{tp:02d}_{pp:03d}_{tp:03d}" for tp in range(2) for pp in range(3)
    ]
    assert verify(wide_model, ranks).verdict == "holds"


@pytest.mark.parametrize(
    "a, b", [("mp_rank_00_001_000", "mp_rank_01_001_001"), ("mp_rank_00_000_000", "mp_rank_01_000_001")]
)
def test_two_exchanged_files_are_named(wide_model: Path, ranks: Path, a: str, b: str) -> None:
    (ranks / a).rename(ranks / "aside")
    (ranks / b).rename(ranks / a)
    (ranks / "aside").rename(ranks / b)
    found = judged(wide_model, ranks)
    assert found.keys() == {"topology.exchanged", "values.bits"}, "what follows from it is not told again"
    assert found["topology.exchanged"] == f"{a}, {b}"


def test_a_deleted_rank_is_named(wide_model: Path, ranks: Path) -> None:
    shutil.rmtree(ranks / "mp_rank_01_002_001")
    found = judged(wide_model, ranks)
    assert found["topology.rank"] == "mp_rank_01_002_001"
    assert found["presence.missing"].endswith(" tensors")
    assert "values.bits" not in found
    (values,) = (check for check in verify(wide_model, ranks).checks if check.group == "values")
    whole = sum(ref.nbytes for ref in open_checkpoint(wide_model).tensors.values())
    assert 0 < int(values.detail.split()[0].replace(",", "")) < whole
    with pytest.raises(CheckpointFails, match="mp_rank_01_002_001"):
        convert(ranks, ranks.parent / "hf")


def renumber(number_of: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    """An edit that gives every decoder layer of a file another number."""

    def change(root: dict[str, Any]) -> None:
        moved = {}
        for name, tensor in root["model"].items():
            lead, _, rest = name.partition("decoder.layers.")
            number, _, below = rest.partition(".")
            moved[name if lead or not rest else f"decoder.layers.{number_of(int(number))}.{below}"] = tensor
        root["model"] = moved

    return change


@pytest.mark.parametrize("by", [1, 4])
def test_shifted_layer_numbers_of_a_stage_are_named(wide_model: Path, ranks: Path, by: int) -> None:
    for path in ranks.glob("mp_rank_*_001_*"):
        edit(path, renumber(lambda number: number + by))
    found = judged(wide_model, ranks)
    assert found == {"topology.layers": "pipeline rank 1"}


def test_turned_layer_numbers_of_a_stage_are_named(wide_model: Path, ranks: Path) -> None:
    for path in ranks.glob("mp_rank_*_002_*"):
        edit(path, renumber(lambda number: (number + 1) % 4))
    assert judged(wide_model, ranks)["topology.turned"] == "pipeline rank 2"


def test_a_changed_replica_is_named_with_rank_and_tensor(wide_model: Path, ranks: Path) -> None:
    name = "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"

    def change(root: dict[str, Any]) -> None:
        root["model"][name][5] = 7.0

    edit(ranks / "mp_rank_01_001_001", change)
    assert judged(wide_model, ranks) == {"topology.replica": f"mp_rank_01_001_001: {name}"}
    with pytest.raises(CheckpointFails, match="differs in 1 elements from mp_rank_00_001_000"):
        convert(ranks, ranks.parent / "hf")


def test_the_embedding_of_the_mtp_stage_is_a_replica(wide_model: Path, ranks: Path) -> None:
    name = "embedding.word_embeddings.weight"

    def change(root: dict[str, Any]) -> None:
        root["model"][name].zero_()

    edit(ranks / "mp_rank_00_002_000", change)
    assert judged(wide_model, ranks) == {"topology.replica": f"mp_rank_00_002_000: {name}"}


def test_gate_and_up_cut_as_one_are_named(wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mtpcheck.roles as module

    monkeypatch.setattr(module, "Cut", lambda axis, pieces=1: module_cut(axis))
    module_cut = __import__("mtpcheck.cut", fromlist=["Cut"]).Cut
    convert(wide_model, tmp_path / "bad", "torch", options=Options("te", 8, topology=Topology(tp=2, etp=2)))
    monkeypatch.undo()
    found = judged(wide_model, tmp_path / "bad")
    assert found["topology.unpaired"] == "linear_fc1"
    assert found["values.bits"].endswith(" tensors")


ENORM, EMBEDDING = "mtp.layers.0.enorm.weight", "embedding.word_embeddings.weight"
EXPERT = "decoder.layers.1.mlp.experts.linear_fc1.weight"


def drop(word: str) -> Any:
    return lambda model: [model.pop(name) for name in list(model) if word in name]


def put(name: str, *shape: int) -> Any:
    return lambda model: model.update({name: torch.ones(*shape).bfloat16()})


MOVED: dict[str, tuple[str, Any, str]] = {
    "a norm of the MTP layer": ("mp_rank_01_002_001", drop(ENORM), f"that it has to hold, such as {ENORM}"),
    "the router's bias": ("mp_rank_01_001_001", drop("layers.1.mlp.router.expert_bias"), "lacks 1"),
    "the embedding of the MTP stage": ("mp_rank_00_002_000", drop(EMBEDDING), f"such as {EMBEDDING}"),
    "the embedding of the first stage": ("mp_rank_00_000_000", drop(EMBEDDING), f"such as {EMBEDDING}"),
    "a layer number": ("mp_rank_01_001_001", drop(".layers.0."), "lacks 1"),
    "an MTP layer elsewhere": ("mp_rank_00_000_000", put(ENORM, 16), "holds 1 tensor of another rank or stage"),
    "a head elsewhere": ("mp_rank_00_001_000", put("output_layer.weight", 40, 16), "holds 1"),
    "an expert elsewhere": ("mp_rank_00_001_000", put(f"{EXPERT}4", 16, 16), "holds 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", MOVED)
def test_what_a_rank_lacks_or_should_not_hold_is_named(what: str, wide_model: Path, ranks: Path) -> None:
    """Every other rank may have it: Megatron loads each file by itself, and strictly."""
    rank, change, told = MOVED[what]
    edit(ranks / rank, lambda root: change(root["model"]))
    for a, b in ((wide_model, ranks), (ranks, wide_model)):
        report = verify(a, b)
        shares = [f for f in report.failures if f.check == "topology.share"]
        assert any(f.subject == rank and told in f.message for f in shares), report.failures
    with pytest.raises(CheckpointFails):
        convert(ranks, ranks.parent / "hf")


@pytest.mark.parametrize("rank, names", [
    ("mp_rank_00_001", ["output_layer.weight"]), ("mp_rank_00_001", [EMBEDDING]), ("mp_rank_00_000", [EMBEDDING]),
    ("mp_rank_00_001", [EMBEDDING, "output_layer.weight"]),
])  # fmt: skip
def test_every_copy_of_a_tied_embedding_has_to_be_there(tmp_path: Path, rank: str, names: list[str]) -> None:
    """megatron-core keeps two on the last stage, as the embedding of the MTP layer and as the head."""
    source = SAMPLES / "core-0.16.1" / "tied_pp2" / "torch"
    folder = Path(shutil.copytree(source, tmp_path / "copy"))
    edit(next(folder.rglob(rank)), lambda root: [root["model"].pop(name) for name in names])
    for a, b in ((source, folder), (folder, source)):
        shares = [f for f in verify(a, b).failures if f.check == "topology.share"]
        assert [f.subject for f in shares] == [rank], shares
        assert shares[0].message.startswith(f"lacks {len(names)} tensor") and names[0] in shares[0].message


def test_a_projection_whole_on_one_rank_and_cut_on_another_is_found(tmp_path: Path) -> None:
    options = Options("te", topology=Topology(tp=2, etp=2))
    convert(FIXTURES / "deepseek_v3", tmp_path / "ranks", "torch", options=options)
    name = "decoder.layers.1.self_attention.linear_kv_down_proj.weight"
    edit(tmp_path / "ranks" / "release" / "mp_rank_01", lambda root: root["model"].update({name: torch.zeros(3, 5)}))
    report = verify(FIXTURES / "deepseek_v3", tmp_path / "ranks")
    (found,) = (f for f in report.failures if f.check == "topology.share")
    assert (found.subject, "whole on one rank and cut on another" in found.message) == (name, True)


@pytest.mark.parametrize("tensor", [torch.zeros(3, 32).bfloat16(), torch.zeros(8, 32), torch.tensor(1.0)], ids=str)
def test_shares_that_do_not_fit_together_fail(wide_model: Path, ranks: Path, tensor: torch.Tensor) -> None:
    name = "mtp.layers.1.eh_proj.weight"
    edit(ranks / "mp_rank_01_002_001", lambda root: root["model"].update({name: tensor}))
    report = verify(wide_model, ranks)
    assert (report.exit_code, "topology.share") == (1, next(f.check for f in report.failures if f.subject == name))


@pytest.mark.parametrize("name", ["mp_rank_001_000_000", "mp_rank_00_0001_000"])
def test_folders_that_name_one_rank_twice_are_refused(ranks: Path, name: str) -> None:
    shutil.copytree(ranks / "mp_rank_01_000_001", ranks / name)
    if name == "mp_rank_001_000_000":
        (ranks / name).rename(ranks / "mp_rank_001_000_001")
    else:
        (ranks / name).rename(ranks / "mp_rank_01_0000_001")
    with pytest.raises(FormatError, match="name one rank"):
        open_checkpoint(ranks)


def test_arguments_may_be_objects_and_layouts_of_megatrons_own_classes(wide_model: Path, tmp_path: Path) -> None:
    topology = Topology(pp=2, layout="Et*5|t*7mmL")
    convert(wide_model, tmp_path / "ranks", "torch", options=Options("local", 8, topology=topology))
    for path in (tmp_path / "ranks" / "release").glob("mp_rank_*"):
        edit(path, lambda root: setattr(root["args"], "pipeline_model_parallel_layout", Layout(topology.layout)))
    assert verify(wide_model, tmp_path / "ranks").verdict == "holds"
    assert verify(wide_model, tmp_path / "ranks").findings == []


class Layout:
    """Pickles as an object of a class that is not there when it is read."""

    def __init__(self, layout: str) -> None:
        self.input_data = layout


def test_an_uneven_split_that_the_arguments_do_not_tell_is_counted(wide_model: Path, tmp_path: Path) -> None:
    convert(wide_model, tmp_path / "ranks", "torch", options=Options("local", 8, topology=Topology(pp=2, first=4)))
    for path in (tmp_path / "ranks" / "release").glob("mp_rank_*"):
        edit(path, lambda root: setattr(root["args"], "decoder_first_pipeline_num_layers", None))
    report = verify(wide_model, tmp_path / "ranks")
    assert report.verdict == "holds"
    (found,) = (f for f in report.findings if f.check == "topology.args")
    assert "they were counted instead" in found.message
    convert(tmp_path / "ranks", tmp_path / "hf")
    assert verify(wide_model, tmp_path / "hf").verdict == "holds"


def test_parameters_and_wrappers_are_read_too(wide_model: Path, ranks: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        tensors = {
            k: torch.nn.Parameter(v) if v is not None and v.is_floating_point() else v for k, v in root["model"].items()
        }
        root["model"] = {f"module.{name}": tensor for name, tensor in tensors.items()}
        root["optimizer"] = [torch.nn.Parameter(torch.zeros(3))]

    for path in ranks.glob("mp_rank_*"):
        edit(path, change)
    assert verify(wide_model, ranks).verdict == "holds"


def test_the_iteration_is_that_of_the_folder(tmp_path: Path) -> None:
    """Megatron's args tell where a run started."""
    source = SAMPLES / "core-0.16.1" / "moe_tp2" / "torch"
    root = Path(shutil.copytree(source, tmp_path / "root"))
    (root / "iter_0000001").rename(root / "iter_0005000")
    for path in (root / "iter_0005000").glob("mp_rank_*"):
        edit(path, lambda root: (root.update(iteration=5000), setattr(root["args"], "iteration", 0)))
    convert(root, tmp_path / "new", "torch_dist", iteration=5000)
    assert (tmp_path / "new" / "iter_0005000").is_dir()
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "5000"


def test_a_tensor_larger_than_its_storage_is_refused(ranks: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        root["model"]["junk"] = torch.zeros(1).expand(1 << 20, 1 << 20)

    for path in ranks.glob("mp_rank_*"):
        edit(path, change)
    with pytest.raises(FormatError, match="storage is too small"):
        open_checkpoint(ranks)


def test_ranks_of_another_iteration_or_run_are_named(wide_model: Path, ranks: Path) -> None:
    edit(ranks / "mp_rank_00_001_000", lambda root: root.update(iteration=500))
    edit(ranks / "mp_rank_01_002_001", lambda root: setattr(root["args"], "rotary_base", 1))
    found = judged(wide_model, ranks)
    assert found == {"topology.iteration": "mp_rank_00_001_000", "topology.args": "mp_rank_01_002_001"}


def test_bits_that_no_mishap_explains_stay_what_they_are(wide_model: Path, ranks: Path) -> None:
    def change(root: dict[str, Any]) -> None:
        root["model"]["mtp.layers.1.eh_proj.weight"][0, 0] = 3.0

    edit(ranks / "mp_rank_01_002_001", change)
    report = verify(wide_model, ranks)
    assert [f.check for f in report.failures] == ["values.bits"]
    assert "mp_rank_01_002_001" in report.failures[0].where


# ---- names and bad input


def test_one_suffix_means_pp_or_ep_as_arguments_or_keys_say(tmp_path: Path) -> None:
    for case, topology in (("moe_pp3", Topology(pp=3)), ("moe_ep2", Topology(ep=2))):
        folder = Path(shutil.copytree(SAMPLES / "core-0.16.1" / case / "torch", tmp_path / case))
        for path in folder.rglob("mp_rank*"):
            edit(
                path,
                lambda root: [vars(root["args"]).pop(key) for key in Topology().args() if key in vars(root["args"])],
            )
        found = open_checkpoint(folder)
        assert found.ranks is not None and found.ranks.ranks.topology == topology
        assert read(read_tensor_map(found)) == read(open_map(SAMPLES / "core-0.16.1" / "moe_tp1" / "torch_dist"))


def test_an_iteration_can_be_chosen(tmp_path: Path) -> None:
    source = SAMPLES / "core-0.16.1" / "moe_tp2" / "torch"
    root = Path(shutil.copytree(source, tmp_path / "root"))
    shutil.copytree(root / "iter_0000001", root / "iter_0000200")
    edit(root / "iter_0000200" / "mp_rank_00", lambda root: root["model"]["mtp.layers.0.hnorm.weight"].zero_())
    assert verify(source, root, iteration=1).verdict == "holds"
    with pytest.raises(UsageError, match=r"has no iteration 7 \(there: iter_0000001, iter_0000200\)"):
        open_checkpoint(root, 7)
    assert verify(source, root / "iter_0000200").verdict == "fails"


@pytest.mark.parametrize("what, match", [
    ("cut", "not a sound zip|damaged"), ("list", "holds no mapping"), ("empty", "holds no 'model'"),
    ("names", "names of several forms"),
])  # fmt: skip
def test_bad_rank_files_get_one_sentence(tmp_path: Path, what: str, match: str) -> None:
    folder = Path(shutil.copytree(SAMPLES / "core-0.16.1" / "dense_tp2" / "torch", tmp_path / "copy")) / "iter_0000001"
    path = folder / "mp_rank_01" / FILE
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-5000])
    elif what == "list":
        torch.save([1], path)
    elif what == "empty":
        torch.save({"args": None}, path)
    else:
        (folder / "mp_rank_01").rename(folder / "mp_rank_01_000")
    with pytest.raises(FormatError, match=match):
        open_checkpoint(folder)


def test_a_rank_too_many_is_named(wide_model: Path, ranks: Path) -> None:
    shutil.copytree(ranks / "mp_rank_01_000_001", ranks / "mp_rank_02_000_000")
    assert judged(wide_model, ranks) == {"topology.rank": "mp_rank_02_000_000"}


HOSTILE: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 10_000, "expert_model_parallel_size": 9_999, "expert_tensor_parallel_size": 9_998},
    {"tensor_model_parallel_size": "2"}, {"tensor_model_parallel_size": -1}, {"num_experts": 10**9},
    {"pipeline_model_parallel_layout": "Et*9999|" * 999}, {"pipeline_model_parallel_layout": [["decoder"], 3]},
    {"pipeline_model_parallel_layout": "Et*" + "9" * 5000}, {"kv_lora_rank": "x"}, {"iteration": 10**5000},
    {"tensor_model_parallel_size": 9999, "pipeline_model_parallel_size": 100},
    {"pipeline_model_parallel_size": 3}, {"expert_tensor_parallel_size": 3}, {"kv_lora_rank": None},
    {"num_layers": "x"}, {"num_layers": 10**12},
    {"virtual_pipeline_model_parallel_size": 7}, {"tensor_model_parallel_size": 1}, {"expert_model_parallel_size": 2},
]  # fmt: skip


@pytest.mark.parametrize("changed", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_sizes_are_refused_or_found_and_nothing_hangs(tmp_path: Path, changed: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(SAMPLES / "core-0.16.1" / "moe_tp2" / "torch", tmp_path / "copy"))
    for path in folder.rglob("mp_rank_*"):
        edit(path, lambda root: vars(root["args"]).update(changed))
    source = SAMPLES / "core-0.16.1" / "moe_tp1" / "torch_dist"
    try:
        report = verify(source, folder)
    except MtpcheckError as error:
        assert str(error)
    else:
        harmless = {"virtual_pipeline_model_parallel_size", "tensor_model_parallel_size", "iteration"}
        told = report.verdict == "fails" or "topology.args" in {f.check for f in report.findings}
        assert told or changed.keys() <= harmless


@pytest.mark.parametrize("flags, why", [
    ({"tp": 3, "etp": 1}, "number of query groups 8 cannot be cut into TP 3"), ({"pp": 5}, "cannot be dealt out"),
    ({"ep": 3}, "number of experts 8 cannot be cut into EP 3"), ({"pp": 2, "vpp": 4}, "no multiples of VPP 4"),
    ({"pp": 2, "layout": "Et*12|m|L"}, "has 3 stages"), ({"pp": 2, "layout": "Et*12|mL"}, "2 × m"),
    ({"pp": 3, "layout": "Et*12|m|mL"}, "spreads MTP layers"),
    ({"pp": 2, "layout": "Ex*12|mmL"}, "expected the letters"),
    ({"pp": 2, "layout": "Et*99999999|mmL"}, "more than 10000"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_reason(wide_model: Path, tmp_path: Path, flags: Any, why: str) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=why):
        convert(wide_model, tmp_path / "new", "torch", options=Options(vocab_multiple=8, topology=Topology(**flags)))
    assert not (tmp_path / "new").exists()
