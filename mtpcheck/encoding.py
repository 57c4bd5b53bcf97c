"""How a checkpoint encodes its weights: FP8 with scales decoded on reading, and coded again on export.

    X.weight                 F8_E4M3, the codes
    X.weight_scale_inv       one scale for each block of ``quantization_config.weight_block_size``, or one in all
    X.activation_scale       beside a tensor with one scale, where activations are quantized by a fixed one

In the tensor map X.weight is bf16 like any other: its bytes are a value node, computed as they are read. The scales go
beside Megatron (the *aside*), and the codes too where bf16 cannot tell two of them apart. Or Megatron's tensors hold
the codes themselves (``keep``): then nothing is computed, and only the scales lie beside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.compare import compare_all
from mtpcheck.errors import FormatError
from mtpcheck.fp8 import WHOLE, Coded, Dequantized, Grid
from mtpcheck.move import SLAB
from mtpcheck.parallel import Alive, in_parallel
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, failure
from mtpcheck.tensormap import Encoded, TensorMap, TensorRef

CODES = "F8_E4M3"
SCALE = "_scale_inv"
_SCALES_OF_WHOLE = (SCALE, "_scale")  # transformers' own spelling, and that of vLLM's FP8 checkpoints
_ACTIVATION = ("activation_scale", "input_scale")


@dataclass(frozen=True)
class Decoded:
    """A checkpoint's tensors as values. ``encoded`` are those that are stored as codes, by name."""

    tensors: Mapping[str, TensorRef]
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def block_of(config: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of one block, if the config declares FP8 with scales; WHOLE for one scale a tensor."""
    declared = (config or {}).get("quantization_config")
    if not isinstance(declared, dict) or declared.get("quant_method") != "fp8":
        return None
    block = declared.get("weight_block_size")
    if block is None:
        return WHOLE
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        return None
    return min(block[0], WHOLE[0]), min(block[1], WHOLE[1])


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
        try:
            own = _encoded(name, ref, tensors, block)
        except FormatError as error:
            findings.append(failure("quantization.scale", name, str(error)))
            tensors.pop(name + SCALE, None)
            continue
        tensors[name], encoded[name] = own.values, own
        for beside in own.beside:
            del tensors[beside]
    return Decoded(tensors, encoded, tuple(findings))


def scale_names(name: str, block: tuple[int, int]) -> list[str]:
    """How the scales of a tensor may be spelled."""
    return [name + suffix for suffix in (_SCALES_OF_WHOLE if block == WHOLE else (SCALE,))]


def activation_names(name: str) -> list[str]:
    """How the scale of a tensor's activations may be spelled."""
    return [f"{name.removesuffix('weight')}{suffix}" for suffix in _ACTIVATION]


def _encoded(name: str, codes: TensorRef, tensors: Mapping[str, TensorRef], block: tuple[int, int]) -> Encoded:
    """Codes with what belongs to them. Raises FormatError if scales are missing or do not fit."""
    spelled = scale_names(name, block)
    scale = next((s for s in spelled if s in tensors), None)
    if scale is None:
        raise FormatError(f"{spelled[0]} is missing, without which the codes mean nothing")
    grid = Grid(tensors[scale], block, codes.shape, name)
    values = TensorRef("BF16", Plan.region(Dequantized(codes.plan, grid), 0, codes.shape, 2))
    others = activation_names(name)
    return Encoded(values, codes, {s: tensors[s] for s in (scale, *others) if s in tensors}, grid)


# ---- in Megatron


def as_codes(tensor_map: TensorMap, names: Collection[str] | None = None) -> TensorMap:
    """The same map with codes in place of the values of encoded tensors, of all or of these."""
    model = tensor_map.model
    parts = dict(tensor_map.parts)
    for row in model.rows:
        if row.name in tensor_map.encoded and (names is None or row.name in names):
            codes = row.split(tensor_map.encoded[row.name].codes.plan, model.shapes)
            parts.update({part: TensorRef(CODES, plan) for part, plan in codes.items() if part in parts})
    return replace(tensor_map, parts=parts)


def decode_parts(tensor_map: TensorMap, aside: Mapping[str, TensorRef], config: Mapping[str, Any] | None) -> TensorMap:
    """A Megatron map whose parts hold codes (``keep``), with values in their place: scales come from the aside."""
    if not any(ref.dtype == CODES for ref in tensor_map.parts.values()):
        return tensor_map
    parts, encoded, findings = dict(tensor_map.parts), dict[str, Encoded](), list[Finding]()
    block = block_of(config)
    shapes = tensor_map.model.shapes
    for row in tensor_map.model.rows:
        refs = [parts.get(part) for part in row.parts]
        if not all(ref is not None and ref.dtype == CODES for ref in refs):
            continue
        codes = TensorRef(CODES, row.join({part: parts[part].plan for part in row.parts}, shapes))
        try:
            if block is None:
                raise FormatError("holds FP8 codes without scales beside; --like the folder that was imported")
            encoded[row.name] = own = _encoded(row.name, codes, aside, block)
        except FormatError as error:
            findings.append(failure("quantization.scale", row.name, str(error)))
            continue
        parts.update({part: TensorRef("BF16", plan) for part, plan in row.split(own.values.plan, shapes).items()})
    return replace(tensor_map, parts=parts, encoded=encoded, findings=(*tensor_map.findings, *findings))


def aside_of(tensor_map: TensorMap, keep: bool) -> dict[str, TensorRef]:
    """What Megatron cannot hold: every scale, and, unless it holds the codes themselves, those of tensors of which
    bf16 cannot tell two codes apart. Of copies, which it leaves out, it holds no codes."""
    kept: dict[str, TensorRef] = {}
    model = tensor_map.model
    copies = {row.name for row in model.rows if all(part in model.copies for part in row.parts)}
    for name, own in tensor_map.encoded.items():
        kept.update(own.beside)
        if own.grid.collapsed and (not keep or name in copies):
            kept[name] = own.codes
    return kept


# ---- back


@dataclass(frozen=True)
class CodedAgain:
    """Tensors of an export, with codes and scales in place of values wherever kept scales still give all of them.

    ``trained``: tensors that were codes, and how many of their values no code gives. ``bare``: those whose codes cannot
    be told from what was kept. Both are still what Megatron holds.
    """

    tensors: Mapping[str, TensorRef]
    trained: Mapping[str, int]
    bare: tuple[str, ...]


def code_again(
    tensors: Mapping[str, TensorRef],
    names: list[str],
    aside: Mapping[str, TensorRef],
    block: tuple[int, int],
    progress: Progress,
    count: bool,
) -> CodedAgain:
    """Put codes in place of values. ``names``: tensors that were codes in the source.

    Every value is looked at either now (``count``) or when the codes are read, which then raises fp8.Strange.
    """
    coded, derived, bare = dict(tensors), dict[str, Coded](), list[str]()
    kept: list[tuple[str, TensorRef, TensorRef]] = []
    beside: dict[str, list[str]] = {}
    for name in names:
        values = tensors.get(name)
        try:
            if values is None or values.dtype != "BF16":
                raise FormatError(f"{name} is not bf16")
            codes = aside.get(name)
            if codes is not None and (codes.dtype, codes.shape) != (CODES, values.shape):
                raise FormatError(f"{name}: what was kept are no codes of it")
            own = _encoded(name, codes or values, aside, block)
            if codes is None and own.grid.collapsed:
                raise FormatError(f"{name}: its scales do not tell codes apart")
        except FormatError:
            bare.append(name)
            continue
        if name in aside:
            kept.append((name, values, own.values))
            coded[name] = own.codes
        else:
            derived[name] = Coded(values.plan, own.grid)
            coded[name] = TensorRef(CODES, Plan.region(derived[name], 0, values.shape, 1))
        coded.update(own.beside)
        beside[name] = list(own.beside)
    trained = {name: difference.elements for name, difference in compare_all(kept, progress).items()}
    for name, strange in in_parallel(_counts(derived)) if count else ():
        trained[name] = trained.get(name, 0) + strange
    trained = {name: strange for name, strange in trained.items() if strange}
    for name in trained:
        coded[name] = tensors[name]
        for other in beside[name]:
            del coded[other]
    return CodedAgain(coded, trained, tuple(name for name in bare if name in tensors))


def _counts(derived: Mapping[str, Coded]) -> Iterator[Callable[[Alive], tuple[str, int]]]:
    """Jobs that count strange values, some blocks of rows each."""
    for name, coded in derived.items():
        rows, width = coded.values.shape
        if not rows * width:
            continue
        high = min(coded.grid.block[0], rows)
        step = high * max(1, SLAB // (2 * width * high))
        for first in range(0, rows, step):
            yield partial(_count, name, coded, first, min(first + step, rows))


def _count(name: str, coded: Coded, first: int, end: int, alive: Alive) -> tuple[str, int]:
    alive()
    return name, coded.strangers(first, end)
