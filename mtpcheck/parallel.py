"""Run independent pieces of work on a few threads; reads, writes and copies release the interpreter lock."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

WORKERS = 2
JOB = 16 << 20
"""Bytes of one job: a large embedding is shared among the workers, small tensors share one job."""

_AHEAD = 64  # jobs queued at a time, so that a list of a million is never held as futures

Alive = Callable[[], None]
"""Called between slabs; raises in a worker once another one has failed or the user has interrupted."""


class _Cancelled(Exception):
    pass


def in_parallel(jobs: Iterable[Callable[[Alive], T]], workers: int = WORKERS) -> Iterator[T]:
    """Results in the order of the jobs. On the first error, or Ctrl-C, the others stop at their next slab."""
    stop = threading.Event()

    def alive() -> None:
        if stop.is_set():
            raise _Cancelled

    waiting: deque[Future[T]] = deque()
    with _frozen(), _alone(), ThreadPoolExecutor(workers) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job, alive))
                if len(waiting) >= _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep the garbage collector from walking all plans again and again, which halts every worker."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _alone() -> Iterator[None]:
    """Keep torch from sharing large operations among threads of its own: ours are at work already."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batches(pieces: Iterable[tuple[int, T]]) -> Iterator[list[T]]:
    """Put consecutive (bytes, piece) together to lists of about ``JOB`` bytes."""
    batch: list[T] = []
    size = 0
    for nbytes, piece in pieces:
        batch.append(piece)
        size += nbytes
        if size >= JOB:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_turn(queues: Sequence[Iterable[T]]) -> Iterator[T]:
    """One of each queue after the other, until all are empty."""
    waiting = [iter(queue) for queue in queues]
    while waiting:
        for queue in list(waiting):
            try:
                yield next(queue)
            except StopIteration:
                waiting.remove(queue)
