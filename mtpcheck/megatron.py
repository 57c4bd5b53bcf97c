"""Any checkpoint, through the tensor map, into Megatron's layouts on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from mtpcheck.checkpoint import Checkpoint, Layout
from mtpcheck.compare import differs
from mtpcheck.deal import Dealer
from mtpcheck.dialect import Dialect, KeyForm, Mcore, Spelling
from mtpcheck.dialects import CORE, load_dialect
from mtpcheck.dtypes import joinable, rounded_by_megatron
from mtpcheck.encoding import as_codes, aside_of
from mtpcheck.errors import UnsupportedError, UsageError
from mtpcheck.facts import args_from_facts
from mtpcheck.layouts.hf import make_header
from mtpcheck.layouts.torch_dist import TRACKER
from mtpcheck.manifest import ASIDE, DIALECT, FOLDER, record_dialect, write_manifest
from mtpcheck.model import BESIDE
from mtpcheck.offset import as_held, inexact, offsets
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, note
from mtpcheck.roles import Experts, Spec
from mtpcheck.rows import Row
from mtpcheck.tensormap import TensorMap, TensorRef
from mtpcheck.topology import Topology

Fp8 = Literal["dequantize", "keep", "requantize"]
"""FP8 weights in Megatron as bf16 values, or as they are; on export, trained ones as bf16, or quantized anew."""


@dataclass(frozen=True)
class Options:
    """How to write Megatron files. ``topology`` and ``experts`` matter for the files of ranks alone."""

    spec: Spec = "te"
    vocab_multiple: int = 128
    mcore: Mcore = "0.16"
    topology: Topology = field(default_factory=Topology)
    experts: Experts | None = None
    fp8: Fp8 = "dequantize"
    text_only: bool = False
    """Carry tensors of no text model beside Megatron, which has no place for them, in place of refusing."""
    dialect: str | None = None
    """The one that Megatron tensors are read and written in; by default that of the source, if it is Megatron's and its
    keys tell, else megatron-core's."""

    def for_source(self, source: Checkpoint) -> Options:
        """What holds for a source that was opened with these options."""
        return replace(self, dialect=self.dialect or source.dialect)

    @property
    def spoken(self) -> Dialect:
        """The dialect itself. Raises UsageError if there is none of its name."""
        return load_dialect(self.dialect or CORE)

    def padded_vocab(self, vocab: int, layout: Layout) -> int:
        """Megatron pads the vocabulary to a multiple of ``vocab_multiple`` × TP."""
        multiple = self.vocab_multiple * (self.topology.tp if layout == "torch" else 1)
        return -(-vocab // multiple) * multiple

    @property
    def expert_form(self) -> Experts:
        """The form of experts that megatron-core builds with this layer spec, unless another is asked for."""
        return self.experts or ("grouped" if self.spec == "te" else "sequential")


def dealer(tensor_map: TensorMap, options: Options) -> Dealer:
    """The model on the ranks of ``options.topology``. Raises UnsupportedError or UsageError if it cannot be cut so."""
    if options.spec == "te" and options.experts == "legacy":
        raise UsageError("legacy grouped experts exist in the local layer spec alone (--spec local)")
    form = KeyForm(options.spec, options.mcore, experts=options.expert_form)
    padded = options.padded_vocab(tensor_map.facts["vocab"], "torch")
    return Dealer(tensor_map, options.topology, options.spoken, form, padded)


def load_writers(*layouts: Layout) -> None:
    """Import what writing needs before a folder is made: a signal while torch is imported ends the process at once."""
    names = {"hf": "hf_writer", "torch_dist": "torch_dist_writer", "torch": "torch_ranks_writer"}
    for layout in layouts:
        import_module(f"mtpcheck.layouts.{names[layout]}")


def read_for_copies(tensor_map: TensorMap) -> set[str]:
    """Stored tensors that ``copy_states`` reads."""
    stored = (part for part in tensor_map.copies if part in tensor_map.parts)
    pairs = ((part, tensor_map.repeated_by(part)) for part in stored)
    return {tensor_map.names[part] for pair in pairs for part in pair if part in tensor_map.parts}


def copy_states(tensor_map: TensorMap) -> dict[str, str]:
    """For every part that may repeat another: absent, equal or own (differs)."""
    states = {}
    for part in tensor_map.copies:
        ref, main = tensor_map.parts.get(part), tensor_map.parts.get(tensor_map.repeated_by(part))
        if ref is None:
            states[part] = "absent"
        else:
            states[part] = "own" if main is None or differs(ref, main) else "equal"
    return states


def one_dtype(row: Row, tensor_map: TensorMap) -> str:
    """The dtype that the parts of a row share. Raises UnsupportedError if they do not."""
    dtypes = {tensor_map.parts[part].dtype for part in row.parts}
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"{row.name} joins tensors of different dtypes ({', '.join(sorted(dtypes))}), such as "
            f"{tensor_map.names[row.parts[0]]}; Megatron keeps one"
        )
    return dtypes.pop()


