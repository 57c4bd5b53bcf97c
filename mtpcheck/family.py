"""Families: which parts a model has and how Hugging Face spells them. One YAML file each.

A family names its blocks (``configs/blocks``), the prefixes of its layers, how its MTP layer is declared, and
facts that hold for every member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from mtpcheck.data import check_keys, configs, load
from mtpcheck.errors import FamilyError
from mtpcheck.expr import evaluate, expand
from mtpcheck.facts import ConfigRow, config_rows
from mtpcheck.model import Block, Model, load_block, table_file
from mtpcheck.rows import prove_invertible

_FAMILY_KEYS = {
    "extends", "match", "trunk", "modules", "text", "beside", "outside", "decoder", "spelled", "mtp", "facts", "config",
    "specimen", "alike", "about",
}  # fmt: skip
_MTP_KEYS = {
    "prefix", "own", "layer", "blocks", "spelled", "declared", "counted", "fed", "passed_on", "norm", "separate",
}  # fmt: skip
_KEYS_OF = {"match": {"model_type", "architectures"}, "decoder": {"prefix", "blocks"}, "mtp": _MTP_KEYS}
_NEEDED = {**_KEYS_OF, "mtp": {"prefix", "own", "blocks", "declared"}}


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    outside: tuple[str, ...]
    decoder: Mapping[str, Any]
    mtp: Mapping[str, Any]
    fixed: Mapping[str, Any]
    """Facts that every member shares."""
    config: tuple[ConfigRow, ...]
    trunk_type: str
    """The model type under which transformers has the decoder."""
    text: Mapping[str, str]
    """Where a model of text and images keeps its text model: ``config``, the key of its config, and ``model``, what
    stands in names where a text model has ``model``."""
    beside: tuple[str, ...]
    """How names of tensors begin that belong to no text model."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names as blocks have them → as this family has them."""
    specimen: Mapping[str, Any] = field(default_factory=dict)
    """Values, for proofs, of facts that no other family has; what is true here is an option and proved both ways."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of a decoder layer's names as transformers has them in memory → as files have them."""
    home: Path | None = None
    """The folder of tables that its blocks come from, if it is not mtpcheck's own."""
    alike: str = ""
    """The family that it cannot be told from in Megatron, and that is meant there unless this one is named."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """For ``mtpcheck families``: ``models``, ``sources``, how the ``megatron`` side is known, why it is ``not_run``."""

    @property
    def _declaration(self) -> ConfigRow:
        """How the number of MTP layers is declared; null, where nothing declares it, stands for those stored."""
        default = "mtp_stored" if self.mtp.get("counted") else 0
        return ConfigRow(tuple(self.mtp["declared"]), "mtp_layers", default=default).within(self.text.get("config", ""))

    @property
    def declared_by(self) -> tuple[str, ...]:
        """Config keys that declare the number of MTP layers; the first is written where none was."""
        return self._declaration.keys

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        entries = (*self.outside, *self.decoder["blocks"], *self.mtp.get("layer", ()), *self.mtp["blocks"])
        return tuple(load_block(name, self.home) for name in dict.fromkeys(map(_block_name, entries)))

    @cached_property
    def all_config(self) -> tuple[ConfigRow, ...]:
        """Config rows of the family and of all its blocks; of these none of a fact that the family tells or fixes."""
        told = {*(row.fact for row in self.config if row.fact), *self.fixed}
        rows = (*(row for block in self.blocks for row in block.config if row.fact not in told), *self.config)
        distinct = (row for i, row in enumerate(rows) if row not in rows[:i])
        return (*(row.within(self.text.get("config", "")) for row in distinct), self._declaration)

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the text model, which may lie within that of a larger one."""
        inner = config.get(self.text.get("config", ""))
        return {**config, **inner} if isinstance(inner, Mapping) else config

    def in_release(self, name: str) -> str:
        """A name of transformers' text model as the release spells it."""
        return self.text.get("model", "model") + name.removeprefix("model") if name.startswith("model.") else name

    @cached_property
    def all_fixed(self) -> dict[str, Any]:
        """Facts that every member shares: what a config row of the family tells is none, whatever blocks say."""
        told = {row.fact for row in self.config}
        return {**{k: v for block in self.blocks for k, v in block.facts.items() if k not in told}, **self.fixed}

    def model(self, facts: Mapping[str, Any]) -> Model:
        """All parts and HF rows at the size that ``facts`` give, with ``mtp_stored`` MTP layers.

        Raises FamilyError if a fact is missing.
        """
        model = self.trunk(facts)
        for i in range(facts["mtp_stored"]):
            self.add_mtp_layer(model, i)
        return model

    def trunk(self, facts: Mapping[str, Any], stored: Collection[str] = ()) -> Model:
        """The model without MTP layers, spelled as in an HF checkpoint of these names."""
        model = Model(self.name, facts, stored)
        for block in self._chosen(self.outside, facts, self.spelled):
            model.add(block, "", "", facts)
        model.rows[:] = [replace(row, name=self.in_release(row.name)) for row in model.rows]
        for k in range(facts["layers"]):
            names = {**facts, "k": k}
            for block in self._chosen(self.decoder["blocks"], names, self.spelled):
                model.add(block, f"layers.{k}", expand(self.decoder["prefix"], names), names)
        return model

    def add_mtp_layer(self, model: Model, i: int) -> None:
        """An MTP layer is a decoder layer, placed after the last one unless the family says which blocks it is made of,
        and the blocks that only it has."""
        names = {**model.facts, "i": i, "k": model.facts["layers"] + i}
        own = self.mtp["own"] if isinstance(self.mtp["own"], list) else [self.mtp["own"]]
        spelled = {**self.spelled, **self.mtp.get("spelled", {})}
        for block in self._chosen(self.mtp.get("layer", self.decoder["blocks"]), names, spelled):
            model.add(block, f"mtp.{i}", expand(self.mtp["prefix"], names), names)
        for block in self._chosen(self.mtp["blocks"], names, spelled):
            model.add(block, f"mtp.{i}", expand(own[min(i, len(own) - 1)], names), names)

    def _chosen(self, entries: Sequence[Any], names: Mapping[str, Any], spelled: Mapping[str, str]) -> list[Block]:
        """Blocks of one layer, as the family spells them; ``{block: condition}`` only where the condition holds."""
        chosen = [
            load_block(_block_name(entry), self.home)
            for entry in entries
            if isinstance(entry, str) or evaluate(next(iter(entry.values())), names)
        ]
        return [block.spelled(spelled) for block in chosen] if spelled else chosen


