"""Which decoder layer of the trunk can run an MTP layer: the one that is made as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtpcheck.errors import UnsupportedError
from mtpcheck.model import Model
from mtpcheck.rows import PartShape

_NORMS = ("pre_attn_norm", "post_attn_norm", "pre_mlp_norm", "post_mlp_norm")


@dataclass(frozen=True)
class Twin:
    """The decoder layers whose attention and whose MLP are made as those of an MTP layer; nearly always one layer."""

    attention: int
    mlp: int


def twin(model: Model, i: int) -> Twin:
    """The last decoder layer that is made as MTP layer ``i`` is: same parts, same shapes. Where none is, the last with
    such attention and norms, and the last with such an MLP.

    Raises UnsupportedError if there is none.
    """
    own = _of_block(model, f"mtp.{i}")
    layers = [_of_block(model, f"layers.{k}") for k in range(model.facts["layers"])]
    wanted = [_half(own, mlp=False), _half(own, mlp=True)]
    alike = [
        {k for k, layer in enumerate(layers) if _half(layer, mlp) == half}
        for half, mlp in zip(wanted, (False, True), strict=True)
    ]
    if both := alike[0] & alike[1]:
        return Twin(max(both), max(both))
    if not all(alike):
        raise UnsupportedError(f"could not judge: no decoder layer is made as MTP layer {i} is, so none can run it")
    return Twin(max(alike[0]), max(alike[1]))


def _of_block(model: Model, layer: str) -> dict[str, PartShape]:
    """Parts of the decoder layer in ``layer``, with their shapes."""
    parts = (part for part in model.layers[layer] if part.split(".")[0] in ("attn", "mlp") or part in _NORMS)
    return {part: model.shapes[f"{layer}.{part}"] for part in parts}


def _half(parts: Mapping[str, PartShape], mlp: bool) -> dict[str, PartShape]:
    return {part: shape for part, shape in parts.items() if part.startswith("mlp.") is mlp}


def renamed(of_twin: Twin, i: int) -> Callable[[str], str]:
    """Parts of the twin's layers → those of MTP layer ``i``."""

    def rename(part: str) -> str:
        _, number, own = part.split(".", 2)
        assert int(number) in (of_twin.attention, of_twin.mlp), part
        return f"mtp.{i}.{own}"

    return rename
