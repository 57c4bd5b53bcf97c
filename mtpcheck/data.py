"""The YAML files under ``configs/``: found beside a source tree or inside an installed package."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mtpcheck.errors import FamilyError


@lru_cache(maxsize=1)
def configs() -> Path:
    """The ``configs`` folder: shipped inside the wheel, beside the package in an editable install."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def load(path: Path) -> Any:
    """Parsed YAML of one file. Raises FamilyError with the line of a syntax error."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise FamilyError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def check_keys(what: str, table: Any, allowed: set[str]) -> None:
    """Raise FamilyError unless ``table`` is a mapping with no other keys than ``allowed``."""
    if not isinstance(table, dict):
        raise FamilyError(f"{what}: expected a mapping, got {type(table).__name__}")
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise FamilyError(f"{what}: unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
