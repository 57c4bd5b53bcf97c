"""Gathering the shares of ranks to whole tensors, under the numbers of the whole model. The inverse of deal.py.

Every rank numbers layers and experts from zero and holds its share of each tensor; what several ranks hold is one
tensor and its replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mtpcheck.cut import Cut
from mtpcheck.dialect import EMBEDDING, HEAD, Dialect
from mtpcheck.errors import FamilyError, FormatError, MtpcheckError
from mtpcheck.expr import evaluate
from mtpcheck.facts import facts_from_args
from mtpcheck.numbering import layers_of, places_of, stages_of
from mtpcheck.report.finding import Finding, failure
from mtpcheck.roles import Address, Place
from mtpcheck.tensormap import TensorRef
from mtpcheck.topology import Rank, Stage, Topology


class Holder(Protocol):
    """One rank: its name and the state dicts of its model chunks, of stored tensors or of plans."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> Sequence[Mapping[str, Any]]: ...

    def ref(self, name: str, value: Any) -> TensorRef | None:
        """The tensor that an entry of a state dict is; None if it is none."""


@dataclass(frozen=True)
class Held:
    """One rank's share of a tensor, or its copy of a whole one."""

    rank: str
    name: str
    """As the rank's file spells it."""
    ref: TensorRef


@dataclass(frozen=True)
class Ranks:
    """All files of a checkpoint by the coordinates that their folders name."""

    files: Mapping[Rank, Holder]
    topology: Topology
    args: Mapping[str, Any] | None


@dataclass(frozen=True)
class Gathered:
    """What one iteration folder holds."""

    ranks: Ranks
    tensors: dict[str, TensorRef]
    replicas: list[tuple[Held, Held]]
    """(the one that is read, another that must hold the same)"""
    findings: list[Finding]
    """What does not fit together."""
    strangers: list[Finding] = field(default_factory=list)
    """Ranks that are missing, that should not be there, or that come from another run."""
    passed_over: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """How the files are put together: as they should be, or, to explain damage, as they would be after it."""

    paired: bool = True
    """Gate and up are cut one by one."""
    turned: Mapping[int, int] = field(default_factory=dict)
    """Stage → by how many its layers are numbered too high, going round."""


@dataclass(frozen=True)
class _Found:
    """One tensor of one rank: which stage holds it, and its address in the whole model."""

    rank: Rank
    stage: int
    address: Address
    held: Held


def gather(
    ranks: Ranks, dialect: Dialect, reading: Reading | None = None, only: Collection[str] | None = None
) -> Gathered:
    """Put the shares of all ranks together, or those of the tensors named in ``only``.

    What a missing rank would hold is left out. Ranks that lack what they have to hold, or hold what they have not to,
    are found.
    """
    reading, facts, findings = reading or Reading(), _facts(ranks, dialect), list[Finding]()
    layers = layers_of(ranks, dialect)
    stages, mine = stages_of(ranks, layers, facts, findings), _mine(ranks, facts)
    found: dict[str, list[_Found]] = defaultdict(list)
    for rank, holder in sorted(ranks.files.items(), key=lambda item: (item[0].pp, item[0].ep, item[0].tp)):
        for chunk, model in enumerate(holder.models):
            number = chunk * ranks.topology.pp + rank.pp
            places = places_of(stages[number], layers[number].numbers, reading.turned.get(number, 0))
            for address, held in _held(holder, model, dialect, places, rank.ep * mine, mine):
                name = EMBEDDING if facts.get("tied") and address.place == "head" else address.name()
                if only is None or name in only:
                    found[name].append(_Found(rank, number, address, held))
    tensors: dict[str, TensorRef] = {}
    replicas: list[tuple[Held, Held]] = []
    for name, own in found.items():
        ref = _together(name, own, ranks, facts, reading, replicas, findings)
        if ref is not None:
            tensors[name] = ref
    if only is None:
        findings += _misplaced(found, ranks, stages, facts)
    return Gathered(ranks, tensors, replicas, findings)


def _facts(ranks: Ranks, dialect: Dialect) -> dict[str, Any]:
    """Facts that the arguments state, as far as they can be read."""
    facts: dict[str, Any] = {}
    for row in dialect.args:
        try:
            facts.update(facts_from_args((row,), ranks.args or {}, facts))
        except MtpcheckError:
            continue
    return facts


def _mine(ranks: Ranks, facts: Mapping[str, Any]) -> int:
    """Experts of one expert rank."""
    return (facts.get("experts") or 0) // ranks.topology.ep


def _held(
    found: Holder, model: Mapping[str, Any], dialect: Dialect, places: Mapping[int, int], first: int, mine: int
) -> Iterator[tuple[Address, Held]]:
    """Every tensor of one model chunk, under the layer and expert numbers of the whole model. The rank's experts are
    the ``mine`` from ``first`` on."""
    for key, value in model.items():
        name = str(key)
        if name.endswith("_extra_state") or (ref := found.ref(name, value)) is None:
            continue
        address = dialect.address(dialect.bare(name))
        if address.place == "layer" and address.layer is not None:
            address = replace(address, layer=places[address.layer])
        if address.role and address.below == address.role.legacy:
            yield from _unpacked(address, Held(found.name, name, ref), first, mine)
            continue
        if address.expert is not None:
            address = replace(address, expert=address.expert + first)
        yield address, Held(found.name, name, ref)


