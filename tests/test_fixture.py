"""``mtpcheck fixture``: tiny checkpoints of every family, bundled or of any size, in every layout."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpcheck.bundled import bundled, find_bundled
from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.family import family_names
from mtpcheck.tensormap import read_tensor_map
from tests.conftest import FIXTURES, Outcome, digest

Cli = Callable[..., Outcome]


@pytest.mark.parametrize("name", bundled())
def test_a_bundled_checkpoint_is_copied(cli: Cli, tmp_path: Path, name: str) -> None:
    outcome = cli("fixture", name, tmp_path / "made")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"mtpcheck: {tmp_path / 'made'}: {name} in hf; its head is trained\n"
    assert digest(tmp_path / "made") == digest(FIXTURES / name)


@pytest.mark.parametrize("family", sorted(set(bundled().values())))
def test_any_size_of_any_family(cli: Cli, tmp_path: Path, family: str) -> None:
    """Sound by every check of a round trip, and the same again for the same seed."""
    moe = [] if family in ("llama", "qwen2", "qwen3", "mimo", "qwen3_5", "glm_ocr") else ["--experts", 6]
    sizes = "--layers", 5, "--mtp-layers", 2, *moe
    outcome = cli("fixture", family, tmp_path / "made", *sizes, "--seed", 7)
    assert outcome.code == 0 and "random weights" in outcome.err
    opened = open_checkpoint(tmp_path / "made")
    facts = read_tensor_map(opened).facts
    assert (facts["layers"], facts["mtp_layers"], facts["mtp_stored"]) == (5, 2, 2)
    assert facts["experts"] == (6 if moe else 0)
    assert cli("roundtrip", tmp_path / "made", "--text-only").code == 0
    assert cli("fixture", family, tmp_path / "again", *sizes, "--seed", 7, "-q").err == ""
    assert digest(tmp_path / "again") == digest(tmp_path / "made")
    assert cli("fixture", family, tmp_path / "other", *sizes).code == 0
    assert digest(tmp_path / "other") != digest(tmp_path / "made")


def test_dtypes_and_copies_are_those_of_the_bundled_one(tmp_path: Path, cli: Cli) -> None:
    assert cli("fixture", "glm4_moe", tmp_path / "made", "--layers", 2).code == 0
    made = open_checkpoint(tmp_path / "made").tensors
    assert made["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == "F32"
    assert made["model.layers.2.eh_proj.weight"].dtype == "BF16"
    assert made["model.layers.2.embed_tokens.weight"].read() == made["model.embed_tokens.weight"].read()
    assert cli("fixture", "glm4_moe_nocopies", tmp_path / "without", "--layers", 2).code == 0
    assert "model.layers.2.embed_tokens.weight" not in open_checkpoint(tmp_path / "without").tensors
    assert cli("fixture", "qwen3", tmp_path / "tied", "--layers", 2).code == 0
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "tied").tensors


def test_transformers_loads_what_is_made(tmp_path: Path, cli: Cli) -> None:
    from transformers import AutoModelForCausalLM

    assert cli("fixture", "deepseek_v3", tmp_path / "made", "--layers", 2, "--experts", 3).code == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["n_group"], config["topk_group"], config["n_routed_experts"]) == (1, 1, 3)
    _, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not loaded["missing_keys"]


@pytest.mark.parametrize("layout", ["torch_dist", "torch"])
@pytest.mark.parametrize("sizes", [(), ("--layers", 4)])
def test_megatron_layouts(cli: Cli, tmp_path: Path, layout: str, sizes: tuple[object, ...]) -> None:
    assert cli("fixture", "mimo", tmp_path / "hf", *sizes).code == 0
    assert cli("fixture", "mimo", tmp_path / "made", *sizes, "--layout", layout).code == 0
    assert open_checkpoint(tmp_path / "made").layout == layout
    assert cli("verify", tmp_path / "hf", tmp_path / "made").code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("glm4_mo", "new"), "unknown family 'glm4_mo'; the nearest is 'glm4_moe'"),
        (("qwen2", "new", "--experts", 2), "qwen2: is dense, --experts says nothing of it"),
        (("qwen2", "there"), "there: exists already"),
        (("qwen2", "nowhere/new"), "nowhere: no such folder to write into"),
        (("qwen2", "new", "--layers", 0), "Invalid value for '--layers'"),
    ],
)
def test_what_cannot_be_made(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    outcome = cli("fixture", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert told in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_fixture_in_hf_layout_needs_no_torch(tmp_path: Path) -> None:
    script = "import sys; from mtpcheck.cli import run; sys.exit(run(sys.argv[1:]) or 'torch' in sys.modules)"
    arguments = ["fixture", "glm_moe_dsa", str(tmp_path / "made"), "--layers", "3"]
    assert subprocess.run([sys.executable, "-c", script, *arguments], cwd=FIXTURES.parent).returncode == 0


def test_every_family_has_one_and_the_wheel_has_all() -> None:
    assert set(bundled().values()) == set(family_names())
    assert find_bundled("glm4_moe") == FIXTURES / "glm4_moe"
    assert find_bundled("llama") == FIXTURES / "llama_mtp"
    project = tomllib.loads((FIXTURES.parent / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {name for name in shipped if name.startswith("fixtures/")} == {f"fixtures/{name}" for name in bundled()}
    assert all(shipped[f"fixtures/{name}"] == f"mtpcheck/fixtures/{name}" for name in bundled())
