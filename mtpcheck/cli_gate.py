"""The commands ``gate`` and ``fixture``, registered in ``cli.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpcheck.errors import HOLDS
from mtpcheck.exits import complain
from mtpcheck.flags import Config, ExitZero, Json, Layout, NoAcceptance, Quiet, Reports, Verbose
from mtpcheck.judging import judged, show_progress

if TYPE_CHECKING:
    from mtpcheck.report.report import Cases


def gate(
    config: Config = None,
    case: Annotated[str | None, typer.Option(metavar="NAME", help="Run this case alone.")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep all that was made in this new folder.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases that run at the same time.")] = 2,
    as_json: Json = False,
    report: Reports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_acceptance: NoAcceptance = False,
    exit_zero: ExitZero = False,
) -> int:
    """Run your own conversion commands on small checkpoints, and judge what they write.

    Settings: mtpcheck.yaml, or \\[tool.mtpcheck] of pyproject.toml, the nearest one up to the root of the repository.
    """

    def judge() -> Cases:
        from mtpcheck.accepted import Known
        from mtpcheck.gate import gate as run
        from mtpcheck.settings import find_settings, read_settings

        settings = read_settings(config or find_settings(Path.cwd()))
        show = show_progress(as_json, quiet)
        return run(settings, Known(settings.accepted), case, keep, jobs, not no_acceptance, show)

    return judged("gate", [config] if config else [], judge, as_json, report, quiet, verbose, no_acceptance, exit_zero)


def fixture(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="A family, or the name of a bundled checkpoint.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of a layer.")] = None,
    mtp_layers: Annotated[int | None, typer.Option(min=0, help="MTP layers.")] = None,
    layout: Annotated[Layout, typer.Option(help="How it lies on disk.")] = Layout.hf,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights.")] = 0,
    quiet: Quiet = False,
) -> int:
    """A tiny checkpoint to test your own code with: trained as bundled, or of any size with random weights.

    Example: mtpcheck fixture deepseek_v3 ./tiny --layers 6 --experts 8
    """
    from mtpcheck.fixture import Size, make_fixture

    trained = make_fixture(family, dst, Size(layers, experts, mtp_layers), layout.value, seed)
    if not quiet:
        told = "its head is trained" if trained else "random weights: its head drafts nothing that would be accepted"
        complain(f"{dst}: {family} in {layout.value}; {told}")
    return HOLDS