def write_megatron(
    source: Checkpoint, tensor_map: TensorMap, folder: Path, layout: Layout, options: Options, progress: Progress
) -> list[Finding]:
    """Write a Megatron root: iteration folder and tracker file. Raises UnsupportedError for what has no place there."""
    states = copy_states(tensor_map)
    own = [tensor_map.names[part] for part, state in states.items() if state == "own"]
    if own:
        raise UnsupportedError(
            f"{source.path}: {', '.join(own)} differ from what they repeat, and Megatron has no place for them"
        )
    held = held_by_megatron(tensor_map, layout, options)
    args, findings = _args(source, tensor_map, layout, options)
    iteration = _iteration(source)
    args["iteration"] = iteration
    name = f"iter_{iteration:07d}" if iteration else "release"
    target = folder / name
    target.mkdir()
    if layout == "torch":
        _write_ranks(held, target, args, options, progress)
    else:
        _write_torch_dist(held, target, args, options, progress)
    if source.hf is not None:
        write_manifest(target, source.folder, source.hf, tensor_map.family, states)
        findings += _write_aside(source, tensor_map, target / FOLDER, options, progress)
    elif source.manifest is not None:
        shutil.copytree(source.manifest.root.parent, target / FOLDER, ignore=shutil.ignore_patterns(ASIDE, DIALECT))
        findings += _write_aside(source, tensor_map, target / FOLDER, options, progress)
    if options.spoken.name != CORE:
        record_dialect(target, options.spoken.name)
    (folder / TRACKER).write_text(name.removeprefix("iter_").lstrip("0"))
    return findings


def _iteration(source: Checkpoint) -> int:
    """The iteration that a Megatron source was saved at, as its folder is named; 0 for a release."""
    name = source.folder.name.removeprefix("iter_")
    return int(name) if source.hf is None and name.isdecimal() and len(name) < 12 else 0


def rows_of(tensor_map: TensorMap, layout: Layout, options: Options) -> Spelling:
    """Rows of the checkpoint that will be written."""
    padded = options.padded_vocab(tensor_map.facts["vocab"], layout)
    experts = options.expert_form if layout == "torch" else None
    return options.spoken.rows(tensor_map.model, padded, KeyForm(options.spec, options.mcore, experts=experts))


def held_by_megatron(tensor_map: TensorMap, layout: Layout, options: Options) -> TensorMap:
    """The map as Megatron's tensors will hold it: FP8 as codes or as values, one dtype in each tensor.

    Raises UnsupportedError where no dtype holds all parts of a tensor.
    """
    held = as_codes(tensor_map) if options.fp8 == "keep" else tensor_map
    rows = rows_of(tensor_map, layout, options).rows
    held = as_held(joinable(held, rows), offsets(rows))
    for row in rows:
        one_dtype(row, held)
    return held


def _write_aside(
    source: Checkpoint, tensor_map: TensorMap, folder: Path, options: Options, progress: Progress
) -> list[Finding]:
    """Keep beside Megatron what it cannot hold, or will round once it has loaded it, and say so."""
    from mtpcheck.layouts.hf_writer import Form, write_shards

    groups = [group for group in _aside(source, tensor_map, options) if group.tensors]
    kept = dict(source.manifest.aside) if source.manifest else {}
    for group in groups:
        kept.update(group.tensors)
    if kept:
        write_shards(folder, Form({ASIDE: make_header(kept.items())}, None), kept, progress)
    return [note(group.check, f"{len(group.tensors):,} tensors", f"{group.what} {FOLDER}/{ASIDE}") for group in groups]


