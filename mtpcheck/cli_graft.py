"""The command ``graft``, registered in ``cli.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpcheck.errors import UsageError
from mtpcheck.flags import ExitZero, Family, Json, NoAcceptance, Quiet, Reports, Verbose, Workloads
from mtpcheck.judging import judged, probing_of, show_progress

if TYPE_CHECKING:
    from mtpcheck.report.report import Report


def graft(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="HF folder, or repository, that lost its MTP layer; not touched.")
    ],
    donor: Annotated[
        str | None,
        typer.Option("--from", metavar="DONOR", help="HF folder or repository that has it, or what --extract made."),
    ] = None,
    take: Annotated[
        bool, typer.Option("--extract", help="The inverse: split the MTP layer of CKPT off into a folder of its own.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder; by default CKPT-grafted or CKPT-mtp, beside CKPT.")
    ] = None,
    family: Family = None,
    workload: Workloads = None,
    as_json: Json = False,
    report: Reports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_acceptance: NoAcceptance = False,
    exit_zero: ExitZero = False,
) -> int:
    """Put a lost MTP layer back into a fine-tuned or quantized checkpoint, then measure what it drafts.

    Example: mtpcheck graft ./my-finetune --from ./GLM-4.5-Air
    """
    from mtpcheck.graft import extract
    from mtpcheck.graft import graft as run

    def judge() -> Report:
        show = show_progress(as_json, quiet)
        if take == (donor is not None):
            raise UsageError("graft needs one of --from DONOR, to put a layer in, and --extract, to take it out")
        if workload and (take or no_acceptance):
            raise UsageError("--workload says what to draft on, and nothing is run")
        if donor is None:
            return extract(ckpt, out, family, show)
        probing = None if no_acceptance else probing_of(workload, "once")
        return run(ckpt, donor, out, family, probing, show)

    subjects = [ckpt, *([donor] if donor is not None else [])]
    return judged("graft", subjects, judge, as_json, report, quiet, verbose, no_acceptance and not take, exit_zero)
