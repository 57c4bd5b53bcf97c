"""Throughput and memory of every command, beside what the shell does with the same bytes in the same run.

    python tests/bench/bench.py [--gb 2] [--family glm4_moe|llama] [--hidden 2048]
                                [--runs 3] [--rounds 3] [--workdir DIR]

The table goes to stdout as markdown, progress to stderr. GB/s are bytes of one copy per wall second, best of
``--runs`` in each of ``--rounds`` through all rows, with a warm page cache; starting Python and importing is not part
of a figure. There are rounds because a machine that is slow for half a minute is slow for one row alone. Nothing is
asserted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
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


# ---- one command in its own process


def verify(reference: Path, candidate: Path) -> None:
    from mtpcheck.verify import verify as run

    if run(reference, candidate).exit_code:
        raise SystemExit(f"{candidate} differs from {reference}")


def convert(source: Path, target: Path) -> None:
    from mtpcheck.convert import convert as run

    run(source, target)


def to_ranks(source: Path, target: Path) -> None:
    """Into per-rank files of TP 2, or of one rank where the name says so."""
    from mtpcheck.convert import convert as run
    from mtpcheck.megatron import Options
    from mtpcheck.topology import Topology

    tp = 1 if target.name.endswith("1") else 2
    run(source, target, "torch", options=Options(topology=Topology(tp=tp, etp=tp)))


def roundtrip(source: Path, workdir: Path) -> None:
    from mtpcheck.roundtrip import roundtrip as run

    if run(source, workdir=workdir).exit_code:
        raise SystemExit(f"{source} did not come back as it was")


TEXTS = [[(7919 * i + 31 * j) % 31_000 for i in range(64)] for j in range(8)]
"""512 tokens that are no text: which experts they are routed to is as good as random."""


def draft(source: Path, workdir: Path) -> None:
    """Run a model and its MTP head once, and leave in ``workdir`` what was read."""
    from mtpcheck.checkpoint import open_checkpoint
    from mtpcheck.draft.run import Engine, run
    from mtpcheck.tensormap import read_tensor_map

    checkpoint = open_checkpoint(source)
    tensor_map = read_tensor_map(checkpoint)
    done = run(Engine(checkpoint, tensor_map), TEXTS)
    experts = [part for part in tensor_map.parts if ".experts." in part]
    share = sum(part in done.touched.ran for part in experts) / len(experts) if experts else 1
    (workdir / "drafted.json").write_text(json.dumps({"nbytes": done.nbytes, "experts": share}))


COMMANDS: dict[str, Callable[[Path, Path], None]] = {
    "draft": draft,
    "verify": verify,
    "convert": convert,
    "to_ranks": to_ranks,
    "roundtrip": roundtrip,
}


def import_all() -> None:
    """Import what the commands import late, so that it is in no figure."""
    for name in (
        "rich.progress",
        "mtpcheck.layouts.hf_writer",
        "mtpcheck.layouts.torch_dist_writer",
        "mtpcheck.layouts.torch_ranks_writer",
        "mtpcheck.draft.run",
        "transformers.models.glm4_moe.modeling_glm4_moe",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(name)


def work(command: str, first: Path, second: Path, runs: int) -> None:
    """Run a command several times in this process and print its seconds and its peak of memory as JSON."""
    import_all()
    with PeakMemory() as memory:  # in a run of its own, since looking takes time too
        _timed(COMMANDS[command], first, second)
    seconds = [_timed(COMMANDS[command], first, second) for _ in range(runs)]
    print(json.dumps({"seconds": min(seconds), "peak": memory.above}))


def _timed(command: Callable[[Path, Path], None], first: Path, second: Path) -> float:
    if command in (convert, to_ranks, _copy):
        shutil.rmtree(second, ignore_errors=True)
    os.sync()  # else the kernel slows down whoever comes next until it has written what is dirty
    start = time.perf_counter()
    command(first, second)
    return time.perf_counter() - start


# ---- all of them beside the shell


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def _compare(a: Path, b: Path) -> None:
    for file in sorted(path.name for path in a.iterdir()):
        subprocess.run(["cmp", a / file, b / file], check=True)


def _start(source: Path, target: Path) -> None:
    """Everything that a command does before it touches a weight."""
    subprocess.run([sys.executable, "-m", "mtpcheck", "inspect", source], check=True, stdout=subprocess.DEVNULL)


@dataclass(frozen=True)
class Row:
    name: str
    command: str | Callable[[Path, Path], None]
    first: str
    second: str
    beside: str = ""


ROWS = (
    Row("cp", _copy, "source", "copy"),
    Row("cmp", _compare, "source", "copy"),
    Row("verify, HF with HF", "verify", "source", "copy", "cmp"),
    Row("convert, HF to torch_dist", "convert", "source", "there", "cp"),
    Row("convert, torch_dist to HF", "convert", "there", "back", "cp"),
    Row("verify, HF with torch_dist", "verify", "source", "there", "cmp"),
    Row("convert, FP8 to torch_dist", "convert", "fp8", "there", "convert, HF to torch_dist"),
    Row("convert, torch_dist to FP8", "convert", "there", "back", "convert, torch_dist to HF"),
    Row("convert, HF to torch (TP 1)", "to_ranks", "source", "ranks1", "cp"),
    Row("convert, HF to torch (TP 2)", "to_ranks", "source", "ranks2", "cp"),
    Row("convert, torch (TP 2) to HF", "convert", "ranks2", "back", "cp"),
    Row("verify, HF with torch (TP 2)", "verify", "source", "ranks2", "cmp"),
    Row("roundtrip", "roundtrip", "source", ".", "cp"),
    Row("accept, 512 tokens", "draft", "numbers", "."),
    Row("inspect, as a process", _start, "source", "."),
)


def bench(folder: Path, nbytes: int, runs: int, rounds: int) -> None:
    """Measure every row in ``folder`` and print the table. It holds the checkpoint as ``source``, in ``fp8``, and with
    ``numbers`` that a model can be run with."""
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for left in reversed(range(rounds)):
        for row in ROWS:
            print(f"round {rounds - left} of {rounds}: {row.name} ...", file=sys.stderr)
            if row.second.startswith("ranks"):  # page cache for what comes, not for what is over
                shutil.rmtree(folder / "there", ignore_errors=True)
            took, peak = _measure(row, folder, runs)
            seconds[row.name] = min(took, seconds.get(row.name, took))
            peaks[row.name] = max(peak, peaks.get(row.name, 0))
            if not left:
                _print(row, folder, nbytes, seconds, peaks)
        for made in ("ranks1", "ranks2", "there", "back"):
            shutil.rmtree(folder / made, ignore_errors=True)


def _print(row: Row, folder: Path, nbytes: int, seconds: dict[str, float], peaks: dict[str, int]) -> None:
    if row is ROWS[0]:
        print("| | s | GB/s | beside | memory |\n|---|---|---|---|---|")
    took, peak = seconds[row.name], peaks[row.name]
    rate = "" if row.command is _start else f"{nbytes / took / 1e9:.2f}"
    beside = f"{seconds[row.beside] / took:.2f} × {row.beside}" if row.beside else ""
    if row.command == "draft":
        drafted = json.loads((folder / "drafted.json").read_text())
        rate, beside = f"{drafted['nbytes'] / took / 1e9:.2f}", f"{drafted['experts']:.0%} of the experts read"
    memory = f"{peak / 1e6:.0f} MB" if peak else ""
    print(f"| {row.name} | {took:.2f} | {rate} | {beside} | {memory} |", flush=True)


def _measure(row: Row, folder: Path, runs: int) -> tuple[float, int]:
    """Seconds of the best run, and the peak of memory in bytes, 0 where it is not looked at."""
    first, second = folder / row.first, folder / row.second
    if not isinstance(row.command, str):
        return min(_timed(row.command, first, second) for _ in range(runs)), 0
    call = [sys.executable, __file__, "--work", row.command, str(first), str(second), "--runs", str(runs)]
    done = json.loads(subprocess.run(call, check=True, stdout=subprocess.PIPE).stdout)
    return done["seconds"], done["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint in 10^9 bytes (default 2)")
    parser.add_argument("--family", choices=("glm4_moe", "llama"), default="glm4_moe")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; 256 gives many small tensors")
    parser.add_argument("--runs", type=int, default=3, help="the best of so many counts (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="times all rows are measured in turn (default 3)")
    parser.add_argument("--workdir", type=Path, help="folder to work in (default: the system's temporary one)")
    parser.add_argument("--work", nargs=3, metavar=("COMMAND", "FIRST", "SECOND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.runs, options.rounds) < 1:
        parser.error("--runs and --rounds are at least 1")
    if options.work:
        work(options.work[0], Path(options.work[1]), Path(options.work[2]), options.runs)
        return
    with tempfile.TemporaryDirectory(prefix="mtpcheck-bench-", dir=options.workdir) as name:
        print("generating ...", file=sys.stderr)
        folder = Path(name)
        nbytes = generate(folder / "source", options.gb, options.family, options.hidden)
        generate(folder / "fp8", options.gb, options.family, options.hidden, fp8=True)
        generate(folder / "numbers", options.gb, options.family, options.hidden, numbers=True)
        best = f"best of {options.rounds} × {options.runs}"
        print(f"{options.family}, {nbytes / 1e9:.2f} GB, {best}, {os.cpu_count()} cores\n")
        bench(folder, nbytes, options.runs, options.rounds)


if __name__ == "__main__":
    main()
