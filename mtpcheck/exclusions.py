"""Writing what ``declared.py`` reads: which modules a quantized checkpoint leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.declared import CONFIG, MODELOPT, Declaration, Packing
from mtpcheck.tree import json_in


def redeclare(
    checkpoint: Checkpoint,
    packing: Packing,
    plain: Iterable[str],
    packed: Iterable[str],
    kinds: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """File → its new content, for every file of ``checkpoint`` that has to declare new modules.

    ``plain``: modules that are stored as they are; each declaration lists those that it does not leave alone yet, under
    its own key and in its own spelling. ``packed``: modules that come off the lists. ``kinds``: tensor → kind, for a
    description of every tensor.
    """
    files: dict[str, dict[str, Any]] = {}
    for declared in packing.declared:
        before = files.get(declared.where) or _content(checkpoint, declared.where)
        after = deepcopy(before)
        if declared.described is not None:
            after.update(kinds)
        else:
            alone = declared.left_alone(plain)
            _edit(_table(after, declared), declared, [m for m in plain if m not in alone], set(packed))
        if after != before:
            files[declared.where] = after
    return files


def _content(checkpoint: Checkpoint, file: str) -> dict[str, Any]:
    if file == CONFIG or checkpoint.hf is None:
        return deepcopy(dict(checkpoint.config or {}))
    return json_in(checkpoint.hf.tree, file)


def _table(content: dict[str, Any], declared: Declaration) -> dict[str, Any]:
    """The mapping that holds the lists of one declaration."""
    if declared.where == MODELOPT:
        own: dict[str, Any] = content.get("quantization", content)
        return own
    for key in declared.listed.split(".")[:-1]:
        content = content[key]
    return content


def _edit(table: dict[str, Any], declared: Declaration, more: list[str], packed: set[str]) -> None:
    """Take ``packed`` off the list, where they stand there by their names, and put ``more`` on it."""
    key = declared.listed.rpartition(".")[2]
    rule = declared.method.exclude.get(key)
    listed = table.get(key)
    if isinstance(listed, list):
        table[key] = [entry for entry in listed if entry not in packed]
    elif isinstance(listed, Mapping):
        table[key] = {entry: value for entry, value in listed.items() if entry not in packed}
    if not more or rule is None:
        return
    if rule == "dynamic":  # the first that matches counts
        table[key] = {**{rf"-:{re.escape(name)}$": {} for name in more}, **(table.get(key) or {})}
    elif rule == "bits":
        table[key] = {**(table.get(key) or {}), **{name: {"bits": 16} for name in more}}
    else:
        listed = table.get(key) or []
        table[key] = [*([listed] if isinstance(listed, str) else listed), *more]
