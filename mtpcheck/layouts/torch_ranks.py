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
from mtpcheck.dialect import Dialect
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
from mtpcheck.topology import Rank, Topology, topology_of_args

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_NAMED = 10  # missing ranks that are named one by one
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


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
    files, topology = _open(folder)
    args = next((found.args for found in files.values() if found.args is not None), None)
    known = {rank: found for rank, found in files.items() if _is_in(rank, topology)}
    if not known:
        raise FormatError(f"{folder}: the arguments say {topology}, and no file is named as one of its ranks")
    ranks = Ranks(known, topology, args)
    found = assemble(ranks, dialect)
    findings = [*_strangers(folder, ranks.topology, files, dialect), *found.findings]
    return replace(found, findings=findings, passed_over=_passed_over(files, found))


def _open(folder: Path) -> tuple[dict[Rank, RankFile], Topology]:
    files: dict[tuple[int, ...], RankFile] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / FILE).is_file():
            file = LocalFile(inside(folder, f"{path.name}/{FILE}"))
            archive = read_archive(file, 0, file.size, str(file.path), foreign=True)
            if not isinstance(archive.root, dict):
                raise FormatError(f"{file.path}: not a Megatron checkpoint: the pickle holds no mapping")
            files[tuple(int(n) for n in match.groups() if n is not None)] = RankFile(file, archive)
    if len({len(numbers) for numbers in files}) > 1:
        raise FormatError(f"{folder}: the mp_rank folders have names of several forms; two checkpoints lie in one")
    args = next((found.args for found in files.values() if found.args is not None), None)
    topology, pipelined = _topology(files, args or {})
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


def _topology(files: Mapping[tuple[int, ...], RankFile], args: Mapping[str, Any]) -> tuple[Topology, bool]:
    """Sizes from the arguments, or, where these do not tell, from folders and keys; whether one suffix means PP."""
    said = topology_of_args(args)
    most = [max(numbers[i] for numbers in files) + 1 for i in range(len(next(iter(files))))]
    if "tensor_model_parallel_size" not in args:
        said = replace(said, tp=most[0], etp=most[0] if "expert_tensor_parallel_size" not in args else said.etp)
    if len(most) == 2 and said.pp == said.ep == 1:  # every expert rank has the final norm, one pipeline rank has it
        ending = [any(".final_" in name and name[0] == "d" for m in f.models for name in m) for f in files.values()]
        said = replace(said, ep=most[1]) if all(ending) else replace(said, pp=most[1])
    elif len(most) == 3:
        said = replace(said, pp=max(said.pp, most[1]), ep=max(said.ep, most[2]))
    chunks = max(len(found.models) for found in files.values())
    return replace(said, vpp=chunks if said.pp > 1 else 1), said.pp > 1


# ---- shares → tensors


def assemble(
    ranks: Ranks, dialect: Dialect, reading: Reading | None = None, only: Collection[str] | None = None
) -> RankFolder:
    """Put the shares of all ranks together, or those of the tensors named in ``only``.

    What a missing rank would hold is left out.
    """
    reading = reading or Reading()
    facts = _facts(ranks, dialect)
    findings: list[Finding] = []
    starts = _starts(ranks, dialect, facts, findings)
    shares: dict[str, dict[int, list[Held]]] = defaultdict(lambda: defaultdict(list))
    cuts: dict[str, tuple[Cut | None, int]] = {}
    for rank, found in sorted(ranks.files.items(), key=lambda item: (item[0].pp, item[0].ep, item[0].tp)):
        for chunk, model in enumerate(found.models):
            stage = chunk * ranks.topology.pp + rank.pp
            turn = reading.turned.get(stage, 0)
            for address, held in _held(ranks, rank, found, model, dialect, starts[stage], turn, facts):
                name = _EMBEDDING if facts.get("tied") and address.name() == _HEAD else address.name()
                if only is not None and name not in only:
                    continue
                cut = _cut(address, held, ranks.topology, facts)
                if cut is not None and not reading.paired:
                    cut = Cut(cut.axis)
                count = 1 if cut is None else ranks.topology.etp if address.expert is not None else ranks.topology.tp
                cuts.setdefault(name, (cut, count))
                shares[name][rank.tp % count].append(held)
    tensors = {name: ref for name in shares if (ref := _whole(name, shares[name], *cuts[name])) is not None}
    replicas = [(first, other) for own in shares.values() for first, *others in own.values() for other in others]
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


def _starts(ranks: Ranks, dialect: Dialect, facts: Mapping[str, Any], findings: list[Finding]) -> list[int]:
    """The first decoder layer of every stage, as the arguments say or, where they do not, counted."""
    own = _layers(ranks, dialect)
    stages = ranks.topology.pp * ranks.topology.vpp
    try:
        dealt = ranks.topology.stages(facts.get("layers") or 0, facts.get("mtp_layers") or 0)
    except UsageError as error:
        what = f"the arguments do not tell how layers were dealt out ({error}); they were counted instead"
        findings.append(warning("topology.args", "pipeline stages", what))
        return list(accumulate((len(own.get(stage, ())) for stage in range(stages)), initial=0))
    for stage, numbers in own.items():
        expected = list(range(len(dealt[stage].layers)))
        if numbers != expected:
            where = f"pipeline rank {stage % ranks.topology.pp}" + f", chunk {stage // ranks.topology.pp}" * (
                stages > ranks.topology.pp
            )
            findings.append(failure(
                "topology.layers", where, "numbers its decoder layers differently than every rank does",
                expected=_run(expected), got=_run(numbers), cause="each stage counts its own layers from 0",
            ))  # fmt: skip
    return [dealt[stage].layers.start for stage in range(stages)]


