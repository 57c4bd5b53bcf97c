"""Does the config declare the MTP layers that are stored, and does it say what it said before?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtpcheck.data import configs, load
from mtpcheck.facts import MISSING, ArgRow, ConfigRow, lookup
from mtpcheck.report.finding import Finding, failure, note, warning
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
        yield note("declaration.count", "MTP layers", message, where=where)
    else:
        yield failure("declaration.count", "MTP layers", message, where=where,
                      todo="a loader fails or leaves the missing layer random")  # fmt: skip


def compare_facts(
    reference: TensorMap, candidate: TensorMap, config: tuple[ConfigRow, ...], args: tuple[ArgRow, ...]
) -> Iterator[Finding]:
    """Facts that both an HF config and Megatron arguments hold, compared across layouts."""
    keys = {row.fact: row.keys[0] for row in config if row.fact}
    names = {row.fact: row.keys[0] for row in args if row.fact}
    for fact in keys.keys() & names.keys():
        expected, got = reference.facts.get(fact), candidate.facts.get(fact)
        if (expected or 0) != (got or 0):
            check = "declaration.mtp" if fact == "mtp_layers" else "declaration.config"
            subject = f"{keys[fact]} / {names[fact]}"
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
        if a != b and a in before and b in after and a not in after and b not in before and before[a] == after[b]
    ]
    for a, b in respelled:
        yield note("declaration.config", a, f"spelled {b} now, with the same value")
    gone = [key for key in before if key not in after and key not in {a for a, _ in respelled}]
    new = [key for key in after if key not in before and key not in {b for _, b in respelled}]
    for key in gone:
        if _last(key) not in _VOLATILE:
            cause = _moved(before[key], key, new, after)
            yield failure(_check(key), key, "is gone", expected=repr(before[key]), cause=cause)
    for key in new:
        finding = failure if _last(key) in mtp_keys() else warning
        yield finding(_check(key), key, "is new", got=repr(after[key]))
    for key, value in before.items():
        if key in after and not _same(value, after[key]):
            finding = note if _last(key) in _VOLATILE else failure
            yield finding(_check(key), key, "changed", expected=repr(value), got=repr(after[key]))


def _moved(value: Any, key: str, new: list[str], after: Mapping[str, Any]) -> str:
    twin = next((k for k in new if _last(k) == _last(key) and _same(after[k], value)), None)
    if twin is not None:
        return f"moved to {twin}"
    twin = next((k for k in new if _same(after[k], value)), None)
    return f"renamed to {twin}" if twin is not None else ""


def _leaves(config: Mapping[str, Any], lead: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{lead}{key}.")
        else:
            yield lead + key, value


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


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
