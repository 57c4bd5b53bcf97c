"""Are all tensors there with the same dtype, shape and bits?"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod

from mtpcheck.box import Shape
from mtpcheck.compare import Difference, compare_all, differs
from mtpcheck.dtypes import NARROW, WIDE, cast
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, failure, note, warning
from mtpcheck.tensormap import TensorMap, TensorRef


def compare_stored(
    reference: Mapping[str, TensorRef], candidate: Mapping[str, TensorRef], progress: Progress, bits: bool = True
) -> Iterator[Finding]:
    """Two checkpoints of one layout, tensor by tensor under their stored names. Without ``bits`` dtypes and shapes."""
    for name in reference:
        if name not in candidate:
            yield failure("presence.missing", name, "is gone", expected=_kind(reference[name]))
    for name in candidate:
        if name not in reference:
            yield failure("presence.unclaimed", name, "is new", got=_kind(candidate[name]))
    both = {name: name for name in reference if name in candidate}
    yield from _compare(reference, candidate, both, progress, bits)


def compare_maps(
    reference: TensorMap, candidate: TensorMap, progress: Progress, bits: bool = True, may_widen: bool = False
) -> Iterator[Finding]:
    """Two checkpoints in any two layouts, part by part. A part that one lacks is a finding of its own map, or of
    ``compare_copies``. Without ``bits`` dtypes and shapes are compared alone. ``may_widen``: the candidate chooses
    dtypes of its own, as Megatron does, and F32 holds all values of the others."""
    both = {part: reference.names[part] for part in reference.parts if part in candidate.parts}
    left, right = dict(reference.parts), candidate.parts
    for part in both if may_widen else ():
        if left[part].dtype in NARROW and right[part].dtype == WIDE:
            what = f"is {left[part].dtype}, and held as {WIDE} by Megatron; compared as {WIDE}"
            yield note("values.dtype", both[part], what)
            left[part] = cast(left[part], WIDE)
    yield from _compare(left, right, both, progress, bits)
    for part, ref in candidate.padding.items():
        if part in reference.padding and differs(ref, reference.padding[part]):
            what = "rows beyond the vocabulary differ, which no loader reads"
            yield warning("values.padding", candidate.names[part], what)


Pair = tuple[str, TensorRef, TensorRef]


def matching(
    reference: Mapping[str, TensorRef], candidate: Mapping[str, TensorRef], names: Mapping[str, str]
) -> tuple[list[Finding], list[Pair]]:
    """Findings of changed dtypes and shapes, and the pairs that are alike in both and can be compared.

    ``names``: key of both maps → the name to report.
    """
    findings: list[Finding] = []
    pairs: list[Pair] = []
    for key, name in names.items():
        a, b, part = reference[key], candidate[key], "" if key == name else key
        if a.dtype != b.dtype:
            what = "the dtype changed"
            findings.append(failure("values.dtype", name, what, expected=a.dtype, got=b.dtype, part=part))
        elif a.shape != b.shape:
            what = "the rank changed" if len(a.shape) != len(b.shape) else "the shape changed"
            shapes = str(list(a.shape)), str(list(b.shape))
            findings.append(failure("values.shape", name, what, expected=shapes[0], got=shapes[1], part=part))
        else:
            pairs.append((key, a, b))
    return findings, pairs


def _compare(
    reference: Mapping[str, TensorRef],
    candidate: Mapping[str, TensorRef],
    names: Mapping[str, str],
    progress: Progress,
    bits: bool = True,
) -> Iterator[Finding]:
    findings, pairs = matching(reference, candidate, names)
    yield from findings
    for key, difference in compare_all(pairs if bits else [], progress).items():
        yield _differing(names[key], key, reference[key], candidate[key], difference)


def _differing(name: str, key: str, a: TensorRef, b: TensorRef, difference: Difference) -> Finding:
    index = _unravel(difference.first, a.plan.shape)
    where = "" if key == name else f" of {key}"
    message = f"{difference.elements:,} of {a.elements:,} elements differ{where}, first at {list(index)}"
    return failure(
        "values.bits", name, message, where=b.plan.place_of(index),
        expected=describe(a.dtype, difference.expected), got=describe(a.dtype, difference.got),
        part="" if key == name else key,
    )  # fmt: skip


def _unravel(flat: int, shape: Shape) -> Shape:
    index = []
    for i in range(len(shape)):
        inner = prod(shape[i + 1 :])
        index.append(flat // inner)
        flat %= inner
    return tuple(index)


def _kind(ref: TensorRef) -> str:
    return f"{ref.dtype} {list(ref.shape)}"


_STRUCT = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?"}


def describe(dtype: str, raw: bytes) -> str:
    """An element's bits in hex, most significant first, with its value if it has one."""
    bits = "0x" + raw[::-1].hex()
    if dtype == "BF16":
        raw, dtype = b"\0\0" + raw, "F32"
    return f"{bits} ({struct.unpack('<' + _STRUCT[dtype], raw)[0]!r})" if dtype in _STRUCT else bits
