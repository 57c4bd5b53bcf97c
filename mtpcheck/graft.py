"""Put a lost MTP layer back into a Hugging Face checkpoint, or split one off into a folder of its own.

``graft`` copies the files of the checkpoint that lost it and adds ``mtp.safetensors``; what it changes is the index,
the declaration, and, where the checkpoint is quantized and the layer is not, the list of what is left alone.
``extract`` is its inverse: grafting what it made gives the bytes that grafting the whole donor gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.checks.acceptance import judge_acceptance
from mtpcheck.checks.components import declared_table
from mtpcheck.checks.declaration import check_count, compare_configs
from mtpcheck.checks.grafted import check_dtype, check_trunk
from mtpcheck.checks.values import compare_stored
from mtpcheck.comparison import declaration, mtp_names
from mtpcheck.declared import CONFIG, DESCRIPTION, MODELOPT
from mtpcheck.draft.probe import Column, Probing, read_workloads, run_all
from mtpcheck.errors import UnsupportedError, UsageError
from mtpcheck.exclusions import redeclare
from mtpcheck.facts import store
from mtpcheck.family import load_family
from mtpcheck.fetch import fetched, is_remote
from mtpcheck.hub import short_name
from mtpcheck.layouts.folder import Folder, new_index, write_folder
from mtpcheck.layouts.hf import INDEX, SINGLE
from mtpcheck.mtp_head import (
    Head,
    check_fit,
    declare_as,
    modules_in,
    open_hf,
    packing_of,
    read_head,
    require_whole,
    stored_of,
)
from mtpcheck.progress import bar
from mtpcheck.report.finding import Finding, Severity, note, warning
from mtpcheck.report.report import Report, of_group
from mtpcheck.rules import MISSING
from mtpcheck.side import Side
from mtpcheck.target import check_space, check_target, new_folder
from mtpcheck.tensormap import TensorRef, read_tensor_map

SHARD, REST = "mtp.safetensors", "model-00001-of-00001.safetensors"


def graft(
    broken: str | Path,
    donor: str | Path,
    out: str | Path | None = None,
    family: str | None = None,
    probing: Probing | None = None,
    show_progress: bool = False,
) -> Report:
    """Write the new folder ``out`` (``BROKEN-grafted`` by default): ``broken`` with the MTP layers of ``donor``.

    Both are Hugging Face checkpoints of one family and size; ``donor`` may be what ``extract`` made. Neither is
    touched. With ``probing`` the result is run. Raises UnsupportedError if the layers do not fit, if the donor has
    none, or if its packed weights mean nothing in ``broken``; UsageError if ``broken`` has an MTP layer, and for the
    paths; CheckpointFails if either lacks tensors.
    """
    target = Path(out) if out is not None else _beside(broken, "grafted")
    for source in (broken, donor):
        check_target(Path(source), target)
    stock = _without_head(open_hf(broken), family)
    head = read_head(donor, family, show_progress)
    check_fit(head, stock)
    if is_remote(stock.checkpoint):
        stock = _read(fetched(stock.checkpoint, show_progress), family)
    tensors, findings = _tensors_for(head, stock)
    folder = _grafted(head, stock, tensors)
    check_space(target.parent, folder.nbytes)
    with new_folder(target) as building:
        with bar("grafting", folder.nbytes, show_progress) as progress:
            write_folder(building, folder, progress)
        _require_sound(stock, building, family)
    made = _read(open_checkpoint(target), family)
    told = f"{made.tensor_map.family} · {_layers(head)} of {donor} into {broken} → {target}"
    report = Report("graft", [str(stock.checkpoint.path), str(head.side.checkpoint.path)], made.tensor_map.family, told)
    findings += [*check_dtype(head.side, stock), *check_trunk(head.side, stock)]
    report.add("graft", findings, f"{len(tensors):,} tensors in {folder.shard}, {folder.nbytes:,} bytes in {target}")
    _judge(report, head, made, tensors, show_progress)
    if probing is None:
        report.skip("acceptance", "the model was not run")
    else:
        judge_acceptance(report, lambda: _drafts(made, probing, show_progress))
    return report


def extract(
    donor: str | Path, out: str | Path | None = None, family: str | None = None, show_progress: bool = False
) -> Report:
    """Write the new folder ``out`` (``DONOR-mtp`` by default): the MTP layers of ``donor``, the embedding and the
    output head that they need, config and tokenizer. Raises as ``graft`` does."""
    target = Path(out) if out is not None else _beside(donor, "mtp")
    check_target(Path(donor), target)
    head = read_head(donor, family, show_progress, whole=True)
    folder = _extracted(head)
    check_space(target.parent, folder.nbytes)
    with new_folder(target) as building, bar("extracting", folder.nbytes, show_progress) as progress:
        write_folder(building, folder, progress)
    made = read_head(target, family)
    told = f"{made.side.tensor_map.family} · {_layers(head)} of {donor} → {target}"
    report = Report("graft", [str(head.side.checkpoint.path)], made.side.tensor_map.family, told)
    report.add("graft", [], f"{len(head.tensors):,} tensors in {SHARD}, {folder.nbytes:,} bytes in {target}")
    _judge(report, head, made.side, head.tensors, show_progress)
    report.skip("acceptance", "a head drafts nothing without its trunk")
    return report


def _beside(path: str | Path, what: str) -> Path:
    whole = Path(path if Path(path).exists() else short_name(str(path))).resolve()  # of a repository: here
    if not whole.name:
        raise UsageError(f"{path}: nothing can lie beside it; name the new folder with --out")
    return whole.with_name(f"{whole.name}-{what}")


def _layers(head: Head) -> str:
    return f"{head.layers} MTP layer{'s' * (head.layers != 1)}"


def _read(checkpoint: Checkpoint, family: str | None) -> Side:
    return Side(checkpoint, read_tensor_map(checkpoint, family))


def _without_head(checkpoint: Checkpoint, family: str | None) -> Side:
    """The checkpoint that is to get a head. Raises UsageError if it has one, CheckpointFails if its trunk is not
    whole."""
    stock = _read(checkpoint, family)
    if stock.tensor_map.facts["mtp_stored"]:
        own = next(name for name in checkpoint.tensors if name in mtp_names(stock.tensor_map))
        raise UsageError(f"{checkpoint.path}: still stores an MTP layer ({own}); nothing is replaced")
    require_whole(checkpoint.path, iter(stock.tensor_map.findings))
    return stock


# ---- tensors


def _tensors_for(head: Head, stock: Side) -> tuple[dict[str, TensorRef], list[Finding]]:
    """What goes into the shard: the donor's tensors, values in place of FP8 codes that mean nothing in ``stock``, and
    for copies that equal what they repeat the stock's own."""
    tensors, findings = dict(head.tensors), list[Finding]()
    if head.packed and _scheme(head.side) != _scheme(stock):
        tensors = _decoded(head, stock)
        what = f"{len(head.packed):,} weights were FP8 codes; their values, rounded to bf16, are stored plain"
        findings.append(warning("graft.decoded", "MTP layers", what))
    names = {part: row.name for row in head.side.tensor_map.model.rows for part in row.parts}
    for part, state in head.copies.items():
        if state == "equal":
            tensors[names[part]] = _main(head.side.tensor_map.copies[part], part, stock)
    return tensors, findings


