"""Does the way back give every file its bytes again?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mtpcheck.compare import compare_all
from mtpcheck.files import LocalFile
from mtpcheck.layouts.hf import HfFolder
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.report.finding import Finding, failure
from mtpcheck.tensormap import TensorRef


def names_of(hf: HfFolder) -> list[str]:
    """All files that belong to an HF checkpoint, relative to its folder."""
    return sorted([*(shard.file for shard in hf.shards), *hf.others])


class HollowShards:
    """Compares every shard with the source's as soon as it is whole, and frees the disk of those that are identical.

    A round trip then needs room for one copy and two shards, and not for two copies. A hollow shard keeps its header
    and its size, so that the result still opens; its data read as zeros.
    """

    def __init__(self, source: Path, progress: Progress) -> None:
        self.source, self.progress = source, progress
        self.identical: set[str] = set()

    def __call__(self, file: str, path: Path) -> Path | None:
        self.identical.discard(file)  # an export may have to be written again
        original = self.source / file
        size = path.stat().st_size
        if not original.is_file() or original.stat().st_size != size:
            return None
        if compare_all([(file, _whole(original), _whole(path))], self.progress):
            return None
        self.identical.add(file)
        with path.open("rb") as shard:
            length = int.from_bytes(shard.read(8), "little")
            header = length.to_bytes(8, "little") + shard.read(length)
        spare = path.with_name(f".{path.name}.spare")
        path.rename(spare)
        path.write_bytes(header)
        os.truncate(path, size)
        return spare


def compare_files(
    source: Path, before: HfFolder, result: Path, after: HfFolder, identical: set[str], progress: Progress
) -> Iterator[Finding]:
    """Every file of two HF folders, byte for byte; those ``identical`` have been compared before."""
    old, new = names_of(before), names_of(after)
    for name in sorted(set(old) - set(new)):
        yield failure("result.identity", name, "is missing in the result")
    for name in sorted(set(new) - set(old)):
        yield failure("result.identity", name, "is new in the result")
    pairs = []
    for name in sorted((set(old) & set(new)) - identical):
        a, b = _whole(source / name), _whole(result / name)
        if a.nbytes != b.nbytes:
            sizes = {"expected": f"{a.nbytes:,} bytes", "got": f"{b.nbytes:,} bytes"}
            yield failure("result.identity", name, "has another size", **sizes)
        else:
            pairs.append((name, a, b))
    for name, difference in compare_all(pairs, progress).items():
        yield failure(
            "result.identity", name, f"{difference.elements:,} bytes differ", where=f"byte {difference.first:,}",
            expected="0x" + difference.expected.hex(), got="0x" + difference.got.hex(),
        )  # fmt: skip


def _whole(path: Path) -> TensorRef:
    file = LocalFile(path)
    return TensorRef("U8", Plan.region(file, 0, (file.size,), 1))
