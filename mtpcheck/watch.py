"""What a command did to files that are none of its business."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISDIR

Snapshot = Mapping[str, tuple[int, ...]]
"""Path below a folder → what changes with a file: type, inode, size, times, number of links."""


def snapshot(folder: Path, without: tuple[Path, ...]) -> Snapshot:
    """Everything below ``folder`` but ``without`` and what lies in these. Nothing is read."""
    found: dict[str, tuple[int, ...]] = {}
    for name, folders, files in os.walk(folder):
        base = Path(name)
        folders[:] = [own for own in folders if base / own not in without]
        for own in (*folders, *files):
            if base / own not in without:
                found[str((base / own).relative_to(folder))] = _state(base / own)
    return found


def _state(path: Path) -> tuple[int, ...]:
    state = path.lstat()
    if S_ISDIR(state.st_mode):  # its times change with its entries, which are told one by one
        return (state.st_mode,)
    return state.st_mode, state.st_ino, state.st_size, state.st_mtime_ns, state.st_nlink, state.st_ctime_ns


def changes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """What is new, changed or gone, in words. A file that only gained or lost a hard link is as it was."""
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            yield f"new: {path}"
        elif path not in after:
            yield f"gone: {path}"
        elif before[path] != after[path] and not _only_linked(before[path], after[path]):
            yield f"changed: {path}"


def _only_linked(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Making a hard link changes the time of the inode, and nothing else."""
    return len(before) == len(after) > 1 and before[:4] == after[:4] and before[4] != after[4]
