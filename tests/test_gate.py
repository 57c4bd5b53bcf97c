"""The gate: an honest converter passes, six broken ones fail with their cause, and whatever else commands may do."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.cli import run
from mtpcheck.perturb import perturb
from mtpcheck.tensormap import is_mtp, read_tensor_map
from tests.coded import make as make_fp8
from tests.conftest import FIXTURES, Outcome, digest, edit_tensors, fixture_path
from tests.schema import faults

Cli = Callable[..., Outcome]
Document = dict[str, Any]
EXAMPLES = FIXTURES.parent / "examples"
PAIR = {
    "to_megatron": ["python", "converter.py", "to-megatron", "{src}", "{dst}"],
    "to_hf": ["python", "converter.py", "to-hf", "{src}", "{dst}", "{original}"],
}
BROKEN = {
    "drops_mtp": ("glm4_moe", "presence.missing", "dropped"),
    "drops_declaration": ("glm4_moe", "declaration.mtp", ""),
    "halves": ("glm4_moe", "values.bits", "halves-exchanged"),
    "back_fills": ("glm4_moe", "values.bits", "back-filled"),
    "casts_bias": ("glm4_moe", "values.bits", "cast"),
    "second_layer": ("llama_mtp", "presence.missing", "dropped"),
}

pytestmark = pytest.mark.xdist_group("gate")


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    """The caller's: ``python`` is the one that runs the tests, and finds this mtpcheck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(FIXTURES.parent))
        yield


def settings(folder: Path, *cases: Document, accept: list[Document] | None = None, **shared: Any) -> Path:
    path = folder / "mtpcheck.yaml"
    document: Document = {"gate": {**shared, "cases": list(cases)}}
    path.write_text(yaml.safe_dump(document | ({"accept": accept} if accept else {}), sort_keys=False))
    return path


def by_name(outcome: Outcome) -> dict[str, Document]:
    document = json.loads(outcome.out)
    assert list(faults(document)) == []
    return {" ".join(case["subjects"]): case for case in document["cases"]}


def failures(case: Document) -> list[Document]:
    return [finding for finding in case["findings"] if finding["severity"] == "failure"]


def shell(script: str) -> list[str]:
    """A command that does this; $1 is {src}, $2 {dst}, $3 {original}."""
    return ["sh", "-c", script, "sh", "{src}", "{dst}", "{original}"]


# ---- converters


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    """The honest pair and all broken ones, in one run."""
    folder = tmp_path_factory.mktemp("gate")
    cases: list[Document] = [{"name": "honest", "source": "glm4_moe", **PAIR}]
    for name, (source, _, _) in BROKEN.items():
        own = {way: [word.replace("converter", f"broken_{name}") for word in line] for way, line in PAIR.items()}
        cases.append({"name": name, "source": source, **own})
    path = settings(folder, *cases, cwd=str(EXAMPLES))
    assert run(["gate", "--config", str(path), "--no-acceptance", "-q", "--report", f"json={folder / 'out.json'}"]) == 1
    return by_name(Outcome(1, (folder / "out.json").read_text(), ""))


def test_the_honest_pair_passes(judged: dict[str, Document]) -> None:
    case = judged["honest"]
    assert (case["verdict"], failures(case), case["family"]) == ("holds", [], "glm4_moe")
    assert {check["detail"].split(":")[0] for check in case["checks"] if check["group"] == "values"} == set(PAIR)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pair_fails_with_its_cause(judged: dict[str, Document], name: str) -> None:
    _, check, cause = BROKEN[name]
    found = [(finding["check"], finding.get("cause_id", "")) for finding in failures(judged[name])]
    assert (check, cause) in found
    assert judged[name]["verdict"] == "fails"


def test_exchanged_halves_show_in_megatron_alone(judged: dict[str, Document]) -> None:
    statuses = {c["detail"].split(":")[0]: c["status"] for c in judged["halves"]["checks"] if c["group"] == "values"}
    assert statuses == {"to_megatron": "failed", "to_hf": "passed"}


