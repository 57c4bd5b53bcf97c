"""Which decoder layers a pipeline stage holds, and under which numbers they stand in the files of its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mtpcheck.dialect import Dialect
from mtpcheck.errors import UsageError
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.topology import Stage

if TYPE_CHECKING:
    from mtpcheck.gather import Ranks


@dataclass(frozen=True)
class Layers:
    """The numbers that decoder layers of one stage have in the files: of all its ranks, and of each."""

    numbers: list[int]
    of_rank: Mapping[str, list[int]]
    mtp: int
    """How many MTP layers it holds."""


def layers_of(ranks: Ranks, dialect: Dialect) -> dict[int, Layers]:
    """Stage → its layers' numbers. Stage ``i`` is chunk ``i // PP`` of pipeline rank ``i % PP``."""
    own: dict[int, dict[str, set[int]]] = defaultdict(dict)
    mtp: dict[int, set[int | None]] = defaultdict(set)
    for rank, found in ranks.files.items():
        for chunk, model in enumerate(found.models):
            stage = chunk * ranks.topology.pp + rank.pp
            addresses = [dialect.address(dialect.bare(name)) for name in model]
            own[stage][found.name] = {a.layer for a in addresses if a.place == "layer" and a.layer is not None}
            mtp[stage] |= {a.layer for a in addresses if a.place == "mtp"}
    return {
        stage: Layers(
            sorted(set().union(*by_rank.values())), {r: sorted(n) for r, n in by_rank.items()}, len(mtp[stage])
        )
        for stage, by_rank in own.items()
    }


def stages_of(
    ranks: Ranks, layers: Mapping[int, Layers], facts: Mapping[str, Any], findings: list[Finding]
) -> list[Stage]:
    """What every stage has to hold: as the arguments say or, where they do not, as counted in the files."""
    topology, total = ranks.topology, facts.get("layers") or 0
    count = topology.pp * topology.vpp
    counts = [len(layers[stage].numbers) if stage in layers else 0 for stage in range(count)]
    in_order = all(own.numbers == list(range(len(own.numbers))) for own in layers.values())
    try:
        # as many MTP layers as there are; whether the arguments declare them is judged elsewhere
        dealt = topology.stages(total, max((own.mtp for own in layers.values()), default=0))
        why = ""
        if in_order and len(layers) == count and sum(counts) == total and counts != [len(s.layers) for s in dealt]:
            why = f"they say {[len(s.layers) for s in dealt]} layers, the stages hold {counts}"
    except UsageError as error:
        why = str(error)
    if why:
        what = f"the arguments do not tell how layers were dealt out ({why}); they were counted instead"
        findings.append(warning("topology.args", "pipeline stages", what))
        return _counted(counts, [stage in layers and layers[stage].mtp > 0 for stage in range(count)])
    for stage, own in layers.items():
        expected = list(range(len(dealt[stage].layers)))
        apart = [rank for rank, numbers in own.of_rank.items() if numbers != expected]
        if apart:
            chunk = f", chunk {stage // topology.pp}" if topology.vpp > 1 else ""
            whole = len(apart) == len(own.of_rank)
            where = f"pipeline rank {stage % topology.pp}" if whole else ", ".join(apart[:3])
            findings.append(failure(
                "topology.layers", f"{where}{chunk}", "its decoder layers are numbered otherwise than Megatron does",
                expected=_run(expected), got=_run(own.of_rank[apart[0]]), cause="each stage counts its layers from 0",
            ))  # fmt: skip
    return dealt


def _counted(counts: list[int], mtp: list[bool]) -> list[Stage]:
    starts, last = accumulate(counts, initial=0), len(counts) - 1
    ending = max((i for i, n in enumerate(counts) if n), default=0) if any(mtp) else last
    return [
        Stage(range(start, start + n), own, i == 0, i == ending, i == last)
        for i, (start, n, own) in enumerate(zip(starts, counts, mtp, strict=False))
    ]


def _run(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:20])) or "none"


def places_of(stage: Stage, numbers: list[int], turn: int) -> dict[int, int]:
    """Number of a decoder layer in the files of a stage → its number in the whole model."""
    count = len(stage.layers)
    if len(numbers) == count:  # a stage that starts to count elsewhere still has its layers in order
        return {number: stage.layers.start + (i - turn) % count for i, number in enumerate(numbers)}
    return {number: stage.layers.start + number for number in numbers}
