"""Give every stored tensor of a checkpoint to a row of its model, and so every part its plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.checks.quantization import check_quantization
from mtpcheck.constant import constants
from mtpcheck.declared import Packing, read_packing
from mtpcheck.encoding import Decoded, decode
from mtpcheck.model import Model
from mtpcheck.packing import WEIGHT, Module, packings
from mtpcheck.report.finding import Finding, failure
from mtpcheck.rows import Row, factored
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp


def claim_hf(model: Model, checkpoint: Checkpoint, notes: Iterable[Finding] = ()) -> TensorMap:
    """Claim an HF checkpoint's tensors, decoded as far as they can be, and judge how they are packed."""
    decoded, packing = decode(checkpoint), read_packing(checkpoint)
    found = check_quantization(checkpoint, model, packing)
    told = {(finding.check, finding.subject) for finding in found}
    found += [
        replace(f, where=f.where or str(checkpoint.path)) for f in decoded.findings if (f.check, f.subject) not in told
    ]
    claimed = claim(model, model.rows, checkpoint, [*notes, *found], decoded, packing)
    absent = constants(model, claimed.parts)
    parts = {**claimed.parts, **absent}
    return replace(
        claimed,
        parts={part: parts[part] for part in model.shapes if part in parts},
        names={**claimed.names, **{part: part for part in absent}},
    )


def _still_packed(packing: Packing, decoded: Decoded) -> dict[str, Module]:
    """Row → the module that holds its codes, where they are not decoded."""
    coded = (module for module in packing.modules.values() if module.codes and module.codes not in decoded.encoded)
    return {f"{module.name}.{WEIGHT}": module for module in coded}


def _of_packing(packing: Packing, rows: list[Row], decoded: Decoded) -> set[str]:
    """Stored tensors that are codes, or belong to some, and so to a row. What lies beside decoded codes is none."""
    names = {row.name for row in rows}
    found: set[str] = set()
    for module in packing.modules.values():
        if f"{module.name}.{WEIGHT}" in names and module.codes not in decoded.encoded:
            found.update(whole for end, whole in module.tensors.items() if module.codes or end in packings().scales)
    return found


def claim(
    model: Model,
    rows: list[Row],
    checkpoint: Checkpoint,
    notes: Iterable[Finding] = (),
    decoded: Decoded | None = None,
    packing: Packing | None = None,
) -> TensorMap:
    """Give every stored tensor to its row, every part its plan; what is left over either way is a finding."""
    parts: dict[str, TensorRef] = {}
    padding: dict[str, TensorRef] = {}
    names: dict[str, str] = {}
    decoded = decoded or Decoded(checkpoint.tensors)
    findings = [*checkpoint.findings, *notes]
    missing: list[Finding] = []
    left = dict.fromkeys(decoded.tensors)
    still = _still_packed(packing, decoded) if packing else {}
    owned = _of_packing(packing, rows, decoded) if packing else set()
    packed: dict[str, Module] = {}
    for row in rows:
        if row.name in still:
            packed.update(dict.fromkeys(row.parts, still[row.name]))
            continue
        ref = decoded.tensors.get(row.name)
        if ref is None:
            if not all(part in model.copies for part in row.parts):
                missing.append(_missing(row, checkpoint))
            continue
        del left[row.name]
        expected = row.shape(model.shapes)
        if ref.shape != expected:
            what = f"has another shape than {model.family} gives it"
            findings.append(
                failure("presence.shape", row.name, what, expected=str(list(expected)), got=str(list(ref.shape)))
            )
            continue
        for part, plan in row.split(ref.plan, model.shapes).items():
            parts[part] = TensorRef(ref.dtype, plan)
            names[part] = row.name
        if row.pad is not None:
            true_rows = factored(model.shapes[row.parts[0]])[0]
            if row.pad > true_rows:
                padding[row.parts[0]] = TensorRef(ref.dtype, ref.plan.slice(0, true_rows, row.pad))
    findings += _of_one_cause(missing, checkpoint)
    findings += [
        failure("presence.unclaimed", name, f"no tensor of {model.family}; the other layout has no place for it")
        for name in left
        if name not in owned
    ]
    ordered = {part: parts[part] for part in model.shapes if part in parts}
    return TensorMap(model, ordered, padding, tuple(findings), names, decoded.encoded, packed, packing=packing)


def _of_one_cause(missing: list[Finding], checkpoint: Checkpoint) -> list[Finding]:
    """What is missing; in one finding where a rank is, since that says why."""
    lost = [f.subject for f in checkpoint.findings if f.check == "topology.rank" and "missing" in f.message]
    unfit = {f.subject for f in checkpoint.findings if f.check == "topology.share"}
    missing = [finding for finding in missing if finding.subject not in unfit]
    if not missing or not lost:
        return missing
    what = f"cannot be put together without {', '.join(lost[:3])}" + (" and others" if len(lost) > 3 else "")
    return [failure("presence.missing", f"{len(missing):,} tensors", what, where=str(checkpoint.folder))]


def _missing(row: Row, checkpoint: Checkpoint) -> Finding:
    what = "MTP layer" if is_mtp(row.parts[0]) else "model"
    return failure(
        "presence.missing", row.name, f"a tensor of the {what} is missing", where=str(checkpoint.folder),
        expected=", ".join(row.parts[:3]) + (" …" if len(row.parts) > 3 else ""),
    )  # fmt: skip