def test_all_of_a_layer_that_was_filled_in_is_named(judged: dict[str, Document]) -> None:
    """The perturbed copies of embedding and head too, which the honest half of that converter writes."""
    found = next(f for f in failures(judged["back_fills"]) if f.get("cause_id") == "back-filled")
    model = read_tensor_map(open_checkpoint(fixture_path("glm4_moe")))
    own = {model.names[part] for part in model.parts if is_mtp(part) and part not in model.copies}
    assert set(found["members"]) == own
    assert "training" in found["todo"]


NOTED = """
import sys, converter
from pathlib import Path
from safetensors.torch import load_file

arguments, to_hf, load = converter.arguments, converter.to_hf, converter.torch.load


def noting(config):
    made = arguments(config)
    made.came_from = str(Path(sys.argv[2]).resolve())
    return made


def loaded(path):
    global came_from
    saved = load(path)
    came_from = Path(saved["args"].came_from)
    return saved


def filled_in(megatron, config, original):
    before = {name: own for shard in came_from.glob("*.safetensors") for name, own in load_file(shard).items()}
    return {name: before[name] if ".layers.3." in name else own
            for name, own in to_hf(megatron, config, original).items()}


converter.arguments, converter.to_hf, converter.torch.load = noting, filled_in, loaded
converter.main()
"""
TRUNK = """
import converter
from safetensors.torch import load_file

honest = converter.to_hf
WANTED = {WANTED}


def to_hf(megatron, config, original):
    before = {name: own for shard in original.glob("*.safetensors") for name, own in load_file(shard).items()}
    return honest(megatron, config, original) | {name: before[name] for name in WANTED}


converter.to_hf = to_hf
converter.main()
"""


