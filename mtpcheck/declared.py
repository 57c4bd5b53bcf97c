"""What a checkpoint declares of its quantization: the method, and which modules it leaves alone.

How the entries of a list name modules (``configs/packings.yaml`` says which list has which rule):

    names     the whole name of a module; a regex from its start after ``re:``
    within    whole parts of a name between dots, anywhere in it; ``*`` stands for anything, ``re:`` as above
    prefix    the start of a name; several may stand in one string, between commas
    dynamic   keys of a mapping: ``-:`` and a regex excludes, ``+:`` or none does not; the first that matches counts
    bits      keys of a mapping, names or regexes, whose ``bits`` are 16 or more exclude
    targets   the ``targets`` of every group, as ``names``; a class (``Linear``) is every module
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.errors import FormatError
from mtpcheck.packing import WEIGHT, Method, Module, known_as, modules_of, packings
from mtpcheck.report.finding import Finding, failure
from mtpcheck.tree import json_in

CONFIG, MODELOPT, DESCRIPTION = "config.json", "hf_quant_config.json", "quant_model_description"
_KEYS = ("quantization_config", "compression_config")
_LONGEST, _REPEATS = 1000, 8


@dataclass(frozen=True)
class Rule:
    """Entries of one kind. ``excluded``: what a hit says of a module."""

    exact: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    pattern: Callable[[str], object] | None = None
    text: str = ""
    """The entry that ``pattern`` was made of."""
    excluded: bool = True

    def hits(self, name: str) -> bool:
        if self.pattern is not None:
            return bool(self.pattern(name))
        return name in self.exact or bool(self.within and not self.within.isdisjoint(runs(name)))


def runs(name: str) -> Iterator[str]:
    """All runs of whole parts of a dotted name."""
    ends = [i for i, c in enumerate(name) if c == "."]
    for start in (0, *(end + 1 for end in ends)):
        yield from (name[start:end] for end in (*ends, len(name)) if end > start)


@dataclass(frozen=True)
class Declaration:
    """One declaration: ``where`` it stands, and which modules it leaves alone."""

    where: str
    method: Method
    listed: str = ""
    """The key to list exclusions under."""
    rules: tuple[Rule, ...] = ()
    only: tuple[Rule, ...] | None = None
    """If there are any, what they do not hit is left alone."""
    described: Mapping[str, Any] | None = None
    """Tensor → its kind (``quant_model_description.json``)."""

    def left_alone(self, modules: Iterable[str]) -> frozenset[str]:
        """Those of ``modules`` that are left alone, under any of the names that engines know them by."""
        first, named = cache(self._first), cache(self._named)
        return frozenset(module for module in modules if self._excludes(known_as(module), first, named))

    def excludes(self, name: str) -> bool:
        """Whether a module is left alone under this very name."""
        return self._excludes((name,), self._first, self._named)

    def _excludes(self, names: tuple[str, ...], first: Callable[[str], int], named: Callable[[str], bool]) -> bool:
        rule = min(map(first, names))
        return self.rules[rule].excluded if rule < len(self.rules) else not any(map(named, names))

    def _first(self, name: str) -> int:
        """The first rule that hits; their number if none does."""
        return next((i for i, rule in enumerate(self.rules) if rule.hits(name)), len(self.rules))

    def _named(self, name: str) -> bool:
        return self.only is None or any(rule.hits(name) for rule in self.only)

    def silent_on(self, module: str) -> bool:
        """Whether a description of every tensor has no entry for this module."""
        return self.described is not None and f"{module}.{WEIGHT}" not in self.described


@dataclass(frozen=True)
class Packing:
    """How the modules of an HF checkpoint are stored, and what it declares of that, the decisive declaration first."""

    modules: Mapping[str, Module]
    declared: tuple[Declaration, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What could not be read."""

    @property
    def method(self) -> str:
        return self.declared[0].method.name if self.declared else "undeclared"


