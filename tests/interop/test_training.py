"""The way of a training run: in, one optimizer step and a save by megatron-core itself, and out again."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mtpcheck.convert import convert as export
from mtpcheck.verify import verify

from .independent import Config, Tensors, hf_to_megatron
from .support import FIXTURES, HERE, assert_same_bits, bits, convert, read_hf, run

PARAMS = [
    pytest.param((name, case), id=f"{name}-{case}", marks=pytest.mark.xdist_group(f"training-{name}"))
    for name in ("glm4_moe", "qwen2_mtp")
    for case in ("trained", "frozen")
]
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
COMPONENTS = {"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "head"}


@dataclass(frozen=True)
class Step:
    """A fixture, what megatron-core made of it in one optimizer step, and that brought back."""

    case: str
    source: Path
    config: Config
    before: Tensors
    megatron: Path
    held: Tensors  # by the model in memory, after the step
    moved: set[str]  # the names of those that the step changed, as the worker saw it
    back: Path
    after: Tensors

    @property
    def mtp(self) -> tuple[str, ...]:
        return "mtp.", f"model.layers.{self.config['num_hidden_layers']}."


_SAVED: dict[str, Path] = {}


def train(name: str, root: Path) -> Path:
    """Where megatron-core left what it saved of a fixture; it is trained once for all tests."""
    if name not in _SAVED:
        run(HERE / "training_worker.py", convert(name, root / "converted", "local"), root / "saved")
        _SAVED[name] = root / "saved"
    return _SAVED[name]


@pytest.fixture(scope="module", params=PARAMS)
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Step:
    name, case = request.param
    root = tmp_path_factory.mktemp(f"{name}-{case}")
    source, back, saved = FIXTURES / name, root / "back", train(name, root) / case
    made = export(saved, back, like=source)
    # Megatron's loss runs over the padded rows of the head, so a step fills them, and an export has to drop them.
    assert [(f.check, f.subject) for f in made.findings] == [("values.padding", "output_layer.weight")]
    return Step(
        case=case,
        source=source,
        config=json.loads((source / "config.json").read_text()),
        before=read_hf(name),
        megatron=saved,
        held=load_file(saved.with_suffix(".safetensors")),
        moved=set(json.loads(saved.with_suffix(".json").read_text())),
        back=back,
        after={key: tensor for file in back.glob("*.safetensors") for key, tensor in load_file(file).items()},
    )


def differing(before: Tensors, after: Tensors) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, tensor in after.items() if not bits(tensor).equal(bits(before[name]))}


def test_the_model_s_weights_come_back_bit_for_bit(step: Step) -> None:
    expected, actual = dict(step.held), hf_to_megatron(step.after, step.config, "local")
    for name in VOCABULARY:
        for tensors in (expected, actual):
            tensors[name] = tensors[name][: step.config["vocab_size"]]
    assert_same_bits(actual, expected)


def test_what_moved_is_what_the_step_changed_and_the_rest_is_the_source_s(step: Step) -> None:
    memory = [hf_to_megatron(tensors, step.config, "local") for tensors in (step.before, step.after)]
    assert differing(*memory) == step.moved
    assert all(name.startswith("mtp.") for name in memory[0].keys() - step.moved if "mlp" not in name)
    layer = {name for name in memory[0] if name.startswith("mtp.")}
    assert step.moved.isdisjoint(layer) if step.case == "frozen" else step.moved > layer


def component(name: str, step: Step) -> str:
    named = COMPONENTS.get(name.removesuffix(".weight"))
    return named or ("mtp.0" if name.startswith(step.mtp) else "trunk")


def halves(tensors: Tensors) -> Tensors:
    """The projection of an MTP layer is two parts in the report: what it takes of the embedding and of the hidden."""
    out = dict(tensors)
    for name in [name for name in tensors if name.endswith((".eh_proj.weight", "mtp.fc.weight"))]:
        out[f"{name}.embedding"], out[f"{name}.hidden"] = out.pop(name).chunk(2, dim=1)
    return out


@pytest.mark.parametrize("side", ["back", "megatron"])
def test_report_tells_exactly_what_moved(step: Step, side: str) -> None:
    report = verify(step.source, getattr(step, side), values="changed")
    before, after = halves(step.before), halves(step.after)
    copies = {name for name in before if name.startswith(step.mtp) and name.endswith(("tokens.weight", "head.weight"))}
    if side == "megatron":  # which has no place for a copy
        before, after = ({k: v for k, v in tensors.items() if k not in copies} for tensors in (before, after))
    of = Counter(component(name, step) for name in before)
    moved = Counter(component(name, step) for name in differing(before, after))
    told = [re.fullmatch(r"(\S+) +([\d,]+) of ([\d,]+) tensors moved", line) for line in report.notes]
    assert {m[1]: (int(m[2]), int(m[3])) for m in told if m} == {name: (moved[name], of[name]) for name in of}
    assert len(told) == len(of)

    assert report.verdict == "holds"
    passed = {check.group for check in report.checks if check.status == "passed"}
    assert passed >= {"structure", "presence", "declaration", "values"}
    stale = [("values.stale", "mtp.0")] if step.case == "frozen" else []
    assert [(f.check, f.subject) for f in report.findings if f.check != "values.padding"] == stale
    (declared,) = (check.detail for check in report.checks if check.group == "declaration")
    theirs = {"back": "num_nextn_predict_layers=1", "megatron": "mtp_num_layers=1"}[side]
    assert declared == f"num_nextn_predict_layers=1 → {theirs}"


def test_all_but_the_weights_is_the_source_s(step: Step) -> None:
    files = {path.relative_to(step.source): path for path in step.source.rglob("*") if path.is_file()}
    assert {path.relative_to(step.back) for path in step.back.rglob("*") if path.is_file()} == set(files)
    for name, path in files.items():
        same = (step.back / name).read_bytes() == path.read_bytes()
        assert same or name.suffix == ".safetensors", name


def test_copies_follow_what_they_repeat(step: Step) -> None:
    for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        name = f"{step.mtp[1]}{copy}.weight"
        assert (name in step.after) == (step.source.name == "glm4_moe")
        if name in step.after:
            assert bits(step.after[name]).equal(bits(step.after[f"{original}.weight"]))
            assert not bits(step.after[name]).equal(bits(step.before[name]))
