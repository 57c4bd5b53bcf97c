"""A checkpoint is streamed: memory does not grow with it."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":  # run as a script, the tests are no package
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.bench.bench import PeakMemory, convert, import_all, to_ranks, verify
from tests.bench.generate import generate

GB = 2.3  # one rank file of it is larger than a signed 32-bit number counts
LIMIT = 300e6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest would keep these gigabytes for three more runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("layout", ["torch_dist", "torch"])
def test_two_gigabytes_convert_and_verify_in_300_megabytes(disk: Path, layout: str) -> None:
    source, there, back = disk / "source", disk / ("ranks1" if layout == "torch" else "there"), disk / "back"
    assert abs(generate(source, GB) - GB * 1e9) < 0.05 * GB * 1e9
    # its own process: memory that other tests have used and freed would hide what these take
    worker = subprocess.run([sys.executable, __file__, source, there, back], stdout=subprocess.PIPE, check=True)
    peaks = json.loads(worker.stdout)
    assert set(peaks) == {"there", "back", "verify"}
    assert all(0 < peak < LIMIT for peak in peaks.values()), peaks
    files = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in back.iterdir()) == files
    assert filecmp.cmpfiles(source, back, files, shallow=False) == (files, [], [])
    if layout == "torch":
        (file,) = there.rglob("*.pt")
        assert file.stat().st_size > 1 << 31
        with zipfile.ZipFile(file) as zipped:
            assert zipped.testzip() is None
        state = torch.load(file, weights_only=False, mmap=True)
        assert state["model"]["output_layer.weight"].shape[1] == state["args"].hidden_size


def main(source: Path, there: Path, back: Path) -> None:
    """Print the peak of each phase, in bytes above what the imports take."""
    import_all()
    phases: dict[str, tuple[Callable[[Path, Path], None], Path, Path]] = {
        "there": (to_ranks if there.name == "ranks1" else convert, source, there),
        "back": (convert, there, back),
        "verify": (verify, source, there),
    }
    peaks = {}
    with PeakMemory() as imports:
        pass
    for name, (command, first, second) in phases.items():
        with PeakMemory() as memory:
            command(first, second)
        peaks[name] = memory.peak - imports.start
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
