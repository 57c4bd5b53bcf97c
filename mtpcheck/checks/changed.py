"""For weights that legitimately changed: what moved, what did not, and whether the MTP layer moved as it should.

Training, pruning and merging change values, so equality is no verdict. What still tells a lost head from a trained
one: a layer that stayed bit-identical while the trunk moved was not trained or was filled in from the base; one with
norms of exactly one and matrices unlike the base's was initialised anew; one of zeros is dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from mtpcheck.checks.values import matching
from mtpcheck.compare import compare_all, differs, only_zeros
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.sample import Floats, first_values
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp

_SAMPLE = 1 << 16  # elements looked at to tell a matrix from its base


@dataclass
class Component:
    """Part names of one component (the trunk, an MTP layer, the embedding …): all, and those whose bits changed."""

    parts: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)


def component_of(part: str) -> str:
    """``mtp.0`` for parts of an MTP layer, ``trunk`` for decoder layers, else the part's own name."""
    if is_mtp(part):
        return ".".join(part.split(".")[:2])
    return "trunk" if part.startswith("layers.") else part


def compare_changed(
    reference: TensorMap, candidate: TensorMap, progress: Progress
) -> tuple[list[Finding], dict[str, Component]]:
    """Findings of dtype, shape, copies and dead layers, and for each component what moved."""
    names = {part: reference.names[part] for part in reference.parts if part in candidate.parts}
    findings, pairs = matching(reference.parts, candidate.parts, names)
    moved = compare_all(pairs, progress)
    components: dict[str, Component] = {}
    for part, _, _ in pairs:
        component = components.setdefault(component_of(part), Component())
        component.parts.append(part)
        if part in moved:
            component.moved.append(part)
    findings += _copies(reference, candidate)
    for name, component in components.items():
        if name.startswith("mtp."):
            findings += _layer(name, component, components, reference, candidate)
    return findings, components


def describe(components: Mapping[str, Component]) -> list[str]:
    """One line for each component."""
    width = max((len(name) for name in components), default=0)
    return [f"{n:<{width}}  {len(c.moved):,} of {len(c.parts):,} tensors moved" for n, c in components.items()]


def _copies(reference: TensorMap, candidate: TensorMap) -> Iterator[Finding]:
    """A part that repeated another before must do so still, in every layout that has a place for it."""
    for part in reference.copies:
        original = candidate.repeated_by(part)
        ref, main = reference.parts.get(part), reference.parts.get(reference.repeated_by(part))
        own, new_main = candidate.parts.get(part), candidate.parts.get(original)
        if ref is None or own is None or main is None or new_main is None:
            continue
        if not differs(ref, main) and differs(own, new_main):
            yield failure("presence.copy", candidate.names[part], f"no longer repeats {original}")


def _layer(
    name: str, layer: Component, all_of: Mapping[str, Component], reference: TensorMap, candidate: TensorMap
) -> Iterator[Finding]:
    trunk = all_of.get("trunk", Component())
    weights = [part for part in layer.parts if len(candidate.model.shapes[part]) > 1 and part not in candidate.copies]
    zeros = [part for part in weights if part in layer.moved and only_zeros(candidate.parts[part])]
    broken = [part for part in layer.moved if not _finite(candidate.parts[part]) and _finite(reference.parts[part])]
    if broken:
        yield failure("values.nonfinite", candidate.names[broken[0]], f"{len(broken)} tensors of {name} hold NaN or "
                      "infinity, which the base does not")  # fmt: skip
    if zeros:
        yield failure("values.zero", candidate.names[zeros[0]], f"{len(zeros)} of {len(weights)} matrices of {name} "
                      "are all zero")  # fmt: skip
    elif trunk.moved and not [part for part in layer.moved if part not in candidate.copies]:
        yield warning(
            "values.stale", name, "is bit-identical to the base while the trunk moved",
            cause="a stale head that was not trained along, or one filled in from the base",
        )  # fmt: skip
    elif _is_fresh(layer, weights, reference, candidate):
        yield failure("values.fresh", name, "looks freshly initialised: its norms are exactly one and its matrices "
                      "have nothing of the base", cause="the layer was not loaded before training")  # fmt: skip


def _finite(ref: TensorRef) -> bool:
    return bool(np.isfinite(_values(ref)).all())


def _is_fresh(layer: Component, weights: list[str], reference: TensorMap, candidate: TensorMap) -> bool:
    norms = [part for part in layer.parts if part.endswith("norm")]
    if (
        not layer.moved
        or not weights
        or not norms
        or not all(np.all(_values(candidate.parts[part]) == 1) for part in norms)
    ):
        return False
    return not any(_related(reference.parts[part], candidate.parts[part]) for part in weights)


def _related(a: TensorRef, b: TensorRef) -> bool:
    """Whether two matrices correlate by more than five standard deviations of independent values."""
    x, y = (np.nan_to_num(_values(ref)).astype(np.float64) for ref in (a, b))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return bool(scale) and abs(float((x * y).sum())) / scale > 5 / len(x) ** 0.5


def _values(ref: TensorRef) -> Floats:
    return first_values(ref, _SAMPLE)
