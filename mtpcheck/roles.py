"""Roles: what one Megatron tensor does in a layer, how it is spelled there, and how parallelism cuts it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mtpcheck.cut import Cut
from mtpcheck.data import check_keys
from mtpcheck.expr import evaluate, expand
from mtpcheck.facts import holds

Spec = Literal["te", "local"]
Experts = Literal["grouped", "sequential", "legacy"]
"""How a module in memory keeps its experts: one tensor each (``weight{e}``), one MLP each
(``local_experts.{e}``), or all in one transposed tensor (``weight1``, ``weight2``)."""

Place = Literal["layer", "mtp", "embed", "final_norm", "head"]

_KEYS = {
    "name", "also", "in_memory", "part", "join", "axis", "halves", "stack", "each", "legacy", "beside", "when", "pad",
    "shard", "size", "extra", "extra_in_memory", "fp32", "chain", "sizes", "split", "offset",
}  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What one Megatron tensor does, and its spellings below a layer."""

    names: Mapping[Spec, str]
    in_memory: Mapping[Spec, str]
    """The module's own name of it, and so that of per-rank files, where it differs from the key of torch_dist."""
    also: tuple[str, ...]
    parts: tuple[str, ...]
    axis: int
    halves: bool
    counter: str
    """The stacked counter (``e``) and, in ``count``, the fact that gives its length."""
    count: str
    each: Mapping[str, str]
    """Spellings of one index of the counter: that of ``torch_dist``, and of modules by form of experts."""
    legacy: str
    beside: tuple[str, ...]
    when: str
    pad: bool
    shard: Mapping[Spec, int | None]
    size: str
    """Expression for the uncut length, where the layer spec decides whether the tensor is cut at all."""
    extra: frozenset[str]
    extra_in_memory: frozenset[str]
    fp32: bool
    """Whether modules hold it in fp32 whatever the dtype of the others."""
    chained: bool = False
    """Whether parts are laid end to end, whatever their factors."""
    sizes: tuple[str, ...] = ()
    """Expressions for the lengths of chained parts, which are cut one by one."""
    split: tuple[str, ...] = ()
    """What torch_dist, which keeps chained parts apart, puts behind the name of each."""
    offset: int = 0
    """What the stored value is more than the part's: -1 where a gain is kept as its distance from one."""
    turns: int = 0
    """How many of the joined parts, from the first on, take turns along the axis."""
    origin: str = ""
    """File and name, for messages."""

    def spellings(self, spec: Spec) -> list[str]:
        """Names to look for, the one to write first."""
        return list(dict.fromkeys([self.names[spec], *self.names.values(), *self.in_memory.values(), *self.also]))

    @property
    def split_names(self) -> list[str]:
        """Keys of torch_dist, one a part, where it keeps them apart."""
        return [f"{self.names['te']}.{piece}" for piece in self.split]

    def templates(self, counter: int | None = None) -> list[str]:
        return [expand(part, {self.counter: counter}) if self.counter else part for part in self.parts]

    def fits(self, parts: Collection[str], facts: Mapping[str, Any]) -> bool:
        """Whether a layer with these parts has this role."""
        return holds(self.when, facts) and all(part in parts for part in self.beside) and self.templates(0)[0] in parts

    @property
    def cutting(self) -> object:
        """What decides how it is cut."""
        return self.shard, self.sizes, len(self.parts) if self.axis == 0 else 1

    def cut(self, spec: Spec, facts: Mapping[str, Any]) -> Cut | None:
        """How tensor parallelism cuts it; None if every rank has all of it.

        Raises FamilyError if ``facts`` do not tell the lengths of parts that are cut one by one.
        """
        axis = self.shard[spec]
        if axis is None:
            return None
        if self.sizes:
            return Cut(axis, tuple(evaluate(size, facts) for size in self.sizes))
        return Cut(axis, (1,) * len(self.parts) if self.axis == axis == 0 else (1,))

    @cached_property
    def patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """For every spelling of one expert: what recognises it, and its template."""
        found = []
        for template in dict.fromkeys(self.each.values()):
            before, _, after = template.partition("{" + self.counter + "}")
            found.append((re.compile(re.escape(before) + r"(\d+)" + re.escape(after)), template))
        return found


def role(path: Path, entry: dict[str, Any]) -> Role:
    """A row of a dialect file. Raises FamilyError for keys that no role has."""
    check_keys(str(path), entry, _KEYS)
    name, stack, shard, join = entry["name"], entry.get("stack", {}), entry.get("shard"), entry.get("join", [])
    names: Mapping[Spec, str] = name if isinstance(name, dict) else {"te": name, "local": name}
    in_turn = join[0] if join and isinstance(join[0], list) else []
    return Role(
        names=names,
        in_memory=entry.get("in_memory", {}),
        also=tuple(entry.get("also", ())),
        parts=tuple([*in_turn, *join[1:]] if in_turn else join or entry.get("chain") or [entry["part"]]),
        axis=entry.get("axis", 0),
        halves=entry.get("halves", False),
        counter=next(iter(stack), ""),
        count=next(iter(stack.values()), ""),
        each=entry.get("each", {}),
        legacy=entry.get("legacy", ""),
        beside=tuple(entry.get("beside", ())),
        when=entry.get("when", ""),
        pad="pad" in entry,
        shard=shard if isinstance(shard, dict) else {"te": shard, "local": shard},
        size=str(entry.get("size", "")),
        extra=frozenset(entry.get("extra", ())),
        extra_in_memory=frozenset(entry.get("extra_in_memory", entry.get("extra", ()))),
        fp32=entry.get("fp32", False),
        chained="chain" in entry,
        sizes=tuple(entry.get("sizes", ())),
        split=tuple(entry.get("split", ())),
        offset=entry.get("offset", 0),
        turns=len(in_turn),
        origin=f"{path.parent.name}/{path.name}: {names['te']}",
    )


@dataclass(frozen=True)
class Address:
    """A Megatron name taken apart: ``decoder.layers.3.`` + ``mlp.experts.linear_fc1.weight{e}`` with e = 7."""

    lead: str
    layer: int | None
    inner: str
    below: str
    expert: int | None
    role: Role | None
    place: Place | None
    """What decides which pipeline stage holds it; None for a name that nobody knows."""

    def name(self, layers: int = 0, experts: int = 0) -> str:
        """The name again, its layer and expert numbers moved by so much."""
        below = self.below if self.expert is None else expand(self.below, {"e": self.expert + experts})
        number = "" if self.layer is None else f"{self.layer + layers}."
        return f"{self.lead}{number}{self.inner}{below}"
