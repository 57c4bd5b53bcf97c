"""The table of acceptance: a line for each workload, a column for each checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mtpcheck.draft.acceptance import Acceptance, Rate
from mtpcheck.draft.probe import Column
from mtpcheck.draft.writing import Written


def lines(columns: Sequence[Column]) -> Iterator[str]:
    """The table as plain text, at most 80 columns for three checkpoints."""
    first = columns[0]
    labels = [_short(column.label) for column in columns]
    width = max(12, *(len(name) for name in first.workloads)) + 1
    wide = [max(10, len(label)) + 2 for label in labels]
    head = "".join(f"{label:>{w}}" for label, w in zip(labels, wide, strict=True))
    yield f"{'acceptance':<{width}}{'drafts':>7}{head}  {labels[0]}, 99.9 %"
    for name in first.workloads:
        yield _line(name, [column.workloads[name] for column in columns], width, wide)
    yield _line("all", [column.overall for column in columns], width, wide)
    for depth in range(1, len(first.overall.depths)) if len(first.overall.depths) > 1 else ():
        rates = [column.overall.depths[depth] for column in columns]
        yield _rates(f"all, depth {depth + 1}", rates, width, wide)
    lengths = "".join(f"{column.overall.mean_length:>{w}.3f}" for column, w in zip(columns, wide, strict=True))
    yield f"{'mean length':<{width}}{'':>7}{lengths}"
    if len(columns) > 1:
        same = ["", *(likeness(first, column) for column in columns[1:])]
        yield f"{'logits':<{width}}{'':>7}" + "".join(f"{text:>{w}}" for text, w in zip(same, wide, strict=True))
    yield from without(first)


def _short(label: str) -> str:
    return label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"


_LABEL = 12


def without(column: Column) -> Iterator[str]:
    """What the rate has to be seen beside: drafters without a head, and the head without parts."""
    base, own = column.overall.baselines, column.overall
    told = {
        "without a head": f"constant {base.constant:.2f}, copy {base.copy:.2f}, repeat {base.repeat:.2f}",
        "without its": ", ".join(f"{ablation.name.split()[0]} {ablation.rate.rate:.2f}" for ablation in own.ablations),
        "where all fail": f"{own.hard.rate:.2f} of {own.hard.drafted:,}",
    }
    for name, value in told.items():
        if value:
            yield f"{name:<16} {value}"
    for why, n in _reasons(column.touched.not_ran.values()).items():
        yield f"{'took no part':<16} {n:,} part{'s' * (n != 1)}: {why}"


def written(texts: Sequence[Written]) -> Iterator[str]:
    """What speculative decoding gave, at most 80 columns."""
    yield f"{'decoding':<13} {'tokens':>7} {'passes':>7} {'a pass':>7} {'acceptance rate':>16} {'mean length':>12}"
    for own in texts:
        rate = "" if own.acceptance_rate is None else f"{own.acceptance_rate:.3f}"
        length = "" if own.mean_length is None else f"{own.mean_length:.3f}"
        yield f"{own.name:<13} {own.tokens:>7,} {own.passes:>7,} {own.tokens_a_pass:>7.2f} {rate:>16} {length:>12}"


def _reasons(reasons: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for why in reasons:
        found[why] = found.get(why, 0) + 1
    return found


def _line(name: str, own: Sequence[Acceptance], width: int, wide: Sequence[int]) -> str:
    return _rates(name, [acceptance.depths[0] for acceptance in own], width, wide)


def _rates(name: str, rates: Sequence[Rate], width: int, wide: Sequence[int]) -> str:
    low, high = rates[0].bounds
    values = "".join(f"{rate.rate:>{w}.3f}" for rate, w in zip(rates, wide, strict=True))
    return f"{name:<{width}}{rates[0].drafted:>7,}{values}  {low:.3f} – {high:.3f}"


def likeness(first: Column, column: Column) -> str:
    """Whether a checkpoint drafts the very bits that the first one does."""
    if column.same_as:
        return "same bytes"
    return "bit-equal" if column.digests == first.digests else "DIFFER"


def as_dicts(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [_column(column, columns[0]) for column in columns]


def _column(column: Column, first: Column) -> dict[str, Any]:
    return {
        "label": column.label,
        "same_bytes_as": column.same_as or None,
        "logits_bit_equal_to_first": column.digests == first.digests,
        "workloads": {name: _acceptance(own) for name, own in column.workloads.items()},
        "all": _acceptance(column.overall),
        "alive": column.verdict.alive,
        "rules": [
            {"name": r.name, "claim": r.claim, "value": r.value, "limit": r.limit, "holds": r.holds}
            for r in column.verdict.rules
        ],
        "parts_run": len(column.touched.ran),
        "parts_not_run": dict(sorted(column.touched.not_ran.items())),
    }


def _acceptance(own: Acceptance) -> dict[str, Any]:
    return {
        "passages": own.passages,
        "acceptance_rate": _number(own.rate.rate),
        "mean_acceptance_length": _number(own.mean_length),
        "depths": [_rate(rate) for rate in own.depths],
        "per_position_acceptance": [_rate(rate) for rate in own.positions],
        "walk": {"rounds": own.walk.rounds, **_rate(own.walk.rate)},
        "hard_positions": _rate(own.hard),
        "baselines": {name: getattr(own.baselines, name) for name in own.baselines.__dataclass_fields__},
        "ablations": {a.name: {**_rate(a.rate), "p": a.p} for a in own.ablations},
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _rate(rate: Rate) -> dict[str, Any]:
    low, high = rate.bounds
    return {
        "accepted": rate.accepted,
        "drafted": rate.drafted,
        "rate": rate.rate if rate.drafted else None,
        "low": low,
        "high": high,
    }
