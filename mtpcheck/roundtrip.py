"""There and back through real files, then every check."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from mtpcheck.checkpoint import Checkpoint, Layout, open_checkpoint
from mtpcheck.checks.acceptance import judge_acceptance
from mtpcheck.checks.files import HollowShards, compare_files, names_of
from mtpcheck.comparison import compare_sides
from mtpcheck.convert import check_before_fetching, check_convertible, convert, other_layout
from mtpcheck.draft.probe import Column, Probing, read_workloads, run_all
from mtpcheck.errors import CheckpointFails, UsageError, require_one_of
from mtpcheck.fetch import fetched, is_remote
from mtpcheck.megatron import Options, dealer, held_by_megatron, load_writers
from mtpcheck.parallel import JOB, WORKERS, Alive, in_parallel
from mtpcheck.progress import bar
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import Report, of_group
from mtpcheck.side import Side
from mtpcheck.target import check_space
from mtpcheck.tensormap import TensorMap, read_like, read_tensor_map
from mtpcheck.topology import Topology
from mtpcheck.verify import in_words, require_mtp, summary


def roundtrip(
    source: str | Path,
    family: str | None = None,
    options: Options | None = None,
    workdir: str | Path | None = None,
    keep: str | Path | None = None,
    allow_no_mtp: bool = False,
    show_progress: bool = False,
    via: Layout | None = None,
    iteration: int | None = None,
    probing: Probing | None = None,
) -> Report:
    """Convert ``source`` to another layout (``via``) and back, and judge both results.

    With ``probing`` the source, what lies in between and the result are also run, and must draft the same.

    What is made in between lies in ``workdir`` (the system's temporary folder by default) and is removed, or
    stays in the new folder ``keep``, as ``keep/<layout>``. Raises MtpcheckError where it cannot judge.
    """
    if via is not None:
        require_one_of("via", via, Layout)
    options = options or Options()
    a = open_checkpoint(source, iteration, options.dialect)
    options = options.for_source(a)
    a_map = read_tensor_map(a, family)
    middle = via or other_layout(a.layout)
    if middle == a.layout == "hf":
        raise UsageError(f"{source}: is an HF checkpoint; --via takes a Megatron layout")
    told = in_words(middle, str(options.topology) if middle == "torch" else "", options.dialect)
    report = Report("roundtrip", [str(a.path)], a_map.family, summary(a, a_map, told, a.layout))
    report.dialects = [options.spoken.name]
    load_writers(middle, a.layout)
    try:
        if is_remote(a):
            check_before_fetching(a, a_map, middle, options)
        else:
            check_convertible(a, a_map)
        require_mtp(a, a_map, allow_no_mtp)
        with _workspace(a.folder, workdir, keep) as folder:
            if is_remote(a):
                a = fetched(a, show_progress)
                a_map = read_tensor_map(a, family)
                check_convertible(a, a_map)
                source = a.folder  # what lies here needs the Hub no longer
            held = held_by_megatron(a_map, middle, options) if middle != "hf" else a_map
            size = dealer(held, options).nbytes if middle == "torch" else held.nbytes
            check_space(folder, space_needed(a, keep is not None, size))
            there, back = folder / middle, folder / (a.layout if a.layout != middle else f"{a.layout}-back")
            with bar("there", a_map.nbytes, show_progress) as progress:
                out = convert(source, there, middle, a_map.family, options, progress=progress, iteration=iteration)
            with bar("back", (1 if a.hf is None or keep else 2) * a_map.nbytes, show_progress) as progress:
                shards = HollowShards(a.folder, progress) if a.hf is not None and keep is None else None
                again = _same_form(a, a_map, options)
                home = convert(there, back, a.layout, a_map.family, again, progress=progress, written=shards)
            identical = shards.identical if shards else set()
            sides = Side(a, a_map), _reopen(there, a_map, options), _reopen(back, a_map, options)
            _judge(report, *sides, identical, show_progress)
            report.include((*out.findings, *home.findings))
            if probing is not None and not a_map.facts["mtp_stored"]:
                report.skip("acceptance", "there is no MTP layer that could draft")
            elif probing is not None:
                judge_acceptance(report, lambda: _columns(*sides, identical, probing, show_progress))
            if keep is None:  # the folder is gone when the report is read
                where = f"{folder}/"
                report.findings = [replace(f, where=f.where.replace(where, "")) for f in report.findings]
    except CheckpointFails as error:  # a verdict, if an early one
        for group in dict.fromkeys(f.check.split(".")[0] for f in error.findings):
            found = [replace(f, source=True) for f in of_group(error.findings, group)]
            report.add(group, found, "the conversion stopped here")
    if probing is None:
        report.skip("acceptance", "the model was not run")
    elif all(check.group != "acceptance" for check in report.checks):
        report.could_not("acceptance", "there is nothing to run")
    if report.acceptance and probing is not None and probing.columns == "once":
        report.notes.append("acceptance: the source alone was run")
    return report


def _columns(
    source: Side, middle: Side, result: Side, identical: set[str], probing: Probing, show: bool
) -> list[Column]:
    """What each of the three drafts. Shards of the result that are ``identical`` may be hollow: the source's are read
    in their place; and where that is all of them, nothing is run again."""
    a, c = source.checkpoint, result.checkpoint
    named = [("source", source), (middle.checkpoint.layout, middle)]
    whole = a.hf is not None and identical >= {shard.file for shard in a.hf.shards}
    if not whole:
        named.append(("result", _filled(result, source, identical)))
    workloads = read_workloads(a, source.tensor_map, probing.files)
    columns = run_all([(name, side.checkpoint, side.tensor_map) for name, side in named], workloads, probing, show)
    if whole and probing.columns == "all" and c.config == a.config:
        columns.append(replace(columns[0], label="result", same_as="source"))
    return columns


def _filled(result: Side, source: Side, identical: set[str]) -> Side:
    """The result with the source's tensors in place of those in identical shards."""
    if source.checkpoint.hf is None or not identical:
        return result
    shard_of = source.checkpoint.hf.shard_of
    own = {name: ref for name, ref in source.checkpoint.tensors.items() if shard_of.get(name) in identical}
    filled = replace(result.checkpoint, tensors={**result.checkpoint.tensors, **own})
    return Side(filled, read_like(filled, source.tensor_map))


def _same_form(a: Checkpoint, a_map: TensorMap, options: Options) -> Options:
    """Write a Megatron result with the vocabulary padding, the ranks and the encoding of the source."""
    coded = a_map.encoded and a.hf is None
    options = replace(options, fp8="keep" if coded else "dequantize", text_only=True)  # the source had them beside
    topology = a.ranks.ranks.topology if a.ranks is not None else Topology()
    padded = (a.args or {}).get("padded_vocab_size")
    if isinstance(padded, int) and padded > 0 and padded % topology.tp == 0:
        options = replace(options, vocab_multiple=padded // topology.tp)
    return replace(options, topology=topology) if a.ranks is not None else options


def _reopen(folder: Path, source: TensorMap, options: Options) -> Side:
    opened = open_checkpoint(folder, dialect=options.dialect)
    return Side(opened, read_like(opened, source))


def space_needed(a: Checkpoint, keep: bool, middle: int) -> int:
    """Bytes of disk of a round trip: ``middle`` for the copy in between, and the result, of which identical shards
    are freed."""
    if a.hf is None or keep:
        return middle + a.nbytes
    sizes = sorted(a.hf.tree.open(shard.file).size for shard in a.hf.shards)
    return middle + sum(sizes[-WORKERS:])


def _judge(report: Report, source: Side, middle: Side, result: Side, identical: set[str], show: bool) -> None:
    """The middle through our rows, then the result: file by file, or part by part for a Megatron source.

    Where every file came back byte for byte, the middle held the same bits, since it is all that the result was made
    of; then they are not read a third time.
    """
    a, c = source.checkpoint, result.checkpoint
    again = Report(report.command, report.subjects)
    different: list[Finding] = []
    if a.hf is None or c.hf is None:
        compare_sides(report, source, middle, show_progress=show)
        compare_sides(again, source, result, show_progress=show)
        told = f"{len(source.tensor_map.parts)} parts compared bit for bit"
    else:
        names = names_of(a.hf)
        with bar("comparing files", a.nbytes, show) as progress:
            different = list(compare_files(a.folder, a.hf, c.folder, c.hf, identical, progress))
        compare_sides(report, source, middle, show_progress=show, bits=bool(different))
        told = f"{len(names) - len(different)} of {len(names)} files byte-identical"
        if different:
            compare_sides(again, _without(source, identical), _without(result, identical))
    if again.failures and not different:
        different = [failure("result.identity", c.layout, "the way back gives another checkpoint")]
    report.add("result", different, told)
    report.include(again.findings)


def _without(side: Side, files: set[str]) -> Side:
    """An HF side without the tensors of some shards, which are known to be identical and may be hollow."""
    shard_of = side.checkpoint.hf.shard_of if side.checkpoint.hf else {}
    tensors = {name: ref for name, ref in side.checkpoint.tensors.items() if shard_of.get(name) not in files}
    return Side(replace(side.checkpoint, tensors=tensors), side.tensor_map)


@contextmanager
def _workspace(source: Path, workdir: str | Path | None, keep: str | Path | None) -> Iterator[Path]:
    """The folder for both legs: temporary, or ``keep``, which then holds both whole results."""
    if keep is not None:
        keep = Path(keep)
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise UsageError(f"{keep}: exists and is not an empty folder; nothing is ever overwritten")
        if keep.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(keep.resolve()):
            raise UsageError(f"{keep}: lies inside the source {source}; name a folder outside it")
        if not keep.parent.is_dir():
            raise UsageError(f"{keep.parent}: no such folder to write into")
        ours = not keep.exists()
        keep.mkdir(exist_ok=True)
        try:
            yield keep
        except BaseException:
            for layout in get_args(Layout):
                shutil.rmtree(keep / layout, ignore_errors=True)
                shutil.rmtree(keep / f"{layout}-back", ignore_errors=True)
            if ours:
                with suppress(OSError):
                    keep.rmdir()
            raise
        return
    if workdir is not None and not Path(workdir).is_dir():
        raise UsageError(f"{workdir}: no such folder to work in")
    with tempfile.TemporaryDirectory(prefix="mtpcheck-", dir=workdir) as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            large = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > JOB]
            list(in_parallel([partial(_empty, path) for path in large]))


def _empty(path: Path, alive: Alive) -> None:
    """Free the disk of a file, open or not. Its pages take as long to free as to compare: work for all workers."""
    os.truncate(path, 0)
