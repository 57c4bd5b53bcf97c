"""Layout ``torch``: Megatron's per-rank files, read without Megatron and without torch.

iter_0000100/mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt    a torch.save zip: args, iteration, model (or model0,
                                                              model1, ... with virtual stages), optimizer, RNG state

gather.py makes whole tensors of what the files hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mtpcheck.dialect import Dialect
from mtpcheck.errors import FormatError
from mtpcheck.files import LocalFile, inside
from mtpcheck.gather import Gathered, Ranks, gather
from mtpcheck.layouts.items import elements_of
from mtpcheck.layouts.zipstore import Archive, Record, StoredTensor, read_archive
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding, failure
from mtpcheck.tensormap import DTYPE_BITS, TensorRef
from mtpcheck.topology import Rank, Topology, topology_of_args

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_NAMED = 10  # missing ranks that are named one by one


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


def is_torch(folder: Path) -> bool:
    return any(_FOLDER.fullmatch(path.name) and (path / FILE).is_file() for path in folder.glob("mp_rank_*"))


def read_torch(folder: Path, dialect: Dialect) -> Gathered:
    """Open every rank file of an iteration folder. Raises FormatError where one cannot be read."""
    files, topology = _open(folder, dialect)
    args = next((found.args for found in files.values() if found.args is not None), None)
    known = {rank: found for rank, found in files.items() if _is_in(rank, topology)}
    if not known:
        raise FormatError(f"{folder}: the arguments say {topology}, and no file is named as one of its ranks")
    ranks = Ranks(known, topology, args)
    topology.ranks()  # refuses sizes beyond any run before they cost time
    found = gather(ranks, dialect)
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
        names = [[dialect.bare(name) for model in found.models for name in model] for found in files.values()]
        ending = [any(name.startswith("decoder.final_") for name in own) for own in names]
        said = replace(said, ep=most[1]) if all(ending) else replace(said, pp=most[1])
    elif len(most) == 3:
        said = replace(said, pp=max(said.pp, most[1]), ep=max(said.ep, most[2]))
    chunks = max(len(found.models) for found in files.values())
    return replace(said, vpp=chunks if said.pp > 1 else 1), said.pp > 1


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


def _passed_over(files: Mapping[Rank, RankFile], found: Gathered) -> dict[str, tuple[int, int]]:
    """What is no weight of the model: kind → (entries, bytes)."""
    extras = sum(str(name).endswith("_extra_state") for f in files.values() for m in f.models for name in m)
    state = {"optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine"}
    entries = sum(len(state & f.archive.root.keys()) for f in files.values())
    stored = sum(n for f in files.values() for name, (_, n) in f.archive.members.items() if name[:5] == "data/")
    weights = sum(t.nbytes for t in found.tensors.values()) + sum(other.ref.nbytes for _, other in found.replicas)
    kinds = {"_extra_state": (extras, 0), "optimizer and training state": (entries, max(0, stored - weights))}
    return {kind: count for kind, count in kinds.items() if count[0]}
