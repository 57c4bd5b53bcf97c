"""configs/report.schema.json, and what in a document breaks it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from mtpcheck.data import configs


@cache
def validator() -> Draft202012Validator:
    schema = json.loads((configs() / "report.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def faults(document: Any) -> list[str]:
    """What in ``document`` breaks the schema, the innermost reason of each."""
    return [f"{error.json_path}: {error.message[:300]}" for error in validator().iter_errors(document)]
