"""What a comparison looked at, component by component, and what both sides declare: the tables of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.checks.declaration import declared_keys
from mtpcheck.report.finding import Finding, Severity
from mtpcheck.report.report import Component, Declared
from mtpcheck.rows import Row
from mtpcheck.tensormap import TensorMap


def component_of(part: str) -> str:
    """``mtp.0`` for parts of an MTP layer, ``layers.3`` for those of a decoder layer, else the part's own name."""
    return ".".join(part.split(".")[:2])


def component_table(reference: TensorMap, candidate: TensorMap, findings: Iterable[Finding]) -> list[Component]:
    """Every component that the reference has: tensors under the names of Hugging Face, bytes, and how they fared.

    ``findings`` are those of the comparison, before any were joined, since one names the part that differs.
    """
    bad = [f for f in findings if f.check.startswith("values.") and f.severity is Severity.FAILURE and not f.source]
    affected = {f.part or f.subject for f in bad}
    table: dict[str, Component] = {}
    for row in reference.model.rows:
        stored = [part for part in row.parts if part in reference.parts or part in reference.packed]
        if not stored:
            continue
        name = component_of(stored[0])
        own = table.get(name) or Component(name, 0, 0)
        missing = any(_is_lost(part, candidate) for part in stored)
        differing = bool(affected) and not missing and not affected.isdisjoint(_names(row, reference, candidate))
        table[name] = replace(
            own,
            tensors=own.tensors + 1,
            nbytes=own.nbytes + sum(reference.parts[part].nbytes for part in stored if part in reference.parts),
            compared=own.compared + (not missing),
            differing=own.differing + differing,
            missing=own.missing + missing,
        )
    return sorted(table.values(), key=lambda own: _place(own.name))


def _place(name: str) -> int:
    """Embedding, decoder layers, what follows them, MTP layers."""
    return next((n for n, lead in enumerate(("embed", "layers.", "", "mtp.")) if lead and name.startswith(lead)), 2)


def _is_lost(part: str, candidate: TensorMap) -> bool:
    return part not in candidate.parts and part not in candidate.packed and part not in candidate.copies


def _names(row: Row, *maps: TensorMap) -> set[str]:
    """Every name under which a finding may speak of a row."""
    names = {row.name, *row.parts}
    for tensor_map in maps:
        names.update(tensor_map.names[part] for part in row.parts if part in tensor_map.names)
        if encoded := tensor_map.encoded.get(row.name):
            names.update(encoded.beside)
        names.update(
            n for part in row.parts if part in tensor_map.packed for n in tensor_map.packed[part].tensors.values()
        )
    return names


def declared_table(a: Checkpoint, b: Checkpoint, findings: Iterable[Finding]) -> list[Declared]:
    """Keys that declare MTP layers on either side, then whatever else findings tell of declarations."""
    before, after = _declared(a), _declared(b)
    table = {key: Declared(key, _text(before, key), _text(after, key)) for key in sorted(before.keys() | after.keys())}
    for finding in findings:
        if finding.check.startswith("declaration.") and (finding.expected or finding.got):
            table.setdefault(finding.subject, Declared(finding.subject, finding.expected, finding.got))
    return list(table.values())


def _declared(checkpoint: Checkpoint) -> Mapping[str, Any]:
    if checkpoint.config is not None:
        return declared_keys(checkpoint.config)
    args = checkpoint.args or {}
    return {"mtp_num_layers": args["mtp_num_layers"]} if "mtp_num_layers" in args else {}


def _text(table: Mapping[str, Any], key: str) -> str:
    return json.dumps(table[key], default=str) if key in table else ""