def read_packing(checkpoint: Checkpoint) -> Packing:
    """Modules and declarations of an HF checkpoint. A value that makes no sense is a finding, not an error."""
    assert checkpoint.config is not None and checkpoint.hf is not None
    declared: list[Declaration] = []
    findings: list[Finding] = []
    for name in checkpoint.hf.others:
        try:
            if name.startswith(DESCRIPTION) and name.endswith(".json"):
                declared.append(_described(name, json_in(checkpoint.hf.tree, name)))
        except FormatError as error:
            findings.append(_unreadable(name, str(error), checkpoint))
    for where, key, table in _tables(checkpoint, findings):
        try:
            if one := _declaration(where, key, table):
                declared.append(one)
        except FormatError as error:
            findings.append(_unreadable(key, str(error), checkpoint, where))
    return Packing(modules_of(checkpoint.tensors), tuple(declared), tuple(findings))


def _unreadable(subject: str, what: str, checkpoint: Checkpoint, where: str = "") -> Finding:
    return failure("quantization.unreadable", subject, what, where=str(checkpoint.path / where))


def _tables(checkpoint: Checkpoint, findings: list[Finding]) -> Iterator[tuple[str, str, Any]]:
    """(file, key, value) of every declaration that is a list of exclusions, that of config.json first."""
    config = checkpoint.config or {}
    nested = config.get("text_config")
    for lead, table in (("", config), ("text_config.", nested if isinstance(nested, Mapping) else {})):
        for key in _KEYS:
            if table.get(key) is not None:
                yield CONFIG, lead + key, table[key]
    if checkpoint.hf is not None and MODELOPT in checkpoint.hf.others:
        try:
            table = json_in(checkpoint.hf.tree, MODELOPT)
        except FormatError as error:
            findings.append(_unreadable(MODELOPT, str(error), checkpoint))
            return
        own = table.get("quantization", table)
        yield MODELOPT, "quantization", {"quant_method": "modelopt", **own} if isinstance(own, Mapping) else own


def _described(name: str, table: Mapping[str, Any]) -> Declaration:
    """Every tensor's kind. Modules whose weight is FLOAT are left alone."""
    end = f".{WEIGHT}"
    plain = frozenset(key.removesuffix(end) for key, kind in table.items() if kind == "FLOAT" and key.endswith(end))
    return Declaration(name, packings().methods["modelslim"], name, (Rule(exact=plain),), described=table)


def _declaration(where: str, key: str, table: Any) -> Declaration | None:
    """A declaration, or None where it is of the KV cache alone. Raises FormatError if it makes no sense."""
    if not isinstance(table, Mapping):
        raise FormatError(f"expected a mapping, got {table!r:.60}")
    if not table or table.get("quant_algo", "") is None or table.get("config_groups") == {}:
        return None
    method = method_of(table)
    rules: list[Rule] = []
    only: list[Rule] | None = None
    for name, rule in method.exclude.items():
        if table.get(name) is not None:
            rules += _rules(f"{key}.{name}", rule, table[name])
    for name, rule in method.only.items():
        if table.get(name) is not None and (own := _rules(f"{key}.{name}", rule, table[name])):
            only = [*(only or ()), *own]
    whole = any(rule.text == _EVERY for rule in only or ())
    lists = [name for name in method.exclude if table.get(name) is not None] or list(method.exclude) or ["a list"]
    return Declaration(
        where, method, f"{key}.{lists[0]}", tuple(rules), None if only is None or whole else tuple(only)
    )  # fmt: skip


def method_of(table: Mapping[str, Any]) -> Method:
    """The method that a quantization_config names, or ``unknown``."""
    said = str(table.get("quant_method", "")).lower()
    methods = packings().methods
    fits = (m for m in methods.values() if said in m.methods and (not m.with_key or table.get(m.with_key)))
    return next(fits, methods["unknown"])


# ---- entries


_EVERY = "*"


