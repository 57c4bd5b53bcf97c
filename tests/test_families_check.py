"""``mtpcheck families check``: sound files hold, each kind of fault is a line with its file, nothing heavy is read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpcheck.data import configs
from mtpcheck.model import load_block
from tests.conftest import Outcome

Cli = Callable[..., Outcome]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A copy of the tables, in a repository of its own."""
    load_block.cache_clear()
    return shutil.copytree(configs(), tmp_path / "repo" / "configs")


def test_families_and_blocks_that_come_with_mtpcheck_hold(cli: Cli) -> None:
    files = [*configs().glob("families/*.yaml"), *configs().glob("blocks/*.yaml")]
    done = cli("families", "check", *files)
    assert done.code == 0 and done.out.startswith("HOLDS: ") and "glm4_moe" in done.out and done.err == ""


def test_a_new_family_of_known_blocks_holds_anywhere(cli: Cli, tmp_path: Path) -> None:
    text = (configs() / "families" / "mimo.yaml").read_text()
    (tmp_path / "ours.yaml").write_text(text.replace("mimo", "ours").replace("mtp_ours", "mtp_mimo"))
    done = cli("families", "check", tmp_path / "ours.yaml")
    assert (done.code, done.out) == (0, "HOLDS: ours\n")


@pytest.mark.parametrize(
    "file, old, new, told",
    [
        ("blocks/gqa.yaml", "k_proj.weight: attn.k", "k_proj.weight: attn.q", "gqa.yaml: self_attn.k_proj.weight"),
        ("blocks/gqa.yaml", "k_proj.weight: attn.k", "k_proj.weight: attn.kk", "'attn.kk' is none"),
        ("blocks/mtp_mimo.yaml", "axis: 1}", "axis: 7}", "mtp_mimo.yaml"),
        ("families/mimo.yaml", "declared: [num_nextn", "declared: [num_nexxt", "mimo.yaml: mtp: declared"),
        ("families/mimo.yaml", "blocks: [mtp_mimo]", "blocks: [mtp_mimoo]", "block 'mtp_mimoo': no file"),
        ("families/mimo.yaml", "trunk: qwen2", "trunk: qwen2\ntrunk: qwen3", "mimo.yaml:4: not valid YAML: key"),
        ("families/mimo.yaml", "  prefix: model.mtp_layers.{i}\n", "", "mimo.yaml: mtp: key 'prefix' is missing"),
        ("families/mimo.yaml", "outside: [model]", "outside: 3", "mimo.yaml: is not built as"),
        ("families/mimo.yaml", "layers.{k}", "layers.{kk}", "'kk' is not known"),
        ("families/_dense_mtp.yaml", "blocks: [mtp_qwen]", "blocks: [mtp_qwen, colour]", "block 'colour'"),
        ("families/llama.yaml", "extends: _dense_mtp", "extends: _dense", "extends '_dense', and there is no"),
        ("blocks/gqa_fused.yaml", "extends: gqa", "extends: gqaa", "extends 'gqaa', and there is no"),
        ("families/llama.yaml", "match: {", "match: [", "llama.yaml:"),
    ],
)  # fmt: skip
def test_every_fault_is_a_line(file: str, old: str, new: str, told: str, tables: Path, cli: Cli) -> None:
    path = tables / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    done = cli("families", "check", path)
    assert done.code == 1 and told in done.out and file.split("/")[1] in done.out, done.out
    assert len(done.out.splitlines()) == 1


def test_faults_of_several_files_are_told_together(tables: Path, cli: Cli) -> None:
    for name in ("mimo", "llama"):
        with (tables / "families" / f"{name}.yaml").open("a") as file:
            file.write("colour: 1\n")
    done = cli("families", "check", *sorted(tables.glob("families/*.yaml")))
    assert done.code == 1 and len(done.out.splitlines()) == 2 and done.out.count("unknown key 'colour'") == 2


def test_a_file_that_is_not_there_is_no_fault_of_a_family(cli: Cli, tmp_path: Path) -> None:
    done = cli("families", "check", tmp_path / "none.yaml")
    assert done.code == 2 and "no such file" in done.err and done.out == ""


def test_a_file_that_is_nested_too_deeply(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 1000)
    done = cli("families", "check", tmp_path / "deep.yaml")
    assert (done.code, done.out.count("\n")) == (1, 1) and "nested too deeply" in done.out


def test_neither_torch_nor_transformers_is_imported() -> None:
    script = (
        "import sys; from mtpcheck.cli import run; run(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'numpy.testing'} & set(sys.modules)"
    )
    mimo = configs() / "families" / "mimo.yaml"
    subprocess.run([sys.executable, "-c", script, "families", "check", str(mimo)], check=True)