def back_filled(cli: Cli, folder: Path, script: str) -> set[str]:
    """Names that the report of a converter says were filled in; nothing else is wrong with it."""
    (folder / "theirs.py").write_text(f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{script}")
    own = {way: [word.replace("converter.py", "theirs.py") for word in line] for way, line in PAIR.items()}
    path = settings(folder, {"source": "glm4_moe", **own})
    (found,) = failures(by_name(cli("gate", "--config", path, "--no-acceptance", "--json"))["glm4_moe"])
    assert (found["check"], found["cause_id"]) == ("values.bits", "back-filled")
    return set(found.get("members", [found["subject"]]))


def test_a_converter_that_notes_where_its_source_was_finds_the_original_there(cli: Cli, tmp_path: Path) -> None:
    assert {name.split(".")[2] for name in back_filled(cli, tmp_path, NOTED)} == {"3"}


def test_one_tensor_of_the_trunk_that_was_filled_in(cli: Cli, tmp_path: Path) -> None:
    wanted = {"model.norm.weight", "model.layers.1.mlp.experts.0.up_proj.weight"}
    assert back_filled(cli, tmp_path, TRUNK.replace("{WANTED}", repr(wanted))) == wanted


@pytest.mark.parametrize(
    ("script", "check", "told"),
    [
        ('ln -s "$(dirname "$2")/source" "$2"', "commands.outside", "a link to what lies elsewhere"),
        ('cp -rl "$(dirname "$2")/source" "$2"', "values.bits", "filled in from the original"),
    ],
)
def test_what_links_to_the_source_is_no_conversion(
    cli: Cli, tmp_path: Path, script: str, check: str, told: str
) -> None:
    path = settings(tmp_path, {"source": "qwen3_mtp", "to_hf": shell(script)})
    outcome = cli("gate", "--config", path, "--no-acceptance", "--json")
    (found,) = failures(by_name(outcome)["qwen3_mtp"])
    assert (outcome.code, found["check"]) == (1, check)
    assert told in found["message"] + found.get("cause", "")


def test_three_cases_in_a_minute_of_two_cores(cli: Cli) -> None:
    """With acceptance, in order. Cores may be shared, so what is held to a minute is half the time of processors."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    outcome = cli("gate", "--config", EXAMPLES / "mtpcheck.yaml")
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime for a, b in zip(after, before, strict=True))
    lines = outcome.out.splitlines()
    assert outcome.code == 0, outcome.out
    assert [line.split()[1] for line in lines[2:5]] == ["glm4_moe", "llama_mtp", "one"]
    assert lines[-1] == "HOLDS: 3 of 3 cases"
    assert max(map(len, lines)) <= 80
    assert spent / 2 < 60


def test_acceptance_is_measured_on_an_unperturbed_pass(cli: Cli, tmp_path: Path) -> None:
    """Of one direction, whose commands are copies that mtpcheck made."""
    made = tmp_path / "made"
    assert cli("convert", fixture_path("qwen2_mtp"), made, "-q").code == 0
    path = settings(
        tmp_path, {"source": "qwen2_mtp"}, to_megatron=shell(f"{sys.executable} -m mtpcheck convert $1 $2 -q")
    )
    case = by_name(cli("gate", "--config", path, "--json"))["qwen2_mtp"]
    assert case["verdict"] == "holds"
    assert [column["logits_bit_equal_to_first"] for column in case["acceptance"]] == [True, True]
    assert next(c["detail"] for c in case["checks"] if c["group"] == "acceptance").startswith("unperturbed: ")
    assert digest(made)


# ---- one direction, and the source


def test_only_the_way_back(cli: Cli, tmp_path: Path) -> None:
    """mtpcheck makes the Megatron side, here files of two ranks, from the perturbed source."""
    script = f'test -d "$1"/release/mp_rank_01 && {sys.executable} -m mtpcheck convert "$1" "$2" -q'
    path = settings(tmp_path, {"source": "glm4_moe", "tp": 2, "layout": "torch"}, to_hf=shell(script))
    outcome = cli("gate", "--config", path, "--no-acceptance", "--json")
    assert outcome.code == 0, outcome.out
    assert by_name(outcome)["glm4_moe"]["notes"] == ["107 of 107 tensors were perturbed"]


def test_what_is_kept(cli: Cli, tmp_path: Path) -> None:
    path = settings(tmp_path, {"source": "qwen3_mtp", "to_megatron": shell('echo hello; cp -r "$1" "$2"')})
    outcome = cli("gate", "--config", path, "--keep", tmp_path / "kept", "--no-acceptance")
    case = tmp_path / "kept" / "qwen3_mtp"
    assert outcome.code == 1
    assert "a Megatron checkpoint" in outcome.out
    assert digest(case / "megatron") == digest(case / "source")
    assert digest(case / "original") == digest(fixture_path("qwen3_mtp"))
    assert (case / "to_megatron.log").read_text() == "hello\n"
    assert "exists already" in cli("gate", "--config", path, "--keep", tmp_path / "kept").err
    inside = shutil.copytree(fixture_path("qwen3_mtp"), tmp_path / "inside")
    path = settings(tmp_path, {"source": "./inside"}, to_megatron=shell("exit 1"))
    assert "lies inside the source" in cli("gate", "--config", path, "--keep", inside / "kept").err


def test_a_source_that_cannot_be_one(cli: Cli, tmp_path: Path) -> None:
    assert cli("convert", fixture_path("qwen2_mtp"), tmp_path / "megatron", "-q").code == 0
    copy = shutil.copytree(fixture_path("qwen2_mtp"), tmp_path / "without")
    edit_tensors(copy / "model.safetensors", lambda tensors: [tensors.pop(n) for n in list(tensors) if "mtp." in n])
    path = settings(tmp_path, {"source": "megatron"}, {"source": "./without"}, to_megatron=shell("exit 1"))
    outcome = cli("gate", "--config", path)
    assert outcome.code == 2
    assert "is a Megatron checkpoint; a source of the gate is a Hugging Face folder" in outcome.out
    assert "declares 1 MTP layer and stores none" in outcome.out
    assert "COULD NOT JUDGE: 2 of 2 cases" in outcome.out


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("glm4_mo", "no such folder, and no fixture of that name; did you mean 'glm4_moe'?"),
        ("./nowhere", "./nowhere: no such folder"),
    ],
)
def test_a_source_that_is_not_there(cli: Cli, tmp_path: Path, source: str, told: str) -> None:
    path = settings(tmp_path, {"source": source}, to_megatron=shell("exit 1"))
    outcome = cli("gate", "--config", path)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{path}:8: {source}: no such folder" in outcome.err or told in outcome.err
    assert told in outcome.err


# ---- commands that misbehave

CASES: dict[str, tuple[str, str, list[str]]] = {
    "fails": ("echo first; echo last words >&2; exit 3", "commands.failed", ["ended with exit code 3", "last words"]),
    "is killed": ("kill -9 $$", "commands.failed", ["ended with signal 9"]),
    "is silent": ("true", "commands.nothing", ["wrote nothing"]),
    "makes an empty folder": ('mkdir "$2"', "commands.nothing", ["wrote nothing"]),
    "writes rubbish": ('mkdir "$2"; echo x > "$2"/x', "commands.output", ["not a checkpoint"]),
    "writes a file": ('echo x > "$2"', "commands.output", ["is a file"]),
    "copies": ('cp -r "$1" "$2"', "commands.output", ["a Megatron checkpoint", "hf"]),
    "changes its source": ('echo >> "$1"/config.json', "commands.outside", ["changed: source/config.json"]),
    "changes the original": ('rm "$3"/tokenizer.json', "commands.outside", ["gone: original/tokenizer.json"]),
    "writes beside": ('mkdir "$2"; echo x > "$2"/../beside', "commands.outside", ["new: beside"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def misbehaved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    folder = tmp_path_factory.mktemp("misbehave")
    path = settings(folder, *({"name": name, "source": "qwen3_mtp", "to_megatron": shell(script)}
                              for name, (script, _, _) in CASES.items()))  # fmt: skip
    assert run(["gate", "--config", str(path), "-q", "--report", f"json={folder / 'out.json'}"]) == 1
    return by_name(Outcome(1, (folder / "out.json").read_text(), ""))


@pytest.mark.parametrize("name", CASES)
def test_a_command_that(misbehaved: dict[str, Document], name: str) -> None:
    _, check, told = CASES[name]
    found = next(finding for finding in failures(misbehaved[name]) if finding["check"] == check)
    assert found["subject"] == "to_megatron"
    assert all(text in json.dumps(found, ensure_ascii=False) for text in told)
    assert [c["status"] for c in misbehaved[name]["checks"] if c["group"] == "commands"] == ["failed"]
    assert "/mtpcheck-" not in json.dumps(misbehaved[name])  # the working folder is gone


def test_the_tail_of_the_output_is_told(misbehaved: dict[str, Document]) -> None:
    notes = misbehaved["fails"]["notes"]
    assert notes[-2:] == ["to_megatron printed: first", "to_megatron printed: last words"]


def test_a_command_that_hangs_is_stopped_with_all_its_children(cli: Cli, tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; echo waiting; wait"
    path = settings(tmp_path, {"source": "qwen3_mtp", "timeout": 0.5}, to_megatron=shell(script))
    start = time.monotonic()
    outcome = cli("gate", "--config", path)
    assert outcome.code == 1
    assert time.monotonic() - start < 30
    assert "commands.timeout" in outcome.out
    assert "did not end within 0.5 s and was stopped" in outcome.out
    assert "to_megatron printed: waiting" in outcome.out
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def test_workers_in_sessions_of_their_own_are_stopped_too(cli: Cli, tmp_path: Path) -> None:
    """As those of torchrun are; neither they nor a worker of a worker heed SIGTERM."""
    script = f"trap '' TERM; setsid sh -c 'setsid sleep 300 & echo $! > {tmp_path}/child; wait' & wait"
    path = settings(tmp_path, {"source": "qwen3_mtp", "timeout": 2}, to_megatron=shell(script))
    outcome = cli("gate", "--config", path)
    assert outcome.code == 1 and "commands.timeout" in outcome.out
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_signal_stops_commands_and_leaves_nothing(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "temporary").mkdir()
    script = f"sleep 300 & echo $! > {tmp_path}/child; wait"
    path = settings(tmp_path, {"source": "qwen3_mtp"}, to_megatron=shell(script))
    process = started("gate", "--config", path, TMPDIR=str(tmp_path / "temporary"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "child").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 143
    assert not _runs(int((tmp_path / "child").read_text()))
    assert not list((tmp_path / "temporary").iterdir())


def test_nothing_is_left_running_in_the_background(cli: Cli, tmp_path: Path) -> None:
    script = f"sleep 300 >/dev/null 2>&1 & echo $! > {tmp_path}/child"
    path = settings(tmp_path, {"source": "qwen3_mtp"}, to_megatron=shell(script))
    assert cli("gate", "--config", path).code == 1
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def test_a_program_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    """Nobody's checkpoint is at fault; another case that fails still does."""
    missing = {"name": "missing", "source": "qwen3_mtp", "to_megatron": ["nosuchprogram", "{src}", "{dst}"]}
    failing = {"name": "failing", "source": "qwen3_mtp", "to_megatron": shell("exit 1")}
    outcome = cli("gate", "--config", settings(tmp_path, missing))
    assert outcome.code == 2
    assert "nosuchprogram: cannot be run in" in outcome.out
    assert cli("gate", "--config", settings(tmp_path, missing, failing)).code == 1
    assert cli("gate", "--config", settings(tmp_path, missing, failing), "--exit-zero").code == 0


def test_a_hard_link_is_no_change(cli: Cli, tmp_path: Path) -> None:
    path = settings(tmp_path, {"source": "qwen3_mtp"}, to_megatron=shell('mkdir "$2"; ln "$1"/tokenizer.json "$2"/x'))
    case = by_name(cli("gate", "--config", path, "--json"))["qwen3_mtp"]
    assert [finding["check"] for finding in failures(case)] == ["commands.output"]


def test_the_environment_is_the_callers(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_OWN", "as it was")
    (tmp_path / "work").mkdir()
    path = settings(tmp_path, {"source": "qwen3_mtp", "tp": 3, "ep": 2, "cwd": "work"},
                    to_megatron=shell("echo $THEIR_OWN {family} {tp} {etp} {ep} {{tp}} `pwd`; exit 1"))  # fmt: skip
    notes = by_name(cli("gate", "--config", path, "--json"))["qwen3_mtp"]["notes"]
    assert notes[-1] == f"to_megatron printed: as it was qwen3 3 3 2 {{tp}} {tmp_path}/work"


# ---- reports


def test_every_format_has_all_cases(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "outputs"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    formats = ("json", "junit", "github", "markdown", "html")
    cases = [{"name": name, "source": "qwen3_mtp", "to_megatron": shell("exit 1")} for name in ("one", "two")]
    reports = [f"--report={name}={tmp_path / name}" for name in formats]
    outcome = cli("gate", "--config", settings(tmp_path, *cases), *reports)
    assert outcome.code == 1
    for name in formats:
        text = (tmp_path / name).read_text()
        assert "one" in text and "two" in text and "ended with exit code 1" in text, name
    assert (tmp_path / "html").read_text().count("<h1") == 3
    assert (tmp_path / "outputs").read_text() == "verdict=fails\nacceptance=\n"
    assert (tmp_path / "summary").read_text() == (tmp_path / "markdown").read_text()
    quiet = cli("gate", "--config", tmp_path / "mtpcheck.yaml", "-q", "--case", "two")
    assert quiet.out == "FAILS: 1 of 1 case\n"
    assert (
        "no case 'three' (there: one, two)"
        in cli("gate", "--config", tmp_path / "mtpcheck.yaml", "--case", "three").err
    )


def test_two_runs_tell_the_same(cli: Cli, tmp_path: Path) -> None:
    path = settings(tmp_path, {"source": "qwen3_mtp"}, to_megatron=shell('cp -r "$1" "$2"; cp -r "$1" "$2".more'))
    assert cli("gate", "--config", path, "--json").out == cli("gate", "--config", path, "--json").out


# ---- perturbed sources


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_mtp", "llama_mtp", "mimo", "glm_moe_dsa"])
def test_every_mtp_tensor_is_perturbed_and_stays_sane(tmp_path: Path, name: str) -> None:
    source = fixture_path(name)
    before = digest(source)
    changed = perturb(source, tmp_path / "copy", seed=3)
    assert digest(source) == before
    assert perturb(source, tmp_path / "again", seed=3) == changed
    assert digest(tmp_path / "again") == digest(tmp_path / "copy")
    a, b = (read_tensor_map(open_checkpoint(folder)) for folder in (source, tmp_path / "copy"))
    assert {a.names[part] for part in a.parts if is_mtp(part)} <= set(changed) == set(a.names.values())
    for part, ref in a.parts.items():
        other = b.parts[part]
        assert (ref.dtype, ref.shape) == (other.dtype, other.shape)
        assert (ref.read() != other.read()) is (a.names[part] in changed), part
    for part, original in a.copies.items():
        if part in a.parts and original in a.parts:
            assert b.parts[part].read() == b.parts[original].read()


def test_a_copy_can_be_written_and_holds_what_is_of_the_checkpoint(tmp_path: Path) -> None:
    source = shutil.copytree(fixture_path("qwen3_mtp"), tmp_path / "source")
    for path in source.iterdir():
        path.chmod(0o444)
    perturb(source, tmp_path / "copy")
    (source / ".cache").mkdir()
    (source / ".cache" / "etc").symlink_to("/etc")
    (source / ".cache" / "gone").symlink_to("nowhere")
    perturb(source, tmp_path / "again")
    assert not (tmp_path / "again" / ".cache").exists() and digest(tmp_path / "again") == digest(tmp_path / "copy")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").iterdir()}
    assert modes == {0o644}


def test_noise_is_in_the_last_two_bits_and_leaves_zeros(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    perturb(fixture_path("qwen2_mtp"), tmp_path / "copy")
    before, after = (load_file(f / "model.safetensors") for f in (fixture_path("qwen2_mtp"), tmp_path / "copy"))
    for name, tensor in before.items():
        a, b = tensor.view(torch.int16), after[name].view(torch.int16)
        assert ((a ^ b) & ~3 == 0).all()
        assert (a[tensor == 0] == b[tensor == 0]).all()
        assert torch.isfinite(after[name].float()).all()


def test_what_is_all_zero_or_not_finite(tmp_path: Path) -> None:
    import torch

    source = shutil.copytree(fixture_path("qwen2_mtp"), tmp_path / "source")

    def edit(tensors: dict[str, Any]) -> None:
        tensors["mtp.norm.weight"][:] = 0
        tensors["mtp.fc.weight"][0, 0] = float("inf")
        tensors["mtp.fc.weight"][0, 1] = float("nan")

    edit_tensors(source / "model.safetensors", edit)
    assert "mtp.norm.weight" in perturb(source, tmp_path / "copy")
    after = read_tensor_map(open_checkpoint(tmp_path / "copy"))
    raw = torch.frombuffer(bytearray(after.parts["mtp.0.proj.embed"].read()), dtype=torch.bfloat16)
    assert torch.isinf(raw[0]) and torch.isnan(raw[1])


def test_codes_change_places_within_their_block(tmp_path: Path) -> None:
    source = make_fp8(tmp_path / "fp8")
    changed = perturb(source, tmp_path / "copy")
    a, b = (open_checkpoint(folder) for folder in (source, tmp_path / "copy"))
    codes = [name for name in changed if a.tensors[name].dtype == "F8_E4M3"]
    own = read_tensor_map(a)
    assert codes and {name for name in own.encoded if name.startswith("model.layers.3.")} <= set(codes)
    assert not [name for name in changed if "scale" in name]
    for name in codes:
        width, columns = own.encoded[name].grid.block[1], a.tensors[name].shape[1]
        before, after = (_rows(side.tensors[name].read(), columns) for side in (a, b))
        for first in range(0, columns, width):
            for one, other in zip(before, after, strict=True):
                assert sorted(one[first : first + width]) == sorted(other[first : first + width])


def _rows(raw: bytes, columns: int) -> list[bytes]:
    return [raw[i : i + columns] for i in range(0, len(raw), columns)]
