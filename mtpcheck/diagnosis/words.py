"""Components of a model in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_OUTSIDE = {"embed": "the embedding", "head": "the output head", "final_norm": "the final norm"}
_LAYER = re.compile(r"(layers|mtp)\.(\d+)(?:\.(.+))?")


def split_layer(key: str) -> tuple[str, str]:
    """``layers.3.attn.q`` → (``layers.3``, ``attn.q``); what is in no layer → ("", key)."""
    found = _LAYER.fullmatch(key)
    return (f"{found[1]}.{found[2]}", found[3] or "") if found else ("", key)


def component(stem: str) -> str:
    """A part, a layer or what several parts have in common, in words: ``mtp.0.mlp.experts``, ``*.attn.sink`` …"""
    if stem.startswith("*."):
        return f"{stem[2:]} of every layer that has it"
    if stem in ("mtp", "layers"):
        return "all MTP layers" if stem == "mtp" else "all decoder layers"
    layer, rest = split_layer(stem)
    if not layer:
        return _OUTSIDE.get(stem, stem)
    kind, number = layer.split(".")
    whole = f"{'MTP' if kind == 'mtp' else 'decoder'} layer {number}"
    return f"{rest} of {whole}" if rest else whole


def layers(names: Iterable[str]) -> str:
    """Layers of one model, as many as there are: ``decoder layers 1 to 3 and MTP layer 0``."""
    found: dict[str, list[int]] = {}
    for name in names:
        kind, number = name.split(".")
        found.setdefault("MTP" if kind == "mtp" else "decoder", []).append(int(number))
    return listed([f"{word} layer{'s' * (len(own) > 1)} {numbers(own)}" for word, own in found.items()])


def components(stems: Iterable[str]) -> str:
    """Several components; counted where there are too many to name."""
    found = list(dict.fromkeys(component(stem) for stem in stems))
    return listed(found) if len(found) <= 3 else f"{len(found)} components"


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def numbers(values: Sequence[int]) -> str:
    """Numbers with runs drawn together: 0 to 3, 7; cut where they are many."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    told = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    return ", ".join(told[:8]) + (" …" if len(told) > 8 else "")


def size(nbytes: int) -> str:
    """Bytes in decimal units."""
    for unit, one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= one:
            return f"{nbytes / one:.1f} {unit}"
    return f"{nbytes} bytes"
