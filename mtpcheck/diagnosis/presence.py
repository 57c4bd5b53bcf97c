"""What happened to tensors that are missing, and to those that are new: other names, or a whole component gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtpcheck.diagnosis.case import Case, Cause
from mtpcheck.diagnosis.joined import Explained
from mtpcheck.diagnosis.same import same, samples
from mtpcheck.diagnosis.words import component, numbers, size, split_layer
from mtpcheck.report.finding import Finding
from mtpcheck.rows import Row
from mtpcheck.tensormap import TensorRef

_ALIKE = 32  # new tensors of the same bits that one may have become: thousands of scales may be alike


@dataclass(frozen=True)
class _Gone:
    """A tensor that the candidate lacks, as the reference would give it, and the parts that it holds."""

    finding: Finding
    ref: TensorRef
    parts: tuple[str, ...]


def explain_presence(case: Case, found: Sequence[Finding]) -> list[Explained]:
    """Findings of missing and new tensors with their causes; one of a rename takes that of the new name with it."""
    rows = case.candidate_rows
    gone: dict[str, _Gone] = {}
    for finding in found:
        if finding.check == "presence.missing" and (lost := _lost(case, finding, rows)) is not None:
            gone[finding.subject] = lost
    new = {f.subject: case.b.checkpoint.tensors[f.subject] for f in found
           if f.check == "presence.unclaimed" and f.subject in case.b.checkpoint.tensors}  # fmt: skip
    pairs = _pairs(gone, new) if case.readable else {}
    causes = _renames(pairs)
    left = {name: lost for name, lost in gone.items() if name not in causes}
    causes |= _shards(case, left) or _components(case, left, rows)
    taken = set(pairs.values())
    return [
        Explained(finding, causes.get(finding.subject), _key(gone.get(finding.subject), finding))
        for finding in found
        if finding.check != "presence.unclaimed" or finding.subject not in taken
    ]


def _key(gone: _Gone | None, finding: Finding) -> str:
    return gone.parts[0] if gone and gone.parts else finding.subject


def _lost(case: Case, finding: Finding, rows: Mapping[str, Row]) -> _Gone | None:
    name, row = finding.subject, rows.get(finding.subject)
    parts = row.parts if row else ()
    if case.a.checkpoint.layout == case.b.checkpoint.layout == "hf":
        ref = case.a.checkpoint.tensors.get(name)
        return _Gone(finding, ref, parts) if ref is not None else None
    joined = case.joined(row) if row is not None else None
    return _Gone(finding, joined, parts) if joined is not None else None


# ---- other names


def _pairs(gone: Mapping[str, _Gone], new: Mapping[str, TensorRef]) -> dict[str, str]:
    """Old name → the new one under which the same bits are."""
    known: dict[tuple[object, ...], list[str]] = {}
    for name, ref in new.items() if gone else ():
        known.setdefault((ref.dtype, ref.shape, *samples(ref.plan)), []).append(name)
    found: dict[str, str] = {}
    for name, lost in gone.items() if new else ():
        alike = known.get((lost.ref.dtype, lost.ref.shape, *samples(lost.ref.plan)), [])
        for other in sorted(alike[:_ALIKE], key=lambda other: -_shared(name, other)):
            if same(lost.ref.plan, new[other].plan):
                found[name] = other
                alike.remove(other)
                break
    return found


def _words(name: str) -> list[str]:
    return name.split(".")


def _shared(a: str, b: str) -> int:
    """Characters of the words that two names begin and end with."""
    before, _, _, behind = _apart(a, b)
    return sum(map(len, before)) + sum(map(len, behind))


def _apart(a: str, b: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """What two names begin with, the words of each between, and what both end with."""
    old, new = _words(a), _words(b)
    start = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), min(len(old), len(new)))
    most = min(len(old), len(new)) - start
    back = next((i for i in range(most) if old[-1 - i] != new[-1 - i]), most)
    return old[:start], old[start : len(old) - back], new[start : len(new) - back], old[len(old) - back :]


def _renames(pairs: Mapping[str, str]) -> dict[str, Cause]:
    """What the new names have in common."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for old, new in pairs.items():
        before, without, instead, _ = _apart(old, new)
        groups.setdefault((".".join(without), ".".join(instead), before[-1] if before else ""), []).append(old)
    steps: dict[tuple[int, str], list[int]] = {}
    for a, b, below in groups:
        if _renumbers(a, b):
            steps.setdefault((int(b) - int(a), below), []).append(int(a))
    causes: dict[str, Cause] = {}
    for (a, b, below), names in groups.items():
        if _renumbers(a, b):
            cause = _renumbered(steps[int(b) - int(a), below], int(b) - int(a), below)
        elif len(names) == 1:
            cause = Cause("renamed", f"the same bits are there as {pairs[names[0]]}")
        elif not a or not b:
            cause = Cause(
                "renamed", f"the same bits are there, with {b + ' added to' if b else a + ' taken out of'} the name"
            )
        else:
            cause = Cause("renamed", f"the same bits are there, with {b} in place of {a} in the name")
        causes.update(dict.fromkeys(names, cause))
    return causes