def _run(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def _layers(ranks: Ranks, dialect: Dialect) -> dict[int, list[int]]:
    """Stage → the numbers that its decoder layers have in the files."""
    numbers: dict[int, set[int]] = defaultdict(set)
    for rank, found in ranks.files.items():
        for chunk, model in enumerate(found.models):
            lead = f"{dialect.decoder}."
            own = (_bare(name, dialect).removeprefix(lead).partition(".")[0] for name in model if lead in str(name))
            numbers[chunk * ranks.topology.pp + rank.pp] |= {int(n) for n in own if n.isdecimal() and len(n) < 8}
    return {stage: sorted(own) for stage, own in numbers.items()}


def _bare(key: Any, dialect: Dialect) -> str:
    """A key without the wrappers' names before it."""
    name = str(key)
    while lead := next((prefix for prefix in dialect.prefixes if name.startswith(prefix)), None):
        name = name.removeprefix(lead)
    return name


def _held(
    ranks: Ranks, rank: Rank, found: Holder, model: Mapping[str, Any], dialect: Dialect, start: int, turn: int,
    facts: Mapping[str, Any],
) -> Iterator[tuple[Address, Held]]:  # fmt: skip
    """Every tensor of one model chunk, under the layer and expert numbers of the whole model."""
    lead = f"{dialect.decoder}."
    weights = {str(name): value for name, value in model.items() if not str(name).endswith("_extra_state")}
    addresses = {name: dialect.address(_bare(name, dialect)) for name in weights}
    layers = sorted({a.layer for a in addresses.values() if a.lead == lead and a.layer is not None})
    mine = (facts.get("experts") or 0) // ranks.topology.ep
    for name, address in addresses.items():
        ref = found.ref(name, weights[name])
        if ref is None:
            continue
        if address.lead == lead and address.layer is not None:
            place = (layers.index(address.layer) - turn) % len(layers)
            address = replace(address, layer=start + place)
        if address.role and address.below == address.role.legacy:
            yield from _unpacked(address, Held(found.name, name, ref), rank.ep * mine, mine)
            continue
        if address.expert is not None:
            address = replace(address, expert=address.expert + rank.ep * mine)
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
    except FamilyError:
        raise FormatError(f"{held.rank}: {held.name}: the arguments do not tell its full size") from None
    return None if held.ref.shape[:1] == (whole,) else local


def _whole(name: str, shares: Mapping[int, list[Held]], cut: Cut | None, count: int) -> TensorRef | None:
    """The tensor that the shares make up; None if a rank that holds one is missing."""
    if cut is None:
        return shares[0][0].ref
    if any(i not in shares for i in range(count)):
        return None
    own = [shares[i][0] for i in range(count)]
    kinds = {(held.ref.dtype, held.ref.shape) for held in own}
    if len(kinds) > 1:
        told = "; ".join(f"{held.rank}: {held.ref.dtype} {list(held.ref.shape)}" for held in own[:4])
        raise FormatError(f"{name}: the shares of its ranks are not alike ({told})")
    try:
        return TensorRef(own[0].ref.dtype, cut.join([held.ref.plan for held in own]))
    except (ValueError, IndexError):
        raise FormatError(f"{name}: shares of shape {list(own[0].ref.shape)} cannot be put together") from None


# ---- what the folder says besides


def _strangers(folder: Path, topology: Topology, files: Mapping[Rank, RankFile], dialect: Dialect) -> Iterator[Finding]:
    """Ranks that are missing, that should not be there, or that come from another run."""
    expected = topology.ranks()
    missing = [topology.folder(rank) for rank in expected if rank not in files]
    names = missing[:_NAMED] if len(missing) > _NAMED + 1 else missing
    if len(names) < len(missing):
        names.append(f"{len(missing) - _NAMED:,} more")
    for name in names:
        yield failure(
            "topology.rank", name, "is missing; its share of every tensor is lost", where=str(folder),
            expected=f"{len(expected):,} ranks ({topology})", got=f"{len(files):,}",
        )  # fmt: skip
    for rank in files.keys() - set(expected):
        what = f"is no rank of {topology}, which the arguments state"
        yield failure("topology.rank", files[rank].name, what, where=str(folder))
    first = next(iter(files.values()))
    keys = {key for row in dialect.args for key in row.keys} | topology.args().keys() | {"padded_vocab_size"}
    for found in files.values():
        if found.archive.root.get("iteration") != first.archive.root.get("iteration"):
            yield failure(
                "topology.iteration", found.name, f"is of another iteration than {first.name}", where=str(folder),
                expected=repr(first.archive.root.get("iteration")), got=repr(found.archive.root.get("iteration")),
            )  # fmt: skip
        for key in sorted(keys):
            mine, theirs = (found.args or {}).get(key), (first.args or {}).get(key)
            if str(mine) != str(theirs):
                yield failure(
                    "topology.args", found.name, f"has another {key} than {first.name}", where=str(folder),
                    expected=repr(theirs), got=repr(mine),
                )  # fmt: skip


def _passed_over(files: Mapping[Rank, RankFile], found: RankFolder) -> dict[str, tuple[int, int]]:
    """What is no weight of the model: kind → (entries, bytes)."""
    extras = sum(str(name).endswith("_extra_state") for f in files.values() for m in f.models for name in m)
    state = {"optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine"}
    entries = sum(len(state & f.archive.root.keys()) for f in files.values())
    stored = sum(n for f in files.values() for name, (_, n) in f.archive.members.items() if name[:5] == "data/")
    weights = sum(t.nbytes for t in found.tensors.values()) + sum(other.ref.nbytes for _, other in found.replicas)
    kinds = {"_extra_state": (extras, 0), "optimizer and training state": (entries, max(0, stored - weights))}
    return {kind: count for kind, count in kinds.items() if count[0]}
