"""Layout ``torch``: Megatron's per-rank files, read without Megatron and without torch.

iter_0000100/mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt    a torch.save zip: args, iteration, model (or model0,
                                                              model1, ... with virtual stages), optimizer, RNG state

Every rank numbers layers and experts from zero and holds its share of each tensor. Here the shares become whole
tensors again, under the numbers of the whole model; what several ranks hold is one tensor and its replicas.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from mtpcheck.cut import Cut
from mtpcheck.dialect import EMBEDDING, Dialect
from mtpcheck.errors import FamilyError, FormatError, MtpcheckError, UsageError
from mtpcheck.expr import evaluate
from mtpcheck.facts import facts_from_args
from mtpcheck.files import LocalFile, inside
from mtpcheck.layouts.items import elements_of
from mtpcheck.layouts.zipstore import Archive, Record, StoredTensor, read_archive
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.roles import Address
from mtpcheck.tensormap import DTYPE_BITS, TensorRef
from mtpcheck.topology import Rank, Stage, Topology, topology_of_args

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_NAMED = 10  # missing ranks that are named one by one


class Holder(Protocol):
    """One rank: its name and the state dicts of its model chunks, of stored tensors or of plans."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> Sequence[Mapping[str, Any]]: ...

    def ref(self, name: str, value: Any) -> TensorRef | None:
        """The tensor that an entry of a state dict is; None if it is none."""


