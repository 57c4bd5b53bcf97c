"""Dialects: mcore_bridge's, written by mcore_bridge itself and by plain loops; which one a checkpoint is in, and which
one it is read in."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.draft.run import Engine, run
from mtpcheck.errors import FamilyError, UsageError
from mtpcheck.family import load_family, specimens
from mtpcheck.inspect import inspect
from mtpcheck.megatron import Options
from mtpcheck.proof import prove
from mtpcheck.report.finding import Finding
from mtpcheck.report.report import Report
from mtpcheck.roundtrip import roundtrip
from mtpcheck.rows import Row, prove_invertible
from mtpcheck.tensormap import read_tensor_map
from mtpcheck.topology import Topology
from mtpcheck.verify import verify
from tests.conftest import FIXTURES, Outcome
from tests.megatron_edit import edit_rank, load_pickled
from tests.peer import tiny_qwen3_next
from tests.schema import faults

BRIDGE = "mcore-bridge"
NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NEXT = FIXTURES / "qwen3_next"
SAMPLE = FIXTURES / "megatron" / "mcore_bridge-1.6.5" / "qwen3_next_tp2"
SIGNED = "release/mtpcheck/dialect"
every_name = pytest.mark.parametrize("name", NAMES)


def options(dialect: str | None = BRIDGE, **sizes: int) -> Options:
    return Options(topology=Topology(**sizes), text_only=True, dialect=dialect)


def megatron(folder: Path, dialect: str | None = BRIDGE, layout: Any = "torch") -> Path:
    """qwen3_next as one rank's file, or as torch_dist, as if others had written it."""
    convert(NEXT, folder, layout, options=options(dialect))
    return unsigned(folder)


def unsigned(folder: Path) -> Path:
    """Without our word on whose order it is in."""
    (folder / SIGNED).unlink(missing_ok=True)
    return folder


def of_dialect(report: Report) -> list[Finding]:
    return [finding for finding in report.failures if finding.cause_id == "other-dialect"]


# ---- the order is mcore_bridge's


def test_what_mcore_bridge_wrote_is_read_bit_for_bit(tmp_path: Path) -> None:
    source = tiny_qwen3_next.write(tmp_path / "hf")
    report = verify(source, SAMPLE, dialect=BRIDGE)
    assert report.verdict == "holds", report.findings
    assert "74 parts" in next(check.detail for check in report.checks if check.group == "presence")
    assert report.dialects == [BRIDGE] and "torch (TP 2, mcore-bridge)" in report.summary


