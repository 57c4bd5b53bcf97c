"""What every judging command shares: run it, render its report everywhere it is wanted, choose the exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mtpcheck.errors import FAILS, HOLDS, MtpcheckError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mtpcheck.draft.probe import Columns, Probing
    from mtpcheck.report.report import Report


def judged(
    command: str,
    subjects: list[Path],
    judge: Callable[[], Report],
    as_json: bool,
    targets: list[str] | None,
    quiet: bool,
    verbose: bool,
    no_acceptance: bool,
    exit_zero: bool,
) -> int:
    """Run a judging command and render its report everywhere it is wanted."""
    from mtpcheck.report import machine

    names = [str(subject) for subject in subjects]
    wanted: list[tuple[str, Path]] = []
    try:
        wanted = [_target(text, subjects) for text in targets or ()]
        report = judge()
    except Exception as error:
        what = command, names, sentence(error)
        _write(wanted, {"json": machine.error_json, "junit": machine.error_junit}, *what)
        if as_json:
            typer.echo(machine.error_json(*what))
        raise
    if no_acceptance:
        report.skip("acceptance", "--no-acceptance was given")
    _write(wanted, {"json": machine.as_json, "junit": machine.as_junit}, report)
    if as_json:
        typer.echo(machine.as_json(report))
    else:
        from mtpcheck.report.terminal import render, verdict_line

        if quiet:
            typer.echo(verdict_line(report))
        else:
            render(report, console(), verbose)
    return HOLDS if exit_zero and report.exit_code == FAILS else report.exit_code


def probing_of(workloads: list[str] | None, columns: Columns) -> Probing:
    """What ``--workload`` and ``--acceptance`` ask for. Raises UsageError for what is no NAME=FILE."""
    from mtpcheck.draft.probe import Probing

    if not workloads:
        return Probing(columns)
    files: dict[str, Path] = {}
    for text in workloads:
        name, _, path = text.partition("=")
        if not name or not path or name in files:
            raise UsageError(f"--workload {text}: expected NAME=FILE, each name once")
        files[name] = Path(path)
    return Probing(columns, files)


def _target(text: str, subjects: list[Path]) -> tuple[str, Path]:
    """Format and path of a report. Refused now what would fail after an hour, or write into a checkpoint."""
    kind, _, name = text.partition("=")
    path = Path(name)
    if kind not in ("json", "junit") or not name:
        raise UsageError(f"--report {text}: expected json=PATH or junit=PATH")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--report {text}: {path} is a folder, or lies in none that exists")
    if any(path.resolve().is_relative_to(subject.resolve()) for subject in subjects):
        raise UsageError(f"--report {text}: lies inside a checkpoint; name a file outside it")
    return kind, path


def _write(wanted: list[tuple[str, Path]], renderers: dict[str, Callable[..., str]], *what: Any) -> None:
    for kind, path in wanted:
        path.write_text(renderers[kind](*what), encoding="utf-8", errors="backslashreplace")


def sentence(error: Exception) -> str:
    return str(error) if isinstance(error, MtpcheckError) else f"{type(error).__name__}: {error}"


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def show_progress(as_json: bool, quiet: bool) -> bool:
    return not (as_json or quiet)
