"""A dialect: how Megatron spells, joins and stacks the parts of any model. One YAML file for all families.

A role may lie in a file in several forms: decoder layers stacked in one tensor or apart, experts stacked or
apart, gate and up joined or apart. ``Dialect.rows`` picks, role by role, the form that a checkpoint has; for
writing, the one megatron-core would write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mtpcheck.errors import FamilyError
from mtpcheck.expr import expand
from mtpcheck.facts import holds
from mtpcheck.model import Model
from mtpcheck.roles import Address, Experts, Role, Spec
from mtpcheck.rows import Row
from mtpcheck.rules import ArgRow

Mcore = Literal["0.16", "0.19"]
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


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
    that megatron-core ``mcore`` with layer spec ``spec`` writes: into torch_dist, or, with ``experts``, into the
    files of ranks, as its modules spell them."""

    spec: Spec = "te"
    mcore: Mcore = "0.16"
    stored: Collection[str] = ()
    experts: Experts | None = None


@dataclass(frozen=True)
class Dialect:
    name: str
    prefixes: tuple[str, ...]
    decoder: str
    mtp: str
    inner: tuple[str, ...]
    inner_in_memory: Mapping[Mcore, str]
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

    # ---- model → names

    def rows(self, model: Model, padded_vocab: int, form: KeyForm) -> Spelling:
        """Rows for every part of ``model`` that Megatron has a place for; copies have none, but a tied head may be
        stored all the same."""
        spelling = Spelling()
        parts = {p for p in model.layers.get("", []) if p not in model.copies}
        if HEAD in form.stored:
            parts |= {"head"} & set(model.layers.get("", []))
        for entry in self.outside:
            if entry.fits(parts, model.facts):
                pad = padded_vocab if entry.pad else None
                names = entry.spellings(form.spec)
                name = next((n for n in names if n in form.stored), names[0])
                row = Row(name, entry.parts, entry.axis, pad=pad, offset=entry.offset, origin=entry.origin)
                spelling.rows.append(row)
                self._extra(spelling, entry, form, name, ())
        self._decoder_rows(spelling, model, form)
        for layer in (name for name in model.layers if name.startswith("mtp.")):
            self._mtp_rows(spelling, model, layer, form)
        return spelling

    def _decoder_rows(self, spelling: Spelling, model: Model, form: KeyForm) -> None:
        layers = [name for name in model.layers if name.startswith("layers.")]
        # transformer_block.py: one key with a layer axis, unless the layers differ (by moe_layer_freq, by
        # linear_attention_freq)
        stacked = not model.facts["experts"] and not model.facts.get("linear_layers")
        for entry in self.layer:
            having = [layer for layer in layers if entry.fits(model.layers[layer], model.facts)]
            if not having:
                continue
            together = [(self.decoder, having)] if len(having) == len(layers) and form.experts is None else []
            apart = [(f"{self.decoder}.{layer.removeprefix('layers.')}", [layer]) for layer in having]
            orders = [together, apart] if stacked else [apart, together]
            chosen = [places for places in orders if places]
            places = next((p for p in chosen if any(self._present(entry, at, form) for at, _ in p)), chosen[0])
            for prefix, members in places:
                stack = (len(members),) if prefix == self.decoder else ()
                self._role_rows(spelling, model, entry, prefix, members, stack, form)

    def _mtp_rows(self, spelling: Spelling, model: Model, layer: str, form: KeyForm) -> None:
        prefix = f"{self.mtp}.{layer.removeprefix('mtp.')}"
        for entry in self.own:
            if entry.fits(model.layers[layer], model.facts):
                self._role_rows(spelling, model, entry, prefix, [layer], (), form)
        first = self.inner[0] if form.experts is None else self.inner_in_memory[form.mcore]
        inner = next((i for i in self.inner if any(k.startswith(f"{prefix}.{i}.") for k in form.stored)), first)
        for entry in self.layer:
            if entry.fits(model.layers[layer], model.facts):
                self._role_rows(spelling, model, entry, f"{prefix}.{inner}", [layer], (), form)
        names = {row.name for row in spelling.rows}
        for bare in self.bare_extra:
            if f"{prefix}.{inner}.{bare['with']}" not in names:
                continue
            if form.spec in bare["extra"] and form.mcore in bare["mcore"] and holds(bare["when"], model.facts):
                spelling.extras.append(ExtraState(f"{prefix}.{inner}.{bare['module']}", ()))

    def _present(self, entry: Role, prefix: str, form: KeyForm) -> bool:
        apart = [expand(template, {entry.counter: 0}) for template in entry.each.values()]
        return any(
            f"{prefix}.{name}{suffix}" in form.stored
            for name in (*entry.spellings(form.spec), *apart)
            for suffix in ("", "_w", "_v")
        )

    def _role_rows(
        self,
        spelling: Spelling,
        model: Model,
        entry: Role,
        prefix: str,
        members: list[str],
        stack: tuple[int, ...],
        form: KeyForm,
    ) -> None:
        """Rows of one role for ``members`` (one layer, or all that share a stacked tensor)."""
        counters: list[int | None] = list(range(model.facts[entry.count])) if entry.counter else [None]
        if template := self._apart(entry, prefix, form):
            for e in counters:
                parts = [f"{m}.{p}" for m in members for p in entry.templates(e)]
                self._add(spelling, entry, [f"{prefix}.{expand(template, {entry.counter: e})}"], parts, stack, form)
            return
        names = [f"{prefix}.{name}" for name in self._spellings(entry, form)]
        parts = [f"{m}.{p}" for m in members for e in counters for p in entry.templates(e)]
        full = (*stack, *((len(counters),) if entry.counter else ()))
        name = self._add(spelling, entry, names, parts, full, form)
        self._extra(spelling, entry, form, name, full)

    def _apart(self, entry: Role, prefix: str, form: KeyForm) -> str:
        """How one expert is spelled where each has a tensor of its own; empty where all share one."""
        if form.experts is not None and not form.stored:
            return entry.each.get(form.experts, "")
        if any(f"{prefix}.{n}{suffix}" in form.stored for n in entry.spellings(form.spec) for suffix in ("", "_w")):
            return ""
        names = {f"{prefix}.{expand(template, {entry.counter: 0})}": template for template in entry.each.values()}
        return next((t for n, t in names.items() if n in form.stored or n + "_w" in form.stored), "")

    def _spellings(self, entry: Role, form: KeyForm) -> list[str]:
        if form.experts is None:
            return entry.spellings(form.spec)
        if form.experts == "legacy" and entry.legacy:
            return [entry.legacy]
        return [entry.in_memory.get(form.spec, entry.names[form.spec])]

    def _add(
        self,
        spelling: Spelling,
        entry: Role,
        names: list[str],
        parts: list[str],
        stack: tuple[int, ...],
        form: KeyForm,
    ) -> str:
        """Add the row in the form that ``stored`` has: joined, or its two halves apart."""
        name = next((n for n in names if (n in form.stored or n + "_w" in form.stored)), names[0])
        if entry.split and form.experts is None and name not in form.stored:
            for i, piece in enumerate(entry.split):
                own = tuple(parts[i :: len(entry.split)])
                spelling.rows.append(Row(f"{name}.{piece}", own, 0, stack, origin=entry.origin))
            return name
        if entry.halves and name not in form.stored and name + "_w" in form.stored:
            for half, suffix in enumerate(("_w", "_v")):
                spelling.rows.append(Row(name + suffix, tuple(parts[half::2]), 0, stack, origin=entry.origin))
        else:
            spelling.rows.append(
                Row(
                    name, tuple(parts), entry.axis, stack,
                    chained=entry.chained, turns=entry.turns, offset=entry.offset, origin=entry.origin,
                )
            )  # fmt: skip
        return name

    def _extra(self, spelling: Spelling, entry: Role, form: KeyForm, name: str, stack: tuple[int, ...]) -> None:
        if form.spec in entry.extra:
            spelling.extras.append(ExtraState(name.rsplit(".", 1)[0], stack))

    # ---- names → roles

    def bare(self, key: Any) -> str:
        """A key without the wrappers' names before it."""
        name = str(key)
        while lead := next((prefix for prefix in self.prefixes if name.startswith(prefix)), None):
            name = name.removeprefix(lead)
        return name

    def address(self, name: str) -> Address:
        """Take a name apart. ``role`` is None for one that no role has."""
        if name not in self._addresses:
            self._addresses[name] = self._address(name)
        return self._addresses[name]

    @cached_property
    def _addresses(self) -> dict[str, Address]:
        return {}

    def _address(self, name: str) -> Address:
        for place, lead in (("layer", f"{self.decoder}."), ("mtp", f"{self.mtp}.")):
            number, dot, below = name.removeprefix(lead).partition(".")
            if name.startswith(lead) and dot and number.isdecimal() and len(number) < 8:
                inner = next((f"{i}." for i in self.inner if below.startswith(f"{i}.")), "") if place == "mtp" else ""
                own, template, expert = self._below(below.removeprefix(inner))
                return Address(lead, int(number), inner, template, expert, own, place)  # type: ignore[arg-type]
        own, template, expert = self._below(name)
        outside = own is not None and own in self.outside
        return Address("", None, "", template, expert, own, own.parts[0] if own and outside else None)  # type: ignore[arg-type]

    def _below(self, below: str) -> tuple[Role | None, str, int | None]:
        """The role of a name below a layer, its template, and the number of its expert."""
        if found := self._by_name.get(below):
            return found, below, None
        for entry in self.layer:
            for pattern, template in entry.patterns:
                if (match := pattern.fullmatch(below)) and len(match[1]) < 8:
                    return entry, template, int(match[1])
        return None, below, None

    @cached_property
    def _by_name(self) -> dict[str, Role]:
        """Below a layer, every spelling → the role whose first name it is, or else one that may be spelled so."""
        named: dict[str, Role] = {}
        roles = (*self.outside, *self.own, *self.layer)
        for entry in roles:
            named.setdefault(entry.names["te"], entry)
        for entry in roles:
            for name in filter(None, [*entry.spellings("te"), entry.legacy, *entry.split_names]):
                other = named.setdefault(name, entry)
                if other.cutting != entry.cutting:
                    raise FamilyError(f"{entry.origin}: {name} is cut in one way here and in another elsewhere")
        return named
