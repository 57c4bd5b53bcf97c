"""Checkpoint → TensorMap: choose the family, learn the facts, claim every stored tensor for its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.checks.declaration import check_own_config
from mtpcheck.claim import claim, claim_hf
from mtpcheck.dialect import EMBEDDING, KeyForm
from mtpcheck.dialects import load_dialect, others
from mtpcheck.encoding import decode_parts
from mtpcheck.errors import FamilyError, MtpcheckError, UnsupportedError
from mtpcheck.facts import ConfigRow, default_of, facts_from_args, facts_from_config
from mtpcheck.family import Family, family_names, family_of_config, load_family
from mtpcheck.layouts.hf import header_entries
from mtpcheck.model import BESIDE, Model
from mtpcheck.offset import from_megatron, offsets
from mtpcheck.report.finding import Finding, failure, note
from mtpcheck.rows import Row
from mtpcheck.rules import MISSING, ArgRow
from mtpcheck.tensormap import DTYPE_BITS, TensorMap, TensorRef, is_mtp


def read_tensor_map(checkpoint: Checkpoint, family: str | None = None) -> TensorMap:
    """See ``tensormap.read_tensor_map``."""
    if checkpoint.layout == "hf":
        return _from_hf(checkpoint, hf_family(checkpoint, family))
    if family is None and checkpoint.manifest is not None:
        family = checkpoint.manifest.family
    if family is not None:
        return _from_megatron(checkpoint, load_family(family))
    return _only_fit(checkpoint)


def is_quantized(checkpoint: Checkpoint, tensor_map: TensorMap) -> str:
    """Why a checkpoint counts as quantized in a way that cannot be decoded: a packed weight, a narrow dtype or a
    declaration; empty if it does not."""
    declared = (checkpoint.config or {}).get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, dict) else declared
    said = [f"quantization_config says {method!r}"] if declared else []
    refs = checkpoint.tensors if checkpoint.layout == "hf" else tensor_map.parts
    decoded = tensor_map.encoded.keys() | {name for own in tensor_map.encoded.values() for name in own.beside}
    narrow = next((n for n, ref in refs.items() if _is_narrow(ref.dtype) and n not in decoded), None)
    codes = next((module.codes for module in tensor_map.packed.values()), narrow)
    if codes:
        return ", ".join([f"{codes} is {refs[codes].dtype}", *said])
    return "".join(said) if not tensor_map.encoded else ""


def _is_narrow(dtype: str) -> bool:
    return dtype.startswith("F") and DTYPE_BITS[dtype] < 16


def hf_family(checkpoint: Checkpoint, family: str | None) -> Family:
    assert checkpoint.config is not None
    return load_family(family) if family else family_of_config(checkpoint.config)


def _from_hf(checkpoint: Checkpoint, family: Family) -> TensorMap:
    assert checkpoint.config is not None
    facts = facts_from_config(family.all_config, checkpoint.config, family.all_fixed)
    stored = checkpoint.tensors.keys()
    model = _with_stored_layers(family, facts, lambda layer, i: any(row.name in stored for row in layer.rows), stored)
    for name in stored:
        if name.startswith(family.beside):
            model.carry(name, checkpoint.tensors[name].shape)
    return claim_hf(model, checkpoint)


def _from_megatron(checkpoint: Checkpoint, family: Family) -> TensorMap:
    dialect = load_dialect(checkpoint.dialect)
    if checkpoint.args is None:
        raise UnsupportedError(f"{checkpoint.folder}: no training arguments are stored; they are needed to read it")
    facts = facts_from_args(dialect.args, checkpoint.args)
    for fact, value in family.all_fixed.items():
        if facts.get(fact, value) != value:
            raise FamilyError(f"{family.name} has {fact} {value!r}, this checkpoint's arguments say {facts[fact]!r}")
    facts.update(family.all_fixed)
    notes: list[Finding] = []
    if facts.get("vocab") is None:
        facts["vocab"] = rows = _embedding_rows(checkpoint)
        what = f"the true vocabulary size is not stored; all {rows} rows count"
        notes.append(note("values.padding", "vocab_size", what))
    _fill_defaults(family, facts)
    if checkpoint.manifest is not None:
        lent = facts_from_config(family.all_config, checkpoint.manifest.config, family.all_fixed)
        facts.update({fact: v for fact, v in lent.items() if fact not in dialect.told or fact not in facts})
    stored = checkpoint.tensors.keys()
    headers = checkpoint.manifest.headers.values() if checkpoint.manifest else ()
    model = _with_stored_layers(
        family,
        facts,
        lambda layer, i: any(name.startswith(f"{dialect.mtp}.{i}.") for name in stored),
        {name for raw in headers for name in header_entries(raw)},
    )
    spelled = stored_rows(checkpoint, model)
    return _with_values(claim(model, spelled, checkpoint, notes), spelled, checkpoint)


def _embedding_rows(checkpoint: Checkpoint) -> int:
    embedding = checkpoint.tensors.get(EMBEDDING)
    return embedding.shape[0] if embedding is not None and embedding.shape else 0


def stored_rows(checkpoint: Checkpoint, model: Model) -> list[Row]:
    """Rows of ``model`` in the form that this Megatron checkpoint has."""
    padded = max(_embedding_rows(checkpoint), model.facts["vocab"])
    return load_dialect(checkpoint.dialect).rows(model, padded, KeyForm(stored=checkpoint.tensors.keys())).rows


def taken_for_granted(*sides: tuple[Checkpoint, Model]) -> list[str]:
    """A sentence on every Megatron checkpoint that may as well be in another dialect than it was read in."""
    told = []
    for checkpoint, model in sides:
        if not checkpoint.dialect_known and (alike := alike_dialects(checkpoint, model)):
            told.append(
                f"{checkpoint.path}: read in the order of {checkpoint.dialect}; {' and '.join(alike)} has the same "
                f"names and shapes, and --dialect {alike[0]} reads that"
            )
    return told


def alike_dialects(checkpoint: Checkpoint, model: Model) -> list[str]:
    """Dialects that give names and shapes of a Megatron checkpoint other bytes than the one it is read in, so that
    only a comparison can tell which one it is in. None where its keys tell."""
    if checkpoint.layout == "hf" or checkpoint.told_dialect:
        return []
    shapes = {name: ref.shape for name, ref in checkpoint.tensors.items()}
    found = []
    for name in others(model, checkpoint.dialect):
        rows = set(stored_rows(replace(checkpoint, dialect=name), model)) - set(stored_rows(checkpoint, model))
        if all(shapes.get(row.name) == row.shape(model.shapes) for row in rows):
            found.append(name)
    return found


def read_like(checkpoint: Checkpoint, reference: TensorMap) -> TensorMap:
    """Read a checkpoint as the model that ``reference`` is, whatever it says of itself.

    What it says stands in the facts of the result, and is compared; an argument that cannot be read is a finding.
    """
    rows = reference.model.rows if checkpoint.layout == "hf" else stored_rows(checkpoint, reference.model)
    stored = {
        part.split(".")[1] for row in rows if row.name in checkpoint.tensors for part in row.parts if is_mtp(part)
    }
    facts, findings = _own_facts(checkpoint, reference)
    facts["mtp_stored"] = len(stored)
    _count_undeclared(facts)
    own = reference.model
    model = replace(own, facts=facts, shapes=dict(own.shapes), rows=list(own.rows))  # what lies beside is added
    if checkpoint.layout == "hf":
        return claim_hf(model, checkpoint, findings)
    return _with_values(claim(model, rows, checkpoint, findings), rows, checkpoint)


def _with_values(tensor_map: TensorMap, rows: list[Row], checkpoint: Checkpoint) -> TensorMap:
    """Values in place of FP8 codes that a Megatron checkpoint holds as they are, and of sums that it holds instead;
    and what lies beside it."""
    manifest = checkpoint.manifest
    aside = manifest.aside if manifest else {}
    decoded = decode_parts(tensor_map, aside, manifest.config if manifest else None)
    return _with_beside(from_megatron(decoded, offsets(rows), aside), aside)


def _with_beside(tensor_map: TensorMap, aside: Mapping[str, TensorRef]) -> TensorMap:
    """The map of a Megatron checkpoint with tensors of no text model, as far as they lie beside it."""
    family = load_family(tensor_map.family)
    own = {name: ref for name, ref in aside.items() if name.startswith(family.beside)}
    if not own:
        return tensor_map
    parts, names = dict(tensor_map.parts), dict(tensor_map.names)
    for name, ref in own.items():
        part = BESIDE + name
        if part not in tensor_map.model.shapes:
            tensor_map.model.carry(name, ref.shape)
        parts[part], names[part] = ref, name
    return replace(tensor_map, parts=parts, names=names)


def _own_facts(checkpoint: Checkpoint, reference: TensorMap) -> tuple[dict[str, Any], list[Finding]]:
    """Facts that a checkpoint states, as far as they can be read, and findings of those that cannot."""
    family = load_family(reference.family)
    facts: dict[str, Any] = {}
    findings: list[Finding] = []
    if checkpoint.config is not None:
        facts.update(family.all_fixed)
        findings += check_own_config(checkpoint.config, family)
        for row in family.all_config:
            _learn(row, lambda row: facts_from_config((row,), checkpoint.config or {}, facts), facts, findings)
    elif checkpoint.args is None:
        raise UnsupportedError(
            f"{checkpoint.folder}: no training arguments are stored; its declaration cannot be judged"
        )
    for arg in load_dialect().args if checkpoint.args is not None else ():
        _learn(arg, lambda arg: facts_from_args((arg,), checkpoint.args or {}, facts), facts, findings)
    return facts, findings


RowT = TypeVar("RowT", ConfigRow, ArgRow)


def _learn(row: RowT, read: Callable[[RowT], dict[str, Any]], facts: dict[str, Any], findings: list[Finding]) -> None:
    """Take over what one row tells; a value that cannot be read is a finding."""
    try:
        facts.update(read(row))
    except MtpcheckError as error:
        findings.append(failure("declaration.config", row.keys[0], str(error)))


def _fill_defaults(family: Family, facts: dict[str, Any]) -> None:
    """Facts that the arguments could tell and do not have the default that an HF config would give them.

    Raises UnsupportedError for those without one.
    """
    for row in family.all_config:
        if row.fact and row.fact in load_dialect().told and facts.get(row.fact) is None:
            if row.default is MISSING:
                what = f"the stored training arguments do not tell {row.fact}"
                raise UnsupportedError(f"{what}, which {family.name} needs ({row.keys[0]})")
            facts[row.fact] = default_of(row, facts)


def _with_stored_layers(
    family: Family, facts: dict[str, Any], is_stored: Callable[[Model, int], bool], names: Collection[str]
) -> Model:
    """The model with as many MTP layers as are stored; what is declared stays in ``facts['mtp_layers']``, and is what
    is stored where no key says it. ``names`` of an HF checkpoint decide between spellings."""
    model = family.trunk(facts, names)
    facts["mtp_stored"] = 0
    while True:
        layer = Model(family.name, facts, names)
        family.add_mtp_layer(layer, facts["mtp_stored"])
        if not is_stored(layer, facts["mtp_stored"]):
            _count_undeclared(facts)
            return model
        family.add_mtp_layer(model, facts["mtp_stored"])
        facts["mtp_stored"] += 1


def _count_undeclared(facts: dict[str, Any]) -> None:
    """Where no key declares MTP layers, and the family does without, those that are stored are meant."""
    if "mtp_layers" in facts and facts["mtp_layers"] is None:
        facts["mtp_layers"] = facts["mtp_stored"]


def _only_fit(checkpoint: Checkpoint) -> TensorMap:
    """The one family whose facts and keys fit, of those that Megatron can tell apart.

    Raises FamilyError with the candidates otherwise.
    """
    fits: list[TensorMap] = []
    reasons: list[str] = []
    for name in (name for name in family_names() if not load_family(name).alike):
        try:
            found = _from_megatron(checkpoint, load_family(name))
        except MtpcheckError as error:
            reasons.append(f"{name}: {error}")
            continue
        bad = [f for f in found.findings if f.check.startswith("presence.") and not f.subject.startswith("mtp.")]
        if bad:
            reasons.append(f"{name}: {bad[0].subject}: {bad[0].message}")
        else:
            fits.append(found)
    if len(fits) == 1:
        return fits[0]
    if fits:
        names = ", ".join(found.family for found in fits)
        raise FamilyError(f"{checkpoint.folder}: arguments and keys fit {names}; --family decides")
    raise FamilyError(f"{checkpoint.folder}: no known family fits; " + "; ".join(reasons))
