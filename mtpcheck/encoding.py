"""How a checkpoint encodes its weights: block-scaled FP8 decoded on reading, and coded again on export.

    X.weight             F8_E4M3, the codes
    X.weight_scale_inv   F32, one scale for each block of ``quantization_config.weight_block_size``

In the tensor map X.weight is bf16 like any other: its bytes are a value node, computed as they are read. The scales go
beside Megatron (the *aside*), and the codes too where bf16 cannot tell two of them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.compare import compare_all
from mtpcheck.errors import FormatError
from mtpcheck.fp8 import Coded, Dequantized, Scaled, grid_of, strangers
from mtpcheck.move import SLAB
from mtpcheck.parallel import Alive, in_parallel
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.tensormap import Encoded, TensorRef

SCALE = "_scale_inv"
CODES = "F8_E4M3"


@dataclass(frozen=True)
class Decoded:
    """A checkpoint's tensors as values. ``encoded`` are those that are stored as codes, by name."""

    tensors: Mapping[str, TensorRef]
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def block_of(config: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of one block, if the config declares block-scaled FP8."""
    declared = (config or {}).get("quantization_config")
    if not isinstance(declared, dict) or declared.get("quant_method") != "fp8":
        return None
    block = declared.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        return None
    return block[0], block[1]


def decode(checkpoint: Checkpoint) -> Decoded:
    """Tensors of an HF checkpoint, with values in place of codes and scales. Codes that cannot be decoded stay as they
    are, and are found."""
    block = block_of(checkpoint.config)
    if block is None:
        return Decoded(checkpoint.tensors)
    tensors, encoded, findings = dict(checkpoint.tensors), dict[str, Encoded](), list[Finding]()
    for name, ref in checkpoint.tensors.items():
        if ref.dtype != CODES:
            continue
        scales = tensors.pop(name + SCALE, None)
        try:
            if scales is None:
                raise FormatError(f"{name}{SCALE} is missing, without which the codes mean nothing")
            if scales.dtype != "F32" or len(ref.shape) != 2:
                raise FormatError(f"{name} is {len(ref.shape)}-D with {scales.dtype} scales, expected 2-D with F32")
            scaled = Scaled(ref.plan, scales.plan, block, name)
        except FormatError as error:
            findings.append(failure("quantization.scale", name, str(error)))
            continue
        values = _values(scaled)
        tensors[name], encoded[name] = values, Encoded(values, ref, scales, block)
    return Decoded(tensors, encoded, tuple(findings))


def _values(scaled: Scaled) -> TensorRef:
    return TensorRef("BF16", Plan.region(Dequantized(scaled), 0, scaled.shape, 2))


# ---- beside Megatron


def aside_of(encoded: Mapping[str, Encoded]) -> dict[str, TensorRef]:
    """What Megatron cannot hold: every scale, and the codes of tensors of which bf16 cannot tell two codes apart."""
    kept: dict[str, TensorRef] = {}
    for name, own in encoded.items():
        kept[name + SCALE] = own.scales
        if _collapses(Scaled(own.codes.plan, own.scales.plan, own.block, name)):
            kept[name] = own.codes
    return kept


def _collapses(scaled: Scaled) -> bool:
    """Whether a scale is so small, large or odd that products leave the range of bf16."""
    exponent = grid_of(scaled).view(np.uint32) >> 23 & 0xFF
    return bool(((exponent < 3) | (exponent > 245)).any())


def code_again(
    tensors: Mapping[str, TensorRef], names: list[str], aside: Mapping[str, TensorRef], block: tuple[int, int],
    progress: Progress,
) -> tuple[dict[str, TensorRef], list[Finding]]:  # fmt: skip
    """Tensors of an export with codes and scales in place of those values that kept scales still give, all of them.

    ``names``: tensors that were codes in the source. Values that were trained on stay bf16, and are found.
    """
    coded = dict(tensors)
    derived: dict[str, Coded] = {}
    bare: list[str] = []
    kept: list[tuple[str, TensorRef, TensorRef]] = []
    for name in names:
        values, scales = tensors.get(name), aside.get(name + SCALE)
        if values is None or values.dtype != "BF16" or scales is None or scales.dtype != "F32":
            bare.append(name)
            continue
        own = Coded(values.plan, scales.plan, block, name)
        codes = aside.get(name) or TensorRef(CODES, Plan.region(own, 0, values.shape, 1))
        decoded = _values(Scaled(codes.plan, scales.plan, block, name))
        coded[name], coded[name + SCALE] = codes, scales
        if name in aside:
            kept.append((name, values, decoded))
        else:
            derived[name] = own
    strange = {name: difference.elements for name, difference in compare_all(kept, progress).items()}
    for name, count in in_parallel(_counts(derived)):
        strange[name] = strange.get(name, 0) + count
    trained = {name: count for name, count in strange.items() if count}
    for name in trained:
        coded[name] = tensors[name]
        del coded[name + SCALE]
    return coded, [*_of_bare(bare), *_of_trained(trained)]


_NAMED = 20  # tensors that are named one by one


def _of_bare(names: list[str]) -> Iterator[Finding]:
    if names:
        what = "no scales were kept for them; they are written as bf16"
        yield warning("quantization.trained", f"{names[0]} and {len(names) - 1:,} more", what)


def _of_trained(trained: Mapping[str, int]) -> Iterator[Finding]:
    todo = "quantization_config still declares FP8: list it in modules_to_not_convert, or quantize it anew"
    for name, count in list(trained.items())[:_NAMED]:
        what = f"{count:,} values are none that its scales give; it is written as bf16"
        yield warning("quantization.trained", name, what, todo=todo)
    if (more := len(trained) - _NAMED) > 0:
        yield warning("quantization.trained", f"{more:,} more tensors", "are written as bf16 too", todo=todo)


def _counts(derived: Mapping[str, Coded]) -> Iterator[Callable[[Alive], tuple[str, int]]]:
    """Jobs that count strange values, some blocks of rows each."""
    for name, coded in derived.items():
        rows, width = coded.values.shape
        step = coded.block[0] * max(1, SLAB // (2 * width * coded.block[0]))
        for first in range(0, rows, step):
            yield partial(_count, name, coded, first, min(step, rows - first))


def _count(name: str, coded: Coded, first: int, rows: int, alive: Alive) -> tuple[str, int]:
    alive()
    return name, strangers(coded, first, rows)
