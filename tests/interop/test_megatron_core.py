"""The real megatron-core loads what mtpcheck wrote, and every parameter is what it has to be."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.draft.run import Engine, run
from mtpcheck.tensormap import read_tensor_map

from .independent import Config, Spec, Tensors, expected_args, hf_to_megatron
from .megatron_worker import STRICTNESS
from .support import FIXTURES, HERE, NAMES, assert_same_bits, bits, convert, read_hf
from .support import run as start

SPECS: tuple[Spec, ...] = ("local", "te")


@dataclass(frozen=True)
class Case:
    name: str
    spec: Spec
    config: Config
    hf: Tensors
    loaded: dict[str, Tensors]
    args: Config
    logits: Tensors  # none with the TE stand-in, which computes nothing


FEW = [(name, "te") for name in ("kimi_k2", "glm4_moe_lite", "hy_v3", "bailing_moe_v2", "glm4_moe_nocopies")]
PARAMS = [
    pytest.param(name, spec, id=f"{name}-{spec}", marks=pytest.mark.xdist_group(f"{name}-{spec}"))
    for name in NAMES
    for spec in SPECS
    # Megatron has sparse attention for Transformer Engine alone: LocalSpecProvider lacks the linear() of an indexer.
    if (name, spec) not in (("glm_moe_dsa", "local"), ("deepseek_v32", "local"))
    # both specs of what differs from another by little only in `make test-all`
    if (name, spec) not in FEW or os.environ.get("MTPCHECK_ALL")
]
# with the TE stand-in nothing is computed, and transformers has no Ling 2.0
RUN = [param for param in PARAMS if "local" in param.values and "bailing_moe_v2" not in param.values]
# transformers norms latents with an epsilon of 1e-6 whatever the config says (modeling_glm4_moe_lite.py), Megatron with
# that of the config, which is 1e-5 here
NEAR = {"glm4_moe_lite": 1e-3}
every_case = pytest.mark.parametrize(("name", "spec"), PARAMS)


@pytest.fixture
def case(name: str, spec: Spec, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if (name, spec) not in _LOADED:
        _LOADED[name, spec] = load_case(name, spec, tmp_path_factory.mktemp(f"{name}-{spec}"))
    return _LOADED[name, spec]


_LOADED: dict[tuple[str, Spec], Case] = {}


def load_case(name: str, spec: Spec, work: Path) -> Case:
    """Convert a fixture and have megatron-core load it; done once for all tests of one case."""
    out = work / "loaded"
    checkpoint = convert(name, work / "megatron", spec)
    te = (FIXTURES / "megatron" / "fake_te",) if spec == "te" else ()
    start(HERE / "megatron_worker.py", checkpoint, spec, out, python_path=te)
    return Case(
        name=name,
        spec=spec,
        config=json.loads((FIXTURES / name / "config.json").read_text()),
        hf=read_hf(name),
        loaded={strictness: load_file(out / f"{strictness}.safetensors") for strictness in STRICTNESS},
        args=json.loads((out / "args.json").read_text()),
        logits=load_file(out / "logits.safetensors") if spec == "local" else {},
    )


@every_case
@pytest.mark.parametrize("strictness", STRICTNESS)
def test_every_parameter_bit_for_bit(case: Case, strictness: str) -> None:
    assert_same_bits(case.loaded[strictness], hf_to_megatron(case.hf, case.config, case.spec))


@every_case
def test_arguments_say_what_model_it_is(case: Case) -> None:
    assert case.args == expected_args(case.hf, case.config)


@pytest.mark.parametrize(("name", "spec"), RUN)
def test_megatron_computes_what_transformers_computes(case: Case) -> None:
    """Proves the second opinion itself, and arguments that no shape depends on, such as the rotary base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known: Config = {}
    # what sets MiMo apart from Qwen2, and Kimi-K2 from DeepSeek-V3, is nothing that a trunk has
    if trunk := {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}.get(case.name):
        own = {key: value for key, value in case.config.items() if key not in ("model_type", "auto_map")}
        known["config"] = AutoConfig.for_model(trunk, **own)
    source = FIXTURES / case.name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager", **known)
    with torch.no_grad():
        expected = model(case.logits["ids"]).logits
    actual = case.logits["logits"][..., : expected.shape[-1]]
    torch.testing.assert_close(actual, expected, rtol=0, atol=NEAR.get(case.name, 1e-5))


@pytest.mark.parametrize(("name", "spec"), RUN)
def test_megatron_drafts_what_the_engine_drafts(case: Case) -> None:
    """The head's wiring, which no byte tells. MiMo's is fed before the final norm, and Megatron's never is."""
    checkpoint = open_checkpoint(FIXTURES / case.name)
    engine = Engine(checkpoint, read_tensor_map(checkpoint))
    ours = run(engine, case.logits["ids"].tolist(), ablate=False, keep_logits=True).passages
    theirs = {name: own for name, own in case.logits.items() if name != "ids"}
    assert len(theirs) == 1 + len(engine.heads)
    for depth, own in enumerate(theirs.values()):
        if case.name == "mimo" and depth:
            continue
        for passage, expected in zip(ours, own, strict=True):
            rows, columns = passage.logits[depth].shape
            actual = torch.from_numpy(passage.logits[depth])
            torch.testing.assert_close(actual, expected[:rows, :columns], rtol=1e-5, atol=NEAR.get(case.name, 1e-4))


@pytest.mark.parametrize(("name", "spec"), [p for p in PARAMS if "mimo" in p.values])
def test_the_halves_of_mimo_s_projection_are_exchanged(case: Case) -> None:
    """Megatron gives eh_proj the embedding first (multi_token_prediction.py), MiMo's input_proj takes it last."""
    theirs = case.hf["model.mtp_layers.0.input_proj.weight"]
    held = case.loaded[STRICTNESS[0]]["mtp.layers.0.eh_proj.weight"]
    width = case.config["hidden_size"]
    assert torch.equal(bits(held[:, :width]), bits(theirs[:, width:]))
    assert torch.equal(bits(held[:, width:]), bits(theirs[:, :width]))
    assert not torch.equal(theirs[:, :width], theirs[:, width:])


def test_comparison_sees_the_sign_of_a_zero() -> None:
    zero = torch.zeros(1, dtype=torch.bfloat16)
    assert torch.equal(zero, -zero)
    assert not torch.equal(bits(zero), bits(-zero))
