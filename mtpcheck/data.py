"""The YAML files under ``configs/``: found beside a source tree or inside an installed package."""

from __future__ import annotations

from collections.abc import Set
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
        return yaml.load(path.read_text(encoding="utf-8"), _Once)
    except UnicodeDecodeError as error:
        raise FamilyError(f"{path}: not valid UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise FamilyError(f"{path}: not valid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise FamilyError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


class _Once(yaml.SafeLoader):
    """YAML in which a key stands once in its mapping: of two rows of one name the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key.value, str) else str(key.value))
        return super().construct_mapping(node, deep)


def check_keys(what: str, table: Any, allowed: Set[str], needed: Set[str] = frozenset()) -> None:
    """Raise FamilyError unless ``table`` is a mapping with all ``needed`` keys and no others than ``allowed``."""
    if not isinstance(table, dict):
        raise FamilyError(f"{what}: expected a mapping, got {type(table).__name__}")
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise FamilyError(f"{what}: unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    missing = sorted(needed - set(table))
    if missing:
        raise FamilyError(f"{what}: key {missing[0]!r} is missing")
