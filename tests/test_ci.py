"""What runs mtpcheck in CI: the action's steps as a runner runs them, and the commit hooks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpcheck.data import configs
from tests.conftest import FIXTURES
from tests.test_graft import MTP, lose

ROOT = Path(__file__).parent.parent
GOOD = FIXTURES / "qwen2_mtp"


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


MTPCHECK = f'PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m mtpcheck "$@"'


@dataclass
class Runner:
    """Runs the ``run`` steps of a composite action with bash, as GitHub does; other steps are told and not run."""

    folder: Path
    inputs: dict[str, str]
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    used: list[dict[str, Any]] = field(default_factory=list)
    printed: str = ""
    summary: str = ""
    failed: bool = False

    def run(self, action: Mapping[str, Any]) -> Runner:
        given = {name: entry["default"] for name, entry in action["inputs"].items() if "default" in entry}
        assert self.inputs.keys() <= action["inputs"].keys()
        self.inputs = {**given, **self.inputs}
        for step in action["runs"]["steps"]:
            if "uses" in step:
                assert step["if"].startswith("always() && ")
                if self.value(step["if"].removeprefix("always() && ")):
                    self.used.append({key: self.filled(text) for key, text in step["with"].items()})
            elif not self.failed:
                self._step(step)
        return self

    def _step(self, step: Mapping[str, Any]) -> None:
        files = {name: self.folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for path in files.values():
            path.write_text("")
        told = {name: self.filled(text) for name, text in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env={**os.environ, **told, **{name: str(path) for name, path in files.items()}},
            cwd=self.folder / self.filled(step.get("working-directory", ".")),
            capture_output=True,
            text=True,
        )
        self.failed, self.printed = done.returncode != 0, done.stdout + done.stderr
        self.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        lines = files["GITHUB_OUTPUT"].read_text().splitlines()
        self.outputs[step.get("id", "")] = dict(line.split("=", 1) for line in lines)

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: str(self.value(found[1])), str(text))

    def value(self, expression: str) -> Any:
        if found := re.fullmatch(r"(.*) != ''", expression):
            return self.value(found[1]) != ""
        where, *path = expression.split(".")
        if where == "inputs":
            return self.inputs[".".join(path)]
        if where == "steps":
            return self.outputs[path[0]].get(path[2], "")
        return {"github.action_path": str(ROOT), "runner.temp": str(self.folder / "temp")}[expression]


@pytest.fixture
def action() -> Any:
    return yaml.safe_load((ROOT / "action.yml").read_text())


@pytest.fixture
def play(action: Any, tmp_path: Path) -> Callable[..., Runner]:
    """``play(**inputs)``: run the action. Its python makes environments whose pip does nothing and whose mtpcheck is
    this one; every call is a line of ``calls``."""
    calls = shlex.quote(str(tmp_path / "calls"))
    script(
        tmp_path / "python",
        f'if [ "$1" = -c ]; then exec {shlex.quote(sys.executable)} "$@"; fi\n'
        f'echo "$@" >> {calls}\n'
        '[ "$2" = venv ] || exit 0\n'
        'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"\n'
        f'printf \'#!/bin/bash\\n%s\\n\' {shlex.quote(MTPCHECK)} > "$3/bin/mtpcheck"; chmod +x "$3/bin/mtpcheck"',
    )
    (tmp_path / "temp").mkdir()

    def run(**inputs: str) -> Runner:
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        return Runner(tmp_path, {"python": str(tmp_path / "python"), **given}).run(action)

    return run


def test_the_action_tells_verdict_summary_and_reports(play: Callable[..., Runner], tmp_path: Path) -> None:
    broken = lose(GOOD, tmp_path / "a b", MTP["qwen2_mtp"])
    done = play(command="verify", arguments=f"{GOOD}\n'{broken}' --only mtp\n")
    assert done.failed and "::error title=mtpcheck verify::" in done.printed
    assert done.outputs["run"]["verdict"] == "fails" and done.outputs["run"]["acceptance"] == ""
    report = Path(done.outputs["run"]["report"])
    assert sorted(path.name for path in report.iterdir()) == ["report.html", "report.json", "report.xml"]
    assert json.loads((report / "report.json").read_text())["subjects"] == [str(GOOD), str(broken)]
    assert done.summary.startswith("## mtpcheck verify: FAILS")
    assert done.used == [{"name": "mtpcheck", "path": str(report), "if-no-files-found": "ignore"}]


def test_the_action_installs_apart_from_the_job(play: Callable[..., Runner], tmp_path: Path) -> None:
    done = play(command="accept", arguments=f"{GOOD} --workload a=missing.jsonl", artifact="")
    home = tmp_path / "temp" / "mtpcheck"
    pip = "-m pip install --quiet --disable-pip-version-check"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"-m venv {home}",
        f"{pip} torch --index-url https://download.pytorch.org/whl/cpu",
        f"{pip} {ROOT}",
    ]
    assert done.failed and done.outputs["run"]["verdict"] == "could not judge" and done.used == []


def test_the_action_may_report_without_failing(play: Callable[..., Runner], tmp_path: Path) -> None:
    broken = lose(GOOD, tmp_path / "broken", MTP["qwen2_mtp"])
    done = play(command="verify", arguments=f"{GOOD} {broken}", fail_on="never")
    assert not done.failed and done.outputs["run"]["verdict"] == "fails"
    assert not play(command="verify", arguments=f"{GOOD} {GOOD}").failed


@pytest.mark.parametrize(
    "inputs, told",
    [
        ({"command": "rm -rf /"}, "command is 'rm -rf /', expected gate"),
        ({"command": "verify", "fail_on": "sometimes"}, "fail-on is 'sometimes'"),
        ({"command": "verify", "arguments": "'unclosed"}, "No closing quotation"),
        ({"command": "verify", "arguments": "$(touch hacked) `touch hacked`; touch hacked"}, ""),
    ],
    ids=["command", "fail-on", "quote", "shell"],
)
def test_inputs_are_words_and_never_code(
    inputs: dict[str, str], told: str, play: Callable[..., Runner], tmp_path: Path
) -> None:
    done = play(**inputs)
    assert done.failed and told in done.printed and done.outputs["run"]["verdict"] == "could not judge"
    assert not (tmp_path / "hacked").exists()


def test_what_the_action_uses_is_pinned(action: Any) -> None:
    used = [step["uses"] for step in action["runs"]["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used)
    assert {"verdict", "acceptance", "report"} == set(action["outputs"])
    assert all("${{" not in step.get("run", "") for step in action["runs"]["steps"])


# ---- pre-commit


HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with family files of its own, and mtpcheck on the PATH."""
    repo = tmp_path / "repo"
    shutil.copytree(configs(), repo / "configs")
    script(tmp_path / "bin" / "mtpcheck", MTPCHECK)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return repo


