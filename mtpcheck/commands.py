"""The commands under test: how they are written down, and one run of one of them.

A command is a list of arguments, or one string that is cut like a shell's line; no shell runs it. ``{name}`` in it
stands for what the gate fills in, ``{{name}}`` for these very characters.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mtpcheck.errors import UsageError

PLACEHOLDERS: Mapping[str, str] = {
    "src": "what to convert",
    "dst": "where to write; it does not exist yet, the folder it lies in does",
    "original": "the source before it was perturbed",
    "family": "the family of the source",
    "tp": "tensor parallel size of the case",
    "pp": "pipeline parallel size",
    "vpp": "virtual stages of a pipeline rank",
    "ep": "expert parallel size",
    "etp": "expert tensor parallel size",
}
_NEEDED = ("src", "dst")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
_TAIL, _LINES = 4096, 15
_POLL = 0.02  # seconds between two looks at a command, doubled up to half a second


@dataclass(frozen=True)
class Command:
    """Arguments with placeholders. ``where`` is the file and line that it stands in."""

    arguments: tuple[str, ...]
    where: str

    def filled(self, values: Mapping[str, object]) -> list[str]:
        def fill(match: re.Match[str]) -> str:
            literal, name = match.groups()
            return "{" + literal + "}" if literal else str(values[name])

        return [_PLACEHOLDER.sub(fill, argument) for argument in self.arguments]


def read_command(where: str, key: str, value: Any) -> Command:
    """A command as settings give it. Raises UsageError for unknown and for missing placeholders."""
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise UsageError(f"{where}: {key}: {error}; quote it as for a shell, or give a list") from None
    if not isinstance(value, list) or not value or not all(map(_is_argument, value)):
        raise UsageError(f"{where}: {key}: expected a command line, or a list of arguments that are all text")
    named = [match[2] for argument in value for match in _PLACEHOLDER.finditer(argument) if match[2]]
    for name in named:
        if name not in PLACEHOLDERS:
            near = get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.4)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            known = ", ".join(f"{{{own}}}" for own in PLACEHOLDERS)
            raise UsageError(f"{where}: {key}: unknown placeholder {{{name}}}{hint} (known: {known}; {{{{{name}}}}} "
                             "stands for itself)")  # fmt: skip
    for name in _NEEDED:
        if name not in named:
            raise UsageError(f"{where}: {key}: {{{name}}} is missing: {PLACEHOLDERS[name]}")
    return Command(tuple(value), where)


def _is_argument(value: Any) -> bool:
    """Whether it can be one: text without NUL, and without halves of characters, which YAML can spell."""
    return isinstance(value, str) and "\0" not in value and not re.search("[\ud800-\udfff]", value)


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``code`` is None if it was stopped after its time; ``tail``: the last that it printed."""

    code: int | None
    seconds: float
    tail: str


def run(arguments: list[str], cwd: Path, log: Path, timeout: float, alive: Callable[[], None]) -> Outcome:
    """Run a command in the caller's environment, its output in ``log``; nothing it started is left running.

    ``alive`` is called again and again, and whatever it raises ends the command. Raises UsageError if there is no such
    program.
    """
    start, wait = time.monotonic(), _POLL
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                arguments, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{arguments[0]}: cannot be run in {cwd}: {error.strerror or error}") from None
    try:
        code: int | None = None
        while (code := process.poll()) is None and time.monotonic() - start < timeout:
            alive()
            time.sleep(min(wait, 0.5, max(0.0, start + timeout - time.monotonic())))
            wait *= 2
    finally:
        if process.poll() is None:
            _stop_children(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left running in the background too
        process.wait()
    return Outcome(code, time.monotonic() - start, _tail(log))


def _stop_children(root: int) -> None:
    """End all that a running process started, in sessions of their own too, as torchrun's workers are. Whoever could
    start more is halted first, so that none escapes by losing its parent."""
    halted: set[int] = set()
    new = {root}
    while new:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        halted |= new
        new = _children(halted) - halted
    for pid in halted - {root}:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _children(parents: set[int]) -> set[int]:
    """Processes that these started and that still run; none where the system has no /proc."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) in parents and state not in "ZX":
                found.add(int(file.parent.name))
    return found


def _tail(log: Path) -> str:
    """The last lines of a file, whatever they hold."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()[-_LINES:])
