"""Does the model accept what the MTP layer drafts, and the same drafts from every copy of it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mtpcheck.draft.probe import Column
from mtpcheck.errors import MtpcheckError
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import Report


def judge_acceptance(report: Report, measure: Callable[[], list[Column]], same: bool = True) -> None:
    """Measure and add to a report; where that cannot be, the report says why and does not hold."""
    try:
        columns = measure()
    except MtpcheckError as error:
        report.could_not("acceptance", str(error).removeprefix("could not judge: "))
        return
    add_acceptance(report, columns, same)


def add_acceptance(report: Report, columns: list[Column], same: bool = True, more: Sequence[Finding] = ()) -> None:
    """Judge columns: all of them alive, and, if they are to be the ``same``, with bit-equal draft logits. ``more``:
    findings of the same group that the caller has made."""
    report.acceptance = columns
    first = columns[0].overall
    told = f"{first.depths[0].accepted:,} of {first.depths[0].drafted:,} drafts accepted; "
    told += f"mean acceptance length {first.mean_length:.2f}"
    findings = [*more, *(check_same(columns) if same else ())]
    own = [column for column in columns if column is columns[0] or column.digests != columns[0].digests]
    for column in own:
        findings += check_alive(column)
    unjudged = [f"{column.label}: {column.verdict.unjudged}" for column in own if column.verdict.alive is None]
    if unjudged and not findings:
        report.could_not("acceptance", "; ".join(unjudged))
    else:
        report.add("acceptance", findings, told)


def check_alive(column: Column) -> Iterator[Finding]:
    """What a living head does and this one does not (rules A1 to A3 of draft/alive.py)."""
    for rule in column.verdict.failed:
        where = f"{rule.value:.3g}, expected {'below' if rule.name == 'A3' else 'over'} {rule.limit:.3g}"
        yield failure(
            "acceptance.dead", f"{rule.name} of {column.label}", f"it is not so that {rule.claim}", got=where,
            todo="the head is broken, or belongs to another trunk; serving is slower with it than without",
        )  # fmt: skip


def check_same(columns: Sequence[Column]) -> Iterator[Finding]:
    """Equal bytes give bit-equal logits, in one process; whoever has others has other weights."""
    first = columns[0]
    for column in columns[1:]:
        differing = sum(a != b for a, b in zip(first.digests, column.digests, strict=True))
        if differing:
            what = f"draft logits differ in {differing:,} of {len(column.passages):,} passages"
            rates = [f"accepts {c.overall.depths[0].rate:.4f}" for c in (first, column)]
            yield failure("acceptance.logits", column.label, what, expected=rates[0], got=rates[1])


def check_minimum(column: Column, minimum: float) -> Iterator[Finding]:
    """A floor that the user gave, on the acceptance rate of depth 1 over all workloads."""
    rate = column.overall.depths[0].rate
    if rate < minimum:
        yield failure("acceptance.minimum", column.label, "accepts too little", expected=f"{minimum:g} or more",
                      got=f"{rate:.4f}")  # fmt: skip
