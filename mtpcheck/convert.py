"""One direction: any checkpoint, through the tensor map, into the other layout on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpcheck.checkpoint import Checkpoint, Layout, open_checkpoint
from mtpcheck.checks.declaration import check_count
from mtpcheck.checks.topology import check_ranks
from mtpcheck.compare import is_zero
from mtpcheck.encoding import CODES, block_of, code_again
from mtpcheck.errors import FAILS, HOLDS, CheckpointFails, UnsupportedError, UsageError
from mtpcheck.facts import config_from_facts
from mtpcheck.family import load_family
from mtpcheck.layouts.hf import INDEX, header_entries, read_hf
from mtpcheck.manifest import Manifest
from mtpcheck.megatron import Options, copy_states, dealer, load_writers, write_megatron
from mtpcheck.normalise import is_quantized
from mtpcheck.progress import Progress, Silent
from mtpcheck.report.finding import Finding, Severity, failure, note, warning
from mtpcheck.rows import factored
from mtpcheck.target import check_space, check_target, new_folder
from mtpcheck.tensormap import DTYPE_BITS, TensorMap, TensorRef, read_tensor_map

if TYPE_CHECKING:
    from mtpcheck.layouts.hf_writer import Written


@dataclass(frozen=True)
class Converted:
    source: Checkpoint
    tensor_map: TensorMap
    target: Path
    layout: Layout
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 if the source declares other MTP layers than it stores: it was converted as it is, and says so."""
        return FAILS if self.failures else HOLDS

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.severity is Severity.FAILURE]


def other_layout(layout: Layout) -> Layout:
    """The layout on the other side, where none is asked for."""
    return "torch_dist" if layout == "hf" else "hf"


def convert(
    source: str | Path,
    target: str | Path,
    to: Layout | None = None,
    family: str | None = None,
    options: Options | None = None,
    like: str | Path | None = None,
    progress: Progress | None = None,
    written: Written | None = None,
    iteration: int | None = None,
) -> Converted:
    """Convert ``source`` into the new folder ``target``; by default into the other layout.

    ``like`` lends an export the form of another checkpoint (an HF folder, or a Megatron folder that we made): shard
    files, and config keys that Megatron has no word for. Never a weight, never the MTP declaration. ``written`` is
    called for every HF shard once it is whole, and may free its disk. ``iteration`` chooses one of a Megatron root.
    ``target`` appears whole or not at all. Raises CheckpointFails if the source lacks tensors or holds some that
    nobody claims, UnsupportedError if the target cannot hold it exactly, UsageError for the paths.
    """
    target = Path(target)
    check_target(Path(source), target)
    options = options or Options()
    opened = open_checkpoint(source, iteration)
    to = to or other_layout(opened.layout)
    if opened.layout == to == "hf":
        raise UsageError(f"{source} is an HF checkpoint already")
    if like is not None:
        opened = replace(opened, manifest=_lent_form(opened, Path(like)))
    tensor_map = read_tensor_map(opened, family)
    check_convertible(opened, tensor_map)
    check_not_lost(opened, tensor_map)
    needed = dealer(tensor_map, options).nbytes if to == "torch" else tensor_map.nbytes
    check_space(target.parent, needed if written is None else 0)
    load_writers(to)
    with new_folder(target) as folder:
        if to == "hf":
            findings = _write_hf(opened, tensor_map, folder, progress or Silent(), written)
        else:
            findings = write_megatron(opened, tensor_map, folder, to, options, progress or Silent())
            findings += padding_findings(tensor_map, options.padded_vocab(tensor_map.facts["vocab"], to))
    counts = check_count(tensor_map, str(source))
    return Converted(opened, tensor_map, target, to, (*tensor_map.findings, *counts, *findings))


def _lent_form(source: Checkpoint, like: Path) -> Manifest:
    """The form of ``like``. Copies that differ from what they repeat there cannot be lent: they would be weights."""
    if source.layout == "hf":
        raise UsageError(f"{source.path}: is an HF checkpoint and has a form of its own; --like lends one to an export")
    lender = open_checkpoint(like)
    if lender.hf is None:
        if lender.manifest is None:
            raise UsageError(f"{like}: a Megatron checkpoint that mtpcheck did not make has no form to lend")
        return lender.manifest
    tensor_map = read_tensor_map(lender)
    headers = {shard.file: shard.header for shard in lender.hf.shards}
    return Manifest(lender.folder, tensor_map.family, headers, copy_states(tensor_map), lender.hf.others)


# ---- before anything is written

_BLOCKING = ("presence", "structure", "topology", "quantization")


def check_convertible(source: Checkpoint, tensor_map: TensorMap) -> None:
    """Raise unless every tensor of the source can be carried exactly."""
    unsound = any(f.check == "quantization.scale" for f in tensor_map.findings)
    if (why := is_quantized(source, tensor_map)) and not unsound:
        raise UnsupportedError(
            f"{source.path}: quantized weights cannot be converted exactly yet ({why}); "
            "verify still compares two such checkpoints"
        )
    blocking = tuple(
        f for f in tensor_map.findings
        if f.severity is Severity.FAILURE and f.check.split(".")[0] in _BLOCKING
    )  # fmt: skip
    blocking = blocking or tuple(f for f in check_ranks(source) if f.severity is Severity.FAILURE)
    if blocking:
        first = blocking[0]
        more = f" and {len(blocking) - 1} more" if len(blocking) > 1 else ""
        raise CheckpointFails(f"{source.path}: {first.subject}: {first.message}{more}; nothing was written", blocking)


