"""Do the MTP layers of one checkpoint look trained? Told from a sample of each tensor; most of it only a warning.

Releases with a placeholder for a head are known, and so are heads that a failed load left as they were initialised:
https://github.com/MiniMax-AI/MiniMax-M2/issues/47, https://github.com/ml-explore/mlx-lm/pull/1543.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mtpcheck.compare import differs, only_zeros
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.sample import Floats, first_values
from mtpcheck.tensormap import TensorMap, is_mtp

_SAMPLE = 1 << 12  # elements of each tensor: a layer may have hundreds of experts
_FEW = 8  # fewer values of a router bias prove nothing


def check_head(tensor_map: TensorMap) -> Iterator[Finding]:
    """Findings of every MTP layer of a checkpoint, as faults of its own."""
    layers: dict[str, list[str]] = {}
    for part in tensor_map.parts:
        if is_mtp(part) and part not in tensor_map.copies and tensor_map.parts[part].dtype in ("BF16", "F16", "F32"):
            layers.setdefault(".".join(part.split(".")[:2]), []).append(part)
    for name, parts in layers.items():
        sample = {part: first_values(tensor_map.parts[part], _SAMPLE) for part in parts}
        matrices = [part for part in parts if len(tensor_map.model.shapes[part]) > 1]
        yield from _alike(name, sample, matrices, tensor_map)
        yield from _same_experts(name, sample, matrices, tensor_map)
        yield from _rounded_bias(sample, tensor_map)
        if _is_fresh(sample, matrices):
            what = "looks freshly initialised: its norms are exactly one, its matrices normal noise of one width"
            yield warning("values.fresh", name, what, cause="it was not loaded, or not trained yet", source=True)


def _alike(name: str, sample: dict[str, Floats], matrices: list[str], tensor_map: TensorMap) -> Iterator[Finding]:
    """Matrices that are one value throughout."""
    alike = [part for part in matrices if len(sample[part]) > 1 and (sample[part] == sample[part][0]).all()]
    zeros = [part for part in alike if not sample[part][0] and only_zeros(tensor_map.parts[part])]
    if zeros:
        finding = failure if len(zeros) == len(matrices) else warning
        what = f"{len(zeros)} of {len(matrices)} matrices of {name} are all zero"
        yield finding("values.zero", tensor_map.names[zeros[0]], what, source=True)
    for part in alike:
        if sample[part][0]:
            what = f"begins with {len(sample[part]):,} times the same value, {sample[part][0]:g}"
            yield warning("values.constant", tensor_map.names[part], what, source=True)


def _same_experts(
    name: str, sample: dict[str, Floats], matrices: list[str], tensor_map: TensorMap
) -> Iterator[Finding]:
    first: dict[tuple[str, bytes], str] = {}
    for part in (part for part in matrices if ".experts." in part and np.count_nonzero(sample[part])):
        lead, _, rest = part.partition(".experts.")
        kind = lead + rest.partition(".")[2]
        other = first.setdefault((kind, sample[part].tobytes()), part)
        if other != part and not differs(tensor_map.parts[part], tensor_map.parts[other]):
            what = f"holds the same as {tensor_map.names[other]}"
            yield warning("values.experts", tensor_map.names[part], what, source=True,
                          cause="experts copied and not trained apart, or a wrong expert index")  # fmt: skip
            return


def _rounded_bias(sample: dict[str, Floats], tensor_map: TensorMap) -> Iterator[Finding]:
    for part, values in sample.items():
        wide = part.endswith(".router_bias") and tensor_map.parts[part].dtype == "F32"
        if wide and len(values) >= _FEW and np.count_nonzero(values) and not (values.view(np.uint32) & 0xFFFF).any():
            what = f"is F32, and all of its {len(np.unique(values))} distinct values are bf16 values"
            yield warning("values.distinct", tensor_map.names[part], what, source=True,
                          cause="it was rounded once, which changes the choice of experts")  # fmt: skip


def _is_fresh(sample: dict[str, Floats], matrices: list[str]) -> bool:
    """Whether all norms are exactly one and all matrices look like N(0, σ) of one small σ."""
    norms = [values for part, values in sample.items() if part.endswith("norm")]
    whole = [part for part in matrices if len(sample[part]) == _SAMPLE]
    if not norms or len(whole) < 2 or not all((values == 1).all() for values in norms):
        return False
    with np.errstate(all="ignore"):  # any bits may stand there
        large = [sample[part].astype(np.float64) for part in whole]
        widths = np.array([values.std() for values in large])
        tails = np.array([((values - values.mean()) ** 4).mean() / values.std() ** 4 for values in large])
        return bool(0 < widths.max() < 1.1 * widths.min() and (np.abs(tails - 3) < 0.5).all())
