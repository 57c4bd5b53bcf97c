"""What every judging command shares: run it, render its report everywhere it is wanted, choose the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtpcheck.errors import FAILS, HOLDS, MtpcheckError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mtpcheck.draft.probe import Columns, Probing
    from mtpcheck.report.report import Cases, Report


def judged(
    command: str,
    subjects: Sequence[str | Path],
    judge: Callable[[], Report | Cases],
    as_json: bool,
    reports: list[str] | None,
    quiet: bool,
    verbose: bool,
    no_acceptance: bool,
    exit_zero: bool,
) -> int:
    """Run a judging command and render its report everywhere it is wanted."""
    from mtpcheck.report import formats, machine
    from mtpcheck.report.report import Cases, Unjudged
    from mtpcheck.report.words import verdict_line

    targets: list[formats.Target] = []
    try:
        targets = formats.targets_of(reports or (), subjects, as_json)
        report = judge()
    except Exception as error:
        ended = Unjudged(command, [str(subject) for subject in subjects], sentence(error))
        formats.write(targets, ended)
        if as_json:
            typer.echo(machine.error_json(ended))
        _print(formats.printed(targets, ended))
        raise
    if no_acceptance and not isinstance(report, Cases):
        report.skip("acceptance", "--no-acceptance was given")
    formats.write(targets, report)
    if as_json:
        typer.echo(formats.FORMATS["json"].render(report))
    elif quiet:
        typer.echo(verdict_line(report))
    else:
        from mtpcheck.report.terminal import render, render_cases

        if isinstance(report, Cases):
            render_cases(report, console(), verbose)
        else:
            render(report, console(), verbose)
    _print(formats.printed(targets, report))
    return HOLDS if exit_zero and report.exit_code == FAILS else report.exit_code


def _print(texts: Iterable[str]) -> None:
    for text in texts:
        typer.echo(text, nl=False)


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


def sentence(error: Exception) -> str:
    return str(error) if isinstance(error, MtpcheckError) else f"{type(error).__name__}: {error}"


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def show_progress(as_json: bool, quiet: bool) -> bool:
    return not (as_json or quiet)
