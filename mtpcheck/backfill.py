"""Which tensors were filled in from the original, and not converted: they have its bits, and not the perturbed ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.compare import differs
from mtpcheck.dtypes import NARROW, WIDE, cast
from mtpcheck.report.finding import Finding
from mtpcheck.report.report import cause_table
from mtpcheck.tensormap import TensorMap, TensorRef, read_like, read_tensor_map

CAUSE = "back-filled"


def with_back_filled(
    findings: list[Finding], source: str, original: str, candidate: str, family: str, dialect: str | None
) -> list[Finding]:
    """Findings of ``candidate`` against the perturbed ``source``: tensors that equal those of ``original``, which
    differs from the source, are one finding with that cause. Reads weights only where bits differ."""
    bits = [f for f in findings if f.check == "values.bits"]
    names = dict.fromkeys(name for f in bits for name in f.members or (f.subject,))
    if not names:
        return findings
    perturbed = read_tensor_map(open_checkpoint(source), family)
    plain = read_tensor_map(open_checkpoint(original), family)
    filled = list(
        _back_filled(names, perturbed, plain, read_like(open_checkpoint(candidate, dialect=dialect), perturbed))
    )
    if not filled:
        return findings
    first = next(f for f in bits if set(f.members or (f.subject,)) & set(filled))
    left = [own for f in findings for own in (_without(f, filled) if f in bits else [f])]
    return [*left, _one(first, filled)]


def _back_filled(names: Collection[str], perturbed: TensorMap, plain: TensorMap, candidate: TensorMap) -> Iterator[str]:
    parts_of: dict[str, list[str]] = {}
    for part, name in perturbed.names.items():
        if name in names and part in candidate.parts and part in plain.parts:
            parts_of.setdefault(name, []).append(part)
    for name, parts in parts_of.items():
        got = [part for part in parts if not _same(perturbed.parts[part], candidate.parts[part])]
        if got and all(_same(plain.parts[part], candidate.parts[part]) for part in got):
            yield name


def _same(a: TensorRef, b: TensorRef) -> bool:
    """Whether two tensors hold the same; Megatron may hold what is narrow as fp32."""
    return not differs(cast(a, WIDE) if a.dtype in NARROW and b.dtype == WIDE else a, b)


def _without(finding: Finding, names: Collection[str]) -> list[Finding]:
    left = tuple(name for name in finding.members or (finding.subject,) if name not in names)
    if not left:
        return []
    return [
        finding if len(left) == len(finding.members or (0,)) else replace(finding, subject=told(left), members=left)
    ]


def told(names: Collection[str]) -> str:
    """Names as one subject."""
    first = next(iter(names))
    return first if len(names) == 1 else f"{first} and {len(names) - 1:,} more"


def _one(first: Finding, names: list[str]) -> Finding:
    cause, members = cause_table()[CAUSE], tuple(names) if len(names) > 1 else ()
    message = first.message if first.members or not members else f"{first.subject}: {first.message}"
    why = {"cause": cause["help"], "cause_id": CAUSE, "todo": cause["todo"]}
    return replace(first, subject=told(names), message=message, members=members, part="", **why)
