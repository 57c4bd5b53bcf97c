"""Writing layout ``torch``: one ``model_optim_rng.pt`` for every rank, streamed, so that a file may exceed memory."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mtpcheck.layouts.torch_ranks import FILE
from mtpcheck.layouts.zipwriter import Frame, Pending, frame, pickled, stream
from mtpcheck.move import write_at
from mtpcheck.parallel import WORKERS, Alive, batches, in_parallel, in_turn
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.tensormap import TensorRef

Model = Mapping[str, TensorRef | None]


@dataclass(frozen=True)
class _Open:
    """A rank file under construction."""

    fd: int
    pickle: bytes
    plans: Sequence[Plan]
    frame: Frame
    crcs: dict[int, int]


def write_ranks(
    folder: Path, ranks: Iterable[tuple[str, Sequence[Model]]], args: Mapping[str, Any], iteration: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Write ``folder/<name>/model_optim_rng.pt`` for every rank of ``ranks``, each with its model chunks."""
    waiting = iter(ranks)
    while group := list(islice(waiting, WORKERS)):
        with ExitStack() as files:
            opened = [_open(folder / name, models, args, iteration, files) for name, models in group]
            for number, done in in_parallel(in_turn([_jobs(n, file, progress) for n, file in enumerate(opened)])):
                opened[number].crcs.update(done)
            for file in opened:
                storages = [(plan.nbytes, file.crcs[i]) for i, plan in enumerate(file.plans)]
                for at, data in frame(file.pickle, storages).pieces:
                    write_at(file.fd, data, at)


def _open(folder: Path, models: Sequence[Model], args: Mapping[str, Any], iteration: int, files: ExitStack) -> _Open:
    plans: list[Plan] = []
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    chunks = {name: _pending(model, plans) for name, model in zip(names, models, strict=True)}
    root = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": iteration, **chunks}
    data = pickled(root)
    folder.mkdir(parents=True)
    fd = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    files.callback(os.close, fd)
    around = frame(data, [(plan.nbytes, 0) for plan in plans])
    os.posix_fallocate(fd, 0, around.length)  # a full disk shows now and not after an hour
    return _Open(fd, data, plans, around, {})


def _pending(model: Model, plans: list[Plan]) -> OrderedDict[str, Pending | None]:
    """The state dict with a placeholder for every tensor, whose plan is added to ``plans``."""
    chunk: OrderedDict[str, Pending | None] = OrderedDict()
    for name, ref in model.items():
        chunk[name] = None
        if ref is not None:
            chunk[name] = Pending(ref.dtype, ref.shape, len(plans))
            plans.append(ref.plan)
    return chunk


_Done = tuple[int, dict[int, int]]  # number of the file; number of a storage → its CRC-32


def _jobs(number: int, file: _Open, progress: Progress) -> Iterator[Callable[[Alive], _Done]]:
    pieces = ((plan.nbytes, i) for i, plan in enumerate(file.plans))
    for batch in batches(pieces):
        yield partial(_write, number, file, batch, progress)


def _write(number: int, file: _Open, storages: list[int], progress: Progress, alive: Alive) -> _Done:
    return number, {i: stream(file.plans[i], file.fd, file.frame.starts[i], progress, alive) for i in storages}
