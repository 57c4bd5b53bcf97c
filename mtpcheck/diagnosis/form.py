"""Tensors that changed their shape or their dtype: whether what they hold went along."""

from __future__ import annotations

from mtpcheck.diagnosis.case import Case, Cause
from mtpcheck.diagnosis.elementwise import raw_codes
from mtpcheck.diagnosis.same import same
from mtpcheck.dtypes import NARROW, WIDE, cast
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding
from mtpcheck.tensormap import TensorRef


def other_dtype(case: Case, finding: Finding) -> Cause | None:
    """The cause that all pieces of the tensor have."""
    keys = [finding.part] if finding.part else case.keys_of.get(finding.subject, [])
    causes = {_other_dtype(case, key) for key in keys if key in case.before and key in case.after}
    return causes.pop() if len(causes) == 1 else None


def _other_dtype(case: Case, key: str) -> Cause | None:
    before, after = case.before[key], case.after[key]
    if before.shape != after.shape or before.packed_shape is not None or after.packed_shape is not None:
        return None
    if key in case.codes and case.comparable(key) and same(before.plan, after.plan):
        return Cause("", "the values that codes and scales give, decoded")
    if key in case.codes and (cause := raw_codes(case.codes[key], after)):
        return cause
    if {before.dtype, after.dtype} <= {WIDE, *NARROW} and same(cast(before, after.dtype).plan, after.plan):
        return Cause("cast", f"the same values, {'widened' if after.dtype == WIDE else 'rounded'} to {after.dtype}")
    if same(before.plan, after.plan):
        return Cause("", "the same bits, taken for another dtype")
    return None


def other_shape(case: Case, finding: Finding) -> Cause | None:
    """Whether a matrix was transposed, or rows were added or lost."""
    before, after = _stored(case, finding)
    if before is None or after is None or before.dtype != after.dtype:
        return None
    if before.packed_shape is not None or after.packed_shape is not None or not before.shape or not after.shape:
        return None
    a, b = before.plan, after.plan
    if a.nbytes == b.nbytes and same(a.reshape(b.shape), b):
        return Cause("", "the same elements in the same order, under another shape")
    if len(a.shape) > 1 and b.shape == (*a.shape[:-2], a.shape[-1], a.shape[-2]):
        order = [*range(len(a.shape) - 2), len(a.shape) - 1, len(a.shape) - 2]
        return Cause("transposed", "the matrix is transposed") if same(a.permute(order), b) else None
    if a.shape[1:] != b.shape[1:]:
        return None
    rows = min(a.shape[0], b.shape[0])
    if not same(a.slice(0, 0, rows), b.slice(0, 0, rows)):
        return None
    if b.shape[0] < a.shape[0]:
        return Cause(
            "rows-cut", f"the last {a.shape[0] - rows:,} rows are missing, the first {rows:,} are as they were"
        )
    more = b.slice(0, rows, b.shape[0])
    what = "rows of zeros" if same(more, Plan.zeros(more.shape, more.itemsize)) else "rows"
    return Cause("rows-padded", f"{more.shape[0]:,} {what} were added at the end, the first {rows:,} are as they were")


def _stored(case: Case, finding: Finding) -> tuple[TensorRef | None, TensorRef | None]:
    """A tensor as the candidate stores it, and as it would if it held the reference's parts."""
    name = finding.subject
    if finding.part:
        return case.before.get(finding.part), case.after.get(finding.part)
    after = case.b.checkpoint.tensors.get(name)
    if case.a.checkpoint.layout == case.b.checkpoint.layout == "hf":
        return case.a.checkpoint.tensors.get(name), after
    row = case.candidate_rows.get(name)
    return (case.joined(row) if row is not None else None), after
