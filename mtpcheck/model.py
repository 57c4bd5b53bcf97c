"""Blocks, and a model made of them: every part with its shape, and how Hugging Face stores it.

A block is a table of ``configs/blocks``: parts that come together. ``Model`` is a family at one size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtpcheck.data import check_keys, configs, load
from mtpcheck.errors import FamilyError
from mtpcheck.expr import evaluate, expand
from mtpcheck.facts import ConfigRow, config_rows, holds
from mtpcheck.rows import PartShape, Row

_BLOCK_KEYS = {
    "extends", "each", "parts", "when", "hf", "either", "copies", "constant", "facts", "config", "quantized",
}  # fmt: skip
_ROW_KEYS = {"join", "chain", "axis", "stacked"}
BESIDE = "beside."


@dataclass(frozen=True)
class Block:
    """Parts that come together, how HF spells them below a prefix, and the config keys that size them."""

    name: str
    parts: Mapping[str, list[Any]]
    hf: Mapping[str, Any]
    each: Mapping[str, str]
    when: Mapping[str, str]
    """Part → the fact that must be true, or after ``not`` must not, for it to exist."""
    copies: Mapping[str, Mapping[str, str]]
    facts: Mapping[str, Any]
    config: tuple[ConfigRow, ...]
    quantized: tuple[str, ...] = ()
    """Parts that no other layer has, and that serving engines build under the quantization config."""
    either: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other spellings of the same parts by the fact (or ``not`` it) that makes each the usual one; a checkpoint that
    has a tensor of another is spelled so."""
    constant: Mapping[str, float] = field(default_factory=dict)
    """Parts that HF does not store, and what every element of them is."""

    def spelled(self, names: Mapping[str, str]) -> Block:
        """The block where HF names begin otherwise; of several beginnings that fit, the longest counts."""
        either = {when: _respelled(table, names) for when, table in self.either.items()}
        return replace(self, hf=_respelled(self.hf, names), either=either)

    def present(self, facts: Mapping[str, Any]) -> list[str]:
        return [part for part in self.parts if part not in self.when or holds(self.when[part], facts)]


@lru_cache(maxsize=128)
def load_block(name: str, home: Path | None = None) -> Block:
    """A block of the tables in ``home``, or of those that come with mtpcheck. Raises FamilyError if there is none."""
    path = table_file(home, "blocks", name)
    if not path.is_file():
        raise FamilyError(f"block {name!r}: no file {path}")
    table = load(path)
    check_keys(str(path), table, _BLOCK_KEYS)
    if base := table.get("extends"):
        if not (below := table_file(home, "blocks", str(base))).is_file():
            raise FamilyError(f"{path}: extends {base!r}, and there is no {below}")
        table = {**load(below), **table}
    check_keys(str(path), table, _BLOCK_KEYS, needed={"parts", "hf"})
    for row, made_of in table["hf"].items():
        check_keys(f"{path}: {row}", made_of if isinstance(made_of, dict) else {}, _ROW_KEYS)
    for rows in (table["hf"], *table.get("either", {}).values()):
        _check_parts(path, table["parts"], rows)
    return Block(
        name=name,
        parts=table["parts"],
        hf=table["hf"],
        each=table.get("each", {}),
        when={part: fact for fact, parts in table.get("when", {}).items() for part in parts},
        copies=table.get("copies", {}),
        facts=table.get("facts", {}),
        config=config_rows(str(path), table.get("config", {})),
        quantized=tuple(table.get("quantized", ())),
        either=table.get("either", {}),
        constant=table.get("constant", {}),
    )


