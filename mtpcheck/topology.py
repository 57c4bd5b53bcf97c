"""Topologies: how a Megatron run cuts a model into ranks (TP, PP, VPP, EP, ETP), and what each rank holds.

The rules are megatron-core's: get_num_layers_to_build and has_final_layernorm_in_this_stage in transformer_block.py,
mtp_on_this_rank in multi_token_prediction.py, PipelineParallelLayerLayout; and, for the files, get_checkpoint_name and
save_checkpoint in Megatron-LM's training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any

from mtpcheck.errors import UsageError
from mtpcheck.roles import Place

_MOST_STAGES, _MOST_RANKS = 10_000, 100_000  # sizes from an untrusted file may multiply without end
_REPEAT = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


@dataclass(frozen=True, order=True, slots=True)
class Rank:
    """The coordinates that name one file: tensor, pipeline and expert parallel rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What one model chunk holds: a pipeline rank has one, or one for each of its virtual stages."""

    layers: range
    """Decoder layers, counted over the whole model."""
    mtp: bool
    embedding: bool
    """The stage that takes in tokens. The one with the MTP layers holds the embedding once more."""
    final_norm: bool
    head: bool

    def holds(self, place: Place | None, layer: int | None, tied: bool) -> bool:
        """Whether a tensor of this place has to be here. A tied head is a copy of the embedding where that is not."""
        if place == "layer":
            return layer in self.layers
        if place == "head":
            return self.head and not (tied and self.embedding)
        if place == "embed":
            return self.embedding or self.mtp
        if place == "mtp":
            return self.mtp
        return place == "final_norm" and self.final_norm


@dataclass(frozen=True)
class Topology:
    """Sizes of every kind of parallelism, and how decoder layers are dealt out to pipeline stages.

    ``first`` and ``last`` are numbers of decoder layers of the outer pipeline ranks where they differ from the rest.
    ``layout`` is Megatron's ``pipeline_model_parallel_layout``: E embedding, t decoder layer, m MTP layer, L loss,
    ``|`` between stages, ``*n`` and ``( )*n`` for repetition.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    first: int | None = None
    last: int | None = None
    layout: str = ""
    account_for_embedding: bool = False
    account_for_loss: bool = False

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "EP": self.ep, "ETP": self.etp}
        if self.ep == 1 and self.etp in (1, self.tp):
            del sizes["ETP"]
        return " · ".join(f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "TP")

    def ranks(self) -> list[Rank]:
        """Every rank that a file is named after, the same for each pipeline rank.

        Dense and expert weights are dealt out over the same processes, so not every pair of TP and EP occurs: with
        TP 2, EP 2 and ETP 1 there is (0, 0) and (1, 1). Raises UsageError where two expert shards share one name.
        """
        pairs: dict[tuple[int, int], int] = {}
        processes = lcm(self.tp, self.ep * self.etp)
        if processes * self.pp > _MOST_RANKS:
            raise UsageError(f"{self}: more than {_MOST_RANKS:,} ranks")
        for process in range(processes):
            pair = process % self.tp, process // self.etp % self.ep
            if pairs.setdefault(pair, process % self.etp) != process % self.etp:
                raise UsageError(
                    f"ETP {self.etp} is no divisor of TP {self.tp}: Megatron names files by TP, PP and EP rank, "
                    "so that two expert shards would take one name"
                )
        return [Rank(tp, pp, ep) for pp in range(self.pp) for tp, ep in sorted(pairs)]

    def folder(self, rank: Rank) -> str:
        """``mp_rank_<tp>[_<pp>][_<ep>]``: PP and EP are named only where there is more than one."""
        pp, ep = f"_{rank.pp:03d}" * (self.pp > 1), f"_{rank.ep:03d}" * (self.ep > 1)
        return f"mp_rank_{rank.tp:02d}{pp}{ep}"

    def stages(self, layers: int, mtp: int) -> list[Stage]:
        """All model chunks in the order of the layers: stage ``i`` is chunk ``i // pp`` of pipeline rank ``i % pp``.

        ``layers`` and ``mtp`` are numbers of layers of the model. Raises UsageError where they cannot be dealt out so.
        """
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"VPP {self.vpp} needs more than one pipeline stage")
        outer = self.first is not None or self.last is not None
        if outer and (self.layout or self.account_for_embedding or self.account_for_loss):
            raise UsageError("layers of the first or last rank and a layout exclude each other in Megatron")
        kinds = parse_layout(self.layout) if self.layout else self._even(layers, mtp)
        if len(kinds) != self.pp * self.vpp:
            raise UsageError(f"the pipeline layout has {len(kinds)} stages, PP × VPP are {self.pp * self.vpp}")
        flat = "".join(kinds)
        wanted = "E" + "t" * layers + "m" * mtp + "L"
        if flat != wanted:
            raise UsageError(
                f"the pipeline layout holds {flat.count('t')} decoder and {flat.count('m')} MTP layers, expected "
                f"E, {layers} × t, {mtp} × m and L in this order"
            )
        if sum("m" in kind for kind in kinds) > 1:
            raise UsageError("the pipeline layout spreads MTP layers over stages; Megatron wants them in one")
        behind = next((i for i, kind in enumerate(kinds) if "m" in kind), len(kinds)) + self.pp
        if mtp and behind < len(kinds):
            raise UsageError("MTP layers have to be in the last virtual stage of their pipeline rank")
        last = max((i for i, kind in enumerate(kinds) if "t" in kind), default=0)
        starts = accumulate((kind.count("t") for kind in kinds), initial=0)
        found = []
        for i, (kind, start) in enumerate(zip(kinds, starts, strict=False)):
            own = range(start, start + kind.count("t"))
            final_norm = i == last if mtp else "L" in kind
            found.append(Stage(own, "m" in kind, "E" in kind, final_norm, "L" in kind))
        return found

    def _even(self, layers: int, mtp: int) -> list[str]:
        """The layout that Megatron takes where none is given: MTP layers with the loss, on the last stage."""
        per_rank = [0] * self.pp
        rest, free = layers + self.account_for_embedding + self.account_for_loss, list(range(self.pp))
        for rank, count in ((0, self.first), (self.pp - 1, self.last)):
            if count is not None and (count < 1 or rank not in free):
                raise UsageError(f"PP {self.pp} cannot have {count} decoder layers on an outer rank")
            if count is not None:
                per_rank[rank], rest = count, rest - count
                free.remove(rank)
        if rest < 0 or (rest % len(free) or not rest if free else rest):
            given = {"first": self.first, "last": self.last}
            outer = "".join(f", {count} on the {name}" for name, count in given.items() if count is not None)
            raise UsageError(f"{layers} decoder layers cannot be dealt out evenly to PP {self.pp}{outer}; {_HINT}")
        for rank in free:
            per_rank[rank] = rest // len(free)
        if any(count % self.vpp for count in per_rank):
            raise UsageError(f"{per_rank} layers of the pipeline ranks are no multiples of VPP {self.vpp}; {_HINT}")
        counts = [per_rank[rank] // self.vpp for _ in range(self.vpp) for rank in range(self.pp)]
        counts[0] -= self.account_for_embedding
        counts[-1] -= self.account_for_loss
        kinds = ["t" * count for count in counts]
        kinds[0] = "E" + kinds[0]
        kinds[-1] += "m" * mtp + "L"
        return kinds

    def args(self) -> dict[str, Any]:
        """Megatron's arguments for this topology."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "decoder_first_pipeline_num_layers": self.first,
            "decoder_last_pipeline_num_layers": self.last,
            "pipeline_model_parallel_layout": self.layout or None,
            "account_for_embedding_in_pipeline_split": self.account_for_embedding,
            "account_for_loss_in_pipeline_split": self.account_for_loss,
        }


_HINT = "give the number of layers of the first or last rank, or a layout"


def topology_of_args(args: Mapping[str, Any]) -> Topology:
    """What stored arguments say. A value of an unexpected type counts as unsaid."""

    def size(*keys: str, default: int | None = 1) -> Any:
        for key in keys:
            value = args.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_STAGES:
                return value
        return default

    tp = size("tensor_model_parallel_size")
    layout = args.get("pipeline_model_parallel_layout")
    layout = getattr(layout, "input_data", layout)  # parsed arguments hold an object that remembers what it was
    return Topology(
        tp,
        size("pipeline_model_parallel_size"),
        size("virtual_pipeline_model_parallel_size"),
        size("expert_model_parallel_size"),
        size("expert_tensor_parallel_size", default=tp),
        size("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage", default=None),
        size("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage", default=None),
        layout if isinstance(layout, str) else _spelled(layout),
        args.get("account_for_embedding_in_pipeline_split") is True,
        args.get("account_for_loss_in_pipeline_split") is True,
    )


def _spelled(layout: Any) -> str:
    """A layout given as lists of layer kinds, in letters; "?" for what cannot be understood."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    if layout is None:
        return ""
    if not isinstance(layout, list) or not all(isinstance(stage, list) for stage in layout):
        return "?"
    kinds = [[letters.get(str(kind).lower(), "?") for kind in stage] for stage in layout]
    return "|".join("".join(stage) for stage in kinds)


def parse_layout(text: str) -> list[str]:
    """``Et*2|(tt|)*2m|L`` → one string of letters for each stage. Raises UsageError."""
    flat = text.replace(",", "").replace(" ", "")
    for pattern in _REPEAT:
        if re.search(r"\*\d{6}", flat) or len(flat) > 100 * _MOST_STAGES:
            raise UsageError(f"pipeline layout {text[:60]!r}: more than {_MOST_STAGES} layers")
        if sum(int(n) for n in re.findall(r"\*(\d+)", flat)) > _MOST_STAGES:
            raise UsageError(f"pipeline layout {text[:60]!r}: more than {_MOST_STAGES} layers")
        flat = pattern.sub(lambda found: found[1] * int(found[2]), flat)
    if not set(flat) <= set("EtmL|"):
        raise UsageError(f"pipeline layout {text[:60]!r}: expected the letters E, t, m, L, and |, ( ) and *n")
    return flat.split("|")


def indivisible(topology: Topology, facts: Mapping[str, Any], padded_vocab: int, mcore: str) -> Iterator[str]:
    """Why tensors of a model cannot be cut to these sizes for megatron-core ``mcore``; nothing if they can."""
    tensor = {"hidden size": "hidden", "number of attention heads": "heads", "feed-forward size": "ffn"}
    if facts.get("linear_layers"):
        tensor |= {f"number of {what} heads of linear attention": f"linear_{what}_heads" for what in ("key", "value")}
    sizes = [(what, facts.get(fact) or 0, topology.tp, "TP") for what, fact in tensor.items()]
    sizes.append(("padded vocabulary", padded_vocab, topology.tp, "TP"))
    if facts.get("experts"):
        shared = facts.get("shared_ffn") or (facts.get("shared_experts") or 0) * facts["expert_ffn"]
        sizes += [
            ("number of experts", facts["experts"], topology.ep, "EP"),
            ("feed-forward size of experts", facts["expert_ffn"], topology.etp, "ETP"),
            ("feed-forward size of shared experts", shared, topology.tp, "TP"),
        ]
    elif topology.ep > 1:
        yield f"a dense model has no experts for EP {topology.ep}"
    if facts.get("wide_norms") and topology.tp > 1:
        yield "megatron-core has no norm over all heads that it would cut"
    for what, size, parts, name in sizes:
        if size % parts:
            yield f"{what} {size} cannot be cut into {name} {parts}"
    for fact in () if facts.get("mla") else ("groups", "window_groups"):
        yield from _groups(topology.tp, facts.get(fact) or topology.tp, facts, mcore)


def _groups(tp: int, groups: int, facts: Mapping[str, Any], mcore: str) -> Iterator[str]:
    """Why queries, keys and values, joined group by group, cannot be cut. A group may go to several ranks: each has an
    even share of the rows, and gathers the others' results. 0.16.1 then takes its part of the queries, and leaves their
    gates as they are, which do not fit; 0.19.2 takes its part of both (attention.py of megatron-core)."""
    ranks = tp // groups
    if groups % tp and tp % groups:
        yield f"number of query groups {groups} cannot be cut into TP {tp}, nor the other way round"
    elif ranks > 1:  # the queries of a group can be cut if all heads can
        rows = facts["head_dim"] + (facts.get("value_dim") or facts["head_dim"])
        if rows % ranks:
            yield f"{rows} rows of a query group's key and value cannot be cut into {ranks} ranks of TP {tp}"
        if facts.get("output_gate") and mcore == "0.16":
            yield f"megatron-core 0.16 cannot run gates of a query group on {ranks} ranks of TP {tp}; --mcore 0.19 can"
