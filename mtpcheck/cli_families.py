"""The commands ``families`` and ``families check``, registered in ``cli.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtpcheck.errors import FAILS, HOLDS

app = typer.Typer(help="What is supported; and family files of your own, checked.")


@app.callback(invoke_without_command=True)
def families(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/families.md.")] = False,
) -> int:
    """What is supported: layouts, copies, acceptance and sources of every family; and what is not yet.

    A family of your own: mtpcheck families check FILE, then --family FILE with any command.
    """
    from mtpcheck import listing

    if context.invoked_subcommand is None:
        said = json.dumps(listing.as_dict(), indent=2) if as_json else listing.text()
        typer.echo(listing.markdown() if markdown and not as_json else said, nl=not markdown)
    return HOLDS


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
