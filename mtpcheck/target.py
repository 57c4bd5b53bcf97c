"""Where results go: a new folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtpcheck.errors import UsageError


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that exists, overlaps the source or has no parent. Raises UsageError."""
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target}: exists already; nothing is ever overwritten, name a new folder")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder to write into")
    src, dst = source.resolve(), target.resolve()
    if dst.is_relative_to(src) or src.is_relative_to(dst):
        raise UsageError(f"{target}: lies inside the source {source}; name a folder outside it")
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{target.parent}: not writable")


def check_space(folder: Path, needed: int, todo: str = "name a folder on another disk") -> None:
    """Raise UsageError if the file system of ``folder`` has fewer than ``needed`` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(f"{folder}: {needed:,} bytes are needed, {free:,} are free; {todo}")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that is built beside ``target`` and takes its name when whole; gone if anything goes wrong."""
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        building.chmod(0o777 & ~mask)
        yield building
        if target.exists():
            raise UsageError(f"{target}: appeared while it was being written; nothing was overwritten")
        building.rename(target)
    except OSError as error:
        error.filename = error.filename or str(target)  # a failed write knows only its descriptor
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
