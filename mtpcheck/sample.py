"""The first values of a tensor, as numbers: enough to tell what kind of tensor it is, never to compare two."""

from __future__ import annotations

import numpy as np

from mtpcheck.move import read_plan
from mtpcheck.tensormap import TensorRef

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def first_values(ref: TensorRef, elements: int) -> Floats:
    """At most ``elements`` values in C order, as float32; those of dtypes that are no floats of 16 bits or more as
    their bytes."""
    plan = ref.plan.reshape((ref.elements,)).slice(0, 0, min(ref.elements, elements))
    raw = read_plan(plan)
    if ref.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}.get(ref.dtype, "u1")).astype("<f4")