def _renumbers(a: str, b: str) -> bool:
    return all(word.isdecimal() and len(word) < 9 for word in (a, b))


def _renumbered(old: Sequence[int], step: int, below: str) -> Cause:
    told = numbers(sorted(old))
    what = f"{below}.{told} became {below}.{old[0] + step}" if len(old) == 1 else (
        f"{below}.{told} became {abs(step)} {'higher' if step > 0 else 'lower'}")  # fmt: skip
    return Cause("renumbered", f"{what}; the bits are the same")


# ---- what is gone


def _shards(case: Case, gone: Mapping[str, _Gone]) -> dict[str, Cause]:
    """Everything that is missing, if it is all of some files of the reference that hold more than one component."""
    if case.a.checkpoint.layout != "hf" or case.b.checkpoint.layout != "hf":
        return {}
    files: dict[str, set[str]] = {}
    for name, ref in case.a.checkpoint.tensors.items():
        for box in ref.plan.boxes:
            if box.source is not None:
                files.setdefault(box.source.name, set()).add(name)
    causes: dict[str, Cause] = {}
    for file, names in files.items():
        stems = {part.split(".")[0:2][-1] for name in names if name in gone for part in gone[name].parts[:1]}
        if len(files) > 1 and names <= gone.keys() and len(stems) > 1:
            what = f"all {len(names):,} tensors of {file.rpartition('/')[2]} are gone, and only these"
            causes.update(dict.fromkeys(names, Cause("shard-lost", what)))
    return causes if causes.keys() == gone.keys() else {}


def _components(case: Case, gone: Mapping[str, _Gone], rows: Mapping[str, Row]) -> dict[str, Cause]:
    """The largest components of which everything is gone."""
    within: dict[str, set[str]] = {}
    for name, row in rows.items():
        if all(part in case.model.copies for part in row.parts) and name not in gone:
            continue
        for stem in _stems(row.parts[0]):
            within.setdefault(stem, set()).add(name)
    causes: dict[str, Cause] = {}
    for stem in sorted(within, key=lambda stem: (-len(within[stem]), -len(stem))):
        names = within[stem]
        if names <= gone.keys() and not names & causes.keys() and (len(names) > 1 or "." not in stem):
            nbytes = sum(gone[name].ref.nbytes for name in names)
            count = f"{len(names):,} tensors, {size(nbytes)}, are" if len(names) > 1 else f"{size(nbytes)} is"
            causes.update(dict.fromkeys(names, Cause("dropped", f"{component(stem)}: {count} gone")))
    return causes


def _stems(part: str) -> Iterator[str]:
    """``mtp``, ``mtp.0``, ``mtp.0.mlp`` … down to the part itself, and ``*.mlp`` … for that of every layer; of what is
    in no layer the part alone."""
    layer, rest = split_layer(part)
    for path in (part, f"*.{rest}") if layer and rest else (part,):
        words = path.split(".")
        yield from (".".join(words[: i + 1]) for i in range(path[0] == "*", len(words)))
