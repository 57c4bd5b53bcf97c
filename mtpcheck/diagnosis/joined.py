"""Findings of one cause become one finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtpcheck.diagnosis.case import Case, Cause
from mtpcheck.diagnosis.words import components, split_layer
from mtpcheck.report.finding import Finding
from mtpcheck.report.report import cause_table


@dataclass(frozen=True)
class Explained:
    """A finding, what explains it, if anything does, and the key of the piece that it is about."""

    finding: Finding
    cause: Cause | None
    key: str


def joined(case: Case, found: Sequence[Explained]) -> list[Finding]:
    """All findings, in their order; those of one check and one confirmed cause as one, in the place of the first."""
    groups: dict[object, list[Explained]] = {}
    for i, own in enumerate(found):
        alone = own.cause is None or not own.cause.id
        groups.setdefault(i if alone else (own.finding.check, own.finding.severity, own.cause), []).append(own)
    return [_one(case, group) for group in groups.values()]


def _one(case: Case, group: Sequence[Explained]) -> Finding:
    first, cause = group[0].finding, group[0].cause
    if cause is None:
        return first
    todo = cause_table()[cause.id].get("todo", "") if cause.id else ""
    told = replace(first, cause=cause.what, cause_id=cause.id, todo=todo or first.todo)
    keys = {own.finding.subject: own.key for own in group}
    if not cause.id or len(keys) == 1:
        return told

    def place(name: str) -> tuple[int, str]:
        return case.place.get(_key(case, keys[name]), len(case.place)), name

    members = tuple(sorted(keys, key=place))
    subject = f"{len(members):,} tensors of {components(_component(case, keys[name]) for name in members)}"
    return replace(told, subject=subject, message=f"{first.subject}: {first.message}", members=members, part="")


def _key(case: Case, key: str) -> str:
    """The part that a key or a stored name stands for, or the first of several."""
    key = next(iter(case.keys_of.get(key, [key])))
    return case.scales.get(key, key)


def _component(case: Case, key: str) -> str:
    part = _key(case, key)
    return split_layer(part)[0] or (part if part in case.model.shapes else case.names.get(part, part))
