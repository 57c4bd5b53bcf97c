"""Facts of a model, and the rows that tie them to config keys and Megatron arguments.

A fact has one neutral name (``layers``, ``qkv_bias``). A config row says which HF key holds it, an argument row
which Megatron argument, each with an invertible rule, so that both directions derive from the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtpcheck.data import check_keys
from mtpcheck.errors import FamilyError, FormatError, UnsupportedError
from mtpcheck.expr import evaluate
from mtpcheck.rules import CONFIG_RULES, MISSING, RULES, ArgRow, of_layers

_LINEAR = {f"linear_{what}" for what in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")}
_POSITIVE = {"hidden", "heads", "groups", "head_dim", "vocab", *_LINEAR}
_MOE = {"experts", "expert_ffn", "shared_experts", "shared_ffn", "dense_layers"}
_COUNTS = {"layers", "ffn", "mtp_layers", *_MOE, *_POSITIVE}
_MOST_SHARE = 1 << 40
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
    lead: str = ""
    """The key under which its keys lie."""
    rule: str = ""
    """One of CONFIG_RULES, where the value is not the fact itself."""
    forms: tuple[tuple[str, Form], ...] = ()
    """Spellings whose value is not the fact itself, by key."""

    def fact_of(self, key: str, value: Any, facts: Mapping[str, Any]) -> Any:
        """The fact that the value of one spelling says. Raises UnsupportedError or FormatError if it says none."""
        if form := dict(self.forms).get(key.removeprefix(f"{self.lead}.")):
            return value if value is None else form.fact_of(key, value, facts)
        return CONFIG_RULES[self.rule][0](value, facts) if self.rule else value

    def value_of(self, key: str, fact: Any, facts: Mapping[str, Any]) -> Any:
        """The inverse: what one spelling has for a fact."""
        if form := dict(self.forms).get(key.removeprefix(f"{self.lead}.")):
            return fact if fact is None else form.value_of(fact, facts)
        return CONFIG_RULES[self.rule][1](fact) if self.rule else fact

    def within(self, lead: str) -> ConfigRow:
        """The row for a config that keeps the keys of the text model under ``lead``, and some at the top as well."""
        return replace(self, keys=(*(f"{lead}.{key}" for key in self.keys), *self.keys), lead=lead) if lead else self


@dataclass(frozen=True, slots=True)
class Form:
    """How one spelling says a fact. With ``of`` it is that fact's multiple by ours. Else it is a list of one entry a
    layer: with ``first`` it counts so many layers of that kind, ``then`` only the other; ``kinds`` are its entries for
    the neutral ones. Entries of MTP layers may follow, and are passed over."""

    kinds: tuple[tuple[Any, Any], ...] = ()
    first: Any = None
    then: Any = None
    of: str = ""

    def fact_of(self, key: str, value: Any, facts: Mapping[str, Any]) -> Any:
        if self.of:
            if type(value) not in (int, float) or not abs(value) <= _MOST_SHARE or not facts.get(self.of):
                raise FormatError(f"config.json: {key} is {value!r}, expected a share of {self.of}")
            share = value / facts[self.of]
            return int(share) if share.is_integer() else share
        value = of_layers(value, facts) if isinstance(value, list) else value
        theirs = [kind for _, kind in self.kinds] or [self.first, self.then]
        if not isinstance(value, list) or any(entry not in theirs for entry in value):
            raise FormatError(f"config.json: {key} is {value!r}, expected a list of {', '.join(map(repr, theirs))}")
        if self.kinds:
            return [next(ours for ours, entry in self.kinds if entry == found) for found in value]
        count = value.index(self.then) if self.then in value else len(value)
        if value != self.value_of(count, {"layers": len(value)}):
            raise UnsupportedError(f"config.json: {key} is {value!r}; layers of {self.first!r} must come first")
        return count

    def value_of(self, fact: Any, facts: Mapping[str, Any]) -> Any:
        if self.of:
            return round(fact * facts[self.of])
        if self.kinds:
            return [dict(self.kinds)[entry] for entry in fact]
        return [self.first] * fact + [self.then] * (facts["layers"] - fact)


def _forms(what: str, table: Mapping[str, Any]) -> tuple[tuple[str, Form], ...]:
    lists = []
    for key, entry in table.items():
        check_keys(f"{what}: {key}", entry, {"first", "then", "kinds", "of"})
        kinds = tuple(entry.get("kinds", {}).items())
        lists.append((key, Form(kinds, entry.get("first"), entry.get("then"), entry.get("of", ""))))
    return tuple(lists)


def _spellings(key: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in key.split("|"))


def config_rows(what: str, table: Mapping[str, Any]) -> tuple[ConfigRow, ...]:
    rows = []
    for key, entry in table.items():
        entry = {"fact": entry} if isinstance(entry, str) else entry
        check_keys(f"{what}: {key}", entry, {"fact", "default", "is", "none", "rule", "forms"})
        given = {name: entry.get(name, MISSING) for name in ("default", "none")}
        if entry.get("rule", "") not in ("", *CONFIG_RULES):
            raise FamilyError(f"{what}: {key}: unknown rule {entry['rule']!r}")
        given["rule"] = entry.get("rule", "")
        given["forms"] = _forms(f"{what}: {key}", entry.get("forms", {}))
        rows.append(ConfigRow(_spellings(key), entry.get("fact"), equals=entry.get("is", MISSING), **given))
    return tuple(rows)


def arg_rows(what: str, table: Mapping[str, Any]) -> tuple[ArgRow, ...]:
    rows = []
    listed = ((key, one) for key, entry in table.items() for one in (entry if isinstance(entry, list) else [entry]))
    for key, entry in listed:
        entry = {"fact": entry} if isinstance(entry, str) else dict(entry)
        check_keys(f"{what}: {key}", entry, {"fact", "rule", "default", "is", "value", "by", "beside", "write_only"})
        entry["equals"] = entry.pop("is", MISSING)
        if entry.get("rule", "same") not in RULES:
            raise FamilyError(f"{what}: {key}: unknown rule {entry['rule']!r}")
        rows.append(ArgRow(_spellings(key), **entry))
    return tuple(rows)


def holds(condition: str, facts: Mapping[str, Any]) -> bool:
    """Whether a fact is true, or after ``not`` is not, and so for all that ``and`` joins; an empty one always holds."""
    return not condition or all(
        bool(facts.get(one.removeprefix("not "))) is not one.startswith("not ") for one in condition.split(" and ")
    )


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
        if not isinstance(config.get(name), dict):
            config[name] = {}
        config = config[name]
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
            facts[row.fact] = row.fact_of(key, found, facts)
            for other in row.keys if row.forms else ():
                said = lookup(config, other)
                if said not in (MISSING, None) and row.fact_of(other, said, facts) != facts[row.fact]:
                    raise UnsupportedError(f"config.json: {key} is {found!r}, but {other} is {said!r}")
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
    if row.rule:
        return row.fact_of(row.keys[0], row.default, facts)
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
        if row.rule:
            _store_ruled(config, row, value, default, facts)
            continue
        value = default if value is MISSING and original is None else value
        present = [key for key in row.keys if lookup(config, key) is not MISSING]
        for key in present:
            before = lookup(config, key)
            own = row.value_of(key, value, facts) if value is not MISSING else value
            if isinstance(before, list) and of_layers(before, facts) == of_layers(own, facts):
                own = before
            unsaid = lookup(config, key) in (None, row.none) and value == default
            if not unsaid and value is not MISSING:
                store(config, key, own)
        plain = original is None and "." not in row.keys[0].removeprefix(f"{row.lead}.")
        if not present and value is not MISSING and (plain or value != default):
            store(config, row.keys[0], row.value_of(row.keys[0], value, facts))
    return config


def _store_ruled(config: dict[str, Any], row: ConfigRow, fact: Any, default: Any, facts: Mapping[str, Any]) -> None:
    """Set the key of a row with a rule. Keys that say the fact in their own way are left as they are."""
    present = [key for key in row.keys if lookup(config, key) not in (MISSING, None)]
    same = all(_says(row, key, lookup(config, key), fact, facts) for key in present)
    if fact is MISSING or fact is None or (same and (present or fact == default)):
        return
    for key in present:
        store(config, key, MISSING)
    store(config, row.keys[0], row.value_of(row.keys[0], fact, facts))


def _says(row: ConfigRow, key: str, value: Any, fact: Any, facts: Mapping[str, Any]) -> bool:
    try:
        return bool(row.fact_of(key, value, facts) == fact)
    except UnsupportedError:  # of another number of layers
        return False


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
            facts[row.fact] = _apply(RULES[row.rule].to_fact, row, found, facts, args)
        _check_count(f"Megatron argument {row.keys[0]}", row.fact, facts)
    return facts


def _apply(step: Callable[..., Any], row: ArgRow, value: Any, *known: Mapping[str, Any]) -> Any:
    """One step of a rule. Values come from untrusted files and may be of any type."""
    try:
        return step(row, value, *known)
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UnsupportedError(f"Megatron argument {row.keys[0]} cannot be told from, or as, {value!r}") from None


def args_from_facts(rows: tuple[ArgRow, ...], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron arguments of a model, under all spellings."""
    args: dict[str, Any] = {}
    for row in rows:
        if not holds(row.beside, facts):
            continue
        if row.fact is None:
            value = row.equals
        else:
            value = _apply(RULES[row.rule].to_arg, row, facts.get(row.fact), facts)
            if value is None and not RULES[row.rule].says_null:
                continue
        args.update(dict.fromkeys(row.keys, value))
    return args
