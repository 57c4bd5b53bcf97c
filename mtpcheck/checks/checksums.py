"""Are the shards of two checkpoints the same files, by their SHA-256? The Hub tells that of its own unsent.

A hash that is equal proves every bit. One that differs, of files with equal headers, proves that some bits differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.errors import UsageError
from mtpcheck.files import Source
from mtpcheck.hub import HubTree
from mtpcheck.layouts.hf import HfFolder
from mtpcheck.parallel import JOB, Alive, in_parallel
from mtpcheck.progress import Progress, bar
from mtpcheck.report.finding import failure
from mtpcheck.report.report import Report


def add_checksums(report: Report, a: Checkpoint, b: Checkpoint, show_progress: bool) -> None:
    """Compare all shards of two HF checkpoints, at least one of which is on the Hub.

    Nothing that was found before is taken back. Where a shard has no counterpart with the same header, its bits could
    not be judged. Raises UsageError if neither side is on the Hub, or one is no HF checkpoint.
    """
    if a.hf is None or b.hf is None or not any(isinstance(hf.tree, HubTree) for hf in (a.hf, b.hf)):
        raise UsageError("--sha256 takes two HF checkpoints, one of them on the Hub, which knows its files' checksums")
    headers = [{shard.file: shard.header for shard in hf.shards} for hf in (a.hf, b.hf)]
    alike = [file for file, header in headers[0].items() if headers[1].get(file) == header]
    others = sorted({*headers[0], *headers[1]} - set(alike))
    total = sum(hf.tree.open(file).size for hf in (a.hf, b.hf) for file in alike if not _known(hf, file))
    with bar("hashing", total, show_progress) as progress:
        before, after = (_sums(hf, alike, progress) for hf in (a.hf, b.hf))
    found = [
        failure(
            "values.sha256", file, "has other bits, and the same header", expected=before[file], got=after[file],
            todo="--values exact tells which tensors differ; it fetches what is on the Hub",
        )
        for file in alike if before[file] != after[file]
    ]  # fmt: skip
    if found or not others:
        report.add("values", found, f"SHA-256 of {len(alike):,} shards compared")
    else:
        what = f"{others[0]} and {len(others) - 1:,} more shards have" if len(others) > 1 else f"{others[0]} has"
        report.could_not("values", f"{what} no counterpart with the same header, and no checksum tells; --values exact")


def _known(hf: HfFolder, file: str) -> str | None:
    return hf.tree.sha256.get(file) if isinstance(hf.tree, HubTree) else None


def _sums(hf: HfFolder, files: list[str], progress: Progress) -> Mapping[str, str]:
    """File → SHA-256: as the Hub tells it, or of what lies here."""
    found = {file: told for file in files if (told := _known(hf, file))}
    left = [file for file in files if file not in found]
    jobs = (partial(_hashed, hf.tree.open(file), progress) for file in left)
    return found | dict(zip(left, in_parallel(jobs), strict=True))


def _hashed(source: Source, progress: Progress, alive: Alive) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(JOB))
    for at in range(0, source.size, JOB):
        alive()
        part = buffer[: min(JOB, source.size - at)]
        source.read_into(part, at)
        digest.update(part)
        progress.advance(len(part))
    return digest.hexdigest()