def _check_parts(path: Path, parts: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Raise FamilyError for a row of what is no part of the block: it would be left out as that of an absent part."""
    for row, made_of in rows.items():
        for part in (made_of.get("join") or made_of["chain"]) if isinstance(made_of, dict) else [made_of]:
            if part not in parts:
                raise FamilyError(f"{path}: {row}: {part!r} is none of the block's parts")


def _respelled(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    def own(name: str) -> str:
        longest = max((start for start in names if f"{name}.".startswith(f"{start}.")), key=len, default="")
        return names[longest] + name.removeprefix(longest) if longest else name

    return {own(name): made_of for name, made_of in table.items()}


def _numbered(name: str, names: Mapping[str, Any]) -> str:
    return expand(name, names) if "{" in name else name


def table_file(home: Path | None, kind: str, name: str) -> Path:
    """A table of ``home`` where it has one of this name, else the one that comes with mtpcheck."""
    own = home / kind / f"{name}.yaml" if home is not None else None
    return own if own is not None and own.is_file() else configs() / kind / f"{name}.yaml"


@dataclass(frozen=True)
class Model:
    """A family at one size: every part with its shape, every HF row, in the order of the layers.

    ``stored`` are names of the HF checkpoint, which decide between spellings.
    """

    family: str
    facts: Mapping[str, Any]
    stored: Collection[str] = ()
    shapes: dict[str, PartShape] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    """Parts that HF does not store, and the value that all their elements have."""
    layers: dict[str, list[str]] = field(default_factory=dict)
    """Layer (``layers.3``, ``mtp.0``) → its parts, named within the layer."""

    def add(self, block: Block, layer: str, prefix: str, names: Mapping[str, Any]) -> None:
        """Instance a block: parts below ``layer``, HF tensors below ``prefix``."""
        present = set(block.present(self.facts))
        lead, hf_lead = layer + "." if layer else "", prefix + "." if prefix else ""
        for template in block.parts:
            if template in present:
                shape = _shape(block.parts[template], names)
                for part in _each(template, block.each, names):
                    self.shapes[lead + part] = shape
                    self.layers.setdefault(layer, []).append(part)
        for template, made_of in {**block.hf, **self._chosen(block, hf_lead, names)}.items():
            form = made_of if isinstance(made_of, dict) else {"join": [made_of]}
            parts = form.get("join") or form["chain"]
            if all(part in present for part in parts):
                own = [[lead + one for one in _each(part, block.each, names)] for part in parts]
                hf_names = [hf_lead + _numbered(name, names) for name in _each(template, block.each, names)]
                self.rows.extend(_rows(hf_names, own, form, f"blocks/{block.name}.yaml: {template}"))
        for part, copy in block.copies.items():
            if "when" not in copy or self.facts.get(copy["when"]):
                self.copies[lead + part] = copy["of"]
        self.constants.update({lead + part: value for part, value in block.constant.items()})

    def _chosen(self, block: Block, lead: str, names: Mapping[str, Any]) -> Mapping[str, Any]:
        """The one of a block's other spellings that is stored, else the usual one."""
        usual: Mapping[str, Any] = {}
        for condition, table in block.either.items():
            if any(lead + name in self.stored for template in table for name in _each(template, block.each, names)[:1]):
                return table
            usual = table if holds(condition, self.facts) else usual
        return usual

    def carry(self, name: str, shape: tuple[int, ...]) -> str:
        """Add a tensor of the release that the text model has no part for, as it is; gives its part."""
        part = BESIDE + name
        self.shapes[part] = tuple((n,) for n in shape)
        self.rows.append(Row(name, (part,), origin="beside"))
        return part


def _rows(names: list[str], parts: list[list[str]], form: Mapping[str, Any], origin: str) -> Iterator[Row]:
    """One row a name, of one instance each of several parts; or, ``stacked``, one row of all instances."""
    chained, axis = "chain" in form, form.get("axis", 0)
    instances = list(zip(*parts, strict=True))
    if form.get("stacked"):
        whole = tuple(part for own in instances for part in own)
        yield Row(names[0], whole, axis, (len(instances),), chained=chained, origin=origin)
        return
    for name, own in zip(names, instances, strict=True):
        yield Row(name, own, axis, chained=chained, origin=origin)


def _each(template: str, each: Mapping[str, str], names: Mapping[str, Any]) -> list[str]:
    """All instances of a template over the counters it mentions."""
    for counter, count in each.items():
        if "{" + counter + "}" in template:
            return [template.replace("{" + counter + "}", str(i)) for i in range(evaluate(count, names))]
    return [template]


def _shape(axes: list[Any], names: Mapping[str, Any]) -> PartShape:
    factors = (axis if isinstance(axis, list) else [axis] for axis in axes)
    return tuple(tuple(evaluate(factor, names) for factor in axis) for axis in factors)
