"""Are the shards of two checkpoints the same files, by their SHA-256? The Hub tells that of its own unsent.

A hash that is equal proves every bit. One that differs, of files with equal headers, proves that some bits differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.checks.copies import check_tied
from mtpcheck.checks.head import check_head
from mtpcheck.errors import UsageError
from mtpcheck.fetch import is_remote
from mtpcheck.files import Source
from mtpcheck.hub import HubTree
from mtpcheck.layouts.hf import HfFolder
from mtpcheck.parallel import JOB, Alive, in_parallel
from mtpcheck.progress import Progress, bar
from mtpcheck.report.finding import failure
from mtpcheck.report.report import Report
from mtpcheck.side import Side


def require_checksums(a: Checkpoint, b: Checkpoint, only_mtp: bool) -> None:
    """Raise UsageError unless both are HF checkpoints and the Hub is there to tell the checksums of one."""
    if a.hf is None or b.hf is None or not any(isinstance(hf.tree, HubTree) for hf in (a.hf, b.hf)):
        raise UsageError(
            "--sha256 takes two HF checkpoints, one of them on the Hub, which knows the checksums of its files and is "
            "asked for them, so not with HF_HUB_OFFLINE"
        )
    if only_mtp:
        raise UsageError("--only mtp and --sha256: a checksum is one of a whole file; leave one out")


def add_checksums(report: Report, a: Side, b: Side, show_progress: bool) -> None:
    """Compare all shards of two HF checkpoints. Nothing that was found before is taken back.

    What has no counterpart with the same header, or no checksum, could not be judged. Where everything is equal, what
    the weights of a checkpoint tell by themselves is looked at too, on the side that lies here.
    """
    assert a.checkpoint.hf is not None and b.checkpoint.hf is not None
    both = a.checkpoint.hf, b.checkpoint.hf
    headers = [{shard.file: shard.header for shard in hf.shards} for hf in both]
    alike = [file for file, header in headers[0].items() if headers[1].get(file) == header]
    without = [file for file in alike if any(_untold(hf, file) for hf in both)]
    alike = [file for file in alike if file not in without]
    total = sum(hf.tree.open(file).size for hf in both for file in alike if not isinstance(hf.tree, HubTree))
    with bar("hashing", total, show_progress) as progress:
        before, after = (_sums(hf, alike, progress) for hf in both)
    found = [
        failure(
            "values.sha256", file, "has other bits, and the same header", expected=before[file], got=after[file],
            todo="--values exact tells which tensors differ; it fetches what is on the Hub",
        )
        for file in alike if before[file] != after[file]
    ]  # fmt: skip
    left = [*without, *sorted({*headers[0], *headers[1]} - {*alike, *without})]
    here = next((side for side in (a, b) if not is_remote(side.checkpoint)), None)
    told = f"SHA-256 of {len(alike):,} shards compared"
    if here is not None and not found and not left:
        found += [*check_tied(here.tensor_map), *check_head(here.tensor_map)]
    elif here is None:
        told += "; whether a head looks trained was not looked at"
    if found or not left:
        report.add("values", found, told)
    if left:
        more = f" and {len(left) - 1:,} more shards" if len(left) > 1 else ""
        what = "no checksum" if without else "no counterpart with the same header"
        report.could_not("values", f"{left[0]}{more}: {what}, so their bits are not known; --values exact tells")


def _untold(hf: HfFolder, file: str) -> bool:
    return isinstance(hf.tree, HubTree) and file not in hf.tree.sha256


def _sums(hf: HfFolder, files: list[str], progress: Progress) -> Mapping[str, str]:
    """File → SHA-256: as the Hub tells it, or of what lies here."""
    if isinstance(hf.tree, HubTree):
        return {file: hf.tree.sha256[file] for file in files}
    jobs = (partial(_hashed, hf.tree.open(file), progress) for file in files)
    return dict(zip(files, in_parallel(jobs), strict=True))


def _hashed(source: Source, progress: Progress, alive: Alive) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(JOB))
    for at in range(0, source.size, JOB):
        alive()
        part = buffer[: min(JOB, source.size - at)]
        source.read_into(part, at)
        digest.update(part)
        progress.advance(len(part))
    return digest.hexdigest()
