"""One direction: any checkpoint, through the tensor map, into another layout on disk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpcheck.checkpoint import Checkpoint, Layout, open_checkpoint
from mtpcheck.checks.copies import check_tied
from mtpcheck.checks.declaration import check_count
from mtpcheck.checks.topology import check_ranks
from mtpcheck.encoding import block_of
from mtpcheck.errors import FAILS, HOLDS, CheckpointFails, UnsupportedError, UsageError
from mtpcheck.export import padding_findings, write_hf
from mtpcheck.fetch import fetched, is_remote
from mtpcheck.manifest import Manifest
from mtpcheck.megatron import (
    Options,
    copy_states,
    dealer,
    held_by_megatron,
    load_writers,
    read_for_copies,
    write_megatron,
)
from mtpcheck.model import BESIDE
from mtpcheck.normalise import is_quantized, taken_for_granted
from mtpcheck.progress import Progress, bar
from mtpcheck.report.finding import Finding, Severity, note
from mtpcheck.target import check_space, check_target, new_folder
from mtpcheck.tensormap import TensorMap, read_tensor_map

if TYPE_CHECKING:
    from mtpcheck.layouts.hf_writer import Written


@dataclass(frozen=True)
class Converted:
    source: Checkpoint
    tensor_map: TensorMap
    target: Path
    layout: Layout
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 if the source declares other MTP layers than it stores: it was converted as it is, and says so."""
        return FAILS if self.failures else HOLDS

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.severity is Severity.FAILURE]


def other_layout(layout: Layout) -> Layout:
    """The layout on the other side, where none is asked for."""
    return "torch_dist" if layout == "hf" else "hf"


def convert(
    source: str | Path,
    target: str | Path,
    to: Layout | None = None,
    family: str | None = None,
    options: Options | None = None,
    like: str | Path | None = None,
    progress: Progress | None = None,
    written: Written | None = None,
    iteration: int | None = None,
    show_progress: bool = False,
) -> Converted:
    """Convert ``source`` into the new folder ``target``; by default into the other layout.

    ``like`` lends an export the form of another checkpoint (an HF folder, or a Megatron folder that we made): shard
    files, and config keys that Megatron has no word for. Never a weight, never the MTP declaration. ``written`` is
    called for every HF shard once it is whole, and may free its disk. ``iteration`` chooses one of a Megatron root.
    ``target`` appears whole or not at all. Raises CheckpointFails if the source lacks tensors or holds some that
    nobody claims, UnsupportedError if the target cannot hold it exactly, UsageError for the paths.
    """
    target = Path(target)
    check_target(Path(source), target)
    options = options or Options()
    opened = open_checkpoint(source, iteration, options.dialect)
    check_target(opened.folder, target)
    options = options.for_source(opened)
    to = to or other_layout(opened.layout)
    if opened.layout == to == "hf":
        raise UsageError(f"{source} is an HF checkpoint already")
    if options.fp8 == ("keep" if to == "hf" else "requantize"):
        raise UsageError(f"--fp8 {options.fp8} is for the other direction; this one writes {to}")
    if like is not None and opened.layout != "hf" != to:
        raise UsageError(f"--like lends its form to a Hugging Face export; this conversion writes {to}")
    if like is not None:
        opened = replace(opened, manifest=lent_form(opened, like, show_progress))
    if options.fp8 == "requantize" and (opened.manifest is None or block_of(opened.manifest.config) is None):
        raise UsageError("--fp8 requantize: nothing says that this was FP8; --like a checkpoint that is")
    tensor_map = read_tensor_map(opened, family)
    if is_remote(opened):
        check_before_fetching(opened, tensor_map, to, options)
        opened = fetched(opened, show_progress)
        tensor_map = read_tensor_map(opened, family)
    check_convertible(opened, tensor_map)
    check_not_lost(opened, tensor_map)
    if opened.layout == "hf":
        check_text(opened, tensor_map, options)
    held = held_by_megatron(tensor_map, to, options) if to != "hf" else tensor_map
    needed = dealer(held, options).nbytes if to == "torch" else held.nbytes
    check_space(target.parent, needed if written is None else 0)
    load_writers(to)
    shown = nullcontext(progress) if progress else bar("converting", opened.nbytes, show_progress)
    with new_folder(target) as folder, shown as progress:
        if to == "hf":
            findings = write_hf(opened, tensor_map, folder, options.fp8, progress, written)
        else:
            findings = write_megatron(opened, tensor_map, folder, to, options, progress)
            findings += padding_findings(tensor_map, options.padded_vocab(tensor_map.facts["vocab"], to))
    findings += [note("topology.dialect", "order", told) for told in taken_for_granted((opened, tensor_map.model))]
    counts = check_count(tensor_map, str(source))
    return Converted(opened, tensor_map, target, to, (*tensor_map.findings, *counts, *findings))


