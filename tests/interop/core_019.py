"""megatron-core 0.19 loads what mtpcheck wrote, in its own form and in that of 0.16.

`make interop-019` runs this in an environment of its own; the name keeps it out of `make test`.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mtpcheck.cli import run as cli
from mtpcheck.convert import convert
from mtpcheck.megatron import Options
from mtpcheck.topology import Topology
from mtpcheck.verify import verify

from .independent import Spec, Tensors, expected_args, hf_to_megatron
from .megatron_worker import STRICTNESS
from .support import FIXTURES, HERE, assert_same_bits, read_hf, run
from .test_ranks import run_ranks

NAMES = ("glm4_moe", "qwen2_mtp", "llama_mtp")
WORKER = HERE / "megatron_worker.py"


def converted(name: str, spec: Spec, mcore: str, root: Path) -> Path:
    assert cli(["convert", str(FIXTURES / name), str(root), "--spec", spec, "--mcore", mcore, "--quiet"]) == 0
    return root / "release"


def python_path(spec: Spec) -> tuple[Path, ...]:
    return (FIXTURES / "megatron" / "fake_te",) if spec == "te" else ()


def loaded(file: Path) -> Tensors:
    """What the model holds, under the names of 0.16: the layer inside an MTP layer has another one in memory."""
    return {name.replace(".mtp_model_layer.", ".transformer_layer."): value for name, value in load_file(file).items()}


def test_this_is_0_19() -> None:
    assert version("megatron-core").startswith("0.19.")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("spec", "mcore"), [("local", "0.16"), ("local", "0.19"), ("te", "0.19")])
def test_every_parameter_bit_for_bit(name: str, spec: Spec, mcore: str, tmp_path: Path) -> None:
    out, config = tmp_path / "loaded", json.loads((FIXTURES / name / "config.json").read_text())
    run(WORKER, converted(name, spec, mcore, tmp_path / "megatron"), spec, out, python_path=python_path(spec))
    for strictness in STRICTNESS:
        assert_same_bits(loaded(out / f"{strictness}.safetensors"), hf_to_megatron(read_hf(name), config, spec))
    assert json.loads((out / "args.json").read_text()) == expected_args(read_hf(name), config)


@pytest.mark.parametrize("name", NAMES)
def test_of_0_16_an_extra_state_is_too_much_for_the_strictest(name: str, tmp_path: Path) -> None:
    """0.16 saves the empty state of an MTP layer's attention core, by accident of its code; 0.19 no longer does."""
    out, config = tmp_path / "loaded", json.loads((FIXTURES / name / "config.json").read_text())
    checkpoint = converted(name, "te", "0.16", tmp_path / "megatron")
    state = r"mtp\.layers\.\d\.transformer_layer\.self_attention\.core_attention\._extra_state"
    with pytest.raises(pytest.fail.Exception, match=rf"Missing keys \(for all ranks\): {{('{state}',? ?)+}}"):
        run(WORKER, checkpoint, "te", out, python_path=python_path("te"))
    held, lenient = loaded(out / "assume_ok_unexpected.safetensors"), STRICTNESS[0]
    assert lenient == "assume_ok_unexpected"
    assert_same_bits(held, hf_to_megatron(read_hf(name), config, "te"))


@pytest.mark.parametrize(
    ("name", "spec", "topology"),
    [
        ("qwen2_mtp", "local", Topology(tp=2, etp=2, pp=2)),
        ("glm4_moe", "te", Topology(tp=2, etp=1, pp=2, ep=2, first=1)),
    ],
)
def test_ranks(name: str, spec: Spec, topology: Topology, tmp_path: Path) -> None:
    """Its modules call the layer inside an MTP layer by another name than 0.16's, and load no file with the old one."""
    source = FIXTURES / name
    convert(source, tmp_path / "ranks", "torch", options=Options(spec, 16, "0.19", topology))
    run_ranks(tmp_path, spec, topology.tp * topology.pp)
    report = verify(source, tmp_path / "saved")
    assert report.verdict == "holds", report.findings
