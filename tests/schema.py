"""JSON Schema (draft 2020-12) as far as configs/report.schema.json uses it; a keyword beyond that is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from mtpcheck.data import configs

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip
_KNOWN = {
    "$schema", "$defs", "title", "description", "$ref", "oneOf", "type", "properties", "required", "items", "enum",
    "const", "additionalProperties", "minimum", "maximum", "minItems", "maxItems", "pattern",
}  # fmt: skip


@cache
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((configs() / "report.schema.json").read_text())
    return found


def faults(value: Any, rule: Any = None, at: str = "$") -> Iterator[str]:
    """What in ``value`` breaks ``rule``, by default the whole schema."""
    rule = schema() if rule is None else rule
    if isinstance(rule, bool):
        yield from () if rule else [f"{at}: not allowed"]
        return
    assert set(rule) <= _KNOWN, set(rule) - _KNOWN
    if "$ref" in rule:
        yield from faults(value, schema()["$defs"][rule["$ref"].removeprefix("#/$defs/")], at)
    if "oneOf" in rule:
        tried = [list(faults(value, option, at)) for option in rule["oneOf"]]
        if sum(not found for found in tried) != 1:
            yield f"{at}: fits {sum(not found for found in tried)} of oneOf: {min(tried, key=len)}"
    types = [rule["type"]] if isinstance(rule.get("type"), str) else rule.get("type")
    if types and not any(_is(value, name) for name in types):
        yield f"{at}: {value!r} is none of {types}"
        return
    if "enum" in rule and value not in rule["enum"]:
        yield f"{at}: {value!r} is none of {rule['enum']}"
    if "const" in rule and (value != rule["const"] or type(value) is not type(rule["const"])):
        yield f"{at}: {value!r} is not {rule['const']!r}"
    if _is(value, "number") and not rule.get("minimum", value) <= value <= rule.get("maximum", value):
        yield f"{at}: {value!r} is too small or too large"
    if isinstance(value, str) and not re.search(rule.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match {rule['pattern']}"
    if isinstance(value, list):
        if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", len(value)):
            yield f"{at}: has {len(value)} entries"
        for number, item in enumerate(value):
            yield from faults(item, rule.get("items", True), f"{at}[{number}]")
    if isinstance(value, dict):
        yield from (f"{at}: lacks {key}" for key in rule.get("required", ()) if key not in value)
        for key, item in value.items():
            inside = rule.get("properties", {}).get(key, rule.get("additionalProperties", True))
            yield from faults(item, inside, f"{at}.{key}")


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
