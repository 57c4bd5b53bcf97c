"""Shared fixtures: checkpoints to copy and damage, and the command line run in this process or in its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the Hub; tests/test_hub.py asks one of its own

FIXTURES = Path(__file__).parent.parent / "fixtures"


def fixture_path(name: str, mcore: str = "core-0.16.1") -> Path:
    """A Hugging Face fixture by its folder, a Megatron one by its case."""
    folder = FIXTURES / name
    return folder if folder.is_dir() else FIXTURES / "megatron" / mcore / name / "torch_dist"


def digest(folder: Path) -> dict[str, str]:
    """Every file and folder below ``folder`` with what it holds, to show that nothing changed."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), raw[start:]


def write_shard(path: Path, header: dict[str, Any] | bytes, data: bytes, claim: int | None = None) -> None:
    """A safetensors file with any header; ``claim`` is the header length it states."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if claim is None else claim).to_bytes(8, "little") + raw + data)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None deletes."""
    table = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def edit_tensors(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def flip_byte(path: Path, offset: int = -1) -> None:
    """Invert one byte of a file, by default the last."""
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0xFF
    path.write_bytes(raw)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Yard:
    """``source`` is a copy to damage; ``out`` and ``tmp`` are empty and must stay so where nothing is written."""

    source: Path
    out: Path
    tmp: Path

    @property
    def target(self) -> Path:
        return self.out / "new"

    @property
    def left_behind(self) -> list[Path]:
        return [*self.out.rglob("*"), *self.tmp.rglob("*")]


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """``copy_of(name)``: a fresh copy of a fixture in the test's own folder."""

    def copy(name: str) -> Path:
        number = sum(1 for _ in tmp_path.glob("source*"))
        return shutil.copytree(fixture_path(name), tmp_path / f"source{number}")

    return copy


@pytest.fixture
def yard(copy_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Yard]:
    """``yard(name)``: a copy of a fixture and empty folders for targets and temporary files."""

    def make(name: str) -> Yard:
        made = Yard(copy_of(name), tmp_path / "out", tmp_path / "tmp")
        made.out.mkdir()
        made.tmp.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(made.tmp))
        return made

    return make


def _without_acceptance(arguments: tuple[object, ...], wanted: bool = False) -> list[str]:
    given = [str(argument) for argument in arguments]
    skip = given[:1] == ["roundtrip"] and not wanted and "--no-acceptance" not in given and "--help" not in given
    return [*given[:1], *["--no-acceptance"] * skip, *given[1:]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """``cli(*arguments)``: run mtpcheck in this process, at 80 columns; a round trip without acceptance, which takes
    seconds, unless ``acceptance`` is set."""
    from mtpcheck.cli import run

    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object, acceptance: bool = False) -> Outcome:
        capfd.readouterr()
        code = run(_without_acceptance(arguments, acceptance))
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``started(*arguments)``: mtpcheck in a process of its own, which none outlives; likewise without acceptance."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mtpcheck", *_without_acceptance(arguments)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, env={**os.environ, **environment}, **pipes))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()
