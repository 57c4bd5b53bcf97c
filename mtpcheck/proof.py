"""The round trip proved from headers: the way there and the way back composed, no byte read or written.

A conversion only moves bytes, so it is a mapping of plans. Composed with its inverse, every stored tensor must
read its own region of the source straight through. What this cannot tell is named: whether copies hold the same
bits as what they repeat, and whether the files can be read and written at all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from mtpcheck.checkpoint import Checkpoint, Layout, open_checkpoint
from mtpcheck.checks.declaration import check_count
from mtpcheck.comparison import declaration
from mtpcheck.convert import check_convertible, check_not_lost, check_text, other_layout
from mtpcheck.dialect import KeyForm
from mtpcheck.dialects import load_dialect
from mtpcheck.errors import CheckpointFails
from mtpcheck.export import derived_config
from mtpcheck.facts import args_from_facts, facts_from_args
from mtpcheck.family import load_family
from mtpcheck.gather import Ranks, gather
from mtpcheck.megatron import Options, dealer, held_by_megatron, rows_of
from mtpcheck.model import BESIDE
from mtpcheck.move import SLAB
from mtpcheck.normalise import stored_rows
from mtpcheck.parallel import WORKERS
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding, failure, warning
from mtpcheck.report.report import Report, of_group
from mtpcheck.roundtrip import space_needed
from mtpcheck.rows import Row
from mtpcheck.tensormap import TensorMap, TensorRef, read_tensor_map
from mtpcheck.verify import in_words, require_mtp, summary

_PASSES = 6  # read and write there, the same back, one comparison of two sides
_BYTES_A_SECOND = 1e9  # a plain disk; docs/benchmarks.md has what was measured


def prove(
    source: str | Path,
    family: str | None = None,
    options: Options | None = None,
    workdir: str | Path | None = None,
    allow_no_mtp: bool = False,
    via: Layout | None = None,
    iteration: int | None = None,
) -> Report:
    """Prove the round trip of ``source`` by plan. Whatever ``roundtrip`` refuses before it writes is refused here.

    Too little disk in ``workdir`` is a warning here and not an error.
    """
    options = options or Options()
    a = open_checkpoint(source, iteration, options.dialect)
    options = options.for_source(a)
    a_map = read_tensor_map(a, family)
    require_mtp(a, a_map, allow_no_mtp)
    middle = via or other_layout(a.layout)
    told = in_words(middle, str(options.topology) if middle == "torch" else "", options.dialect)
    report = Report("roundtrip --plan", [str(a.path)], a_map.family, summary(a, a_map, told, a.layout))
    report.dialects = [options.spoken.name]
    try:
        check_convertible(a, a_map)
        check_not_lost(a, a_map)
    except CheckpointFails as error:
        for group in dict.fromkeys(f.check.split(".")[0] for f in error.findings):
            report.add(group, of_group(error.findings, group), "nothing can be proved")
        report.skip("plan", "the checkpoint fails before")
        return report
    if a.layout == "hf":
        check_text(a, a_map, options)
    report.add("structure", of_group(a.findings, "structure"), f"{len(a.tensors):,} tensors in {a.layout}")
    report.add("presence", [], f"{len(a_map.parts):,} parts, every stored tensor claimed once")
    report.add("declaration", _declaration(a, a_map), declaration(a, a_map))
    held = held_by_megatron(a_map, middle, options) if middle != "hf" else a_map
    needed = space_needed(a, False, dealer(held, options).nbytes if middle == "torch" else held.nbytes)
    different = list(_different(a, a_map, held, options, middle))
    keep = options.fp8 == "keep" and middle != "hf"
    nodes = 0 if keep else len(a_map.encoded)
    told = f"{len(a.tensors):,} tensors read their own region again; {nodes:,} value nodes"
    if held.held:
        told += f"; {len(held.held):,} are sums in Megatron, what these lose is kept beside it"
    report.add("plan", different, told)
    if nodes:
        what = f"{nodes:,} value nodes (FP8 to bf16 and back) are proved by bytes alone"
        report.skip("quantization", what)
    elif a_map.encoded:
        report.add("quantization", [], f"{len(a_map.encoded):,} FP8 tensors stay codes; scales lie beside Megatron")
    report.skip("values", "no byte was read; copies were compared by shape alone")
    report.skip("acceptance", "no weight was read")
    report.include(_space(Path(workdir or tempfile.gettempdir()), needed))
    report.notes = _needs(a, needed)
    return report


@dataclass(frozen=True)
class _Dealt:
    """A rank that was never written: its state dicts hold plans."""

    name: str
    models: Sequence[Mapping[str, Any]]

    def ref(self, name: str, value: Any) -> TensorRef | None:
        return value if isinstance(value, TensorRef) else None


def _in_between(held: TensorMap, options: Options, middle: Layout) -> tuple[list[Row], Mapping[str, TensorRef] | None]:
    """Rows of the checkpoint in between, and its tensors where ranks hold shares of them."""
    dialect, model = options.spoken, held.model
    if middle == "hf":
        return model.rows, None
    if middle == "torch_dist":
        return rows_of(held, middle, options).rows, None
    dealt = dealer(held, options)
    ranks = {rank: _Dealt(dealt.topology.folder(rank), models) for rank, models in dealt.deal()}
    tensors = gather(Ranks(ranks, dealt.topology, args_from_facts(dialect.args, held.facts)), dialect).tensors
    return dialect.rows(model, dealt.padded_vocab, KeyForm(options.spec, stored=tensors.keys())).rows, tensors


def _different(a: Checkpoint, a_map: TensorMap, held: TensorMap, options: Options, middle: Layout) -> Iterator[Finding]:
    """Stored tensors that would not come back as they are, with the rows at fault."""
    shapes = a_map.model.shapes
    own = a_map.model.rows if a.layout == "hf" else stored_rows(a, a_map.model)
    other, tensors = _in_between(held, options, middle)
    plans = {part: ref.plan for part, ref in held.parts.items()}
    origin: dict[str, str] = {}
    back: dict[str, Plan] = {}
    for row in other:
        origin.update(dict.fromkeys(row.parts, row.origin))
        if all(part in plans for part in row.parts):
            stored = row.join(plans, shapes) if tensors is None else tensors[row.name].plan
            back.update(row.split(stored, shapes))
    for part in a_map.copies.keys() & plans.keys() - back.keys():
        back[part] = plans[part]  # by shape alone; the report says that values were not judged
    back.update({part: plan for part, plan in plans.items() if part.startswith(BESIDE)})  # beside Megatron as it is
    for row in own:
        if row.name not in a.tensors:
            continue
        before, rows = _before(row, a, a_map, held), [row.origin, *(origin.get(part, "") for part in row.parts)]
        true_rows = row.shape(shapes)[0] if row.pad is None else shapes[row.parts[0]][0][0]
        lost = [part for part in row.parts if part not in back]
        if lost or not row.join(back, shapes).slice(0, 0, true_rows).same_bytes(before.slice(0, 0, true_rows)):
            yield failure(
                "plan.identity", row.name, "would not come back as it is", where="; ".join(sorted(set(rows) - {""})),
                cause=f"{lost[0]} is not carried" if lost else "a row and its inverse do not undo each other",
            )  # fmt: skip


def _before(row: Row, a: Checkpoint, a_map: TensorMap, held: TensorMap) -> Plan:
    """What must come back of a stored tensor: its own region, or the value nodes that Megatron holds in its place."""
    dtypes = {held.parts[part].dtype for part in row.parts if part in held.parts}
    if row.name in a_map.encoded and dtypes == {"BF16"}:
        return a_map.encoded[row.name].values.plan
    if not held.held.keys() & set(row.parts) and all(dtype == a.tensors[row.name].dtype for dtype in dtypes):
        return a.tensors[row.name].plan
    return row.join({part: held.parts[part].plan for part in row.parts}, a_map.model.shapes)


def _declaration(a: Checkpoint, a_map: TensorMap) -> Iterator[Finding]:
    """The config through Megatron's arguments and back."""
    yield from check_count(a_map, str(a.path))
    rows = load_dialect().args
    again = facts_from_args(rows, args_from_facts(rows, a_map.facts))
    model = replace(a_map.model, facts={**a_map.facts, **again})
    if a.config is None:
        return
    derived = derived_config(replace(a_map, model=model), a.config)
    for key in sorted(a.config.keys() | derived.keys()):
        if a.config.get(key) != derived.get(key):
            check = "declaration.mtp" if key in load_family(a_map.family).declared_by else "declaration.config"
            yield failure(check, key, "would change", expected=repr(a.config.get(key)), got=repr(derived.get(key)))


def _space(folder: Path, needed: int) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < needed:
        sizes = {"expected": decimal(needed), "got": decimal(free)}
        what = "too little disk for a round trip here"
        yield warning("plan.space", str(folder), what, **sizes, todo="name another folder with --workdir")


def _needs(a: Checkpoint, needed: int) -> list[str]:
    seconds = _PASSES * a.nbytes / _BYTES_A_SECOND
    time = f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.0f} min"
    disk, buffers = decimal(needed), decimal(2 * WORKERS * SLAB)
    return [
        f"a round trip through files needs {disk} of disk, {buffers} of buffers,",
        f"and about {time} at {decimal(int(_BYTES_A_SECOND))}/s",
    ]
