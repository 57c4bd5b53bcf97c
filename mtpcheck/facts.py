"""Facts of a model, and the rows that tie them to config keys and Megatron arguments.

A fact has one neutral name (``layers``, ``qkv_bias``). A config row says which HF key holds it, an argument row
which Megatron argument, each with an invertible rule, so that both directions derive from the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpcheck.data import check_keys
from mtpcheck.errors import FamilyError, FormatError, UnsupportedError
from mtpcheck.expr import evaluate

MISSING = object()

_POSITIVE = {"hidden", "heads", "groups", "head_dim", "vocab"}
_COUNTS = {"layers", "ffn", "experts", "expert_ffn", "shared_experts", "dense_layers", "mtp_layers", *_POSITIVE}
_MOST = {"layers": 10_000, "experts": 100_000}  # beyond any model; a file that says more would keep us busy for hours


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One HF config value. ``keys`` are its spellings (dots descend); exactly one of fact and ``equals`` is set."""

    keys: tuple[str, ...]
    fact: str | None = None
    default: Any = MISSING
    equals: Any = MISSING
    none: Any = MISSING
    """Another way to write null."""


@dataclass(frozen=True, slots=True)
class ArgRow:
    """One Megatron argument. ``rule`` turns the fact into the argument and back."""

    keys: tuple[str, ...]
    fact: str | None = None
    rule: str = "same"
    default: Any = MISSING
    equals: Any = MISSING
    value: Any = None
    by: str = ""
    beside: str = ""
    write_only: bool = False


def _spellings(key: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in key.split("|"))


def config_rows(what: str, table: Mapping[str, Any]) -> tuple[ConfigRow, ...]:
    rows = []
    for key, entry in table.items():
        entry = {"fact": entry} if isinstance(entry, str) else entry
        check_keys(f"{what}: {key}", entry, {"fact", "default", "is", "none"})
        given = {name: entry.get(name, MISSING) for name in ("default", "none")}
        rows.append(ConfigRow(_spellings(key), entry.get("fact"), equals=entry.get("is", MISSING), **given))
    return tuple(rows)


def arg_rows(what: str, table: Mapping[str, Any]) -> tuple[ArgRow, ...]:
    rows = []
    for key, entry in table.items():
        entry = {"fact": entry} if isinstance(entry, str) else dict(entry)
        check_keys(f"{what}: {key}", entry, {"fact", "rule", "default", "is", "value", "by", "beside", "write_only"})
        entry["equals"] = entry.pop("is", MISSING)
        if entry.get("rule", "same") not in _RULES:
            raise FamilyError(f"{what}: {key}: unknown rule {entry['rule']!r}")
        rows.append(ArgRow(_spellings(key), **entry))
    return tuple(rows)


def holds(condition: str, facts: Mapping[str, Any]) -> bool:
    """Whether a fact is true, or after ``not`` is not; an empty condition always holds."""
    fact = condition.removeprefix("not ")
    return not condition or bool(facts.get(fact)) is (fact == condition)


# ---- Hugging Face


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value under a dotted key, or MISSING."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def store(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, or delete it if ``value`` is MISSING."""
    *path, last = key.split(".")
    for name in path:
        config = config.setdefault(name, {})
    if value is MISSING:
        config.pop(last, None)
    else:
        config[last] = value


