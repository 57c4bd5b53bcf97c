"""Do index, shard headers and folder of an HF checkpoint tell the same story?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mtpcheck.compare import differs
from mtpcheck.report.finding import Finding, Severity, failure, warning
from mtpcheck.tensormap import TensorRef


@dataclass(frozen=True)
class Twice:
    """A tensor that stands in two shards: in ``file``, which is the one that counts, and in ``other``."""

    name: str
    file: str
    other: str
    refs: tuple[TensorRef, TensorRef]


def check_index(index: str, weight_map: Mapping[str, str], shard_of: Mapping[str, str]) -> Iterator[Finding]:
    """Every entry of the file ``index`` against the headers. ``shard_of``: tensor → the file that counts for it."""
    for name, file in weight_map.items():
        if name not in shard_of:
            yield failure(
                "structure.ghost", name, "the index names a tensor that no shard holds", where=index, expected=file
            )
        elif shard_of[name] != file:
            yield failure(
                "structure.ghost", name, "the index names the wrong shard", where=index,
                expected=shard_of[name], got=file,
            )  # fmt: skip
    for name, file in shard_of.items():
        if name not in weight_map:
            yield failure(
                "structure.unindexed", name, "a shard holds a tensor that the index does not name", where=file,
                todo="loaders that follow the index never see it; add it to the index or remove it",
            )  # fmt: skip


def check_size(index: str, stated: object, tensors: Iterable[TensorRef]) -> Iterator[Finding]:
    """The total that the index states. Nothing goes by it, so a wrong one is a warning; 0 and none state nothing."""
    total = sum(ref.nbytes for ref in tensors)
    if stated and stated != total:
        yield warning(
            "structure.size", "metadata.total_size", "is not the size of the tensors", where=index,
            expected=f"{total}", got=f"{stated}",
        )  # fmt: skip


def check_twice(twice: Iterable[Twice]) -> Iterator[Finding]:
    for own in twice:
        yield failure(
            "structure.duplicate", own.name, f"stands in {own.file} and in {own.other}", where=own.other,
            todo="loaders disagree on which one counts; remove the other",
        )  # fmt: skip


def with_bits(findings: Iterable[Finding], twice: Collection[Twice]) -> Iterator[Finding]:
    """The same findings; of a tensor that stands twice they tell whether both are the same, which takes reading."""
    known = {(own.name, own.other): own for own in twice}
    for finding in findings:
        own = known.get((finding.subject, finding.where)) if finding.check == "structure.duplicate" else None
        if own:
            alike = "other bits" if differs(*own.refs) else "the same bits"
            finding = replace(finding, message=f"{finding.message}, with {alike}")
        yield finding


def check_orphan(file: str, names: Collection[str] | None, shard_of: Mapping[str, str]) -> Finding:
    """A weight file that the index does not name. ``names``: its tensors, None if it is no sound safetensors file."""
    plain = "weights that the index does not name are not part of the checkpoint"
    known = {_pattern(name) for name in shard_of}
    again = [name for name in names or () if name in shard_of]
    beyond = [
        name for name in names or () if name not in shard_of and ("mtp" in name.split(".") or _pattern(name) in known)
    ]
    if beyond:
        what = f"holds {_tensors(len(beyond))} of the model that no shard of the index has, first {beyond[0]}"
        todo = "loaders that follow the index never see it; name it there, or remove it"
        return failure("structure.orphan_file", file, what, todo=todo)
    if names and len(again) == len(names):
        what = f"holds {_tensors(len(again))} again that the index takes from other shards"
        return warning("structure.stale", file, what, cause="left over from another run", todo="remove it")
    return warning("structure.orphan_file", file, plain)


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'s' * (count != 1)}"


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def of_conversion(reference: Iterable[Finding], candidate: Iterable[Finding], blame_source: bool) -> list[Finding]:
    """Findings that two checkpoints have of their own, as a comparison sees them.

    What the candidate alone has wrong was done to it, and fails it. What the reference has wrong, too, is its own
    fault; unless it is to be blamed for it, that is a warning.
    """
    own = {(f.check, f.subject, f.message): f for f in reference}
    new = [f for f in candidate if (f.check, f.subject, f.message) not in own]
    return [
        *(replace(f, source=True, severity=f.severity if blame_source else _softened(f)) for f in own.values()),
        *(replace(f, severity=_blamed(f)) for f in new),
    ]


def _softened(finding: Finding) -> Severity:
    return Severity.WARNING if finding.severity is Severity.FAILURE else finding.severity


def _blamed(finding: Finding) -> Severity:
    return Severity.FAILURE if finding.severity is Severity.WARNING else finding.severity