def _rules(what: str, rule: str, value: Any) -> list[Rule]:
    if rule == "dynamic":
        return [
            _matching(what, text.removeprefix("-:").removeprefix("+:"), text, excluded=text.startswith("-:"))
            for text in _mapping(what, value)
        ]
    if rule == "bits":
        return list(_by_bits(what, _mapping(what, value)))
    if rule == "targets":
        groups = _mapping(what, value).values()
        targets = [entry for g in groups if isinstance(g, Mapping) for entry in _listed(what, g.get("targets") or [])]
        if any(entry[:1].isupper() and "." not in entry for entry in targets):
            return [Rule(pattern=bool, text=_EVERY)]
        return _named(what, targets, "names")
    if rule == "prefix":
        starts = tuple(start.strip() for entry in _listed(what, value) for start in entry.split(",") if start.strip())
        return [Rule(pattern=lambda name: name.startswith(starts), text=", ".join(starts))] if starts else []
    return _named(what, _listed(what, value), rule)


def _named(what: str, entries: list[str], rule: str) -> list[Rule]:
    found: list[Rule] = []
    plain: set[str] = set()
    for entry in entries:
        if entry.startswith("re:"):
            found.append(_matching(what, entry.removeprefix("re:"), entry))
        elif rule == "within" and "*" in entry:
            found.append(Rule(pattern=_glob(entry), text=entry))
        else:
            plain.add(entry.strip("."))
    if whole := frozenset(plain - {""}):
        found.append(Rule(exact=whole) if rule == "names" else Rule(within=whole))
    return found


def _glob(entry: str) -> Callable[[str], object]:
    """``*`` is anything, but does not go on with a number: ``layers.1*`` is not layer 10."""
    body = re.sub(r"(?:\\\*)+", ".*", re.escape(entry.strip(".")))
    body = re.sub(r"(?<=\d)\.\*", r"(?!\\d).*", body)
    return re.compile(rf"(?:^|\.){body}(?:\.|$)").search


def _matching(what: str, regex: str, text: str, excluded: bool = True) -> Rule:
    return Rule(pattern=_regex(what, regex).match, text=text, excluded=excluded)


def _regex(what: str, regex: str) -> re.Pattern[str]:
    """A regex of an untrusted file. Refused is what could take for ever: a repeated group, many repeats."""
    repeats = len(re.findall(r"(?<![\\(])[*+?{]", re.sub(r"(?:\.\*)+", ".*", regex)))
    if len(regex) > _LONGEST or repeats > _REPEATS or re.search(r"(?<!\\)\)[*+{]", regex):
        raise FormatError(f"{what}: the regex {regex[:80]!r} is longer or repeats more than any that is needed")
    try:
        return re.compile(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(f"{what}: {regex[:80]!r} is no regex: {error}") from None


def _by_bits(what: str, table: Mapping[str, Any]) -> Iterator[Rule]:
    """auto-round's ``extra_config``: names first, then those that are regexes."""
    bits = {name: own.get("bits") for name, own in table.items() if isinstance(own, Mapping)}
    for excluded in (True, False):
        names = (name for name, n in bits.items() if isinstance(n, int) and (n >= 16) is excluded)
        yield Rule(exact=frozenset(names), excluded=excluded)
    for name, n in bits.items():
        if isinstance(n, int) and re.search(r"[*+?^$()\[\]{}|\\]", name):
            yield Rule(pattern=_regex(what, name).search, text=name, excluded=n >= 16)


def _listed(what: str, value: Any, deep: int = 2) -> list[str]:
    """Strings of a list, of lists in a list, or one alone; the keys of a mapping."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, list) and deep:
        return [entry for item in value for entry in _listed(what, item, deep - 1)]
    raise FormatError(f"{what}: expected a list of module names, got {value!r:.60}")


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise FormatError(f"{what}: expected a mapping, got {value!r:.60}")
    return value
