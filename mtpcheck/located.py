"""YAML and TOML whose tables know the line of every key, for messages about what a person wrote."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mtpcheck.errors import UsageError

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Table:
    """Keys with values (scalars, lists and further tables). ``line`` is its own, ``lines`` those of its keys."""

    file: str
    line: int
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def at(self, key: Any) -> str:
        """File and line of a key; those of the table, if it lacks the key."""
        return f"{self.file}:{self.lines.get(key, self.line)}"


def read_yaml(path: Path) -> Table:
    """A YAML file whose top is a mapping. Raises UsageError with the line of what is wrong."""

    class Loader(yaml.SafeLoader):
        """Mappings become tables of this file."""

    def table(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Table:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in lines:
                what = "stands twice" if isinstance(key, str) else "is no text"
                raise UsageError(f"{path}:{key_node.start_mark.line + 1}: key {key!r} {what}")
            lines[key] = key_node.start_mark.line + 1
        loader.flatten_mapping(node)  # what << stands for is put in front
        lines = {str(own.value): own.start_mark.line + 1 for own, _ in node.value} | lines
        values = {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}
        return Table(str(path), node.start_mark.line + 1, values, lines)

    def date(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        try:
            return loader.construct_yaml_timestamp(node)
        except ValueError:  # such as 30 February: text, which is refused where a date is expected
            return node.value

    Loader.add_constructor("tag:yaml.org,2002:map", table)
    Loader.add_constructor("tag:yaml.org,2002:timestamp", date)
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is no UTF-8 text: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: not valid YAML: nested too deeply") from None
    except ValueError as error:  # a number that is none, such as 0b_
        raise UsageError(f"{path}: not valid YAML: {error}") from None
    if found is None:
        return Table(str(path), 1, {}, {})
    if not isinstance(found, Table):
        raise UsageError(f"{path}:1: expected keys with values, got {type(found).__name__}")
    return found


def read_toml(path: Path, section: Iterable[str]) -> Table | None:
    """A section of a TOML file; None if there is none. Raises UsageError for what is no TOML.

    tomllib tells no lines. It keeps the order of the file, so the line of a key is the next one that spells it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    for name in section:
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return None
    lines = text.splitlines()
    header = re.compile(r"\s*\[+\s*" + r"\s*\.\s*".join(section))
    start = next((number for number, line in enumerate(lines) if header.match(line)), 0)
    return _Located(str(path), lines, start).table(found)


class _Located:
    """Walks TOML in the order of the file; ``at`` is the line, counted from 0, that was reached."""

    def __init__(self, file: str, lines: list[str], at: int) -> None:
        self.file, self.lines, self.at = file, lines, at

    def table(self, values: Mapping[str, Any]) -> Table:
        first, lines, made = self.at, dict[str, int](), dict[str, Any]()
        for key, value in values.items():
            self.at = lines[key] = self._line_of(key)
            made[key] = self._value(value)
        own = min(lines.values(), default=first)
        return Table(self.file, own + 1, made, {key: line + 1 for key, line in lines.items()})

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.table(value)
        return self._entries(value) if isinstance(value, list) else value

    def _entries(self, values: list[Any]) -> list[Any]:
        """Entries of a list. A table after the first starts on a line of its own, unless all stand on one."""
        made = []
        for number, value in enumerate(values):
            if number and isinstance(value, dict) and self.lines[self.at].count("{") < 2:
                starts = (n for n in range(self.at + 1, len(self.lines)) if re.match(r"\s*(\[\[|\{)", self.lines[n]))
                self.at = next(starts, self.at)
            made.append(self._value(value))
        return made

    def _line_of(self, key: str) -> int:
        spelled = re.compile(rf"(?:^|[\s{{,.\[\"']){re.escape(key)}[\"']?\s*[=.\]]")
        return next((n for n in range(self.at, len(self.lines)) if spelled.search(self.lines[n])), self.at)
