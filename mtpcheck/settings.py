"""``mtpcheck.yaml``, or ``[tool.mtpcheck]`` of pyproject.toml: the cases of the gate, and differences that are known.

    gate:
      to_megatron: python convert.py {src} {dst} --tp {tp}
      to_hf: [python, export.py, "{src}", "{dst}"]
      cases:
        - source: glm4_moe
        - {source: ./tiny, name: two ranks, tp: 2, timeout: 60}
    accept:
      - {check: values.bits, tensor: "*.router.bias", reason: rounded by us, issue 12, expires: 2027-01-31}

Everything that a case says may stand under ``gate`` for all of them. A key that nobody knows, a placeholder that
nobody fills and a value of the wrong kind are refused with the line they stand in.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from mtpcheck.commands import Command, read_command
from mtpcheck.dialects import dialect_names
from mtpcheck.errors import UsageError
from mtpcheck.hub import short_name
from mtpcheck.located import Table, read_toml, read_yaml
from mtpcheck.report.report import check_table
from mtpcheck.topology import Topology

NAME, PYPROJECT = "mtpcheck.yaml", "pyproject.toml"
SECTION = ("tool", "mtpcheck")
MegatronLayout = Literal["torch_dist", "torch"]

_SIZES = ("tp", "pp", "vpp", "ep", "etp")
_SHARED = {"family", "dialect", "to_megatron", "to_hf", "layout", "timeout", "cwd", "acceptance", "seed", *_SIZES}
_KEYS = {
    "": {"gate", "accept"},
    "gate": {"cases", *_SHARED},
    "gate.cases": {"name", "source", *_SHARED},
    "accept": {"check", "tensor", "reason", "expires"},
}
_NOT_ACCEPTABLE = ("commands", "accepted")


@dataclass(frozen=True)
class Case:
    """One source that the commands under test have to bring through. ``where`` is its file and line."""

    name: str
    source: str
    where: str
    cwd: Path
    to_megatron: Command | None
    to_hf: Command | None
    family: str | None = None
    dialect: str | None = None
    """The one that Megatron tensors are in; by default what keys tell, else megatron-core's."""
    layout: MegatronLayout = "torch_dist"
    """Of the Megatron input that mtpcheck makes where only the way back is under test."""
    topology: Topology = field(default_factory=Topology)
    timeout: float = 600
    """Seconds that each command may take."""
    acceptance: bool = True
    seed: int = 0

    @property
    def commands(self) -> dict[str, Command]:
        """Those that are given, by direction, in the order they run."""
        both = {"to_megatron": self.to_megatron, "to_hf": self.to_hf}
        return {way: command for way, command in both.items() if command is not None}


@dataclass(frozen=True)
class Accepted:
    """Findings of ``check`` about tensors or keys like ``tensor`` (fnmatch) are known, up to and with ``expires``."""

    check: str
    tensor: str
    reason: str
    expires: datetime.date
    where: str


@dataclass(frozen=True)
class Settings:
    """One file of settings. ``folder`` is what its relative paths start from."""

    path: Path
    cases: tuple[Case, ...] = ()
    accepted: tuple[Accepted, ...] = ()

    @property
    def folder(self) -> Path:
        return self.path.parent


def find_settings(start: Path) -> Path:
    """The nearest file with settings, from ``start`` up to the root of its git repository, or to the root of the file
    system. Raises UsageError if there is none, or two in one folder."""
    for folder in (start.resolve(), *start.resolve().parents):
        own, project = folder / NAME, folder / PYPROJECT
        in_project = project.is_file() and _section(project) is not None
        if own.is_file() and in_project:
            raise UsageError(f"{folder}: {NAME} and [tool.mtpcheck] of {PYPROJECT} both hold settings; keep one")
        if own.is_file() or in_project:
            return Path(os.path.relpath(own if own.is_file() else project, start))
        if (folder / ".git").exists():
            break
    raise UsageError(
        f"{start}: no {NAME}, and no [tool.mtpcheck] in a {PYPROJECT}, up to {folder}; write one, or name it with "
        "--config"
    )


