"""Do Megatron's tensors stand in the order of another dialect than they were read in? One answer for many of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from mtpcheck.checkpoint import in_dialect
from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.same import same
from mtpcheck.dialects import CORE, others
from mtpcheck.dtypes import NARROW, WIDE, cast
from mtpcheck.errors import MtpcheckError
from mtpcheck.normalise import read_like, stored_rows
from mtpcheck.rows import Row
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorRef

_Parts = Mapping[str, TensorRef]


def other_dialect(case: Case, keys: Collection[str]) -> Told:
    """Causes of pieces that differ only because one side was read in the wrong dialect.

    Every role that the two dialects have otherwise must say so: of each at least one tensor is the other side's under
    the other dialect, and no tensor is so under the present one alone. So a norm that lacks its offset, or one layer in
    another order, is no other dialect.
    """
    for side, fixed, whose in ((case.b, case.a, "these bytes are"), (case.a, case.b, "the reference's bytes are")):
        if side.checkpoint.layout == "hf":
            continue
        present = side.checkpoint.dialect
        for name in others(case.model, present):
            if found := set(_read_rightly(case, side, fixed.tensor_map.parts, name, set(keys))):
                what = (
                    f"{whose} in {_owner(name)} order and were read in {_owner(present)}: --dialect {name} reads them"
                )
                return dict.fromkeys(found, Cause("other-dialect", what))
    return {}


def _owner(dialect: str) -> str:
    return f"{'megatron-core' if dialect == CORE else dialect}'s"


def _read_rightly(case: Case, side: Side, expected: _Parts, dialect: str, keys: set[str]) -> Iterator[str]:
    """Those of ``keys`` that a side holds as ``expected`` if it is in a dialect; none if it is not."""
    present = set(stored_rows(side.checkpoint, case.model))
    spoken = stored_rows(replace(side.checkpoint, dialect=dialect), case.model)
    rows = [row for row in spoken if row not in present]
    differing = {row for row in rows if not keys.isdisjoint(row.parts)}
    if not differing:
        return
    try:
        other = read_like(in_dialect(side.checkpoint, dialect), case.a.tensor_map).parts
    except MtpcheckError:
        return
    fits = {row for row in rows if _is(row, other, expected)}
    every_role = {row.origin for row in differing} == {row.origin for row in differing & fits}
    if every_role and fits | differing == set(rows):
        yield from (part for row in differing & fits for part in row.parts if part in keys)


def _is(row: Row, other: _Parts, expected: _Parts) -> bool:
    """Whether all parts of a stored tensor are there on both sides, and the same."""
    return all(part in other and part in expected and _alike(expected[part], other[part]) for part in row.parts)


def _alike(a: TensorRef, b: TensorRef) -> bool:
    """Whether two tensors hold the same; Megatron may hold what is narrow as fp32."""
    a, b = (cast(x, WIDE) if x.dtype in NARROW and y.dtype == WIDE else x for x, y in ((a, b), (b, a)))
    return a.dtype == b.dtype and same(a.plan, b.plan)
