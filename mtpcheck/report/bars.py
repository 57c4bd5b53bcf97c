"""Acceptance as bars: a row for each workload, a column for each checkpoint, drawn as SVG without text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtpcheck.draft.acceptance import Rate
from mtpcheck.draft.probe import Column
from mtpcheck.draft.writing import Written
from mtpcheck.report import drafts
from mtpcheck.report.elements import lines, table, text

_LEGEND = (
    "Bar: drafts accepted of those made. Line across its end: bounds at 99.9 %. "
    "Upright mark: what drafting without a head reaches on the same text."
)


def acceptance(columns: Sequence[Column]) -> str:
    """HTML of what each checkpoint drafts; empty if none was run."""
    if not columns:
        return ""
    first = columns[0]
    rows = [
        _row(name, [(own.depths[0], own.baselines.floor) for own in (c.workloads[name] for c in columns)])
        for name in first.workloads
    ]
    rows.append(_row("all", [(c.overall.depths[0], c.overall.baselines.floor) for c in columns]))
    for depth in range(1, len(first.overall.depths)):
        rows.append(_row(f"all, depth {depth + 1}", [(c.overall.depths[depth], None) for c in columns]))
    rows.append(["mean length", "", *(_or_nothing(column.overall.mean_length) for column in columns)])
    if len(columns) > 1:
        rows.append(["draft logits", "", "", *(drafts.likeness(first, column) for column in columns[1:])])
    shown = table(["workload", "drafts", *(column.label for column in columns)], rows, "rates")
    return "\n".join([shown, f'<p class="legend">{text(_LEGEND)}</p>', lines(list(drafts.without(first)))])


def _row(name: str, rates: Sequence[tuple[Rate, float | None]]) -> list[str]:
    return [text(name), f"{rates[0][0].drafted:,}", *(_bar(rate, floor) for rate, floor in rates)]


def _bar(rate: Rate, floor: float | None) -> str:
    if not rate.drafted:
        return "none drafted"
    low, high = (100 * bound for bound in rate.bounds)
    mark = (
        "" if floor is None else f'<line class="floor" x1="{100 * floor:.2f}%" x2="{100 * floor:.2f}%" y1="0" y2="16"/>'
    )
    return (
        f"<span><b>{rate.rate:.3f}</b> <small>{low / 100:.3f} – {high / 100:.3f}</small></span>"
        '<svg aria-hidden="true" width="100%" height="16"><rect class="track" width="100%" y="4" height="8"/>'
        f'<rect class="bar" width="{100 * rate.rate:.2f}%" y="4" height="8"/>'
        f'<line class="bounds" x1="{low:.2f}%" x2="{high:.2f}%" y1="8" y2="8"/>{mark}</svg>'
    )


def written(texts: Sequence[Written]) -> str:
    """HTML of what speculative decoding gave; empty if nothing was written."""
    rows = [
        [text(own.name), f"{own.tokens:,}", f"{own.passes:,}", f"{own.tokens_a_pass:.2f}",
         _or_nothing(own.acceptance_rate), _or_nothing(own.mean_length)]
        for own in texts
    ]  # fmt: skip
    head = ["decoding", "tokens", "passes", "tokens a pass", "acceptance rate", "mean length"]
    return table(head, rows, "rates") if rows else ""


def _or_nothing(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
