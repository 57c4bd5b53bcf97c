"""Any Megatron checkpoint, through the tensor map, into a Hugging Face folder on disk.

Every weight, and every config key that Megatron has a word for, comes from Megatron. The manifest lends the form:
shard files, index, other files, dtypes, and codes with scales in place of values that they still give.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.compare import is_zero
from mtpcheck.constant import check_constants
from mtpcheck.dtypes import as_declared
from mtpcheck.encoding import CODES, activation_names, block_of, code_again, scale_names
from mtpcheck.facts import config_from_facts
from mtpcheck.family import family_names, load_family
from mtpcheck.fp8 import Strange
from mtpcheck.layouts.hf import INDEX, header_entries, read_hf
from mtpcheck.manifest import Manifest
from mtpcheck.normalise import stored_rows
from mtpcheck.offset import offsets, rounded
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, failure, note, warning
from mtpcheck.rows import factored
from mtpcheck.tensormap import DTYPE_BITS, TensorMap, TensorRef

if TYPE_CHECKING:
    from mtpcheck.layouts.hf_writer import Written
    from mtpcheck.megatron import Fp8


@dataclass(frozen=True)
class _Encoded:
    """Tensors in the encoding of the source. ``plain``: those that were codes and are bf16."""

    tensors: Mapping[str, TensorRef]
    plain: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def write_hf(
    source: Checkpoint, tensor_map: TensorMap, folder: Path, fp8: Fp8, progress: Progress, written: Written | None
) -> list[Finding]:
    """Fill the new folder ``folder``.

    Whether kept scales still give Megatron's values shows while the codes are written, which spares a pass over all
    weights. Where they do not, all values are looked at, and everything is written again.
    """
    try:
        return _write(source, tensor_map, folder, fp8, progress, written, count=False)
    except Strange:
        for path in list(folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return _write(source, tensor_map, folder, fp8, progress, written, count=True)


def _write(
    source: Checkpoint,
    tensor_map: TensorMap,
    folder: Path,
    fp8: Fp8,
    progress: Progress,
    written: Written | None,
    count: bool,
) -> list[Finding]:
    from mtpcheck.layouts.hf_writer import Form, default_form, write_shards

    manifest = source.manifest
    encoded = _Encoded(_hf_tensors(tensor_map, manifest.copies if manifest else {}))
    if manifest is not None:
        encoded = _as_source(encoded.tensors, tensor_map, manifest, fp8, progress, count)
    tensors, findings = encoded.tensors, list(encoded.findings)
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
        _declare_plain(config, tensors, encoded.plain)
    if config != original:
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    read_hf(folder)  # a manifest may be damaged; what does not open again is not handed over
    if manifest is None:
        findings += _also_meant(tensor_map.family)
    by = offsets(stored_rows(source, tensor_map.model)) if tensor_map.held else {}
    return [*findings, *rounded(tensor_map, by), *check_constants(tensor_map), *padding_findings(tensor_map, 0)]


def _also_meant(family: str) -> Iterator[Finding]:
    """Megatron's files of several families look alike: which names were written, and which might be right."""
    alike = [name for name in family_names() if load_family(name).alike == family]
    if alike:
        what = f"written as {family}'s; {', '.join(alike)} look the same in Megatron: --family decides"
        yield note("result.family", "names", what)


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


# ---- the encoding of the source


def _as_source(
    tensors: Mapping[str, TensorRef],
    tensor_map: TensorMap,
    manifest: Manifest,
    fp8: Fp8,
    progress: Progress,
    count: bool,
) -> _Encoded:
    """The tensors in the dtypes that the source had, as codes where it had codes."""
    entries = {name: entry for raw in manifest.headers.values() for name, entry in header_entries(raw).items()}
    dtypes = {name: dtype for name, (dtype, _, _) in entries.items()}
    block = block_of(manifest.config)
    values = {name: "BF16" if dtype == CODES else dtype for name, dtype in dtypes.items()}
    declared, findings = as_declared(tensors, values, manifest.aside, progress)
    if block is None:
        return _Encoded(declared, (), tuple(findings))
    for name, own in tensor_map.encoded.items():
        declared.update({name: own.codes, **own.beside})
    names = [name for name, dtype in dtypes.items() if dtype == CODES and name not in tensor_map.encoded]
    again = code_again(declared, names, manifest.aside, block, progress, count)
    plain = (*again.trained, *again.bare)
    if fp8 == "requantize":
        return _anew(_Encoded(again.tensors, plain, tuple(findings)), dtypes, manifest, block)
    return _Encoded(again.tensors, plain, (*findings, *_of_bare(again.bare), *_of_trained(again.trained)))


def _anew(encoded: _Encoded, dtypes: Mapping[str, str], manifest: Manifest, block: tuple[int, int]) -> _Encoded:
    """The same tensors, the plain ones quantized anew. The scales of activations stay as they were."""
    from mtpcheck.quantize import quantize

    tensors, findings, plain = dict(encoded.tensors), list(encoded.findings), list[str]()
    powers = manifest.config["quantization_config"].get("scale_fmt") == "ue8m0"
    for name in encoded.plain:
        if (made := quantize(name, tensors[name], block, powers)) is None:
            plain.append(name)
            continue
        scale = next((s for s in scale_names(name, block) if s in dtypes), scale_names(name, block)[0])
        tensors[name], tensors[scale] = made
        tensors.update({n: manifest.aside[n] for n in activation_names(name) if n in manifest.aside})
    if plain:
        what = "NaN, infinity or too large, so not quantized anew; written as Megatron holds it"
        findings.append(warning("quantization.trained", _some(plain), what))
    if done := [name for name in encoded.plain if name not in plain]:
        what = "quantized anew, with new scales: values are rounded"
        findings.append(warning("quantization.anew", _some(done), what))
    return _Encoded(tensors, tuple(plain), tuple(findings))


def _declare_plain(config: dict[str, Any], tensors: Mapping[str, TensorRef], plain: tuple[str, ...]) -> None:
    """Let ``quantization_config`` say what is stored: nothing where nothing is coded, and what no longer is."""
    if not any(ref.dtype == CODES for ref in tensors.values()):
        del config["quantization_config"]
    elif plain:
        declared = dict(config["quantization_config"])
        before = declared.get("modules_to_not_convert")
        listed = before if isinstance(before, list) else []
        modules = (name.removesuffix(".weight") for name in plain)
        declared["modules_to_not_convert"] = [*listed, *(m for m in modules if m not in listed)]
        config["quantization_config"] = declared


def _some(names: list[str] | tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def _of_bare(names: tuple[str, ...]) -> Iterator[Finding]:
    if names:
        what = "what was kept does not tell their codes; they are written as Megatron holds them"
        yield warning("quantization.trained", _some(names), what, todo="--fp8 requantize would quantize them anew")


_NAMED = 20  # tensors that are named one by one
_TODO = "modules_to_not_convert lists it now; --fp8 requantize would quantize it anew"


def _of_trained(trained: Mapping[str, int]) -> Iterator[Finding]:
    for name, count in list(trained.items())[:_NAMED]:
        what = f"{count:,} values are none that its scales give; it is written as bf16"
        yield warning("quantization.trained", name, what, todo=_TODO)
    if (more := len(trained) - _NAMED) > 0:
        yield warning("quantization.trained", f"{more:,} more tensors", "are written as bf16 too", todo=_TODO)
