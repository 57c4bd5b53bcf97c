"""The command line: help, version, usage, exit codes, what is imported, what stands on which stream."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpcheck import __version__
from tests.conftest import Outcome, Yard, digest, edit_json, edit_tensors, fixture_path, flip_byte

Cli = Callable[..., Outcome]
MakeYard = Callable[[str], Yard]
Started = Callable[..., "subprocess.Popen[str]"]

COMMANDS = ("inspect", "verify", "roundtrip", "convert")


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(command: tuple[str, ...], flag: str, cli: Cli) -> None:
    outcome = cli(*command, flag)
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage: mtpcheck " + " ".join(command) in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_help_tells_the_exit_codes(cli: Cli) -> None:
    assert all(
        word in cli("--help").out for word in ("0 holds", "1 the checkpoint fails", "2 could not judge", *COMMANDS)
    )


def test_version(cli: Cli) -> None:
    assert cli("--version") == Outcome(0, f"mtpcheck {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "nonsense"),
        (["verify"], "REFERENCE"),
        (["verify", "a"], "CANDIDATE"),
        (["convert", "a"], "DST"),
        (["convert", "a", "b", "c"], "unexpected"),
        (["inspect", "a", "--bogus"], "--bogus"),
        (["inspect", "a", "--family"], "--family"),
        (["roundtrip", "a", "--spec", "vllm"], "--spec"),
        (["roundtrip", "a", "--vocab-multiple", "0"], "--vocab-multiple"),
        (["convert", "a", "b", "--to", "zarr"], "--to"),
        (["verify", "a", "b", "--only", "main"], "--only"),
        (["verify", "a", "b", "--report", "xml=r"], "--report xml=r"),
        (["verify", "a", "b", "--report", "json"], "--report json"),
        (["verify", "a", "b", "--report", "json="], "--report json="),
        (["verify", "a", "b", "--report", "json=no/such/folder/r.json"], "no/such/folder"),
        (["verify", "a", "b", "--report", "json=."], "folder"),
        (["verify", "a", "b", "--report", "json=a/r.json"], "folder"),
    ],
)  # fmt: skip
def test_usage_errors(arguments: list[str], word: str, cli: Cli) -> None:
    outcome = cli(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert word in outcome.err
    assert "Traceback" not in outcome.err


def test_no_command_shows_help(cli: Cli) -> None:
    outcome = cli()
    assert outcome.code == 2
    assert "Usage: mtpcheck" in outcome.out + outcome.err
    assert "Traceback" not in outcome.err


def test_as_a_module(started: Started) -> None:
    process = started("--version")
    assert process.communicate() == (f"mtpcheck {__version__}\n", "")
    assert process.returncode == 0


def test_exit_codes_of_the_process(started: Started, tmp_path: Path) -> None:
    process = started("inspect", tmp_path / "no", PYTHONWARNINGS="error")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == f"mtpcheck: {tmp_path / 'no'}: no such folder\n"


def test_light_commands_import_neither_torch_nor_transformers() -> None:
    calls = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    calls += [["inspect", str(fixture_path(name))] for name in ("glm4_moe", "qwen3_mtp", "dense2_tp1", "moegqa_te_tp1")]
    calls += [["inspect", str(fixture_path("dense_tp1", "core-0.19.2")), "--json", "--family", "qwen2"]]
    script = (
        "import sys\nfrom mtpcheck.cli import run\n"
        f"for call in {calls!r}:\n"
        "    assert run(call) == 0, call\n"
        "    heavy = {'torch', 'transformers', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "    assert not heavy, (call, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "layout", "family", "layers"),
    [
        ("glm4_moe", "hf", "glm4_moe", 1), ("llama_mtp", "hf", "llama", 2), ("qwen3_mtp", "hf", "qwen3", 1),
        ("moegqa_te_tp1", "torch_dist", "glm4_moe", 1),
        ("dense2_tp1", "torch_dist", "llama", 2),
    ],
)  # fmt: skip
def test_inspect(name: str, layout: str, family: str, layers: int, cli: Cli) -> None:
    outcome = cli("inspect", fixture_path(name), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    told = {key: found[key] for key in ("schema_version", "command", "layout", "family", "mtp_declared", "mtp_stored")}
    assert told == {"schema_version": 1, "command": "inspect", "layout": layout, "family": family,
                    "mtp_declared": layers, "mtp_stored": layers}  # fmt: skip
    assert found["mtp_parts"] and found["nbytes"] and found["mtp_elements"] < found["elements"]
    text = cli("inspect", fixture_path(name))
    assert (text.code, text.err) == (0, "")
    assert all(word in text.out for word in (layout, family, f"MTP stored   {layers}"))


def test_inspect_tells_what_does_not_fit(yard: MakeYard, cli: Cli) -> None:
    """It describes and does not judge: exit 0."""
    place = yard("qwen2_mtp")
    edit_json(place.source / "config.json", num_nextn_predict_layers=3)
    outcome = cli("inspect", place.source)
    assert outcome.code == 0
    assert "declares 3 MTP layers, stores 1" in outcome.out


def test_inspect_names_the_family_it_is_given(cli: Cli) -> None:
    assert json.loads(cli("inspect", fixture_path("qwen2_mtp"), "--family", "qwen2", "--json").out)["family"] == "qwen2"


@pytest.mark.parametrize("more", [(), ("--quiet",), ("--verbose",), ("--json",), ("--no-acceptance",)])
@pytest.mark.parametrize("command", ["roundtrip", "verify", "inspect", "convert"])
def test_no_colour_and_no_noise_when_piped(command: str, more: tuple[str, ...], yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen3_mtp")
    second = {"verify": [place.source], "convert": [place.target]}.get(command, [])
    if more and (command == "inspect" or (command == "convert" and more != ("--quiet",))):
        return
    before = digest(place.source)
    outcome = cli(command, place.source, *second, *more)
    assert (outcome.code, outcome.err) == (0, "")
    assert "\x1b" not in outcome.out and "\r" not in outcome.out
    assert digest(place.source) == before


def test_quiet_is_one_line(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    good = cli("roundtrip", place.source, "--quiet")
    assert (good.code, good.out, good.err) == (0, "HOLDS; not judged: acceptance\n", "")
    flip_byte(place.source / "model.safetensors")
    bad = cli("verify", fixture_path("qwen2_mtp"), place.source, "-q")
    assert (bad.code, bad.out, bad.err) == (1, "FAILS: 1 failure; not judged: files, acceptance\n", "")


def test_exit_zero_forgives_failures_alone(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    flip_byte(place.source / "model.safetensors")
    outcome = cli("verify", fixture_path("qwen2_mtp"), place.source, "--exit-zero")
    assert outcome.code == 0 and "FAILS" in outcome.out
    assert cli("verify", fixture_path("qwen2_mtp"), place.out / "no", "--exit-zero").code == 2


def test_only_mtp(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(place.source / "model.safetensors", lambda tensors: tensors[name].neg_())
    pair = fixture_path("qwen2_mtp"), place.source
    assert cli("verify", *pair).code == 1
    assert cli("verify", *pair, "--only", "mtp").code == 0
    edit_tensors(place.source / "model.safetensors", lambda tensors: tensors["mtp.fc.weight"].neg_())
    assert cli("verify", *pair, "--only", "mtp").code == 1


def test_keep(yard: MakeYard, cli: Cli) -> None:
    place = yard("glm4_moe")
    assert cli("roundtrip", place.source, "--keep", place.target).code == 0
    assert sorted(path.name for path in place.target.iterdir()) == ["hf", "torch_dist"]
    assert digest(place.target / "hf") == digest(place.source)
    assert cli("verify", place.source, place.target / "torch_dist").code == 0


@pytest.mark.parametrize("options", [(), ("--workdir", "out")])
def test_roundtrip_leaves_nothing(options: tuple[str, ...], yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    assert cli("roundtrip", place.source, *(place.out if o == "out" else o for o in options)).code == 0
    assert place.left_behind == []


def test_convert_to_hf_of_hf_is_refused(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    outcome = cli("convert", place.source, place.target, "--to", "hf")
    assert (outcome.code, outcome.out, place.left_behind) == (2, "", [])
    assert "HF checkpoint already" in outcome.err


def test_long_and_odd_names_stand_whole(yard: MakeYard, cli: Cli) -> None:
    """Never truncated or wrapped, no markup, no control character that a terminal would obey."""
    import torch

    place = yard("qwen2_mtp")
    names = ["model." + "very_long_name." * 20 + "weight", "[bold]odd[/bold] \x1b[31m\a\nname"]
    odd = {name: torch.ones(1) for name in names}
    edit_tensors(place.source / "model.safetensors", lambda tensors: tensors.update(odd))
    texts = [cli("verify", fixture_path("qwen2_mtp"), place.source).out, cli("inspect", place.source).out]
    texts.append(cli("convert", place.source, place.target).err)
    for text in texts:
        assert names[0] in text
        assert "[bold]odd[/bold] \\x1b[31m\\x07\\nname" in text
        assert "\x1b" not in text and "\a" not in text


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_terminals_without_unicode(environment: dict[str, str], started: Started) -> None:
    process = started("verify", fixture_path("qwen2_mtp"), fixture_path("qwen2_mtp"), **environment)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "HOLDS" in out


def test_path_that_is_no_text(yard: MakeYard, started: Started) -> None:
    place = yard("qwen2_mtp")
    odd = os.fsdecode(os.fsencode(place.source.parent) + b"/odd\xff")
    place.source.rename(odd)
    process = started("inspect", odd, "--json")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["path"] == odd


def test_closed_pipe_is_no_failure_of_the_checkpoint(started: Started) -> None:
    process = started("inspect", fixture_path("qwen2_mtp"))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (2, "")


def test_every_check_in_the_help_text_of_reports_is_known() -> None:
    """Stable ids: what the code reports stands in the table."""
    from mtpcheck.report.report import check_table

    known = {f"{group}.{name}" for group, entry in check_table().items() for name in entry["ids"]}
    package = Path(sys.modules["mtpcheck"].__file__ or "").parent
    used = {
        match
        for path in package.rglob("*.py")
        for match in re.findall(
            r'"((?:structure|presence|declaration|values|result|commands|accepted)\.[a-z_]+)"', path.read_text()
        )
    }
    assert used <= known
