"""The command ``families check``, registered in ``cli.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtpcheck.errors import FAILS, HOLDS

app = typer.Typer(no_args_is_help=True, help="Family files: what mtpcheck knows of models.")


@app.callback()
def _root() -> None: ...


@app.command()
def check(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Family or block files (YAML).")]) -> int:
    """Prove family files: well-formed, invertible, complete on the Megatron side. Reads no checkpoint.

    Of a block, every family that uses it is proved. What is wrong is one line each.
    """
    from mtpcheck.families import check_files
    from mtpcheck.report.finding import printable

    holding, wrong = check_files(files)
    for line in wrong:
        typer.echo(printable(line))
    if not wrong:
        typer.echo(f"HOLDS: {', '.join(holding) or 'no family uses these files'}")
    return FAILS if wrong else HOLDS
