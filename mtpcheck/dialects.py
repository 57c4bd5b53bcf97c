"""The dialects there are: read from their files, proved, and told apart by the keys of a checkpoint.

megatron-core's stands whole in ``configs/dialects/core.yaml``. Another names what it has otherwise: it ``extends`` one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtpcheck.data import check_keys, configs, load
from mtpcheck.dialect import Dialect, KeyForm
from mtpcheck.errors import FamilyError, UsageError
from mtpcheck.facts import arg_rows
from mtpcheck.family import family_names, load_family, specimens
from mtpcheck.model import Model
from mtpcheck.roles import Experts, Role, Spec, role
from mtpcheck.rows import prove_invertible

CORE = "core"
_LISTS = ("outside", "own", "layer")


@lru_cache(maxsize=1)
def dialect_names() -> tuple[str, ...]:
    """Names of all dialects, megatron-core's first."""
    names = sorted(path.stem for path in (configs() / "dialects").glob("*.yaml"))
    return (CORE, *(name for name in names if name != CORE))


def check_name(name: str) -> None:
    """Raise UsageError unless there is a dialect of this name."""
    if name not in dialect_names():
        raise UsageError(f"unknown dialect {name!r}; there are {', '.join(dialect_names())}")


@lru_cache(maxsize=8)
def load_dialect(name: str = CORE) -> Dialect:
    """A dialect by its name, proved invertible for every family in both specs; one that extends another for those
    models that have a role of its own. Raises UsageError for a name that there is not."""
    check_name(name)
    dialect = read_dialect(name)
    for model, spec in _specimens():
        if name == CORE or _differ(dialect, read_dialect(CORE), model):
            prove_complete(dialect, model, spec)
    return dialect


@lru_cache(maxsize=8)
def read_dialect(name: str) -> Dialect:
    """A dialect from its file, not proved yet."""
    path = configs() / "dialects" / f"{name}.yaml"
    table = load(path)
    if "extends" in table:
        check_keys(str(path), table, {"extends", *_LISTS})
        base = read_dialect(table["extends"])
        outside, own, layer = (_instead(getattr(base, key), table.get(key, ()), path) for key in _LISTS)
        return replace(base, name=name, outside=outside, own=own, layer=layer)
    plain = {"decoder", "mtp", "inner_in_memory", "constants"}
    check_keys(str(path), table, {*_LISTS, *plain, "prefixes", "inner", "bare_extra", "args"})
    roles = {key: tuple(role(path, entry) for entry in table[key]) for key in _LISTS}
    return Dialect(
        name=name,
        prefixes=tuple(table["prefixes"]),
        decoder=table["decoder"],
        mtp=table["mtp"],
        inner=tuple(table["inner"]),
        inner_in_memory=table["inner_in_memory"],
        outside=roles["outside"],
        own=roles["own"],
        layer=roles["layer"],
        bare_extra=tuple(table["bare_extra"]),
        args=arg_rows(str(path), table["args"]),
        constants=table["constants"],
    )


def _instead(base: Sequence[Role], table: Sequence[Mapping[str, Any]], path: Path) -> tuple[Role, ...]:
    """The roles of a dialect, those of ``table`` in the place of the ones of their name and condition."""
    own = {(entry.names["te"], entry.when): entry for entry in (role(path, dict(entry)) for entry in table)}
    places = [(entry.names["te"], entry.when) for entry in base]
    if strange := own.keys() - set(places):
        name, when = min(strange)
        raise FamilyError(f"{path}: {name} ({when or 'always'}) takes the place of no role of what this extends")
    return tuple(own.get(place, entry) for place, entry in zip(places, base, strict=True))


# ---- proofs


def _specimens() -> Iterator[tuple[Model, Spec]]:
    for name in family_names():
        for spec in ("te", "local"):
            for model in specimens(load_family(name)):
                yield model, spec


def _differ(a: Dialect, b: Dialect, model: Model) -> bool:
    """Whether two dialects have any role of a model otherwise."""
    own = [entry for key in _LISTS for entry in getattr(a, key) if entry not in getattr(b, key)]
    return any(entry.fits(parts, model.facts) for parts in model.layers.values() for entry in own)


def prove_complete(dialect: Dialect, model: Model, spec: Spec) -> None:
    """Check that the dialect stores every part but copies, once, invertibly. Raises FamilyError."""
    forms: tuple[Experts | None, ...] = (None, "grouped" if spec == "te" else "sequential")
    for experts in forms:
        rows = dialect.rows(model, model.facts["vocab"] + 1, KeyForm(spec, experts=experts)).rows
        prove_invertible(rows, model.shapes)
        homeless = set(model.shapes) - set(model.copies) - {part for row in rows for part in row.parts}
        if homeless:
            raise FamilyError(f"dialects/{dialect.name}.yaml has no row for {min(homeless)!r} of {model.family}")


# ---- which one a checkpoint is in


def others(model: Model, name: str) -> list[str]:
    """Dialects that have any role of a model otherwise than the one called ``name``."""
    own = read_dialect(name)
    return [other for other in dialect_names() if _differ(read_dialect(other), own, model)]


def told_by(keys: Collection[str]) -> str | None:
    """The dialect that the keys of a torch_dist checkpoint tell: one that writes a key which megatron-core does not.

    None if they do not tell, since it has the names of megatron-core's or keys that no dialect writes.
    """
    core = _written(read_dialect(CORE))
    for name in dialect_names():
        own = tuple(f".{key}" for key in _written(read_dialect(name)) - core)
        if own and any(key.endswith(own) for key in keys):
            return name
    return None


def _written(dialect: Dialect) -> set[str]:
    """What torch_dist keys of roles in a layer end in, as the dialect writes them."""
    return {name for entry in dialect.layer for name in (entry.split_names or entry.names.values())}