def check_not_lost(source: Checkpoint, tensor_map: TensorMap) -> None:
    """Raise CheckpointFails if a layer is declared and no tensor of it stored: a conversion would hide the loss."""
    if tensor_map.facts.get("mtp_layers") and not tensor_map.facts["mtp_stored"]:
        findings = tuple(check_count(tensor_map, str(source.path)))
        raise CheckpointFails(f"{source.path}: {findings[0].message}; nothing was written", findings)


def padding_findings(tensor_map: TensorMap, room: int) -> list[Finding]:
    """Vocabulary rows beyond the true size that hold anything but zeros, where the target has ``room`` for fewer."""
    findings = []
    for part, ref in tensor_map.padding.items():
        true = factored(tensor_map.model.shapes[part])[0]
        lost = ref.plan.slice(0, min(max(0, room - true), ref.shape[0]), ref.shape[0])
        if not is_zero(TensorRef(ref.dtype, lost)):
            what = f"{lost.shape[0]} rows beyond the vocabulary of {true} are not zero; there is no place for them"
            findings.append(warning("values.padding", tensor_map.names[part], what))
    return findings


# ---- Megatron → Hugging Face


def _write_hf(
    source: Checkpoint, tensor_map: TensorMap, folder: Path, progress: Progress, written: Written | None
) -> list[Finding]:
    from mtpcheck.layouts.hf_writer import Form, default_form, write_shards

    manifest = source.manifest
    findings: list[Finding] = []
    tensors = _hf_tensors(tensor_map, manifest.copies if manifest else {})
    if manifest is not None:
        tensors, findings = _coded(tensors, manifest, progress)
    form = None
    for part, state in (manifest.copies if manifest else {}).items():
        if state == "own" and part in tensor_map.copies:
            what = "the reference has its own tensor here, which Megatron does not hold; it is left out"
            findings.append(failure("presence.copy", part, what))
    if manifest is not None:
        index = manifest.file(INDEX).read_bytes() if INDEX in manifest.files else None
        form = Form(manifest.headers, index)
        if not form.fits(tensors):
            form = None
            findings.append(note("result.form", str(folder.name), "Megatron's tensors no longer have the form of the "
                                 "original files; shards and index are made anew"))  # fmt: skip
        for name in manifest.files:
            if name != INDEX:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(manifest.file(name), folder / name)
    write_shards(folder, form or default_form(tensors), tensors, progress, written)
    original = manifest.config if manifest else None
    config = derived_config(tensor_map, original)
    if original is not None and block_of(original):
        if any(ref.dtype == CODES for ref in tensors.values()):
            _leave_alone(config["quantization_config"], _codes_of(manifest), tensors)
        else:
            config.pop("quantization_config")
    if config != original:
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    read_hf(folder)  # a manifest may be damaged; what does not open again is not handed over
    return findings + padding_findings(tensor_map, 0)


def _coded(
    tensors: dict[str, TensorRef], manifest: Manifest, progress: Progress
) -> tuple[dict[str, TensorRef], list[Finding]]:
    """The tensors with codes in place of values, where the source had codes and the values are still theirs."""
    names = _codes_of(manifest)
    block = block_of(manifest.config)
    return code_again(tensors, names, manifest.aside, block, progress) if names and block else (tensors, [])


def _codes_of(manifest: Manifest | None) -> list[str]:
    """Tensors that were codes in the source."""
    headers = manifest.headers.values() if manifest else ()
    entries = {name: entry for raw in headers for name, entry in header_entries(raw).items()}
    return [name for name, (dtype, _, _) in entries.items() if dtype == CODES]


def _leave_alone(declared: dict[str, Any], names: list[str], tensors: Mapping[str, TensorRef]) -> None:
    """Declare those that are no longer codes, or an engine asks for the scales of plain weights."""
    plain = [name for name in names if name in tensors and tensors[name].dtype != CODES]
    listed = declared.get("modules_to_not_convert")
    if plain:
        declared["modules_to_not_convert"] = [*(listed or ()), *(name.removesuffix(".weight") for name in plain)]


def _hf_tensors(tensor_map: TensorMap, copies: Mapping[str, str]) -> dict[str, TensorRef]:
    """Every HF tensor, with the copies that the source had and that equalled what they repeat."""
    refs = dict(tensor_map.parts)
    for part, state in copies.items():
        if state == "equal" and part in tensor_map.copies:
            refs.setdefault(part, refs[tensor_map.repeated_by(part)])
    plans = {part: ref.plan for part, ref in refs.items()}
    tensors = {}
    for row in tensor_map.model.rows:
        if all(part in refs for part in row.parts):
            plan = row.join(plans, tensor_map.model.shapes)
            tensors[row.name] = TensorRef(refs[row.parts[0]].dtype, plan)
            assert plan.itemsize * 8 == DTYPE_BITS[refs[row.parts[0]].dtype]
    return tensors


def derived_config(tensor_map: TensorMap, original: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json from Megatron's arguments; ``original`` lends only keys that Megatron has no word for."""
    family = load_family(tensor_map.family)
    start: dict[str, Any] = {"architectures": list(family.architectures), "model_type": family.model_types[0]}
    derived = config_from_facts(family.all_config, tensor_map.facts, original)
    return derived if original is not None else {**start, **derived}