def lent_form(source: Checkpoint, like: str | Path, show: bool = False) -> Manifest:
    """The form of ``like``. Copies that differ from what they repeat there cannot be lent: they would be weights.

    What the source itself has kept beside it stays its own.
    """
    if source.layout == "hf":
        raise UsageError(f"{source.path}: is an HF checkpoint and has a form of its own; --like lends one to an export")
    lender = open_checkpoint(like)
    if lender.hf is None:
        if lender.manifest is None:
            raise UsageError(f"{like}: a Megatron checkpoint that mtpcheck did not make has no form to lend")
        return replace(lender.manifest, aside=source.manifest.aside) if source.manifest else lender.manifest
    lender = fetched(lender, show, read_for_copies(read_tensor_map(lender)))
    assert lender.hf is not None
    tensor_map = read_tensor_map(lender)
    headers = {shard.file: shard.header for shard in lender.hf.shards}
    own = source.manifest.aside if source.manifest else {}
    return Manifest(lender.folder, tensor_map.family, headers, copy_states(tensor_map), lender.hf.others, own)


# ---- before anything is written

_BLOCKING = ("presence", "structure", "topology", "quantization")


def check_before_fetching(source: Checkpoint, tensor_map: TensorMap, to: Layout, options: Options) -> None:
    """What headers tell of a checkpoint on the Hub that cannot be converted, before it is fetched."""
    check_convertible(source, tensor_map, bits=False)
    check_not_lost(source, tensor_map)
    check_text(source, tensor_map, options)
    if to == "torch":
        dealer(tensor_map, options)


def check_convertible(source: Checkpoint, tensor_map: TensorMap, bits: bool = True) -> None:
    """Raise unless every tensor of the source can be carried exactly; without ``bits`` as far as headers tell."""
    _check_decoded(source, tensor_map)
    blocking = tuple(
        f for f in tensor_map.findings
        if f.severity is Severity.FAILURE and f.check.split(".")[0] in _BLOCKING
    )  # fmt: skip
    if bits:
        blocking = blocking or tuple(f for f in check_ranks(source) if f.severity is Severity.FAILURE)
        blocking = blocking or tuple(check_tied(tensor_map))
    if blocking:
        first = blocking[0]
        more = f" and {len(blocking) - 1} more" if len(blocking) > 1 else ""
        raise CheckpointFails(f"{source.path}: {first.subject}: {first.message}{more}; nothing was written", blocking)


def _check_decoded(source: Checkpoint, tensor_map: TensorMap) -> None:
    """Raise UnsupportedError for packed weights that are not decoded here."""
    unsound = any(f.check == "quantization.scale" for f in tensor_map.findings)
    if (why := is_quantized(source, tensor_map)) and not unsound:
        raise UnsupportedError(
            f"{source.path}: quantized weights cannot be converted exactly yet ({why}); "
            "verify still compares two such checkpoints"
        )


def check_text(source: Checkpoint, tensor_map: TensorMap, options: Options) -> None:
    """Raise UnsupportedError if an HF source holds tensors of no text model, unless they may be carried beside."""
    beside = [part.removeprefix(BESIDE) for part in tensor_map.parts if part.startswith(BESIDE)]
    if beside and not options.text_only:
        raise UnsupportedError(
            f"{source.path}: {beside[0]} and {len(beside) - 1:,} more belong to no text model, and a Megatron "
            "checkpoint of one has no place for them; --text-only carries them beside it"
        )


def check_not_lost(source: Checkpoint, tensor_map: TensorMap) -> None:
    """Raise CheckpointFails if a layer is declared and no tensor of it stored: a conversion would hide the loss."""
    if tensor_map.facts.get("mtp_layers") and not tensor_map.facts["mtp_stored"]:
        findings = tuple(check_count(tensor_map, str(source.path)))
        raise CheckpointFails(f"{source.path}: {findings[0].message}; nothing was written", findings)
