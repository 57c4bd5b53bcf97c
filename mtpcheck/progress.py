"""Progress in bytes, shown on stderr when it is a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    def advance(self, nbytes: int) -> None:
        """Count bytes done. Called from worker threads."""


class Silent:
    """Counts nothing and shows nothing."""

    def advance(self, nbytes: int) -> None:
        return None


class _Bar:
    """Passes on at most ten updates a second: one a slab would cost more than the slab."""

    def __init__(self, update: object) -> None:
        self._update, self._lock, self._pending, self._last = update, threading.Lock(), 0, 0.0

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._pending += nbytes
            now = time.monotonic()
            if now - self._last > 0.1:
                self._update(self._pending)  # type: ignore[operator]
                self._pending, self._last = 0, now


@contextmanager
def bar(title: str, total: int, shown: bool = True) -> Iterator[Progress]:
    """A byte progress bar on stderr for the time of a ``with`` block, if ``shown`` and stderr is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield Silent()
        return
    title_column = TextColumn("{task.description}")
    columns = (title_column, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=console, transient=True) as rich:
        task = rich.add_task(title, total=total)
        yield _Bar(lambda n: rich.advance(task, n))