@dataclass(frozen=True)
class RankFile:
    """One opened rank file. Its pickle has been read, and no tensor."""

    file: LocalFile
    archive: Archive

    @property
    def name(self) -> str:
        return self.file.path.parent.name

    @cached_property
    def args(self) -> dict[str, Any] | None:
        args = self.archive.root.get("args")
        return {k: v for k, v in vars(args).items() if k != "args"} if isinstance(args, Record) else None

    @cached_property
    def models(self) -> list[dict[str, Any]]:
        """The model chunks: one, or one for each virtual stage."""
        root = self.archive.root
        numbered = sorted((k for k in root if re.fullmatch(r"model\d{1,4}", str(k))), key=lambda k: int(k[5:]))
        if "model" not in root and numbered != [f"model{i}" for i in range(len(numbered))]:
            raise FormatError(
                f"{self.file.path}: its model chunks are {', '.join(numbered)}; expected model0 and so on"
            )
        chunks = [root[k] for k in (["model"] if "model" in root else numbered)]
        if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
            raise FormatError(f"{self.file.path}: holds no 'model' and no 'model0'; not a Megatron checkpoint")
        return chunks

    def ref(self, name: str, value: Any) -> TensorRef | None:
        if not isinstance(value, StoredTensor):
            return None
        source, at = elements_of(value, self.archive, self.file, name)
        return TensorRef(value.dtype, Plan.region(source, at, value.shape, DTYPE_BITS[value.dtype] // 8))


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
class RankFolder:
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


def is_torch(folder: Path) -> bool:
    return any(_FOLDER.fullmatch(path.name) and (path / FILE).is_file() for path in folder.glob("mp_rank_*"))


def read_torch(folder: Path, dialect: Dialect) -> RankFolder:
    """Open every rank file of an iteration folder. Raises FormatError where one cannot be read."""
    files, topology = _open(folder, dialect)
    args = next((found.args for found in files.values() if found.args is not None), None)
    known = {rank: found for rank, found in files.items() if _is_in(rank, topology)}
    if not known:
        raise FormatError(f"{folder}: the arguments say {topology}, and no file is named as one of its ranks")
    ranks = Ranks(known, topology, args)
    topology.ranks()  # refuses sizes beyond any run before they cost time
    found = assemble(ranks, dialect)
    findings = [*_strangers(folder, ranks.topology, files, dialect), *found.findings]
    return replace(found, findings=findings, passed_over=_passed_over(files, found))


def _open(folder: Path, dialect: Dialect) -> tuple[dict[Rank, RankFile], Topology]:
    files: dict[tuple[int, ...], RankFile] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / FILE).is_file():
            file = LocalFile(inside(folder, f"{path.name}/{FILE}"))
            archive = read_archive(file, 0, file.size, str(file.path), foreign=True)
            if not isinstance(archive.root, dict):
                raise FormatError(f"{file.path}: not a Megatron checkpoint: the pickle holds no mapping")
            numbers = tuple(int(n) for n in match.groups() if n is not None)
            if numbers in files:
                raise FormatError(
                    f"{folder}: {files[numbers].name} and {path.name} name one rank; two checkpoints lie in one"
                )
            files[numbers] = RankFile(file, archive)
    if len({len(numbers) for numbers in files}) > 1:
        raise FormatError(f"{folder}: the mp_rank folders have names of several forms; two checkpoints lie in one")
    args = next((found.args for found in files.values() if found.args is not None), None)
    topology, pipelined = _topology(files, args or {}, dialect)
    if topology.pp == 1 and (several := next((f for f in files.values() if len(f.models) > 1), None)):
        raise FormatError(f"{several.file.path}: holds several model chunks, and there is one pipeline rank")
    return {_rank(numbers, pipelined): found for numbers, found in files.items()}, topology


def _is_in(rank: Rank, topology: Topology) -> bool:
    return rank.tp < topology.tp and rank.pp < topology.pp and rank.ep < topology.ep


def _rank(numbers: tuple[int, ...], pipelined: bool) -> Rank:
    """A folder with one suffix names a pipeline rank or an expert rank."""
    tp, *rest = numbers
    if len(rest) == 2:
        return Rank(tp, *rest)
    return Rank(tp, rest[0], 0) if rest and pipelined else Rank(tp, 0, rest[0] if rest else 0)


def _topology(
    files: Mapping[tuple[int, ...], RankFile], args: Mapping[str, Any], dialect: Dialect
) -> tuple[Topology, bool]:
    """Sizes from the arguments, or, where these do not tell, from folders and keys; whether one suffix means PP."""
    said = topology_of_args(args)
    most = [max(numbers[i] for numbers in files) + 1 for i in range(len(next(iter(files))))]
    if "tensor_model_parallel_size" not in args:
        said = replace(said, tp=most[0], etp=most[0] if "expert_tensor_parallel_size" not in args else said.etp)
    if len(most) == 2 and said.pp == said.ep == 1:  # every expert rank has the final norm, one pipeline rank has it
        names = [[_bare(name, dialect) for model in found.models for name in model] for found in files.values()]
        ending = [any(name.startswith("decoder.final_") for name in own) for own in names]
        said = replace(said, ep=most[1]) if all(ending) else replace(said, pp=most[1])
    elif len(most) == 3:
        said = replace(said, pp=max(said.pp, most[1]), ep=max(said.ep, most[2]))
    chunks = max(len(found.models) for found in files.values())
    return replace(said, vpp=chunks if said.pp > 1 else 1), said.pp > 1


# ---- shares → tensors


@dataclass(frozen=True)
class _Found:
    """One tensor of one rank: which stage holds it, and its address in the whole model."""

    rank: Rank
    stage: int
    address: Address
    held: Held


def assemble(
    ranks: Ranks, dialect: Dialect, reading: Reading | None = None, only: Collection[str] | None = None
) -> RankFolder:
    """Put the shares of all ranks together, or those of the tensors named in ``only``.

    What a missing rank would hold is left out. Ranks that lack what they have to hold, or hold what they have not to,
    are found.
    """
    reading, facts, findings = reading or Reading(), _facts(ranks, dialect), list[Finding]()
    layers = _layers(ranks, dialect)
    stages, mine = _stages(ranks, layers, facts, findings), _mine(ranks, facts)
    found: dict[str, list[_Found]] = defaultdict(list)
    for rank, holder in sorted(ranks.files.items(), key=lambda item: (item[0].pp, item[0].ep, item[0].tp)):
        for chunk, model in enumerate(holder.models):
            number = chunk * ranks.topology.pp + rank.pp
            places = _places(stages[number], layers[number].numbers, reading.turned.get(number, 0))
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
    return RankFolder(ranks, tensors, replicas, findings)


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


@dataclass(frozen=True)
class _Layers:
    """The numbers that decoder layers of one stage have in the files: of all its ranks, and of each."""

    numbers: list[int]
    of_rank: Mapping[str, list[int]]
    mtp: bool


def _layers(ranks: Ranks, dialect: Dialect) -> dict[int, _Layers]:
    own: dict[int, dict[str, set[int]]] = defaultdict(dict)
    mtp: set[int] = set()
    for rank, found in ranks.files.items():
        for chunk, model in enumerate(found.models):
            stage = chunk * ranks.topology.pp + rank.pp
            addresses = [dialect.address(_bare(name, dialect)) for name in model]
            own[stage][found.name] = {a.layer for a in addresses if a.place == "layer" and a.layer is not None}
            if any(a.place == "mtp" for a in addresses):
                mtp.add(stage)
    return {
        stage: _Layers(sorted(set().union(*by_rank.values())), {r: sorted(n) for r, n in by_rank.items()}, stage in mtp)
        for stage, by_rank in own.items()
    }


def _stages(
    ranks: Ranks, layers: Mapping[int, _Layers], facts: Mapping[str, Any], findings: list[Finding]
) -> list[Stage]:
    """What every stage has to hold: as the arguments say or, where they do not, as counted in the files."""
    topology, total = ranks.topology, facts.get("layers") or 0
    count = topology.pp * topology.vpp
    counts = [len(layers[stage].numbers) if stage in layers else 0 for stage in range(count)]
    in_order = all(own.numbers == list(range(len(own.numbers))) for own in layers.values())
    try:
        dealt = topology.stages(total, facts.get("mtp_layers") or 0)
        why = ""
        if in_order and len(layers) == count and sum(counts) == total and counts != [len(s.layers) for s in dealt]:
            why = f"they say {[len(s.layers) for s in dealt]} layers, the stages hold {counts}"
    except UsageError as error:
        why = str(error)
    if why:
        what = f"the arguments do not tell how layers were dealt out ({why}); they were counted instead"
        findings.append(warning("topology.args", "pipeline stages", what))
        return _counted(counts, [stage in layers and layers[stage].mtp for stage in range(count)])
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


def _places(stage: Stage, numbers: list[int], turn: int) -> dict[int, int]:
    """Number of a decoder layer in the files of a stage → its number in the whole model."""
    count = len(stage.layers)
    if len(numbers) == count:  # a stage that starts to count elsewhere still has its layers in order
        return {number: stage.layers.start + (i - turn) % count for i, number in enumerate(numbers)}
    return {number: stage.layers.start + number for number in numbers}


def _bare(key: Any, dialect: Dialect) -> str:
    """A key without the wrappers' names before it."""
    name = str(key)
    while lead := next((prefix for prefix in dialect.prefixes if name.startswith(prefix)), None):
        name = name.removeprefix(lead)
    return name


def _held(
    found: Holder, model: Mapping[str, Any], dialect: Dialect, places: Mapping[int, int], first: int, mine: int
) -> Iterator[tuple[Address, Held]]:
    """Every tensor of one model chunk, under the layer and expert numbers of the whole model. The rank's experts are
    the ``mine`` from ``first`` on."""
    for key, value in model.items():
        name = str(key)
        if name.endswith("_extra_state") or (ref := found.ref(name, value)) is None:
            continue
        address = dialect.address(_bare(name, dialect))
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
    te, local = role.cut("te"), role.cut("local")
    if te == local or topology.tp == 1:
        return te
    try:
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
        address = next((f.address for f in own if f.address.place != "head"), own[0].address)
        if address.place is None:
            continue
        experts = address.expert is not None and mine
        have = {(f.rank, f.stage) for f in own}
        due = {
            (rank, stage)
            for stage, held in enumerate(stages)
            if held.holds(address.place, address.layer, tied)
            or (tied and address.place == "embed" and held.holds("head", None, tied))
            for rank in by_stage[stage]
            if not experts or (address.expert or 0) // mine == rank.ep
        }
        for rank, _ in due - have:
            lacking[rank].append(name)
        for rank, _ in have - due:
            beyond[rank].append(name)
    for rank, names in sorted(lacking.items()):
        what = f"lacks {len(names):,} tensors that it has to hold, such as {names[0]}"
        yield failure("topology.share", ranks.files[rank].name, what, todo="Megatron refuses to load this file")
    for rank, names in sorted(beyond.items()):
        what = f"holds {len(names):,} tensors that belong on another rank or stage, such as {names[0]}"
        yield failure("topology.share", ranks.files[rank].name, what, todo="Megatron refuses to load this file")


# ---- what the folder says besides


def _strangers(folder: Path, topology: Topology, files: Mapping[Rank, RankFile], dialect: Dialect) -> Iterator[Finding]:
    """Ranks that are missing, that should not be there, or that come from another run."""
    expected = dict.fromkeys(topology.ranks())
    missing = [topology.folder(rank) for rank in expected if rank not in files]
    names = missing[:_NAMED] if len(missing) > _NAMED + 1 else missing
    if len(names) < len(missing):
        names.append(f"{len(missing) - _NAMED:,} more")
    for name in names:
        yield failure(
            "topology.rank", name, "is missing; its share of every tensor is lost", where=str(folder),
            expected=f"{len(expected):,} ranks ({topology})", got=f"{len(files):,}",
        )  # fmt: skip
    for rank, found in files.items():
        if rank not in expected:
            what = f"is no rank of {topology}, which the arguments state"
            yield failure("topology.rank", found.name, what, where=str(folder))
        elif found.name != topology.folder(rank):
            what = "has a name that Megatron does not look for"
            yield failure("topology.rank", found.name, what, where=str(folder), expected=topology.folder(rank))
    first = next((found for found in files.values() if found.args is not None), next(iter(files.values())))
    keys = {key for row in dialect.args for key in row.keys} | {"padded_vocab_size"}
    for found in files.values():
        if found.archive.root.get("iteration") != first.archive.root.get("iteration"):
            yield failure(
                "topology.iteration", found.name, f"is of another iteration than {first.name}", where=str(folder),
                expected=_shown(first.archive.root.get("iteration")),
                got=_shown(found.archive.root.get("iteration")),
            )  # fmt: skip
        if found.args is None and first.args is not None:
            yield failure("topology.args", found.name, "holds no arguments, others do", where=str(folder))
            continue
        told = [(key, (found.args or {}).get(key), (first.args or {}).get(key)) for key in sorted(keys)]
        sizes = topology_of_args(found.args or {}), topology_of_args(first.args or {})
        for key, mine, theirs in [*told, ("topology", str(sizes[0]), str(sizes[1]))]:
            if not isinstance(mine, Record) and not isinstance(theirs, Record) and mine != theirs:
                yield failure(
                    "topology.args", found.name, f"has another {key} than {first.name}", where=str(folder),
                    expected=_shown(theirs), got=_shown(mine),
                )  # fmt: skip


def _shown(value: Any) -> str:
    """An argument in a message. It may be anything, a number of thousands of digits too."""
    try:
        return repr(value)[:100]
    except ValueError:
        return "something that cannot be shown"


def _passed_over(files: Mapping[Rank, RankFile], found: RankFolder) -> dict[str, tuple[int, int]]:
    """What is no weight of the model: kind → (entries, bytes)."""
    extras = sum(str(name).endswith("_extra_state") for f in files.values() for m in f.models for name in m)
    state = {"optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine"}
    entries = sum(len(state & f.archive.root.keys()) for f in files.values())
    stored = sum(n for f in files.values() for name, (_, n) in f.archive.members.items() if name[:5] == "data/")
    weights = sum(t.nbytes for t in found.tensors.values()) + sum(other.ref.nbytes for _, other in found.replicas)
    kinds = {"_extra_state": (extras, 0), "optimizer and training state": (entries, max(0, stored - weights))}
    return {kind: count for kind, count in kinds.items() if count[0]}
