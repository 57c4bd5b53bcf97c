"""Does the config declare the MTP layers that are stored, and does it say what it said before?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mtpcheck.data import configs, load
from mtpcheck.facts import ConfigRow, holds, lookup
from mtpcheck.family import Family
from mtpcheck.report.finding import Finding, failure, note, warning
from mtpcheck.rules import MISSING, ArgRow, of_layers
from mtpcheck.tensormap import TensorMap

_VOLATILE = {"transformers_version", "_name_or_path", "_commit_hash"}


def mtp_keys() -> frozenset[str]:
    """Every known config key that declares MTP layers."""
    return frozenset(load(configs() / "mtp_keys.yaml"))


def check_count(tensor_map: TensorMap, where: str) -> Iterator[Finding]:
    """Declared against stored MTP layers of one checkpoint."""
    declared, stored = tensor_map.facts.get("mtp_layers") or 0, tensor_map.facts["mtp_stored"]
    if declared == stored:
        return
    message = f"declares {declared} MTP layer{'s' * (declared != 1)}, stores {stored}"
    if not declared:
        yield warning("declaration.count", "MTP layers", message, where=where,
                      todo="a loader that goes by the config never builds the head")  # fmt: skip
    else:
        yield failure("declaration.count", "MTP layers", message, where=where,
                      todo="a loader fails or leaves the missing layer random")  # fmt: skip


def check_own_config(config: Mapping[str, Any], family: Family) -> Iterator[Finding]:
    """What an HF config must say of itself to be the export of a Megatron checkpoint, beside its facts."""
    if config.get("model_type") not in family.model_types:
        expected = " or ".join(family.model_types)
        yield failure("declaration.config", "model_type", "is another family's", expected=expected,
                      got=repr(config.get("model_type")))  # fmt: skip
    said = {key: value or 0 for key, value in declared_keys(config).items()}
    if len(set(said.values())) > 1:
        told = ", ".join(f"{key}={value}" for key, value in said.items())
        yield failure(
            "declaration.mtp", next(iter(said)), f"keys that declare MTP layers contradict one another: {told}"
        )


def compare_facts(
    reference: TensorMap, candidate: TensorMap, config: tuple[ConfigRow, ...], args: tuple[ArgRow, ...]
) -> Iterator[Finding]:
    """Facts that Megatron arguments state, compared across layouts."""
    keys = {row.fact: row.keys[0] for row in config if row.fact}
    for row in args:
        if row.fact is None or row.write_only or not holds(row.beside, reference.facts):
            continue
        expected, got = reference.facts.get(row.fact), candidate.facts.get(row.fact)
        expected, got = of_layers(expected, reference.facts), of_layers(got, reference.facts)
        # what the reference does not tell (null is told), and Megatron needs only the padded vocabulary size
        unsaid = row.fact not in reference.facts or (got is None and row.fact == "vocab")
        if not unsaid and expected != got:
            check = "declaration.mtp" if row.fact == "mtp_layers" else "declaration.config"
            subject = " / ".join(dict.fromkeys([keys.get(row.fact, row.keys[0]), row.keys[0]]))
            yield failure(check, subject, "changed", expected=repr(expected), got=repr(got))


def compare_configs(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], rows: tuple[ConfigRow, ...]
) -> Iterator[Finding]:
    """Two HF configs, key by key. Another known spelling of the same value is a note, not a change."""
    before, after = dict(_leaves(reference)), dict(_leaves(candidate))
    respelled = [
        (a, b)
        for row in rows
        for a in row.keys
        for b in row.keys
        if a != b and a in before and b in after and a not in after and b not in before and _same(before[a], after[b])
        if _last(a) not in mtp_keys()  # a serving engine looks for just one of them
    ]
    for a, b in respelled:
        yield note("declaration.config", a, f"spelled {b} now, with the same value")
    gone = [key for key in before if key not in after and key not in {a for a, _ in respelled}]
    new = [key for key in after if key not in before and key not in {b for _, b in respelled}]
    nulls = {key for row in rows if row.equals is None for key in row.keys}
    for key in gone:
        if _last(key) in _VOLATILE:
            continue
        if before[key] is None and key in nulls:
            yield note("declaration.config", key, "was null, and is left to its default, which is null")
            continue
        twin = _twin(key, before[key], new, after)
        where = f"{'moved' if _last(twin) == _last(key) else 'renamed'} to {twin}" if twin else "is gone"
        yield failure(_check(key), key, where, expected=repr(before[key]))
        new = [other for other in new if other != twin]
    for key in new:
        finding = failure if _last(key) in mtp_keys() else warning
        yield finding(_check(key), key, "is new", got=repr(after[key]))
    for key, value in before.items():
        if key not in after or _same(value, after[key]):
            continue
        if isinstance(value, list) and isinstance(after[key], list) and len(value) != len(after[key]):
            yield _list_length(key, value, after[key])
            continue
        finding = note if _last(key) in _VOLATILE else failure
        yield finding(_check(key), key, "changed", expected=repr(value), got=repr(after[key]))


def _list_length(key: str, before: list[Any], after: list[Any]) -> Finding:
    """A list of another length: in some families one with an entry for each layer counts MTP layers too."""
    what = f"has {len(after)} entries, and had {len(before)}"
    cut = len(after) < len(before) and all(_same(a, b) for a, b in zip(before, after, strict=False))
    cause = f"its last {len(before) - len(after)} were cut off; they may speak of MTP layers" if cut else ""
    return failure("declaration.list", key, what, expected=repr(before), got=repr(after), cause=cause)


def _twin(key: str, value: Any, new: list[str], after: Mapping[str, Any]) -> str:
    """The new key that a vanished one has become: of the same name elsewhere, or a unique one of the same value. That
    two are null tells nothing."""
    same = [other for other in new if _same(after[other], value)]
    moved = [other for other in same if _last(other) == _last(key)]
    alone = same if len(same) == 1 and value is not None else []
    return next(iter(moved or alone), "")


def _leaves(config: Mapping[str, Any], lead: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path → value; a dot within a key is escaped, so that no two paths are spelled alike."""
    for key, value in config.items():
        path = lead + key.replace(".", "\\.")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path, value


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)  # 1, 1.0 and true are three values


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _check(key: str) -> str:
    return "declaration.mtp" if _last(key) in mtp_keys() else "declaration.config"


def declared_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of an HF config, at the top and under text_config, that declare MTP layers, with their values."""
    found = {}
    for lead in ("", "text_config."):
        for key in sorted(mtp_keys()):
            value = lookup(config, lead + key)
            if value is not MISSING:
                found[lead + key] = value
    return found