def _scheme(side: Side) -> Any:
    """How a checkpoint packs weights: its declaration without the list of what is left alone; None if it has none."""
    packing = packing_of(side)
    if not packing.declared:
        return None
    key = packing.declared[0].listed.split(".")[-2:-1]
    table = (side.checkpoint.config or {}).get(key[0] if key else "", {})
    passed = {*packing.declared[0].method.exclude, "version"}
    return packing.method, {k: v for k, v in table.items() if k not in passed} if isinstance(table, dict) else table


def _decoded(head: Head, stock: Side) -> dict[str, TensorRef]:
    """Values in place of FP8 codes. Raises UnsupportedError for codes that are not decoded here."""
    encoded = head.side.tensor_map.encoded
    for module in head.packed.values():
        if module.codes not in encoded:
            theirs = packing_of(stock)
            raise UnsupportedError(
                f"{head.side.checkpoint.path}: {module.codes} is packed ({packing_of(head.side).method}) and cannot be "
                f"unpacked here, while {stock.checkpoint.path} is "
                + (f"packed otherwise ({theirs.method})" if theirs.declared else "plain")
                + "; take a donor with plain MTP weights"
            )
    beside = {name for own in encoded.values() for name in own.beside}
    return {
        name: encoded[name].values if name in encoded else ref
        for name, ref in head.tensors.items()
        if name not in beside
    }


def _main(original: str, part: str, stock: Side) -> TensorRef:
    """The stock's own tensor that a copy repeats; a tied head that is not stored is the embedding."""
    tensor_map = stock.tensor_map
    while original in tensor_map.copies and original not in tensor_map.parts:
        original = tensor_map.copies[original]
    if original not in tensor_map.parts:
        raise UnsupportedError(
            f"{stock.checkpoint.path}: {original} is packed, and {part} repeats it as a plain tensor"
        )
    return tensor_map.parts[original]


# ---- files


def _grafted(head: Head, stock: Side, tensors: Mapping[str, TensorRef]) -> Folder:
    """``stock`` as it is to be written: its files, the new shard, index and declarations."""
    own = stock.checkpoint
    assert own.hf is not None and own.config is not None and head.side.checkpoint.config is not None
    moved = {SINGLE: REST}  # a file of this name is read without an index
    shards = {shard.file: moved.get(shard.file, shard.file) for shard in own.hf.shards}
    shard = next(name for name in (SHARD, *(f"mtp-{i}.safetensors" for i in range(1, 99))) if name not in shards)
    plain = modules_in(head.side.tensor_map, tensors)
    if packed := [name for name in head.packed if name not in plain]:  # then the donor has a word on the rest
        alone = frozenset[str]().union(*(d.left_alone(plain) for d in packing_of(head.side).declared))
        plain = [name for name in plain if name in alone]
    files = redeclare(own, packing_of(stock), plain, packed, _kinds(head, tensors))
    config = files.get(CONFIG, own.config)
    files[CONFIG] = declare_as(config, head.side.checkpoint.config, stock.tensor_map.facts["layers"])
    file_of = {name: shards[file] for name, file in own.hf.shard_of.items()} | dict.fromkeys(tensors, shard)
    index = new_index(own.folder / INDEX, {**own.tensors, **tensors}, file_of)
    return Folder(own.folder, shards, own.hf.others, shard, tensors, index, files)