def facts_from_config(
    rows: tuple[ConfigRow, ...], config: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """All facts that an HF config states. Raises UnsupportedError where a key has a value we cannot carry."""
    facts = dict(fixed)
    for row in rows:
        key = next((key for key in row.keys if lookup(config, key) is not MISSING), row.keys[0])
        found = lookup(config, key)
        found = None if found is not MISSING and found == row.none else found
        if row.fact is None:
            if found is not MISSING and found != row.equals:
                raise UnsupportedError(
                    f"config.json: {row.keys[0]} is {found!r}; only {row.equals!r} can be expressed in Megatron"
                )
        elif found is MISSING or (found is None and row.default is not MISSING):
            if row.default is MISSING:
                raise UnsupportedError(f"config.json: {' or '.join(row.keys)} is missing")
            facts[row.fact] = default_of(row, facts)
        else:
            facts[row.fact] = found
        _check_count(f"config.json: {key}", row.fact, facts)
    return facts


def _check_count(what: str, fact: str | None, facts: Mapping[str, Any]) -> None:
    """Raise FormatError if a fact that sizes the model is no whole number that can."""
    value = facts.get(fact or "")
    if fact not in _COUNTS or value is None:
        return
    least, most = int(fact in _POSITIVE), _MOST.get(fact, 1 << 40)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise FormatError(f"{what} is {value!r}, expected a whole number from {least} to {most}")


def default_of(row: ConfigRow, facts: Mapping[str, Any]) -> Any:
    """A default is a plain value, or an expression over facts already known."""
    if isinstance(row.default, str) and row.fact != "dtype":
        return facts.get(row.default) if row.default.isidentifier() else evaluate(row.default, facts)
    return row.default


def _default_or_missing(row: ConfigRow, facts: Mapping[str, Any]) -> Any:
    """What a key that is not there means; MISSING where it has to be there at this size (96 heads in 5120)."""
    if row.default is MISSING:
        return row.equals
    try:
        return default_of(row, facts)
    except FamilyError:
        return MISSING


def config_from_facts(
    rows: tuple[ConfigRow, ...], facts: Mapping[str, Any], original: Mapping[str, Any] | None
) -> dict[str, Any]:
    """HF config with every ruled key derived from ``facts``; all other keys are the original's.

    A key that the original leaves to its default stays unsaid while the default still holds.
    """
    config: dict[str, Any] = _copy(original or {})
    for row in rows:
        value = row.equals if row.fact is None else facts.get(row.fact, MISSING)
        default = _default_or_missing(row, facts)
        value = default if value is MISSING and original is None else value
        present = [key for key in row.keys if lookup(config, key) is not MISSING]
        for key in present:
            if isinstance(value, list) and isinstance(before := lookup(config, key), list):
                value = value[: len(before)]  # a list of layers may count the MTP layer or not
            unsaid = lookup(config, key) in (None, row.none) and value == default
            if not unsaid and value is not MISSING:
                store(config, key, value)
        plain = original is None and "." not in row.keys[0]
        if not present and value is not MISSING and (plain or value != default):
            store(config, row.keys[0], value)
    return config


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


# ---- Megatron


def facts_from_args(
    rows: tuple[ArgRow, ...], args: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All facts that Megatron arguments state, added to those already ``known``.

    Rows are read in order, so that later ones may use earlier facts.

    Raises UnsupportedError where an argument has a value we cannot carry.
    """
    facts = dict(known or {})
    for row in rows:
        found = next((args[key] for key in row.keys if key in args), row.default)
        if row.write_only or found is MISSING or not holds(row.beside, facts):
            continue
        if row.fact is None:
            if found != row.equals:
                raise UnsupportedError(f"Megatron argument {row.keys[0]} is {found!r}, expected {row.equals!r}")
        else:
            facts[row.fact] = _RULES[row.rule][1](row, found, facts, args)
        _check_count(f"Megatron argument {row.keys[0]}", row.fact, facts)
    return facts


def args_from_facts(rows: tuple[ArgRow, ...], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron arguments of a model, under all spellings."""
    args: dict[str, Any] = {}
    for row in rows:
        if not holds(row.beside, facts):
            continue
        if row.fact is None:
            value = row.equals
        elif facts.get(row.fact) is None and row.rule in ("same", "groups"):
            continue
        else:
            value = _RULES[row.rule][0](row, facts.get(row.fact), facts)
            if value is None and row.rule.startswith("indexer"):
                continue  # a pattern that has no schedule stays in the manifest
        args.update(dict.fromkeys(row.keys, value))
    return args


def _first_dense(row: ArgRow, dense: Any, facts: Mapping[str, Any]) -> Any:
    if not facts["experts"]:
        return 1  # Megatron's default, without meaning in a dense model
    return [0] * dense + [1] * (facts["layers"] - dense)


def _dense_layers(row: ArgRow, frequency: Any, facts: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    if not facts.get("experts"):
        return None
    if isinstance(frequency, list):
        dense = frequency.index(1) if 1 in frequency else len(frequency)
        if frequency == [0] * dense + [1] * ((facts.get("layers") or len(frequency)) - dense):
            return dense
    elif frequency == 1:
        return 0
    raise UnsupportedError(f"Megatron argument {row.keys[0]} is {frequency!r}; dense layers must come first")


def _divided(row: ArgRow, product: Any, facts: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    by = facts.get(row.by)
    if not product or not by:
        return 0
    if product % by:
        raise UnsupportedError(f"Megatron argument {row.keys[0]} is {product}, no multiple of {row.by} = {by}")
    return product // by


def _torch_dtype(row: ArgRow, name: Any, facts: Mapping[str, Any]) -> Any:
    import torch

    return getattr(torch, name) if name else None


def _groups(row: ArgRow, groups: Any, facts: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    """``num_query_groups`` has a meaning only under ``group_query_attention``."""
    return groups if args.get("group_query_attention") else facts.get("heads")


def _unless_one(row: ArgRow, value: Any, facts: Mapping[str, Any]) -> Any:
    return None if facts.get(row.by, 1) == 1 else value


def _indexer_schedule(types: Any, facts: Mapping[str, Any]) -> tuple[int, int] | None:
    """(frequency, offset) whose schedule is ``types``, or None. Layers count from one, the MTP layer as the next."""
    if types is None:
        return 1, 1
    own = [kind != "shared" for kind in types]
    for frequency in range(1, len(own) + 1):
        for offset in range(1, len(own) + 1):
            if own == [max(n - offset, 0) % frequency == 0 for n in range(1, len(own) + 1)]:
                return frequency, offset
    return None


def _indexer_types(row: ArgRow, frequency: Any, facts: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    offset = max(args.get("dsa_indexer_skip_topk_offset") or 1, 1)
    count = facts.get("layers", 0) + (args.get("mtp_num_layers") or 0)
    if (frequency or 1) == 1:
        return None
    return ["shared" if max(n - offset, 0) % frequency else "full" for n in range(1, count + 1)]


def _renamed(row: ArgRow, value: Any, facts: Mapping[str, Any]) -> Any:
    return row.value.get(value, value)


def _named(row: ArgRow, value: Any, facts: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    return {theirs: ours for ours, theirs in row.value.items()}.get(value, value)


_RULES: dict[str, tuple[Any, Any]] = {
    "same": (lambda row, value, facts: value, lambda row, value, facts, args: value),
    "optional": (lambda row, value, facts: value, lambda row, value, facts, args: value),
    "not": (lambda row, value, facts: not value, lambda row, value, facts, args: not value),
    "none_is": (
        lambda row, value, facts: None if value == row.value else value,
        lambda row, value, facts, args: row.value if value is None else value,
    ),
    "unless_one": (_unless_one, lambda row, value, facts, args: 1 if value is None else value),
    "renamed": (_renamed, _named),
    "indexer_freq": (lambda row, types, facts: (_indexer_schedule(types, facts) or (None, 0))[0], _indexer_types),
    "indexer_offset": (lambda row, types, facts: (_indexer_schedule(types, facts) or (0, None))[1], _indexer_types),
    "groups": (lambda row, value, facts: value, _groups),
    "times": (lambda row, value, facts: value * facts[row.by] if value else None, _divided),
    "first_dense": (_first_dense, _dense_layers),
    "torch_dtype": (_torch_dtype, lambda row, value, facts, args: str(value).removeprefix("torch.") if value else None),
}
"""rule → (fact to argument, argument to fact). ``optional`` writes a null, ``same`` leaves it unsaid."""