@dataclass(frozen=True)
class _Aside:
    """Tensors that are kept beside Megatron for one reason, by HF name."""

    check: str
    what: str
    tensors: Mapping[str, TensorRef]


def _aside(source: Checkpoint, tensor_map: TensorMap, options: Options) -> Iterator[_Aside]:
    keep = options.fp8 == "keep"
    coded = aside_of(tensor_map, keep)
    held, nbytes = "FP8 codes" if keep else "bf16", sum(ref.nbytes for ref in coded.values())
    what = f"{len(tensor_map.encoded):,} FP8 tensors are {held} here; scales ({nbytes:,} bytes) are in"
    yield _Aside("quantization.aside", what, coded)
    if source.hf is None:  # what it cannot hold was kept before
        return
    rows, dialect = rows_of(tensor_map, "torch_dist", options).rows, options.spoken
    fp32 = {part for row in rows
            if (role := dialect.address(row.name).role) and role.fp32 for part in row.parts}  # fmt: skip
    wide, near = sorted(rounded_by_megatron(tensor_map, fp32)), inexact(tensor_map, offsets(rows))
    beside = [part.removeprefix(BESIDE) for part in tensor_map.parts if part.startswith(BESIDE)]
    for names, what in (
        (wide, "are F32, which Megatron rounds once it has loaded them; they are in"),
        (near, "are w - 1 in Megatron, which does not give w back; they are in"),
        (beside, "belong to no text model; they are in"),
    ):
        yield _Aside("values.aside", what, {name: source.tensors[name] for name in names})


def _write_torch_dist(
    tensor_map: TensorMap, folder: Path, args: Mapping[str, Any], options: Options, progress: Progress
) -> None:
    from mtpcheck.layouts.torch_dist_writer import StoredChunks, write_torch_dist

    spelling = rows_of(tensor_map, "torch_dist", options)
    shapes = tensor_map.model.shapes
    plans = {part: ref.plan for part, ref in tensor_map.parts.items()}
    tensors = []
    for row in spelling.rows:
        dtype = one_dtype(row, tensor_map)
        chunks = row.chunks(plans, shapes, tensor_map.padding_plans)
        tensors.append(StoredChunks(row.name, dtype, row.shape(shapes), row.stack, chunks))
    write_torch_dist(folder, tensors, spelling.extras, args, options.spec, options.mcore, progress)


def _write_ranks(
    tensor_map: TensorMap, folder: Path, args: Mapping[str, Any], options: Options, progress: Progress
) -> None:
    from mtpcheck.layouts.torch_ranks_writer import write_ranks

    dealt = dealer(tensor_map, options)
    ranks = ((dealt.topology.folder(rank), models) for rank, models in dealt.deal())
    write_ranks(folder, ranks, args, args.get("iteration") or 0, progress)


def _args(
    source: Checkpoint, tensor_map: TensorMap, layout: Layout, options: Options
) -> tuple[dict[str, Any], list[Finding]]:
    """Arguments of the result: those of a Megatron source that are plain values, and all that follow from the model."""
    dialect, findings = options.spoken, list[Finding]()
    before = source.args or {}
    kept = {key: value for key, value in before.items() if _is_plain(value)}
    facts = tensor_map.facts
    topology = options.topology if layout == "torch" else Topology()
    derived = {
        **args_from_facts(dialect.args, facts),
        **topology.args(),
        "padded_vocab_size": options.padded_vocab(facts["vocab"], layout),
        "make_vocab_size_divisible_by": options.vocab_multiple,
        "transformer_impl": "transformer_engine" if options.spec == "te" else "local",
        "moe_grouped_gemm": bool(facts["experts"]) and options.expert_form != "sequential",
        "moe_use_legacy_grouped_gemm": options.experts == "legacy",
        "bf16": facts.get("dtype") == "bfloat16",
        "fp16": facts.get("dtype") == "float16",
        "ckpt_format": layout,
    }
    if dropped := sorted(before.keys() - kept.keys() - derived.keys()):
        what = "objects of Megatron's own classes cannot be written without it and were left out"
        findings.append(note("topology.args", ", ".join(dropped), what))
    return {**dialect.constants, **kept, **derived}, findings


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return value is None or type(value) in (bool, int, float, str)