def test_what_mcore_bridge_wrote_is_not_taken_for_megatron_core_s(tmp_path: Path) -> None:
    source = tiny_qwen3_next.write(tmp_path / "hf")
    report = verify(source, SAMPLE)
    assert report.verdict == "fails"
    (found,) = report.failures
    assert (found.check, found.cause_id) == ("values.bits", "other-dialect")
    assert found.cause == ("these bytes are in mcore-bridge's order and were read in megatron-core's: "
                           "--dialect mcore-bridge reads them")  # fmt: skip
    linear = {f"model.layers.0.linear_attn.{own}" for own in
              ("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "norm.weight")}  # fmt: skip
    gated = {f"{layer}.self_attn.q_proj.weight" for layer in ("model.layers.1", "mtp.layers.0")}
    assert set(found.members) == linear | gated


def test_our_files_of_two_ranks_are_those_that_mcore_bridge_wrote(tmp_path: Path) -> None:
    source = tiny_qwen3_next.write(tmp_path / "hf")
    plain = Options(topology=Topology(tp=2, etp=2), dialect=BRIDGE, vocab_multiple=1)
    convert(source, tmp_path / "megatron", "torch", options=plain)
    for rank in ("mp_rank_00", "mp_rank_01"):
        theirs, ours = (
            load_pickled(root / rank / "model_optim_rng.pt")["model"]
            for root in (SAMPLE / "iter_0000001", tmp_path / "megatron" / "release")
        )
        weights = {name for name in ours if not name.endswith("_extra_state")}
        inner = {name.replace("mtp_model_layer", "transformer_layer"): name for name in theirs}
        assert weights == inner.keys()
        assert all(torch.equal(ours[name].view(torch.int16), theirs[inner[name]].view(torch.int16)) for name in weights)


def _gated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    rows = []
    for g in range(groups):
        for own in (q, k, v):
            step = own.shape[0] // groups
            rows.append(own[g * step : (g + 1) * step])
    return torch.cat(rows)


def _by_key_head(parts: list[torch.Tensor], key_heads: int) -> torch.Tensor:
    rows = []
    for head in range(key_heads):
        for own in parts:
            step = own.shape[0] // key_heads
            rows.append(own[head * step : (head + 1) * step])
    return torch.cat(rows)


@every_name
def test_every_joined_tensor_is_what_plain_loops_make(name: str, tmp_path: Path) -> None:
    config = json.loads((FIXTURES / name / "config.json").read_text())
    text = config.get("text_config", config)
    heads, lead = text["linear_num_key_heads"], "model.language_model." if "text_config" in config else "model."
    keys = heads * text["linear_key_head_dim"]
    own = {n: t for file in (FIXTURES / name).glob("*.safetensors") for n, t in load_file(file).items()}
    convert(FIXTURES / name, tmp_path / "new", "torch", options=options())
    made = load_pickled(tmp_path / "new" / "release" / "mp_rank_00" / "model_optim_rng.pt")["model"]

    linear = f"{lead}layers.0.linear_attn."
    if name == "qwen3_next":
        joined = [own[f"{linear}in_proj_qkvz.weight"], own[f"{linear}in_proj_ba.weight"]]
    else:
        flat = own[f"{linear}in_proj_qkv.weight"]
        joined = [flat[:keys], flat[keys : 2 * keys], flat[2 * keys :]]
        joined += [own[f"{linear}in_proj_{part}.weight"] for part in "zba"]
    conv = own[f"{linear}conv1d.weight"]
    expected = {
        "in_proj.weight": _by_key_head(joined, heads),
        "conv1d.weight": _by_key_head([conv[:keys], conv[keys : 2 * keys], conv[2 * keys :]], heads),
        "out_norm.weight": own[f"{linear}norm.weight"],
    }
    assert all(torch.equal(made[f"decoder.layers.0.self_attention.{key}"], t) for key, t in expected.items())
    for layer, mine in ((f"{lead}layers.1", "decoder.layers.1"), ("mtp.layers.0", "mtp.layers.0.transformer_layer")):
        q, k, v = (own[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        gated = _gated(q, k, v, text["num_key_value_heads"])
        assert torch.equal(made[f"{mine}.self_attention.linear_qkv.weight"], gated)


# ---- there and back


@every_name
@pytest.mark.parametrize("via", ["torch_dist", "torch"])
def test_every_file_comes_back_byte_for_byte(name: str, via: Any) -> None:
    sizes = {"tp": 2, "pp": 2, "ep": 1 if name == "qwen3_5" else 2, "etp": 2} if via == "torch" else {}
    report = roundtrip(FIXTURES / name, options=options(**sizes), via=via)
    assert report.verdict == "holds", report.findings
    told = next(check.detail for check in report.checks if check.group == "result")
    assert told.endswith("files byte-identical") and len(set(told.split()[:3:2])) == 1
    assert report.dialects == [BRIDGE]
    assert prove(FIXTURES / name, options=options(**sizes), via=via).failures == []


def test_a_megatron_source_stays_in_its_dialect(tmp_path: Path) -> None:
    source = megatron(tmp_path / "source", layout="torch_dist")  # keys tell
    convert(source, tmp_path / "ranks", "torch", options=options(None, tp=2))
    assert verify(NEXT, tmp_path / "ranks", dialect=BRIDGE).verdict == "holds"
    for via in ("hf", "torch"):
        report = roundtrip(source, options=Options(), via=via)  # type: ignore[arg-type]
        assert report.verdict == "holds", report.findings
    report = roundtrip(tmp_path / "ranks", options=options(), via="torch_dist")
    assert report.verdict == "holds", report.findings
    convert(tmp_path / "ranks", tmp_path / "hf", options=options())
    assert verify(NEXT, tmp_path / "hf").verdict == "holds"


def test_it_drafts_what_its_source_drafts(tmp_path: Path) -> None:
    source = megatron(tmp_path / "source")
    passages = []
    for checkpoint in (open_checkpoint(NEXT), open_checkpoint(source, dialect=BRIDGE)):
        passages += run(Engine(checkpoint, read_tensor_map(checkpoint)), [list(range(24))], keep_logits=True).passages
    assert all(np.array_equal(*pair) for pair in zip(*(own.logits for own in passages), strict=True))


# ---- which dialect a checkpoint is in


@pytest.mark.parametrize("given", ["core", BRIDGE])
def test_keys_of_torch_dist_tell(given: str, tmp_path: Path) -> None:
    source = megatron(tmp_path / "source", given, "torch_dist")
    assert open_checkpoint(source).dialect == given
    report = verify(NEXT, source)
    assert report.verdict == "holds" and report.dialects == [given]
    found = inspect(source)
    assert (found.dialect, found.dialect_alike) == (given, [])


@pytest.mark.parametrize(("given", "other"), [("core", BRIDGE), (BRIDGE, "core")])
def test_names_and_shapes_of_rank_files_do_not_tell(given: str, other: str, tmp_path: Path) -> None:
    source = megatron(tmp_path / "source", given)
    found = inspect(source, dialect=given)
    assert (found.dialect, found.dialect_alike) == (given, [other])
    assert inspect(source).dialect == "core"


def test_dialects_do_not_concern_other_models(tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe", tmp_path / "new", "torch")
    assert inspect(tmp_path / "new").dialect_alike == []
    assert inspect(FIXTURES / "glm4_moe").dialect == ""
    assert verify(FIXTURES / "glm4_moe", tmp_path / "new", dialect=BRIDGE).verdict == "holds"


@pytest.mark.parametrize("layout", ["torch", "torch_dist"])
@pytest.mark.parametrize(("given", "read", "words"), [
    (BRIDGE, "core", "in mcore-bridge's order and were read in megatron-core's: --dialect mcore-bridge"),
    ("core", BRIDGE, "in megatron-core's order and were read in mcore-bridge's: --dialect core"),
])  # fmt: skip
def test_the_wrong_dialect_is_one_finding(given: str, read: str, words: str, layout: Any, tmp_path: Path) -> None:
    source = megatron(tmp_path / "source", given, layout)
    if (layout, given) == ("torch_dist", BRIDGE):
        with pytest.raises(UsageError, match="its keys are in the order of mcore-bridge, and --dialect says core"):
            verify(NEXT, source, dialect=read)
        return
    report = verify(NEXT, source, dialect=read)
    if (layout, given) == ("torch_dist", "core"):  # nor are the keys those that mcore_bridge writes
        (found,) = of_dialect(report)
        assert words in found.cause and {f.check for f in report.failures} > {"presence.missing", "values.bits"}
        return
    (found,) = report.failures
    assert found.cause_id == "other-dialect" and words in found.cause and len(found.members) == 11
    if layout == "torch":
        (found,) = verify(NEXT, source, dialect=read, only_mtp=True).failures
        assert found.subject == "mtp.layers.0.self_attn.q_proj.weight" and words in found.cause
        (found,) = verify(source, NEXT, dialect=read).failures
        assert found.cause.startswith("the reference's bytes") and words in found.cause


LINEAR, FULL = "decoder.layers.0.self_attention", "decoder.layers.1.self_attention"


def _scaled(model: dict[str, Any]) -> None:
    model[f"{LINEAR}.in_proj.weight"] *= 2


def test_what_is_damaged_too_is_told_besides(tmp_path: Path) -> None:
    source = megatron(tmp_path / "source")
    edit_rank(source / "release" / "mp_rank_00", lambda root: _scaled(root["model"]))
    report = verify(NEXT, source)
    (found,) = of_dialect(report)
    assert len(found.members) == 9
    assert not any(name.startswith("model.layers.0.linear_attn.in_proj") for name in found.members)
    assert any("model.layers.0.linear_attn.in_proj_qkvz.weight" in (f.subject, *f.members) for f in report.failures)


def _plain_norm(model: dict[str, Any]) -> None:
    for layer in (0, 2):
        model[f"decoder.layers.{layer}.self_attention.out_norm.weight"] += 1


def _bridged(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(model: dict[str, Any]) -> None:
        other = load_pickled(change.other / "release" / "mp_rank_00" / "model_optim_rng.pt")["model"]  # type: ignore[attr-defined]
        model.update({key: other[key] for key in keys})

    return change


@pytest.mark.parametrize(
    "change",
    [
        _plain_norm,
        _bridged(f"{FULL}.linear_qkv.weight"),
        _bridged(f"{LINEAR}.in_proj.weight"),
        _bridged(f"{LINEAR}.in_proj.weight", f"{LINEAR}.conv1d.weight", f"{LINEAR}.out_norm.weight"),
    ],
    ids=["a norm without its offset", "one attention", "one projection", "one layer"],
)
def test_a_fault_is_no_dialect(change: Any, tmp_path: Path) -> None:
    """What the other dialect would not read rightly either is told as what it is."""
    change.other = megatron(tmp_path / "other")
    source = megatron(tmp_path / "source", "core")
    edit_rank(source / "release" / "mp_rank_00", lambda root: change(root["model"]))
    report = verify(NEXT, source)
    assert report.verdict == "fails" and not of_dialect(report)


# ---- names and tables


def test_an_unknown_name_is_refused(cli: Callable[..., Outcome], tmp_path: Path) -> None:
    for command in (
        ["inspect", NEXT], ["verify", NEXT, NEXT], ["accept", NEXT], ["roundtrip", NEXT], ["roundtrip", NEXT, "--plan"],
        ["convert", NEXT, tmp_path / "new"],
    ):  # fmt: skip
        done = cli(*command, "--dialect", "../core")
        assert (done.code, done.out) == (2, "")
        assert done.err == "mtpcheck: unknown dialect '../core'; there are core, mcore-bridge\n"
    with pytest.raises(UsageError, match="unknown dialect"):
        verify(NEXT, NEXT, dialect="")


def test_every_command_takes_it(cli: Callable[..., Outcome], tmp_path: Path) -> None:
    source = tmp_path / "new"
    assert cli("convert", NEXT, source, "--to", "torch", "--dialect", BRIDGE).code == 0
    assert cli("verify", NEXT, source, "--dialect", BRIDGE).code == 0
    unsigned(source)
    failed = cli("verify", NEXT, source)
    assert failed.code == 1 and "--dialect mcore-bridge" in failed.out
    assert "dialect      mcore-bridge; or core, by names and shapes" in cli("inspect", source, "--dialect", BRIDGE).out
    assert cli("roundtrip", source, "--dialect", BRIDGE).code == 0
    assert cli("roundtrip", NEXT, "--plan", "--dialect", BRIDGE).code == 0
    shown = json.loads(cli("inspect", source, "--json").out)
    assert (shown["dialect"], shown["dialect_alike"]) == ("core", [BRIDGE]) and not faults(shown)
    shown = json.loads(cli("verify", NEXT, source, "--dialect", BRIDGE, "--json").out)
    assert shown["dialects"] == [BRIDGE] and not faults(shown)
    assert json.loads(cli("verify", NEXT, NEXT, "--json").out)["dialects"] == []


def test_what_we_write_says_whose_order_it_is_in(tmp_path: Path, cli: Callable[..., Outcome]) -> None:
    """No later step needs the flag, whatever it goes through; and none may contradict it."""
    for name, layout, source in (("a", "torch", NEXT), ("b", "torch_dist", NEXT), ("c", "torch", tmp_path / "b")):
        given = options() if source == NEXT else None
        convert(source, tmp_path / name, layout, options=given)
        assert (tmp_path / name / SIGNED).read_text() == "mcore-bridge\n"
        assert verify(NEXT, tmp_path / name).verdict == "holds"
        convert(tmp_path / name, tmp_path / f"{name}-hf")
        assert verify(NEXT, tmp_path / f"{name}-hf").verdict == "holds"
    assert "mtpcheck wrote it in the order of mcore-bridge" in cli("inspect", tmp_path / "a", "--dialect", "core").err
    convert(NEXT, tmp_path / "plain", "torch", options=options("core"))
    assert not (tmp_path / "plain" / SIGNED).exists()


def test_what_is_taken_for_granted_is_told(tmp_path: Path) -> None:
    source = megatron(tmp_path / "source")
    told = f"{source}: read in the order of core; mcore-bridge has the same names and shapes"
    assert any(note.startswith(told) for note in verify(NEXT, source, values="changed").notes)
    found = [f for f in convert(source, tmp_path / "hf").findings if f.check == "topology.dialect"]
    assert [f.message.startswith(told) for f in found] == [True]
    assert not [n for n in verify(NEXT, source, values="changed", dialect=BRIDGE).notes if "granted" in n or told in n]


def test_the_gate_takes_it(cli: Callable[..., Outcome], tmp_path: Path) -> None:
    ours = f"{sys.executable} -m mtpcheck convert {{src}} {{dst}} --dialect {BRIDGE}"
    case = {"source": "qwen3_next", "to_megatron": f"{ours} --to torch", "to_hf": ours, "acceptance": False}
    back = {"source": "qwen3_next", "to_hf": ours, "layout": "torch", "acceptance": False}
    theirs = f"sh -c '{ours} --to torch && rm {{dst}}/{SIGNED}'"
    cases = [{**case, "name": "named", "dialect": BRIDGE}, {**back, "name": "back", "dialect": BRIDGE},
             {**case, "name": "unnamed", "to_megatron": theirs}]  # fmt: skip
    settings = tmp_path / "mtpcheck.yaml"
    settings.write_text(yaml.safe_dump({"gate": {"cases": cases}}))
    done = cli("gate", "--config", settings, "--json")
    named, way_back, other = json.loads(done.out)["cases"]
    assert done.code == 1
    assert (named["verdict"], way_back["verdict"], other["verdict"]) == ("holds", "holds", "fails")
    assert named["dialects"] == [BRIDGE]
    assert [f.get("cause_id") for f in other["findings"] if f["severity"] == "failure"] == ["other-dialect"]
    settings.write_text(yaml.safe_dump({"gate": {"cases": [{**case, "dialect": "bridge"}]}}))
    done = cli("gate", "--config", settings)
    assert done.code == 2 and "dialect is 'bridge', expected core or mcore-bridge" in done.err


def _in_place_of_none(table: dict[str, Any]) -> None:
    table["layer"][1]["name"] = "self_attention.in_projection.weight"


def _other_turns(table: dict[str, Any]) -> None:
    table["layer"][0]["join"] = [["attn.q", "attn.k"], "attn.gate", "attn.v"]


def _loses(table: dict[str, Any]) -> None:
    table["layer"][1]["join"].remove("attn.gdn.z")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_in_place_of_none, "takes the place of no role"),
        (_other_turns, "do not fit together"),
        (_loses, "has no row for 'layers"),
        (lambda table: table.update(args={}), "unknown key 'args'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    change: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtpcheck import data, dialects

    folder = Path(shutil.copytree(data.configs(), tmp_path / "configs"))
    path = folder / "dialects" / "mcore-bridge.yaml"
    table = yaml.safe_load(path.read_text())
    change(table)
    path.write_text(yaml.safe_dump(table))
    cached = (dialects.read_dialect, dialects.load_dialect, dialects.dialect_names)
    try:
        for own in cached:
            own.cache_clear()
        monkeypatch.setattr(dialects, "configs", lambda: folder)
        with pytest.raises(FamilyError, match=words):
            dialects.load_dialect(BRIDGE)
    finally:
        for own in cached:
            own.cache_clear()


def test_parts_that_take_turns_are_interleaved() -> None:
    model = specimens(load_family("qwen3_next"))[0]
    layer = next(name for name, parts in model.layers.items() if "attn.gate" in parts)
    row = Row("x", tuple(f"{layer}.attn.{part}" for part in ("q", "gate", "k", "v")), 1, turns=2)
    prove_invertible([row], model.shapes)
    other = Row("x", row.parts, 1)
    assert row.shape(model.shapes) == other.shape(model.shapes)
