"""The options that commands share, as Typer reads them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtpcheck.errors import UsageError

if TYPE_CHECKING:
    from mtpcheck.megatron import Options


class Layout(StrEnum):
    hf = "hf"
    torch_dist = "torch_dist"
    torch = "torch"


class MegatronLayout(StrEnum):
    torch_dist = "torch_dist"
    torch = "torch"


class Experts(StrEnum):
    grouped = "grouped"
    sequential = "sequential"
    legacy = "legacy"


class Spec(StrEnum):
    te = "te"
    local = "local"


class Mcore(StrEnum):
    core_0_16 = "0.16"
    core_0_19 = "0.19"


class Fp8(StrEnum):
    dequantize = "dequantize"
    keep = "keep"


class Fp8Export(StrEnum):
    dequantize = "dequantize"
    keep = "keep"
    requantize = "requantize"


class Columns(StrEnum):
    all = "all"
    once = "once"


class Values(StrEnum):
    exact = "exact"
    changed = "changed"
    headers = "headers"
    sha256 = "sha256"


class Only(StrEnum):
    mtp = "mtp"


# paths of checkpoints are strings: ./org/name is no repository, and Path would drop the dot
Source = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="HF folder, Megatron root or iteration folder; or org/name\\[@revision] on the Hub.",
    ),
]
Like = Annotated[
    str | None,
    typer.Option(metavar="CKPT", help="Give an export the form of this checkpoint."),
]
Family = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="Model family, if it cannot be told from the checkpoint, or its YAML file."),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Whose order Megatron's tensors stand in: core, mcore-bridge. By default what keys tell, else core.",
    ),
]
SpecOption = Annotated[Spec, typer.Option(help="Megatron layer spec to write for.")]
Multiple = Annotated[int, typer.Option(min=1, help="Pad the vocabulary to a multiple of this.")]
McoreOption = Annotated[Mcore, typer.Option(help="Write the common state as this megatron-core does.")]
_RANKS = "Ranks (--to torch, --via torch)"
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size.", rich_help_panel=_RANKS)]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel size.", rich_help_panel=_RANKS)]
Vpp = Annotated[int, typer.Option("--vpp", min=1, help="Virtual stages of a pipeline rank.", rich_help_panel=_RANKS)]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Expert parallel size.", rich_help_panel=_RANKS)]
Etp = Annotated[
    int | None, typer.Option("--etp", min=1, help="Expert tensor parallel size; by default TP.", rich_help_panel=_RANKS)
]
First = Annotated[
    int | None, typer.Option("--first-layers", min=1, help="Decoder layers of the first rank.", rich_help_panel=_RANKS)
]
Last = Annotated[
    int | None, typer.Option("--last-layers", min=1, help="Decoder layers of the last rank.", rich_help_panel=_RANKS)
]
PipelineLayout = Annotated[
    str, typer.Option(metavar="Et*3|..|m|L", help="Megatron's pipeline layout.", rich_help_panel=_RANKS)
]
ExpertForm = Annotated[
    Experts | None, typer.Option(help="How modules keep experts; by default as the spec.", rich_help_panel=_RANKS)
]
Fp8Option = Annotated[
    Fp8, typer.Option(help="FP8 weights in between: bf16 values with their scales beside, or codes as they are.")
]
Fp8ExportOption = Annotated[
    Fp8Export,
    typer.Option(help="FP8 weights in Megatron: bf16 values, or codes (keep). In an export trained ones: bf16, or "
                      "quantized anew (requantize)."),
]  # fmt: skip
TextOnly = Annotated[
    bool,
    typer.Option("--text-only", help="Carry tensors that belong to no text model (images) beside Megatron's."),
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="File of settings: mtpcheck.yaml, or a pyproject.toml with \\[tool.mtpcheck]."),
]
Iteration = Annotated[int | None, typer.Option(min=0, help="Take this iteration of a Megatron root.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")]
Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report", metavar="FORMAT=PATH",
        help="Also write json, junit, markdown, html or github to a file, which is replaced. github=- prints GitHub's "
             "annotations after the result (not with --json); github also appends to the step's summary and outputs. "
             "Repeatable.",
    ),
]  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict line alone.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show notes and every finding.")]
AllowNoMtp = Annotated[bool, typer.Option("--allow-no-mtp", help="Judge a model without MTP layers too.")]
AcceptanceOption = Annotated[
    Columns, typer.Option("--acceptance", help="Run the source alone (once), or also every copy of it (all).")
]
Acceptance = Annotated[bool, typer.Option("--acceptance", help="Run both models, and compare what they draft.")]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload", metavar="NAME=FILE",
        help='Draft on this JSON Lines file ({"text": …} or {"ids": […]} a line) instead of the bundled texts. '
             "Repeatable.",
    ),
]  # fmt: skip
NoAcceptance = Annotated[bool, typer.Option("--no-acceptance", help="Do not run the draft probe; the report says so.")]
ExitZero = Annotated[bool, typer.Option("--exit-zero", help="Report failures without failing (exit 0 instead of 1).")]


def options_of(
    spec: Spec,
    multiple: int,
    mcore: Mcore,
    ranks: tuple[Any, ...],
    experts: Experts | None,
    layout: str | None,
    fp8: Literal["dequantize", "keep", "requantize"],
    text_only: bool,
    dialect: str | None,
) -> Options:
    """Options from flags. Raises UsageError for flags that a layout without ranks would ignore."""
    from mtpcheck.megatron import Options
    from mtpcheck.topology import Topology

    tp, pp, vpp, ep, etp, first, last, pipeline = ranks
    topology = Topology(tp, pp, vpp, ep, tp if etp is None else etp, first, last, pipeline)
    if layout != "torch" and (topology != Topology() or experts):
        raise UsageError("--tp, --pp, --experts and the like tell how to write rank files: add --to or --via torch")
    return Options(
        spec.value, multiple, mcore.value, topology, experts.value if experts else None, fp8, text_only, dialect
    )
