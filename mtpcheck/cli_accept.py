"""The command ``accept``, registered in ``cli.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpcheck.flags import Dialect, ExitZero, Family, Iteration, Json, Quiet, Reports, Source, Verbose, Workloads
from mtpcheck.judging import judged, probing_of, show_progress

if TYPE_CHECKING:
    from mtpcheck.report.report import Report


def accept(
    ckpt: Source,
    family: Family = None,
    dialect: Dialect = None,
    workload: Workloads = None,
    min_acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fail below this acceptance rate (depth 1, all workloads).")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Written if there is none; else fail where it was surely better."),
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="Take config keys and the tokenizer, which Megatron lacks, from here.")
    ] = None,
    decode: Annotated[
        int, typer.Option(metavar="N", min=0, help="Also write N tokens after some prompts, with drafts.")
    ] = 0,
    drafts: Annotated[int, typer.Option(min=0, help="Tokens drafted a round, with --decode.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy, with --decode.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn at a temperature.")] = 0,
    iteration: Iteration = None,
    as_json: Json = False,
    report: Reports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    exit_zero: ExitZero = False,
) -> int:
    """Draft acceptance: run the model and its MTP head, on the CPU, from the files.

    Example: mtpcheck accept ./GLM-4.5-Air --workload chat=our_chats.jsonl
    """
    from mtpcheck.accept import accept as run
    from mtpcheck.draft.writing import Writing

    def judge() -> Report:
        show = show_progress(as_json, quiet)
        probing = probing_of(workload, "once")
        writing = Writing(decode, drafts, temperature, seed) if decode else None
        return run(ckpt, family, probing, min_acceptance, baseline, like, iteration, show, writing, dialect)

    return judged("accept", [ckpt], judge, as_json, report, quiet, verbose, False, exit_zero)
