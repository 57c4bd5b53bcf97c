"""Do the ranks of a Megatron checkpoint belong together, agree, and stand in their own places?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.compare import compare_all
from mtpcheck.dialect import load_dialect
from mtpcheck.errors import MtpcheckError
from mtpcheck.layouts.torch_ranks import RankFolder, Reading, assemble
from mtpcheck.progress import Progress, Silent
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import of_group
from mtpcheck.tensormap import TensorMap, TensorRef, read_like


def check_ranks(checkpoint: Checkpoint, progress: Progress | None = None) -> list[Finding]:
    """What the headers said, and every tensor that several ranks hold, compared bit for bit."""
    if checkpoint.ranks is None:
        return []
    found = of_group(checkpoint.findings, "topology")
    pairs = []
    for number, (first, other) in enumerate(checkpoint.ranks.replicas):
        if (first.ref.dtype, first.ref.shape) == (other.ref.dtype, other.ref.shape):
            pairs.append((str(number), first.ref, other.ref))
        else:
            kinds = (f"{ref.dtype} {list(ref.shape)}" for ref in (first.ref, other.ref))
            found.append(_disagree(checkpoint.ranks, number, "has another dtype or shape there", *kinds))
    for name, difference in compare_all(pairs, progress or Silent()).items():
        bits = "0x" + difference.expected[::-1].hex(), "0x" + difference.got[::-1].hex()
        found.append(_disagree(checkpoint.ranks, int(name), f"differs in {difference.elements:,} elements", *bits))
    return found


def _disagree(ranks: RankFolder, number: int, what: str, expected: str, got: str) -> Finding:
    first, other = ranks.replicas[number]
    copied = "" if first.name == other.name else f", a copy of {first.name}"
    return failure(
        "topology.replica", f"{other.rank}: {other.name}", f"{what} from {first.rank}{copied}",
        where=other.ref.plan.place_of((0,) * len(other.ref.shape)), expected=expected, got=got,
        cause="one rank was trained, loaded or written apart from the others",
    )  # fmt: skip


# ---- what happened to files whose tensors differ


@dataclass(frozen=True)
class _Theory:
    """Something that may have happened, and how the files would read before it did."""

    finding: Finding
    folder: RankFolder


def explain(checkpoint: Checkpoint, reference: TensorMap, differing: Mapping[str, TensorRef]) -> Iterator[Finding]:
    """The one mishap with ranks that explains every differing bit, if there is one.

    ``differing``: parts of the checkpoint whose bits are not the reference's. Each theory is another way to read
    the same files, and is held if all parts then equal the reference's.
    """
    if checkpoint.ranks is None or not differing:
        return
    part, ref = min(differing.items(), key=lambda item: item[1].nbytes)
    for theory in _theories(checkpoint.ranks, part, ref):
        tensor_map = read_like(replace(checkpoint, tensors=theory.folder.tensors, ranks=theory.folder), reference)
        if _agree(reference, tensor_map, [part]) and _agree(reference, tensor_map, list(reference.parts)):
            yield theory.finding
            return


def _agree(reference: TensorMap, other: TensorMap, parts: list[str]) -> bool:
    pairs = []
    for part in parts:
        if part not in other.parts and part in reference.copies:
            continue
        a, b = reference.parts[part], other.parts.get(part)
        if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        pairs.append((part, a, b))
    return not compare_all(pairs)


def _theories(ranks: RankFolder, part: str, ref: TensorRef) -> Iterator[_Theory]:
    dialect = load_dialect()
    try:
        unpaired = assemble(ranks.ranks, dialect, Reading(paired=False))
    except MtpcheckError:
        unpaired = None
    if unpaired is not None:
        what = "gate and up were cut as one tensor; Megatron cuts each of them for every rank"
        cause = "the whole of gate over up was split by rows"
        yield _Theory(failure("topology.unpaired", "linear_fc1", what, cause=cause), unpaired)
    for stage in range(ranks.ranks.topology.pp * ranks.ranks.topology.vpp):
        yield from _turned(ranks, stage)
    yield from _exchanged(ranks, {box.source.name for box in ref.plan.boxes if box.source})


def _turned(ranks: RankFolder, stage: int) -> Iterator[_Theory]:
    dialect, pp = load_dialect(), ranks.ranks.topology.pp
    most = max(len(model) for found in ranks.ranks.files.values() for model in found.models)
    for turn in range(1, min(4, most)):
        folder = assemble(ranks.ranks, dialect, Reading(turned={stage: turn}))
        where = f"pipeline rank {stage % pp}" + f", chunk {stage // pp}" * (ranks.ranks.topology.vpp > 1)
        what = f"numbers its decoder layers {turn} too high, going round"
        cause = "an offset was added that belongs to another stage"
        yield _Theory(failure("topology.turned", where, what, cause=cause), folder)


def _read_by(files: set[str], rank: str) -> bool:
    return any(Path(file).parent.name == rank for file in files)


def _exchanged(ranks: RankFolder, involved: set[str]) -> Iterator[_Theory]:
    """Pairs of files, one of which the differing part was read from."""
    files = ranks.ranks.files
    for a in files:
        for b in files:
            if a < b and any(_read_by(involved, files[rank].name) for rank in (a, b)):
                swapped = {**files, a: files[b], b: files[a]}
                try:
                    folder = assemble(replace(ranks.ranks, files=swapped), load_dialect())
                except MtpcheckError:
                    continue
                names = f"{files[a].name}, {files[b].name}"
                what = "stand in each other's place"
                yield _Theory(failure("topology.exchanged", names, what, cause="the two files were exchanged"), folder)