def _kinds(head: Head, tensors: Mapping[str, TensorRef]) -> dict[str, str]:
    """What a description of every tensor is to say of these: the donor's word, or that they are plain."""
    said = next((d.described for d in packing_of(head.side).declared if d.described is not None), {})
    return {name: str(said.get(name, "FLOAT")) if head.packed else "FLOAT" for name in tensors}


def _extracted(head: Head) -> Folder:
    """The head as a folder. Where nothing of it is packed, it declares no quantization."""
    own = head.side.checkpoint
    assert own.hf is not None and own.config is not None
    rest = {name: own.tensors[name] for name in stored_of(head.side, "embed", "head")}
    files = {CONFIG: dict(own.config)}
    others = own.hf.others
    if not head.packed:
        for declared in packing_of(head.side).declared:
            if declared.where == CONFIG:
                store(files[CONFIG], declared.listed.rpartition(".")[0], MISSING)
        others = tuple(name for name in others if name != MODELOPT and not name.startswith(DESCRIPTION))
    file_of = {**dict.fromkeys(head.tensors, SHARD), **dict.fromkeys(rest, REST)}
    index = new_index(None, {**head.tensors, **rest}, file_of)
    return Folder(own.folder, {}, others, SHARD, head.tensors, index, files, {REST: rest})


# ---- judgement


def _require_sound(stock: Side, folder: Path, family: str | None) -> None:
    """Raise UnsupportedError if the grafted folder has a fault that the stock had not."""
    before = {(f.check, f.subject) for f in stock.tensor_map.findings}
    made = _read(open_checkpoint(folder), family)
    for finding in made.tensor_map.findings:
        if finding.severity is Severity.FAILURE and (finding.check, finding.subject) not in before:
            what = f"{finding.subject}: {finding.message}" + (f" ({finding.todo})" if finding.todo else "")
            raise UnsupportedError(f"{stock.checkpoint.path}: grafted, this would fail: {what}; nothing was written")


def _judge(report: Report, head: Head, made: Side, tensors: Mapping[str, TensorRef], show_progress: bool) -> None:
    """What was written, read again: structure, MTP tensors bit for bit, declaration, packing."""
    found = made.tensor_map.findings
    report.add("structure", of_group(made.checkpoint.findings, "structure"), f"{len(made.checkpoint.tensors):,} in hf")
    nbytes = sum(ref.nbytes for ref in tensors.values())
    own = mtp_names(made.tensor_map)
    stored = {name: ref for name, ref in made.checkpoint.tensors.items() if name in own}
    with bar("comparing", nbytes, show_progress) as progress:
        compared = list(compare_stored(tensors, stored, progress))
    report.add("presence", of_group(compared, "presence"), f"{len(stored):,} tensors in MTP layers")
    if packing_of(made).declared:
        told = f"{packing_of(made).method}; {len(modules_in(made.tensor_map, stored)):,} MTP matrices are plain"
        report.add("quantization", of_group(found, "quantization"), told)
    report.add("declaration", _declaration(head, made), declaration(made.checkpoint, made.tensor_map))
    report.declared = declared_table(head.side.checkpoint, made.checkpoint, report.findings)
    report.add("values", of_group(compared, "values"), f"{nbytes:,} bytes compared bit for bit")


def _declaration(head: Head, made: Side) -> list[Finding]:
    """MTP keys must be the donor's; what else the two configs differ in is told, and is no fault of the graft."""
    before, after = head.side.checkpoint.config, made.checkpoint.config
    assert before is not None and after is not None
    rows = load_family(made.tensor_map.family).all_config
    findings = list(check_count(made.tensor_map, str(made.checkpoint.path)))
    for finding in compare_configs(before, after, rows):
        mine = finding.check == "declaration.mtp"
        told = note("declaration.config", finding.subject, f"{finding.message}, compared with the donor")
        findings.append(finding if mine else replace(told, expected=finding.expected, got=finding.got))
    return findings


def _drafts(made: Side, probing: Probing, show_progress: bool) -> list[Column]:
    checkpoint, tensor_map = made.checkpoint, made.tensor_map
    workloads = read_workloads(checkpoint, tensor_map, probing.files)
    return run_all([(checkpoint.path.name, checkpoint, tensor_map)], workloads, probing, show_progress)
