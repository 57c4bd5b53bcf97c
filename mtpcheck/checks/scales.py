"""What happened to the scales of an FP8 matrix, where two checkpoints have different ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mtpcheck.encoding import SCALE
from mtpcheck.report.finding import Finding
from mtpcheck.tensormap import TensorRef


def with_cause(finding: Finding, reference: Mapping[str, TensorRef], candidate: Mapping[str, TensorRef]) -> Finding:
    """A finding of differing scales with what explains all of them, if anything does."""
    name = finding.subject
    if finding.check != "values.bits" or not name.endswith(SCALE) or reference[name].dtype != "F32":
        return finding
    before, after = _read(reference[name]), _read(candidate[name])
    if before.shape[:1] == before.shape[1:] and (after == before.T).all():
        return replace(finding, cause="the grid of scales is transposed")
    with np.errstate(all="ignore"):
        ratio = after / before
    if np.isfinite(ratio).all() and (ratio == ratio.flat[0]).all():
        return replace(finding, cause=f"every scale is {ratio.flat[0]:g} times what it was")
    changed = np.argwhere(before != after)
    if len(changed) == 1 and np.isfinite(one := ratio[tuple(changed[0])]):
        return replace(finding, cause=f"the scale of block {changed[0].tolist()} is {one:g} times what it was")
    for other, ref in reference.items():
        if other.endswith(SCALE) and other != name and ref.shape == after.shape and (_read(ref) == after).all():
            return replace(finding, cause=f"these are the scales of {other.removesuffix(SCALE)}")
    return finding


def _read(ref: TensorRef) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.frombuffer(ref.read(), np.float32).reshape(ref.shape)
