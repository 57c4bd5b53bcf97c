"""What is supported: every family with its layouts, copies, acceptance and sources, and what is not here yet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mtpcheck.family import Family, family_names, load_family, not_yet


@dataclass(frozen=True)
class Listed:
    """One family, as ``mtpcheck families`` and docs/families.md tell of it."""

    name: str
    models: str
    model_types: tuple[str, ...]
    layouts: tuple[str, ...]
    declared_by: tuple[str, ...]
    """Config keys that declare MTP layers; none of them has to be there where ``counted`` is true."""
    counted: bool
    copies: tuple[str, ...]
    """What an MTP layer may repeat of the model."""
    acceptance: str
    """The model type of transformers that runs the trunk; empty where nothing is run, for the reason ``not_run``."""
    not_run: str
    megatron: str
    """How it is known that the Megatron side is right."""
    sources: tuple[str, ...]
    alike: str
    """The family that Megatron cannot tell it from, and takes it for where neither is named."""


def listed() -> list[Listed]:
    """All families, by name. Reads tables alone."""
    return [_listed(load_family(name)) for name in family_names()]


def _listed(family: Family) -> Listed:
    about, rows = family.about, "torch (TP 1)" if family.all_fixed.get("wide_norms") else "torch"
    return Listed(
        name=family.name,
        models=about.get("models", ""),
        model_types=family.model_types,
        layouts=("hf", "torch_dist", rows),
        declared_by=family.declared_by,
        counted=bool(family.mtp.get("counted")),
        copies=tuple(part for block in family.blocks for part, copy in block.copies.items() if "when" not in copy),
        acceptance="" if "not_run" in about else family.trunk_type,
        not_run=about.get("not_run", ""),
        megatron=about.get("megatron", ""),
        sources=tuple(about.get("sources", ())),
        alike=family.alike,
    )


def as_dict() -> dict[str, Any]:
    """The list as a JSON document."""
    families = [asdict(family) for family in listed()]
    return {"schema_version": 1, "command": "families", "families": families, "not_yet": dict(not_yet())}


def words(family: Listed) -> dict[str, str]:
    """One family in words, by what they are about."""
    usually = " (or by none: those stored count)" if family.counted else ""
    return {
        "models": family.models,
        "model type": ", ".join(family.model_types),
        "layouts": ", ".join(family.layouts),
        "MTP declared by": ", ".join(family.declared_by) + usually,
        "copies": ", ".join(family.copies) or "none",
        "acceptance": f"runs as transformers' {family.acceptance}" if family.acceptance else f"no: {family.not_run}",
        "Megatron side": family.megatron + (f"; taken for {family.alike} unless named" if family.alike else ""),
        "sources": ", ".join(family.sources),
    }


def text() -> str:
    """The list for a terminal."""
    lines = []
    for family in listed():
        lines += [family.name, *(f"  {what:<16} {said}" for what, said in words(family).items()), ""]
    return "\n".join([*lines, "not yet", *(f"  {name:<16} {why}" for name, why in not_yet().items())])


def markdown() -> str:
    """docs/families.md, whole."""
    families = [(family.name, words(family)) for family in listed()]
    heads = ["family", *families[0][1]]
    rows = [[f"`{name}`", *said.values()] for name, said in families]
    table = [heads, ["---"] * len(heads), *rows]
    gone = [
        ["model type", "what stands in the way"],
        ["---"] * 2,
        *([f"`{name}`", why] for name, why in not_yet().items()),
    ]
    return f"""# Families

Made by `mtpcheck families --markdown` from the family files; a test holds this page to them.

Both directions and all three layouts (`hf`, `torch_dist`, `torch`) hold for every family. How to add one:
[adding-a-family.md](adding-a-family.md).

{_table(table)}

*Copies* are tensors in which an MTP layer repeats the model's embedding or head. *Megatron side* tells how it is known
that names, shapes and cuts are Megatron's, and what no megatron-core could be asked.

## Not yet

A checkpoint of these is refused by name.

{_table(gone)}
"""


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