def _block_name(entry: str | dict[str, str]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


@lru_cache(maxsize=64)
def load_family(name: str) -> Family:
    """A family by its name, or by a YAML file of one's own, which is known by its name from then on.

    Raises FamilyError, naming the nearest, if there is none.
    """
    if name.endswith((".yaml", ".yml")):
        return _own_family(Path(name).resolve())
    if name in _OWN:
        return _OWN[name]
    if name not in family_names():
        near = get_close_matches(name, family_names(), n=1, cutoff=0.3)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise FamilyError(f"unknown family {name!r}{hint} (known: {', '.join(family_names())})")
    return read_family(configs() / "families" / f"{name}.yaml")


_OWN: dict[str, Family] = {}
"""Families from files of one's own, by name."""


def _own_family(path: Path) -> Family:
    if not path.is_file():
        raise FamilyError(f"{path}: no such family file")
    if path.stem in family_names():
        raise FamilyError(f"{path}: {path.stem} is a family of mtpcheck's own; give the file another name")
    try:
        family = read_family(path, path.parent.parent)
    except NOT_BUILT_SO as error:
        raise FamilyError(not_built_so(path, error)) from None
    if _OWN.setdefault(path.stem, family) != family:
        raise FamilyError(f"{path}: another family is known as {path.stem} by now; give the file another name")
    return family


NOT_BUILT_SO = (TypeError, KeyError, AttributeError, ValueError, IndexError, RecursionError)
"""What comes of a table whose values are of other kinds than a family's or block's."""


def not_built_so(path: Path, error: Exception) -> str:
    return f"{path}: is not built as a family or block is: {type(error).__name__}: {error}"


def read_family(path: Path, home: Path | None = None) -> Family:
    """A family from its file, with blocks of ``home``. Raises FamilyError if it is not well-formed or not
    invertible."""
    name, table = path.stem, _table(path, home)
    check_keys(str(path), table, _FAMILY_KEYS, needed={"match", "outside", "decoder", "mtp"})
    for key, needed in _NEEDED.items():
        check_keys(f"{path}: {key}", table[key], _KEYS_OF[key], needed)
    family = Family(
        name=name,
        model_types=tuple(_listed(table["match"]["model_type"])),
        architectures=tuple(table["match"]["architectures"]),
        outside=tuple(table["outside"]),
        decoder=table["decoder"],
        mtp=table["mtp"],
        fixed=table.get("facts", {}),
        config=config_rows(f"families/{name}.yaml", table.get("config", {})),
        trunk_type=table.get("trunk", _listed(table["match"]["model_type"])[0]),
        text=table.get("text", {}),
        beside=tuple(table.get("beside", ())),
        spelled=table.get("spelled", {}),
        specimen=table.get("specimen", {}),
        modules=table.get("modules", {}),
        home=home,
        alike=table.get("alike", ""),
        about=table.get("about", {}),
    )
    _check_spelled(family)
    if not family.declared_by or not all(isinstance(key, str) for row in family.all_config for key in row.keys):
        raise FamilyError(f"families/{name}.yaml: mtp: declared: expected a list of config keys")
    for model in specimens(family):
        prove_invertible(model.rows, model.shapes)
        homeless = model.shapes.keys() - model.constants.keys() - {part for row in model.rows for part in row.parts}
        if homeless:
            raise FamilyError(f"families/{name}.yaml: {min(homeless)!r} is stored nowhere")
    return family


def _check_spelled(family: Family) -> None:
    """Raise FamilyError for a beginning that no name of the family's blocks has."""
    names = [name + "." for block in family.blocks for name in block.hf]
    for start in (*family.spelled, *family.mtp.get("spelled", {})):
        if not any(name.startswith(start + ".") for name in names):
            raise FamilyError(f"families/{family.name}.yaml: spelled: no name of its blocks begins with {start!r}")


def specimens(family: Family) -> tuple[Model, Model]:
    """The family at the smallest size, with every option on and with every option off, for proofs."""
    own = [fact for fact, value in family.specimen.items() if value is True]
    options = ("qkv_bias", "qk_norm", "q_lora", "shared_experts", "dense_layers", "linear_layers", "router_bias", *own)
    facts, off = {**_SPECIMEN, **family.specimen}, dict.fromkeys(options, 0)
    return tuple(family.model({**facts, **chosen, **family.all_fixed}) for chosen in ({}, off))  # type: ignore[return-value]


_SPECIMEN: dict[str, Any] = {
    "layers": 2, "mtp_stored": 2, "vocab": 7, "hidden": 6, "heads": 4, "groups": 2, "head_dim": 2, "ffn": 5,
    "experts": 2, "expert_ffn": 3, "shared_experts": 2, "dense_layers": 1, "qkv_bias": True, "qk_norm": True,
    "tied": False, "q_lora": 8, "kv_lora": 9, "nope_dim": 3, "rope_dim": 2, "v_dim": 7, "index_heads": 3,
    "index_dim": 4, "indexer_types": ["full", "shared", "full"], "shared_ffn": 7, "linear_layers": [1, 0],
    "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 3, "linear_value_dim": 5, "linear_kernel": 4,
    "router_bias": True,
}  # fmt: skip
"""Axes of unequal lengths, so that an exchange of two shows."""


def _table(path: Path, home: Path | None) -> dict[str, Any]:
    """A family's YAML with its ``extends`` merged under it, mapping by mapping."""
    table: dict[str, Any] = load(path)
    check_keys(str(path), table, _FAMILY_KEYS)
    if base := table.pop("extends", None):
        if not (below := table_file(home, "families", str(base))).is_file():
            raise FamilyError(f"{path}: extends {base!r}, and there is no {below}")
        merged = _table(below, home)
        for key, value in table.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
        return merged
    return table


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@lru_cache(maxsize=1)
def family_names() -> tuple[str, ...]:
    """Names of all families; files that start with an underscore are only extended."""
    folder = configs() / "families"
    return tuple(sorted(path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("_")))


def not_yet() -> Mapping[str, str]:
    """Model types with MTP layers that are known and have no family yet → what stands in the way."""
    table: dict[str, str] = load(configs() / "not_yet.yaml")
    return table


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family that a Hugging Face config names. Raises FamilyError, naming the nearest, if none does."""
    model_type = config.get("model_type")
    named = config.get("architectures")
    architectures = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    known = {t: name for name in family_names() for t in load_family(name).model_types}
    if isinstance(model_type, str) and model_type in known:
        return load_family(known[model_type])
    for name in family_names():
        if architectures & set(load_family(name).architectures):
            return load_family(name)
    if isinstance(model_type, str) and (why := not_yet().get(model_type)):
        raise FamilyError(f"config.json: {model_type} is not supported yet: {why}")
    near = get_close_matches(str(model_type), list(known), n=1, cutoff=0.3)
    hint = f"; the nearest known is {near[0]!r} (--family {known[near[0]]} insists)" if near else ""
    raise FamilyError(f"config.json: unknown family, model_type is {model_type!r}{hint}")
