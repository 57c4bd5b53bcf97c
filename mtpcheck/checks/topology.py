"""Do the ranks of a Megatron checkpoint belong together, agree, and stand in their own places?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.compare import compare_all
from mtpcheck.dialects import load_dialect
from mtpcheck.errors import MtpcheckError
from mtpcheck.gather import Gathered, Ranks, Reading, gather
from mtpcheck.progress import Progress, Silent
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import of_group
from mtpcheck.tensormap import TensorMap, read_like


def check_ranks(checkpoint: Checkpoint, bits: bool = True, progress: Progress | None = None) -> list[Finding]:
    """What the headers said, and every tensor that several ranks hold, compared bit for bit, or without ``bits`` by
    dtype and shape."""
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
    for name, difference in compare_all(pairs if bits else [], progress or Silent()).items():
        both = "0x" + difference.expected[::-1].hex(), "0x" + difference.got[::-1].hex()
        found.append(_disagree(checkpoint.ranks, int(name), f"differs in {difference.elements:,} elements", *both))
    return found


def _disagree(ranks: Gathered, number: int, what: str, expected: str, got: str) -> Finding:
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
    ranks: Ranks
    reading: Reading = field(default_factory=Reading)


_WORK = 20_000_000  # names to look at for all theories together, some ten seconds: thousands of ranks have many pairs


def explain(
    checkpoint: Checkpoint, reference: TensorMap, differing: Mapping[str, str]
) -> tuple[Finding, Checkpoint] | None:
    """The one mishap with ranks that explains every differing bit, if there is one, and the checkpoint before it.

    ``differing``: parts of the checkpoint whose bits are not the reference's → the stored tensor each lies in. Every
    theory is another way to read the same files, and is held if all parts then equal the reference's.
    """
    if checkpoint.ranks is None or not differing:
        return None
    part = min(differing, key=lambda part: reference.parts[part].nbytes)
    files = {box.source.name for box in checkpoint.tensors[differing[part]].plan.boxes if box.source}
    names = sum(len(model) for found in checkpoint.ranks.ranks.files.values() for model in found.models)
    for theory in islice(_theories(checkpoint.ranks.ranks, files), max(20, _WORK // max(names, 1))):
        fits = _read(theory, checkpoint, reference, [part], {differing[part]})
        if fits and (before := _read(theory, checkpoint, reference, list(reference.parts), None)):
            return theory.finding, before
    return None


def _read(
    theory: _Theory, checkpoint: Checkpoint, reference: TensorMap, parts: list[str], only: set[str] | None
) -> Checkpoint | None:
    """The checkpoint as it reads under a theory; None unless ``parts`` then equal the reference's."""
    try:
        folder = gather(theory.ranks, load_dialect(checkpoint.dialect), theory.reading, only)
    except MtpcheckError:
        return None
    strangers = checkpoint.ranks.strangers if checkpoint.ranks else []
    told = (*strangers, *folder.findings)
    before = replace(checkpoint, tensors=folder.tensors, ranks=folder, findings=told)
    other = read_like(before, reference)
    pairs = []
    for part in parts:
        if part not in other.parts and part in reference.copies:
            continue
        a, b = reference.parts[part], other.parts.get(part)
        if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            return None
        pairs.append((part, a, b))
    return None if compare_all(pairs) else before


def _theories(ranks: Ranks, involved: set[str]) -> Iterator[_Theory]:
    """What may have happened to a tensor that was read from the files ``involved``."""
    what = "gate and up were cut as one tensor; Megatron cuts each of them for every rank"
    finding = failure("topology.unpaired", "linear_fc1", what, cause="the whole of gate over up was split by rows")
    yield _Theory(finding, ranks, Reading(paired=False))
    topology = ranks.topology
    for stage in range(topology.pp * topology.vpp):
        chunk = f", chunk {stage // topology.pp}" if topology.vpp > 1 else ""
        for turn in (1, 2, 3):
            finding = failure(
                "topology.turned", f"pipeline rank {stage % topology.pp}{chunk}",
                f"numbers its decoder layers {turn} too high, going round",
                cause="an offset was added that belongs to another stage",
            )  # fmt: skip
            yield _Theory(finding, ranks, Reading(turned={stage: turn}))
    names = {Path(file).parent.name for file in involved}
    for a, b in combinations(sorted(ranks.files), 2):
        first, second = ranks.files[a], ranks.files[b]
        near = a.pp == b.pp or (a.tp, a.ep) == (b.tp, b.ep)
        if near and {first.name, second.name} & names:
            finding = failure(
                "topology.exchanged", f"{first.name}, {second.name}", "stand in each other's place",
                cause="the two files were exchanged",
            )  # fmt: skip
            yield _Theory(finding, replace(ranks, files={**ranks.files, a: second, b: first}))