def _unpacked(address: Address, held: Held, first: int, count: int) -> Iterator[tuple[Address, Held]]:
    """The experts of a legacy grouped tensor: in memory one after the other, each transposed."""
    plan, role = held.ref.plan, address.role
    assert role is not None
    if len(plan.shape) != 2 or not count or plan.shape[role.shard["te"] == 0] % count:
        raise FormatError(f"{held.rank}: {held.name} of shape {list(plan.shape)} does not hold {count} experts")
    rows, columns = plan.shape
    inner = (rows, columns // count) if role.shard["te"] == 0 else (rows // count, columns)
    for i, expert in enumerate(plan.reshape((count, *inner)).unstack()):
        ref = TensorRef(held.ref.dtype, expert.permute((1, 0)))
        yield replace(address, below=role.each["grouped"], expert=first + i), Held(held.rank, held.name, ref)


def _cut(address: Address, held: Held, topology: Topology, facts: Mapping[str, Any]) -> Cut | None:
    """How a tensor is cut. Where the layer spec decides, its shape tells which one it was."""
    role = address.role
    if role is None:
        return None
    try:
        te, local = role.cut("te", facts), role.cut("local", facts)
        if te == local or topology.tp == 1:
            return te
        whole = evaluate(role.size, facts)
    except (FamilyError, TypeError, ValueError):
        raise FormatError(f"{held.rank}: {held.name}: the arguments do not tell its full size") from None
    return None if held.ref.shape[:1] == (whole,) else local


def _together(
    name: str, own: list[_Found], ranks: Ranks, facts: Mapping[str, Any], reading: Reading,
    replicas: list[tuple[Held, Held]], findings: list[Finding],
) -> TensorRef | None:  # fmt: skip
    """The tensor that the shares make up, and what repeats one; None if they make up none."""
    cuts = {_cut(f.address, f.held, ranks.topology, facts) for f in own}
    if len(cuts) > 1:
        findings.append(failure("topology.share", name, f"is whole on one rank and cut on another ({_kinds(own)})"))
        return None
    cut = cuts.pop()
    if cut is not None and not reading.paired:
        cut = Cut(cut.axis)
    count = 1 if cut is None else ranks.topology.etp if own[0].address.expert is not None else ranks.topology.tp
    shares: dict[int, list[Held]] = defaultdict(list)
    for f in own:
        shares[f.rank.tp % count].append(f.held)
    replicas += [(first, other) for first, *others in shares.values() for other in others]
    if any(i not in shares for i in range(count)):
        return None
    firsts = [shares[i][0] for i in range(count)]
    if len({(held.ref.dtype, held.ref.shape) for held in firsts}) > 1:
        findings.append(failure("topology.share", name, f"the shares of its ranks are not alike ({_kinds(own)})"))
        return None
    try:
        plan = firsts[0].ref.plan if cut is None else cut.join([held.ref.plan for held in firsts])
    except (ValueError, IndexError):
        findings.append(failure("topology.share", name, f"its shares cannot be put together ({_kinds(own)})"))
        return None
    return TensorRef(firsts[0].ref.dtype, plan)


def _kinds(own: list[_Found]) -> str:
    return "; ".join(f"{f.held.rank}: {f.held.ref.dtype} {list(f.held.ref.shape)}" for f in own[:4])


def _misplaced(
    found: Mapping[str, list[_Found]], ranks: Ranks, stages: list[Stage], facts: Mapping[str, Any]
) -> Iterator[Finding]:
    """Ranks that lack a tensor which another has, and ranks that hold one of another stage or expert rank."""
    by_stage: dict[int, list[Rank]] = defaultdict(list)
    for rank, holder in ranks.files.items():
        for chunk in range(len(holder.models)):
            by_stage[chunk * ranks.topology.pp + rank.pp].append(rank)
    lacking: dict[Rank, list[str]] = defaultdict(list)
    beyond: dict[Rank, list[str]] = defaultdict(list)
    mine, tied = _mine(ranks, facts), bool(facts.get("tied"))
    for name, own in found.items():
        # a tied head is the embedding under a second name, and a stage may have to hold both
        places: tuple[Place | None, ...] = ("embed", "head") if tied and name == EMBEDDING else (own[0].address.place,)
        if None in places:
            continue
        layer, expert = own[0].address.layer, own[0].address.expert
        have = {(f.rank, f.stage, f.address.place) for f in own}
        due = {
            (rank, number, place)
            for number, stage in enumerate(stages)
            for place in places
            if stage.holds(place, layer, tied)
            for rank in by_stage[number]
            if expert is None or not mine or expert // mine == rank.ep
        }
        for told, apart in ((lacking, due - have), (beyond, have - due)):
            for rank, _, place in sorted(apart, key=lambda one: (one[0], one[1], one[2] or "")):
                told[rank].append(HEAD if place == "head" else name)
    for rank, names in sorted(lacking.items()):
        what = f"lacks {len(names):,} tensor{'s' * (len(names) > 1)} that it has to hold, such as {names[0]}"
        yield failure("topology.share", ranks.files[rank].name, what, todo="Megatron refuses to load this file")
    for rank, names in sorted(beyond.items()):
        what = f"holds {len(names):,} tensor{'s' * (len(names) > 1)} of another rank or stage, such as {names[0]}"
        yield failure("topology.share", ranks.files[rank].name, what, todo="Megatron refuses to load this file")
