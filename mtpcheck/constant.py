"""Parts that Hugging Face does not store, since every element of them is one value: a norm that a family lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from mtpcheck.box import Shape
from mtpcheck.compare import differs
from mtpcheck.model import Model
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding, failure
from mtpcheck.rows import factored
from mtpcheck.tensormap import DTYPE_BITS, TensorMap, TensorRef


@dataclass(frozen=True)
class Constant:
    """A source: one element, again and again."""

    element: bytes
    count: int

    @property
    def name(self) -> str:
        return "no file"

    @property
    def size(self) -> int:
        return len(self.element) * self.count

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return "no file: HF does not store it"

    def read_into(self, buffer: memoryview, offset: int) -> None:
        start, n = offset % len(self.element), len(self.element)
        whole = self.element * ((start + buffer.nbytes) // n + 1)
        buffer.cast("B")[:] = whole[start : start + buffer.nbytes]


def constant(value: float, shape: Shape, dtype: str) -> TensorRef:
    """A tensor of one value in BF16, F16 or F32, which must hold it exactly."""
    wide = np.float32(value)
    elements = {"BF16": wide.tobytes()[2:], "F16": np.float16(value).tobytes(), "F32": wide.tobytes()}
    return TensorRef(dtype, Plan.region(Constant(elements[dtype], prod(shape)), 0, shape, DTYPE_BITS[dtype] // 8))


def constants(model: Model, parts: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """All constant parts of a model whose HF tensors are ``parts``, in the dtype of the layer that they are in."""
    found = {}
    for part, value in model.constants.items():
        layer = part.rsplit(".", 1)[0] + "."
        dtype = next((ref.dtype for name, ref in parts.items() if name.startswith(layer)), "BF16")
        found[part] = constant(value, factored(model.shapes[part]), dtype)
    return found


def check_constants(tensor_map: TensorMap) -> Iterable[Finding]:
    """Megatron's values for parts that an HF checkpoint has no place for: they must be the ones that HF means."""
    for part, value in tensor_map.model.constants.items():
        ref = tensor_map.parts.get(part)
        if ref is not None and differs(ref, constant(value, ref.shape, ref.dtype)):
            what = f"is not {value:g} everywhere, and {tensor_map.family} has no tensor for it: it cannot be exported"
            yield failure("presence.constant", tensor_map.names[part], what)
