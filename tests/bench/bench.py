"""Throughput and memory of every command, beside what the shell does with the same bytes in the same run.

    python tests/bench/bench.py [--gb 2] [--family glm4_moe|llama] [--hidden 2048] [--runs 3] [--workdir DIR]

The table goes to stdout as markdown, progress to stderr. GB/s are bytes of one copy per wall second, best of
``--runs``, with a warm page cache; starting Python and importing is not part of a figure. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

if __name__ == "__main__":  # run as a script, the tests are no package
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.generate import generate


class PeakMemory:
    """The peak of anonymous memory in a ``with`` block, in bytes above what there was at its start.

    Resident memory would count the mapped pages of files, which the kernel takes back as it likes.
    """

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, _anonymous())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, _anonymous())

    @property
    def above(self) -> int:
        return self.peak - self.start


def _anonymous() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/smaps_rollup has no line Anonymous")


# ---- what is measured


def import_all() -> None:
    """Import what the commands import late, so that it is in no figure."""
    import rich.progress
    import torch.distributed.checkpoint

    import mtpcheck.layouts.hf_writer
    import mtpcheck.layouts.torch_dist_writer
    import mtpcheck.roundtrip
    import mtpcheck.verify  # noqa: F401


def verify(reference: Path, candidate: Path) -> None:
    from mtpcheck.verify import verify as run

    if run(reference, candidate).exit_code:
        raise SystemExit(f"{candidate} differs from {reference}")


def convert(source: Path, target: Path) -> None:
    from mtpcheck.convert import convert as run

    shutil.rmtree(target, ignore_errors=True)
    run(source, target)


def roundtrip(source: Path, workdir: Path) -> None:
    from mtpcheck.roundtrip import roundtrip as run

    if run(source, workdir=workdir).exit_code:
        raise SystemExit(f"{source} did not come back as it was")


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def compare(a: Path, b: Path) -> None:
    for file in sorted(path.name for path in a.iterdir()):
        subprocess.run(["cmp", a / file, b / file], check=True)


_COMMANDS: dict[str, Callable[[Path, Path], None]] = {"verify": verify, "convert": convert, "roundtrip": roundtrip}


def work(command: str, first: Path, second: Path, runs: int) -> None:
    """Run one command in this process and print its times and its peak of memory."""
    import_all()
    times = []
    with PeakMemory() as memory:
        for _ in range(runs):
            if command == "convert":
                shutil.rmtree(second, ignore_errors=True)
            start, cpu = time.perf_counter(), time.process_time()
            _COMMANDS[command](first, second)
            times.append(time.perf_counter() - start)
            print("cpu", time.process_time() - cpu)
    print(json.dumps({"times": times, "peak": memory.above}))


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
