"""Does the way back give every file its bytes again?"""

from __future__ import annotations

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


def compare_files(
    source: Path, before: HfFolder, result: Path, after: HfFolder, progress: Progress
) -> Iterator[Finding]:
    """Every file of two HF folders, byte for byte."""
    old, new = names_of(before), names_of(after)
    for name in sorted(set(old) - set(new)):
        yield failure("result.identity", name, "is missing in the result")
    for name in sorted(set(new) - set(old)):
        yield failure("result.identity", name, "is new in the result")
    pairs = []
    for name in sorted(set(old) & set(new)):
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
