"""There and back through real files, then every check."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.checks.declaration import check_count
from mtpcheck.checks.files import compare_files, names_of
from mtpcheck.convert import Options, convert, other_layout
from mtpcheck.errors import CheckpointFails, UsageError
from mtpcheck.progress import bar
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import Report, of_group
from mtpcheck.target import check_space
from mtpcheck.tensormap import TensorMap, read_like, read_tensor_map
from mtpcheck.verify import Side, compare_sides, require_mtp, summary


def roundtrip(
    source: str | Path,
    family: str | None = None,
    options: Options | None = None,
    workdir: str | Path | None = None,
    keep: str | Path | None = None,
    allow_no_mtp: bool = False,
    show_progress: bool = False,
) -> Report:
    """Convert ``source`` to the other layout and back, and judge both results.

    What is made in between lies in ``workdir`` (the system's temporary folder by default) and is removed, or
    stays in the new folder ``keep``, as ``keep/<layout>``. Raises MtpcheckError where it cannot judge.
    """
    a = open_checkpoint(source)
    a_map = read_tensor_map(a, family)
    require_mtp(a, a_map, allow_no_mtp)
    middle = other_layout(a.layout)
    report = Report("roundtrip", [str(source)], a_map.family, summary(a, a_map, middle, a.layout))
    try:
        with _workspace(Path(source), workdir, keep) as folder:
            check_space(folder, 2 * a.nbytes)
            there, back = folder / middle, folder / a.layout
            with bar("there", a_map.nbytes, show_progress) as progress:
                out = convert(source, there, family=a_map.family, options=options, progress=progress)
            with bar("back", a_map.nbytes, show_progress) as progress:
                home = convert(there, back, family=a_map.family, options=_same_form(a, options), progress=progress)
            _judge(report, Side(a, a_map), _reopen(there, a_map), _reopen(back, a_map), show_progress)
            report.include((*out.findings, *home.findings))
            if keep is None:  # the folder is gone when the report is read
                where = f"{folder}/"
                report.findings = [replace(f, where=f.where.replace(where, "")) for f in report.findings]
    except CheckpointFails as error:  # a verdict, if an early one
        for group in dict.fromkeys(f.check.split(".")[0] for f in error.findings):
            report.add(group, of_group(error.findings, group), "the conversion stopped here")
    report.skip("acceptance", "this version has no draft probe")
    return report


def _same_form(a: Checkpoint, options: Options | None) -> Options:
    """Write a Megatron result with the vocabulary padding of the source."""
    options = options or Options()
    padded = (a.args or {}).get("padded_vocab_size")
    return replace(options, vocab_multiple=padded) if isinstance(padded, int) and padded > 0 else options


def _reopen(folder: Path, source: TensorMap) -> Side:
    opened = open_checkpoint(folder)
    return Side(opened, read_like(opened, source))


def _judge(report: Report, source: Side, middle: Side, result: Side, show: bool) -> None:
    """The middle through our rows, then the result: file by file, or part by part for a Megatron source."""
    a, a_map = source.checkpoint, source.tensor_map
    compare_sides(report, source, middle, show_progress=show)
    report.include(check_count(a_map, str(a.path)))
    c = result.checkpoint
    again = Report(report.command, report.subjects)
    different: list[Finding] = []
    if a.hf is None or c.hf is None:
        compare_sides(again, source, result, show_progress=show)
        told = f"{len(a_map.parts)} parts compared bit for bit"
    else:
        names = names_of(a.hf)
        with bar("comparing files", a.nbytes, show) as progress:
            different = list(compare_files(a.folder, a.hf, c.folder, c.hf, progress))
        told = f"{len(names) - len(different)} of {len(names)} files byte-identical"
        if different:  # identical files need no second look; differing ones an explanation
            compare_sides(again, source, result)
    if again.failures and not different:
        different = [failure("result.identity", c.layout, "the way back gives another checkpoint")]
    report.add("result", different, told)
    report.include(again.findings)


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
            for layout in ("hf", "torch_dist"):
                shutil.rmtree(keep / layout, ignore_errors=True)
            if ours:
                with suppress(OSError):
                    keep.rmdir()
            raise
        return
    if workdir is not None and not Path(workdir).is_dir():
        raise UsageError(f"{workdir}: no such folder to work in")
    with tempfile.TemporaryDirectory(prefix="mtpcheck-", dir=workdir) as folder:
        yield Path(folder)