def read_settings(path: Path) -> Settings:
    """Read and check a file of settings. Raises UsageError with the line of what is wrong."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    table = _section(path) if path.suffix == ".toml" else read_yaml(path)
    if table is None:
        raise UsageError(f"{path}: has no [tool.mtpcheck]")
    _check_keys(table, "")
    gate = _table(table, "gate")
    cases = tuple(_cases(gate, path.parent)) if gate is not None else ()
    return Settings(path, cases, tuple(_accepted(own) for own in _tables(table, "accept", "accept")))


def _section(path: Path) -> Table | None:
    """``[tool.mtpcheck]`` of a TOML file, if it has one."""
    return read_toml(path, SECTION)


# ---- parts of the file


def _cases(gate: Table, folder: Path) -> Iterator[Case]:
    _check_keys(gate, "gate")
    tables = _tables(gate, "cases", "gate.cases")
    if not tables:
        raise UsageError(f"{gate.where}: gate: cases is missing or empty; name at least one source")
    names: set[str] = set()
    for own in tables:
        case = _case(own, gate, folder)
        if case.name in names:
            raise UsageError(f"{own.where}: a case named {case.name!r} stands above; give each a name of its own")
        names.add(case.name)
        yield case


def _case(own: Table, gate: Table, folder: Path) -> Case:
    if "source" not in own.values:
        raise UsageError(f"{own.where}: source is missing: the name of a fixture, or a folder")
    source = _text(own, "source")
    name = _text(own, "name", short_name(source) or "case")
    if not name or name.startswith(".") or "/" in name or not name.isprintable() or len(name.encode()) > 200:
        raise UsageError(f"{own.at('name')}: name {name!r} cannot be that of a folder; give another")

    def given(key: str) -> Table:
        return own if key in own.values else gate

    def command(key: str) -> Command | None:
        table = given(key)
        return read_command(table.at(key), key, table.values[key]) if key in table.values else None

    tp, pp, vpp, ep = (_whole(given(key), key, 1, least=1) for key in ("tp", "pp", "vpp", "ep"))
    etp = _whole(given("etp"), "etp", tp, least=1)
    layout = _text(given("layout"), "layout", "torch_dist")
    if layout not in get_args(MegatronLayout):
        at = given("layout").at("layout")
        raise UsageError(f"{at}: layout is {layout!r}, expected {' or '.join(get_args(MegatronLayout))}")
    where = _text(given("cwd"), "cwd", ".")
    if not (folder / where).is_dir():
        raise UsageError(f"{given('cwd').at('cwd')}: cwd {where!r}: no such folder (it starts from {folder})")
    case = Case(
        name=name,
        source=source,
        where=own.where,
        cwd=folder / where,
        to_megatron=command("to_megatron"),
        to_hf=command("to_hf"),
        family=_text(given("family"), "family", "") or None,
        dialect=_dialect(given("dialect")),
        layout="torch" if layout == "torch" else "torch_dist",
        topology=Topology(tp, pp, vpp, ep, etp),
        timeout=_seconds(given("timeout")),
        acceptance=_flag(given("acceptance"), "acceptance", True),
        seed=_whole(given("seed"), "seed", 0, least=0),
    )
    if not case.commands:
        raise UsageError(f"{own.where}: neither to_megatron nor to_hf says what to run; give one, or both")
    return case


def _dialect(table: Table) -> str | None:
    name = _text(table, "dialect", "") or None
    if name and name not in dialect_names():
        raise UsageError(f"{table.at('dialect')}: dialect is {name!r}, expected {' or '.join(dialect_names())}")
    return name


def _accepted(table: Table) -> Accepted:
    for key in sorted(_KEYS["accept"]):
        if key not in table.values:
            raise UsageError(f"{table.where}: {key} is missing; an accepted difference has check, tensor, reason and "
                             "expires")  # fmt: skip
    check, expires = _text(table, "check"), table.values["expires"]
    groups = {group: entry for group, entry in check_table().items() if group not in _NOT_ACCEPTABLE}
    known = [f"{group}.{name}" for group, entry in groups.items() for name in entry["ids"]]
    if check not in known:
        raise UsageError(f"{table.at('check')}: no finding {check!r} can be accepted{_nearest(check, known)}")
    if isinstance(expires, str):
        try:
            expires = datetime.date.fromisoformat(expires)
        except ValueError:
            expires = None
    if isinstance(expires, datetime.datetime) or not isinstance(expires, datetime.date):
        got = table.values["expires"]
        raise UsageError(f"{table.at('expires')}: expires is {got!r}, expected a date such as 2027-01-31")
    return Accepted(check, _text(table, "tensor"), _text(table, "reason"), expires, table.where)


# ---- values


def _check_keys(table: Table, kind: str) -> None:
    known = _KEYS[kind]
    for key in table.values:
        if key not in known:
            lead = f"{kind}: " if kind else ""
            hint = _nearest(str(key), sorted(known))
            raise UsageError(f"{table.at(key)}: {lead}unknown key {key!r}{hint} (known: {', '.join(sorted(known))})")


def _nearest(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _table(table: Table, key: str) -> Table | None:
    value = table.values.get(key)
    if value is not None and not isinstance(value, Table):
        raise UsageError(f"{table.at(key)}: {key} is {_kind(value)}, expected keys with values")
    return value


def _tables(table: Table, key: str, kind: str) -> list[Table]:
    """A list of tables, their keys checked."""
    value = table.values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(own, Table) for own in value):
        raise UsageError(
            f"{table.at(key)}: {key} is {_kind(value)}, expected a list of entries, each of keys with values"
        )
    for own in value:
        _check_keys(own, kind)
    return value


def _kind(value: Any) -> str:
    names = {Table: "a table", list: "a list", str: f"the text {value!r}", type(None): "empty"}
    return names.get(type(value), repr(value))


def _text(table: Table, key: str, default: str | None = None) -> str:
    value = table.values.get(key, default)
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise UsageError(f"{table.at(key)}: {key} is {_kind(value)}, expected text")
    return value


def _whole(table: Table, key: str, default: int, least: int) -> int:
    value = table.values.get(key, default)
    if type(value) is not int or value < least:
        raise UsageError(f"{table.at(key)}: {key} is {_kind(value)}, expected a whole number from {least} on")
    return value


def _seconds(table: Table) -> float:
    value = table.values.get("timeout", 600)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise UsageError(f"{table.at('timeout')}: timeout is {_kind(value)}, expected seconds")
    return float(value)


def _flag(table: Table, key: str, default: bool) -> bool:
    value = table.values.get(key, default)
    if not isinstance(value, bool):
        raise UsageError(f"{table.at(key)}: {key} is {_kind(value)}, expected true or false")
    return value
