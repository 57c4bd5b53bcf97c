"""Typer commands: parse, call the API, choose the exit code. No logic lives here.

stdout carries the result, stderr progress and complaints; exits.py turns errors into exit codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from mtpcheck import __version__, cli_families, exits
from mtpcheck.cli_accept import accept
from mtpcheck.cli_gate import fixture, gate
from mtpcheck.cli_graft import graft
from mtpcheck.errors import HOLDS, UsageError
from mtpcheck.exits import complain
from mtpcheck.flags import (
    Acceptance,
    AcceptanceOption,
    AllowNoMtp,
    Columns,
    Config,
    Dialect,
    Ep,
    Etp,
    ExitZero,
    ExpertForm,
    Family,
    First,
    Fp8,
    Fp8Export,
    Fp8ExportOption,
    Fp8Option,
    Iteration,
    Json,
    Last,
    Layout,
    Like,
    Mcore,
    McoreOption,
    MegatronLayout,
    Multiple,
    NoAcceptance,
    Only,
    PipelineLayout,
    Pp,
    Quiet,
    Reports,
    Source,
    Spec,
    SpecOption,
    TextOnly,
    Tp,
    Values,
    Verbose,
    Vpp,
    Workloads,
    options_of,
)
from mtpcheck.judging import console, judged, probing_of, sentence, show_progress

if TYPE_CHECKING:
    from mtpcheck.report.report import Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Does a converted checkpoint still have its multi-token-prediction (MTP) layer, bit for bit?\n\n"
    "Exit codes: 0 holds, 1 the checkpoint fails a check, 2 could not judge.",
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"mtpcheck {__version__}")
        raise typer.Exit(HOLDS)


@app.command()
def inspect(
    ckpt: Source, family: Family = None, dialect: Dialect = None, iteration: Iteration = None, as_json: Json = False
) -> int:
    """What is declared, what is stored, from headers alone."""
    from mtpcheck.inspect import inspect as run
    from mtpcheck.report import machine
    from mtpcheck.report.inspection import render
    from mtpcheck.report.report import Unjudged

    try:
        found = run(ckpt, family, iteration, dialect)
    except Exception as error:
        if as_json:
            typer.echo(machine.error_json(Unjudged("inspect", [str(ckpt)], sentence(error))))
        raise
    if as_json:
        typer.echo(machine.inspection_json(found))
    else:
        render(found, console())
    return HOLDS


@app.command()
def verify(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="What it should be; as CKPT elsewhere.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="What it is.")],
    family: Family = None,
    dialect: Dialect = None,
    values: Annotated[
        Values | None,
        typer.Option(
            help="exact: bit for bit. changed: trained on, tell what moved. headers: read none, the default where one "
            "is on the Hub. sha256: headers, and the Hub's checksums of shards."
        ),
    ] = None,
    headers: Annotated[bool, typer.Option("--headers", help="As --values headers.")] = False,
    sha256: Annotated[bool, typer.Option("--sha256", help="As --values sha256.")] = False,
    only: Annotated[Only | None, typer.Option(help="Compare MTP layers alone.")] = None,
    iteration: Iteration = None,
    as_json: Json = False,
    report: Reports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    acceptance: Acceptance = False,
    workload: Workloads = None,
    no_acceptance: NoAcceptance = False,
    allow_no_mtp: AllowNoMtp = False,
    config: Config = None,
    exit_zero: ExitZero = False,
) -> int:
    """Compare any two checkpoints in any two layouts, whoever made them."""
    from mtpcheck.accepted import add_known
    from mtpcheck.verify import verify as run

    def judge() -> Report:
        show = show_progress(as_json, quiet)
        if workload and not acceptance:
            raise UsageError("--workload says what to draft on: add --acceptance")
        asked = {*([values] if values else []), *([Values.headers] * headers), *([Values.sha256] * sha256)}
        if len(asked) > 1:
            raise UsageError(f"--values {' and '.join(sorted(asked))} at once: each tells how to look at values")
        how: Any = next((value.value for value in asked), None)
        probing = probing_of(workload, "all") if acceptance and not no_acceptance else None
        mtp_alone = only is Only.mtp
        return run(reference, candidate, family, how, mtp_alone, allow_no_mtp, show, iteration, probing, dialect)

    return judged(
        "verify",
        [reference, candidate],
        lambda: add_known(judge(), config),
        as_json,
        report,
        quiet,
        verbose,
        no_acceptance,
        exit_zero,
    )


@app.command()
def roundtrip(
    ckpt: Source,
    family: Family = None,
    dialect: Dialect = None,
    spec: SpecOption = Spec.te,
    vocab_multiple: Multiple = 128,
    mcore: McoreOption = Mcore.core_0_16,
    workdir: Annotated[Path | None, typer.Option(help="Folder for what is made in between.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep both results in this new folder.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Prove it from headers; read and write no weights.")] = False,
    via: Annotated[MegatronLayout | None, typer.Option(help="Layout in between; by default torch_dist.")] = None,
    iteration: Iteration = None,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    first_layers: First = None,
    last_layers: Last = None,
    pipeline_layout: PipelineLayout = "",
    experts: ExpertForm = None,
    fp8: Fp8Option = Fp8.dequantize,
    text_only: TextOnly = False,
    as_json: Json = False,
    report: Reports = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    acceptance: AcceptanceOption = Columns.all,
    workload: Workloads = None,
    no_acceptance: NoAcceptance = False,
    allow_no_mtp: AllowNoMtp = False,
    config: Config = None,
    exit_zero: ExitZero = False,
) -> int:
    """There and back through files, then every check.

    Example: mtpcheck roundtrip ./GLM-4.5-Air --keep /big/disk/check
    """
    from mtpcheck.accepted import add_known
    from mtpcheck.proof import prove
    from mtpcheck.roundtrip import roundtrip as run

    ranks = tp, pp, vpp, ep, etp, first_layers, last_layers, pipeline_layout
    middle: Literal["torch_dist", "torch"] | None = via.value if via else None

    def judge() -> Report:
        options = options_of(spec, vocab_multiple, mcore, ranks, experts, middle, fp8.value, text_only, dialect)
        if workload and (plan or no_acceptance):
            raise UsageError("--workload says what to draft on, and nothing is run")
        if plan:
            return prove(ckpt, family, options, workdir, allow_no_mtp, middle, iteration)
        show = show_progress(as_json, quiet)
        probing = None if no_acceptance else probing_of(workload, acceptance.value)
        return run(ckpt, family, options, workdir, keep, allow_no_mtp, show, middle, iteration, probing)

    return judged(
        "roundtrip",
        [ckpt],
        lambda: add_known(judge(), config),
        as_json,
        report,
        quiet,
        verbose,
        no_acceptance,
        exit_zero,
    )


@app.command()
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")],
    to: Annotated[Layout | None, typer.Option(help="Target layout; by default the other one.")] = None,
    family: Family = None,
    dialect: Dialect = None,
    spec: SpecOption = Spec.te,
    vocab_multiple: Multiple = 128,
    mcore: McoreOption = Mcore.core_0_16,
    like: Like = None,
    iteration: Iteration = None,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    first_layers: First = None,
    last_layers: Last = None,
    pipeline_layout: PipelineLayout = "",
    experts: ExpertForm = None,
    fp8: Fp8ExportOption = Fp8Export.dequantize,
    text_only: TextOnly = False,
    quiet: Quiet = False,
) -> int:
    """One direction. DST appears whole or not at all."""
    from mtpcheck.convert import convert as run
    from mtpcheck.report.inspection import render_converted

    ranks = tp, pp, vpp, ep, etp, first_layers, last_layers, pipeline_layout
    layout: Any = to.value if to else None
    options = options_of(spec, vocab_multiple, mcore, ranks, experts, layout, fp8.value, text_only, dialect)
    show = not quiet
    converted = run(src, dst, layout, family, options, like, iteration=iteration, show_progress=show)
    if not quiet:
        render_converted(converted, console())
    elif converted.exit_code != HOLDS:
        complain(f"{dst}: written, but " + "; ".join(f.message for f in converted.failures))
    return converted.exit_code


app.command()(accept)
app.command()(gate)
app.command()(fixture)
app.command()(graft)
app.add_typer(cli_families.app, name="families")


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return exits.run(app, arguments)


def main() -> NoReturn:
    exits.start(app)
