"""What happened to the scales of an FP8 matrix, where two checkpoints have different ones for the same codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.numbers import STORED, floats
from mtpcheck.encoding import SCALE
from mtpcheck.tensormap import TensorRef


def of_scales(case: Case, keys: Sequence[str]) -> Told:
    """Causes of grids of scales that are not another tensor's."""
    grids = [key for key in keys if key in case.scales or case.names[key].endswith(SCALE)]
    return {key: cause for key in grids if (cause := _cause(case.before[key], case.after[key]))}


def _cause(before: TensorRef, after: TensorRef) -> Cause | None:
    if before.dtype not in STORED:
        return None
    old, new = (floats(ref.read(), ref.dtype).reshape(ref.shape) for ref in (before, after))
    if old.ndim == 2 and old.shape == old.T.shape and (new == old.T).all():
        return Cause("scales-transposed", "the grid of scales is transposed")
    with np.errstate(all="ignore"):
        ratio = new / old
    if np.isfinite(ratio).all() and (ratio == ratio.flat[0]).all():
        return Cause("scales-scaled", f"every scale is {ratio.flat[0]:g} times what it was")
    changed = np.argwhere(old != new)
    if len(changed) == 1 and np.isfinite(one := ratio[tuple(changed[0])]):
        return Cause("scales-scaled", f"the scale of block {changed[0].tolist()} is {one:g} times what it was")
    return None