def test_the_families_hook_takes_family_and_block_files(repository: Path) -> None:
    hook = HOOKS["mtpcheck-families"]
    files = [str(path.relative_to(repository)) for path in repository.rglob("*.yaml")]
    chosen = [file for file in files if re.search(hook["files"], file)]
    assert {Path(file).parent.name for file in chosen} == {"families", "blocks"}
    done = subprocess.run([*shlex.split(hook["entry"]), *chosen], cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "glm4_moe" in done.stdout


@pytest.mark.skipif(shutil.which("pre-commit") is None, reason="pre-commit is not installed")
def test_the_hooks_run_with_try_repo(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "cache"))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", hooks)
    for folder in (hooks, repository):
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            subprocess.run([*git, *command], cwd=folder, check=True)

    def run(hook: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = ["pre-commit", "try-repo", str(hooks), hook, "--all-files", *more]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True)

    done = run("mtpcheck-families")
    assert done.returncode == 0 and "Passed" in done.stdout, done.stdout + done.stderr
    with (repository / "configs" / "families" / "mimo.yaml").open("a") as file:
        file.write("colour: 1\n")
    done = run("mtpcheck-families")
    assert done.returncode == 1 and "mimo.yaml: unknown key 'colour'" in done.stdout
    settings = repository / "mtpcheck.yaml"
    settings.write_text(
        "gate:\n  to_megatron: mtpcheck convert {src} {dst}\n  acceptance: false\n  cases:\n    - source: qwen2_mtp\n"
    )
    subprocess.run([*git, "add", "-A"], cwd=repository, check=True)
    done = run("mtpcheck-gate", "--hook-stage", "pre-push")
    assert done.returncode == 0 and "Passed" in done.stdout, done.stdout + done.stderr
    settings.write_text(settings.read_text().replace("convert {src}", "inspect {src}"))
    done = run("mtpcheck-gate", "--hook-stage", "pre-push")
    assert done.returncode == 1 and "exit code: 1" in done.stdout and "FAILS" in done.stdout, done.stdout
