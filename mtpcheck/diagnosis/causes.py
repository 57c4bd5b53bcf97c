"""The way from findings to causes and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from mtpcheck.diagnosis.arranged import THEORIES, arranged
from mtpcheck.diagnosis.case import Case, Cause, Told, make_case
from mtpcheck.diagnosis.elementwise import casted, constant, offset, raw_codes, scaled
from mtpcheck.diagnosis.form import other_dtype, other_shape
from mtpcheck.diagnosis.fresh import is_random, with_layers
from mtpcheck.diagnosis.grid import quantized
from mtpcheck.diagnosis.joined import Explained, joined
from mtpcheck.diagnosis.moved import Index, moved
from mtpcheck.diagnosis.nearest import nearest
from mtpcheck.diagnosis.numbers import STORED
from mtpcheck.diagnosis.presence import explain_presence
from mtpcheck.diagnosis.reordered import reordered
from mtpcheck.diagnosis.scales import of_scales
from mtpcheck.diagnosis.spoken import other_dialect
from mtpcheck.report.finding import Finding
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorRef

LIMIT = 64
"""Tensors of a component that may resist all theories before the rest are only tried with those that held."""

Theory = Callable[[str], Told]
"""What it explains of a piece, and of those it is stored with; nothing if it does not hold."""


def with_causes(found: Sequence[Finding], a: Side, b: Side) -> list[Finding]:
    """Findings of a comparison of ``b`` with ``a``, with causes; those of one cause are one finding with ``members``.

    Looks at values.bits, .dtype and .shape and at presence.missing, .unclaimed and .shape, unless they have a cause or
    are the reference's own; all others stay as they are. Reads weights only where there is something to explain.
    """
    wanted = {"values.bits", "values.dtype", "values.shape", "presence.missing", "presence.unclaimed", "presence.shape"}
    groups: dict[str, list[Finding]] = {}
    for finding in found:
        if finding.check in wanted and not finding.cause and not finding.source:
            groups.setdefault(finding.check, []).append(finding)
    if not groups:
        return list(found)
    case = make_case(a, b)
    names = [*groups.get("presence.missing", []), *groups.get("presence.unclaimed", [])]
    explained = _by_finding(explain_presence(case, names)) if names else {}
    for check, explain in (
        ("values.dtype", other_dtype),
        ("values.shape", other_shape),
        ("presence.shape", other_shape),
    ):
        own = groups.get(check, [])
        explained |= {id(f): [Explained(f, explain(case, f) if case.readable else None, f.subject)] for f in own}
    explained |= _by_finding(_explain_bits(case, groups.get("values.bits", [])))
    looked_at = {id(finding) for group in groups.values() for finding in group}
    every = (explained.get(id(f), []) if id(f) in looked_at else [Explained(f, None, f.subject)] for f in found)
    return joined(case, [own for group in every for own in group])


def _by_finding(found: Iterable[Explained]) -> dict[int, list[Explained]]:
    grouped: dict[int, list[Explained]] = {}
    for own in found:
        grouped.setdefault(id(own.finding), []).append(own)
    return grouped


def _explain_bits(case: Case, found: Sequence[Finding]) -> Iterable[Explained]:
    """Findings of differing bits, once for each cause that any of their pieces has."""
    keys = [case.differing(finding.subject, finding.part) for finding in found]
    told = _causes(case, [key for own in keys for key in dict.fromkeys(own) if case.comparable(key)])
    described: Counter[str] = Counter()
    for finding, own in zip(found, keys, strict=True):
        causes: dict[Cause | None, str] = {}
        for key in own or [finding.subject]:
            causes.setdefault(told.get(key), key)
        for cause, key in causes.items():
            if cause is None and described[case.component(key)] < LIMIT:
                described[case.component(key)] += 1
                cause = _nearest(case, finding, key, alone=len(causes) > 1)
            yield Explained(finding, cause, key)


@np.errstate(all="ignore")
def _nearest(case: Case, finding: Finding, key: str, alone: bool) -> Cause | None:
    """How far apart they are: the tensor as it is stored, or the one piece of it that nothing explains."""
    sides = (case.before.get(key), case.after.get(key))
    if not finding.part and not alone and key in case.model.shapes and key not in case.codes:
        sides = (case.a.checkpoint.tensors.get(finding.subject), case.b.checkpoint.tensors.get(finding.subject))
    before, after = sides
    if before is None or after is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return None
    words = nearest(before, after)
    return Cause("", words) if words else None


# ---- theories, the cheap ones first


@np.errstate(all="ignore")  # untrusted values: NaN and infinities are looked at like any others
def _causes(case: Case, keys: Sequence[str]) -> Told:
    """Causes of pieces that differ, as far as any theory holds."""
    if not keys:
        return {}
    told: Told = {key: cause for key in keys if (cause := constant(case.after[key]))}
    told |= other_dialect(case, [key for key in keys if key not in told])
    left = [key for key in keys if key not in told]
    index = Index(case, left)
    told |= moved(case, left, index)
    told |= of_scales(case, [key for key in left if key not in told])
    told |= _one_by_one(case, [key for key in left if key not in told], index)
    return with_layers(case, [key for key in left if key not in told], told, index)


def _one_by_one(case: Case, keys: Sequence[str], index: Index) -> Told:
    """Every piece under every theory, those that held before first; what resists too often is only tried with these."""
    order: list[Theory] = _theories(case)
    last: Theory = partial(is_random, case, index)  # names what bits cannot prove, so only when all else has failed
    told: Told = {}
    held: set[int] = set()
    resisted: Counter[str] = Counter()
    for key in keys:
        if key in told:
            continue
        thorough = resisted[case.component(key)] < LIMIT
        for theory in [*order, last]:
            if (thorough or id(theory) in held) and (own := theory(key)):
                told.update({other: cause for other, cause in own.items() if other not in told})
                held.add(id(theory))
                if theory is not last:
                    order.remove(theory)
                    order.insert(0, theory)
                break
        else:
            resisted[case.component(key)] += 1
    wanted = set(keys)
    return {key: cause for key, cause in told.items() if key in wanted}


def _theories(case: Case) -> list[Theory]:
    values = [partial(_of_values, theory, case) for theory in (casted, offset, scaled)]
    orders = [partial(arranged, theory, case) for theory in THEORIES]
    return [partial(_raw_codes, case), *values, *orders, partial(quantized, case), partial(reordered, case)]


def _of_values(theory: Callable[[TensorRef, TensorRef], Cause | None], case: Case, key: str) -> Told:
    """A theory of single elements."""
    if case.before[key].dtype not in STORED:
        return {}
    cause = theory(case.before[key], case.after[key])
    return {key: cause} if cause else {}


def _raw_codes(case: Case, key: str) -> Told:
    cause = raw_codes(case.codes[key], case.after[key]) if key in case.codes else None
    return {key: cause} if cause else {}
