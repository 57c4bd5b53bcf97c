"""The dialect: how Megatron spells, joins and stacks the parts of any model. One YAML file for all families.

A role may lie in a file in several forms: decoder layers stacked in one tensor or apart, experts stacked or
apart, gate and up joined or apart. ``Dialect.rows`` picks, role by role, the form that a checkpoint has; for
writing, the one megatron-core would write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from mtpcheck.data import check_keys, configs, load
from mtpcheck.errors import FamilyError
from mtpcheck.expr import expand
from mtpcheck.facts import arg_rows, holds
from mtpcheck.family import Model, family_names, load_family, specimens
from mtpcheck.rows import Row, prove_invertible
from mtpcheck.rules import ArgRow

Spec = Literal["te", "local"]
Mcore = Literal["0.16", "0.19"]
_ROLE_KEYS = {
    "name",
    "also",
    "part",
    "join",
    "axis",
    "halves",
    "stack",
    "each",
    "beside",
    "when",
    "pad",
    "shard",
    "extra",
}


@dataclass(frozen=True)
class Role:
    """What one Megatron tensor does, and its spellings below a layer."""

    names: Mapping[Spec, str]
    also: tuple[str, ...]
    parts: tuple[str, ...]
    axis: int
    halves: bool
    counter: str
    """The stacked counter (``e``) and, in ``count``, the fact that gives its length."""
    count: str
    each: str
    beside: tuple[str, ...]
    when: str
    pad: bool
    shard: int | None
    extra: frozenset[str]

    def spellings(self, spec: Spec) -> list[str]:
        """Names to look for, the one to write first."""
        return list(dict.fromkeys([self.names[spec], *self.names.values(), *self.also]))

    def templates(self, counter: int | None = None) -> list[str]:
        return [expand(part, {self.counter: counter}) if self.counter else part for part in self.parts]

    def fits(self, parts: Collection[str], facts: Mapping[str, Any]) -> bool:
        """Whether a layer with these parts has this role."""
        return holds(self.when, facts) and all(part in parts for part in self.beside) and self.templates(0)[0] in parts


def _role(what: str, entry: dict[str, Any]) -> Role:
    check_keys(what, entry, _ROLE_KEYS)
    name = entry["name"]
    stack = entry.get("stack", {})
    return Role(
        names=name if isinstance(name, dict) else {"te": name, "local": name},
        also=tuple(entry.get("also", ())),
        parts=tuple(entry.get("join") or [entry["part"]]),
        axis=entry.get("axis", 0),
        halves=entry.get("halves", False),
        counter=next(iter(stack), ""),
        count=next(iter(stack.values()), ""),
        each=entry.get("each", ""),
        beside=tuple(entry.get("beside", ())),
        when=entry.get("when", ""),
        pad="pad" in entry,
        shard=entry.get("shard"),
        extra=frozenset(entry.get("extra", ())),
    )


@dataclass(frozen=True)
class ExtraState:
    """The `_extra_state` entries of one module: ``shard_<i>_<n>`` for every index of its leading axes."""

    module: str
    stack: tuple[int, ...]


@dataclass(frozen=True)
class Spelling:
    """How one Megatron checkpoint spells one model."""

    rows: list[Row] = field(default_factory=list)
    extras: list[ExtraState] = field(default_factory=list)


@dataclass(frozen=True)
class KeyForm:
    """Which form of each key: that of an existing checkpoint with these ``stored`` keys, or, without them, the one
    that megatron-core ``mcore`` with layer spec ``spec`` writes."""

    spec: Spec = "te"
    mcore: Mcore = "0.16"
    stored: Collection[str] = ()


@dataclass(frozen=True)
class Dialect:
    name: str
    prefixes: tuple[str, ...]
    decoder: str
    mtp: str
    inner: tuple[str, ...]
    outside: tuple[Role, ...]
    own: tuple[Role, ...]
    layer: tuple[Role, ...]
    bare_extra: tuple[Mapping[str, Any], ...]
    args: tuple[ArgRow, ...]
    constants: Mapping[str, Any]

    @cached_property
    def told(self) -> frozenset[str]:
        """Facts that Megatron has a word for."""
        return frozenset(row.fact for row in self.args if row.fact)

    def rows(self, model: Model, padded_vocab: int, form: KeyForm) -> Spelling:
        """Rows for every part of ``model`` that Megatron has a place for (copies have none)."""
        spelling = Spelling()
        parts = {p for p in model.layers.get("", []) if p not in model.copies}
        for role in self.outside:
            if role.fits(parts, model.facts):
                pad = padded_vocab if role.pad else None
                names = role.spellings(form.spec)
                name = next((n for n in names if n in form.stored), names[0])
                spelling.rows.append(Row(name, role.parts, role.axis, pad=pad, origin=self._origin(role)))
                self._extra(spelling, role, form, name, ())
        self._decoder_rows(spelling, model, form)
        for layer in (name for name in model.layers if name.startswith("mtp.")):
            self._mtp_rows(spelling, model, layer, form)
        return spelling

    def _origin(self, role: Role) -> str:
        return f"dialects/{self.name}.yaml: {role.names['te']}"

    def _decoder_rows(self, spelling: Spelling, model: Model, form: KeyForm) -> None:
        layers = [name for name in model.layers if name.startswith("layers.")]
        # transformer_block.py: one key with a layer axis, unless the layers differ (moe_layer_freq is a list)
        stacked = not model.facts["experts"]
        for role in self.layer:
            having = [layer for layer in layers if role.fits(model.layers[layer], model.facts)]
            if not having:
                continue
            together = [(self.decoder, having)] if len(having) == len(layers) else []
            apart = [(f"{self.decoder}.{layer.removeprefix('layers.')}", [layer]) for layer in having]
            orders = [together, apart] if stacked else [apart, together]
            chosen = [places for places in orders if places]
            places = next((p for p in chosen if self._present(role, p[0][0], form)), chosen[0])
            for prefix, members in places:
                stack = (len(members),) if prefix == self.decoder else ()
                self._role_rows(spelling, model, role, prefix, members, stack, form)

    def _mtp_rows(self, spelling: Spelling, model: Model, layer: str, form: KeyForm) -> None:
        prefix = f"{self.mtp}.{layer.removeprefix('mtp.')}"
        for role in self.own:
            if role.fits(model.layers[layer], model.facts):
                self._role_rows(spelling, model, role, prefix, [layer], (), form)
        inner = next(
            (i for i in self.inner if any(k.startswith(f"{prefix}.{i}.") for k in form.stored)),
            self.inner[0],
        )
        for role in self.layer:
            if role.fits(model.layers[layer], model.facts):
                self._role_rows(spelling, model, role, f"{prefix}.{inner}", [layer], (), form)
        for entry in self.bare_extra:
            if form.spec in entry["extra"] and form.mcore in entry["mcore"] and holds(entry["when"], model.facts):
                spelling.extras.append(ExtraState(f"{prefix}.{inner}.{entry['module']}", ()))

    def _present(self, role: Role, prefix: str, form: KeyForm) -> bool:
        return any(
            f"{prefix}.{name}{suffix}" in form.stored
            for name in (*role.spellings(form.spec), *([expand(role.each, {role.counter: 0})] if role.each else []))
            for suffix in ("", "_w", "_v")
        )

    def _role_rows(
        self,
        spelling: Spelling,
        model: Model,
        role: Role,
        prefix: str,
        members: list[str],
        stack: tuple[int, ...],
        form: KeyForm,
    ) -> None:
        """Rows of one role for ``members`` (one layer, or all that share a stacked tensor)."""
        counters: list[int | None] = list(range(model.facts[role.count])) if role.counter else [None]
        names = [f"{prefix}.{name}" for name in role.spellings(form.spec)]
        single = f"{prefix}.{role.each}" if role.each else ""
        if single and not any(n in form.stored or n + "_w" in form.stored for n in names):
            first = expand(single, {role.counter: 0})
            if first in form.stored or first + "_w" in form.stored:
                for e in counters:
                    name = expand(single, {role.counter: e})
                    parts = [f"{m}.{p}" for m in members for p in role.templates(e)]
                    self._add(spelling, role, [name], parts, stack, form)
                return
        parts = [f"{m}.{p}" for m in members for e in counters for p in role.templates(e)]
        full = (*stack, *((len(counters),) if role.counter else ()))
        name = self._add(spelling, role, names, parts, full, form)
        self._extra(spelling, role, form, name, full)

    def _add(
        self,
        spelling: Spelling,
        role: Role,
        names: list[str],
        parts: list[str],
        stack: tuple[int, ...],
        form: KeyForm,
    ) -> str:
        """Add the row in the form that ``stored`` has: joined, or its two halves apart."""
        name = next((n for n in names if (n in form.stored or n + "_w" in form.stored)), names[0])
        origin = self._origin(role)
        if role.halves and name not in form.stored and name + "_w" in form.stored:
            for half, suffix in enumerate(("_w", "_v")):
                spelling.rows.append(Row(name + suffix, tuple(parts[half::2]), 0, stack, origin=origin))
        else:
            spelling.rows.append(Row(name, tuple(parts), role.axis, stack, origin=origin))
        return name

    def _extra(self, spelling: Spelling, role: Role, form: KeyForm, name: str, stack: tuple[int, ...]) -> None:
        if form.spec in role.extra:
            spelling.extras.append(ExtraState(name.rsplit(".", 1)[0], stack))


@lru_cache(maxsize=8)
def load_dialect(name: str = "core") -> Dialect:
    """A dialect by its file name, proved invertible for every family in both specs."""
    path = configs() / "dialects" / f"{name}.yaml"
    if not path.is_file():
        raise FamilyError(f"unknown dialect {name!r}: no file {path}")
    table = load(path)
    lists = {"outside", "own", "layer"}
    check_keys(str(path), table, lists | {"prefixes", "decoder", "mtp", "inner", "bare_extra", "args", "constants"})
    dialect = Dialect(
        name=name,
        prefixes=tuple(table["prefixes"]),
        decoder=table["decoder"],
        mtp=table["mtp"],
        inner=tuple(table["inner"]),
        **{key: tuple(_role(f"{path}: {key}", entry) for entry in table[key]) for key in lists},
        bare_extra=tuple(table["bare_extra"]),
        args=arg_rows(str(path), table["args"]),
        constants=table["constants"],
    )
    for model, spec in _specimens():
        prove_complete(dialect, model, spec)
    return dialect


def _specimens() -> Iterator[tuple[Model, Spec]]:
    for name in family_names():
        for spec in ("te", "local"):
            for model in specimens(load_family(name)):
                yield model, spec


def prove_complete(dialect: Dialect, model: Model, spec: Spec) -> None:
    """Check that the dialect stores every part but copies, once, invertibly. Raises FamilyError."""
    rows = dialect.rows(model, model.facts["vocab"] + 1, KeyForm(spec)).rows
    prove_invertible(rows, model.shapes)
    homeless = set(model.shapes) - set(model.copies) - {part for row in rows for part in row.parts}
    if homeless:
        raise FamilyError(f"dialects/{dialect.name}.yaml has no row for {min(homeless)!r} of {model.family}")
