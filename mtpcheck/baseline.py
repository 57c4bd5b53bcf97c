"""Acceptance that was recorded before: a JSON file that later checkpoints are held against."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpcheck.draft.probe import Column
from mtpcheck.draft.workloads import Workload
from mtpcheck.errors import FormatError, UsageError
from mtpcheck.report.finding import Finding, failure

_SCHEMA = 1


@dataclass(frozen=True)
class Baseline:
    """``ids``: workload → SHA-256 of its token ids. ``before``: workload → (accepted, drafted) of every depth, or None
    where nothing was recorded yet."""

    path: Path
    family: str
    ids: dict[str, str]
    before: dict[str, list[list[int]]] | None

    def check(self, column: Column) -> Iterator[Finding]:
        """Rates that are surely below what was recorded."""
        for name, own in column.workloads.items():
            for depth, rate in enumerate(own.depths, start=1):
                recorded = (self.before or {}).get(name, [])[depth - 1 : depth]
                for accepted, drafted in recorded:
                    if rate.bounds[1] < accepted / drafted:
                        subject = name if len(own.depths) == 1 else f"{name}, depth {depth}"
                        yield failure("acceptance.baseline", subject, "is surely below what was recorded",
                                      expected=f"{accepted / drafted:.4f}", got=f"{rate.rate:.4f}",
                                      where=str(self.path))  # fmt: skip

    def record(self, column: Column) -> None:
        """Write the file, whole or not at all. Raises UsageError if there is one by now."""
        workloads = {
            name: {"ids": self.ids[name], "depths": [[rate.accepted, rate.drafted] for rate in own.depths]}
            for name, own in column.workloads.items()
        }
        content = {"schema_version": _SCHEMA, "family": self.family, "workloads": workloads}
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            Path(file.name).chmod(0o644)
            try:
                os.link(file.name, self.path)
            except FileExistsError:
                raise UsageError(f"{self.path}: was recorded meanwhile; run again to hold against it") from None


def open_baseline(path: Path, family: str, workloads: Sequence[Workload], apart_from: Sequence[Path]) -> Baseline:
    """What was recorded in ``path``, if it exists. Raises UsageError or FormatError if it is none for these workloads,
    or lies in one of the folders ``apart_from``."""
    if any(path.resolve().is_relative_to(folder.resolve()) for folder in apart_from):
        raise UsageError(f"--baseline {path}: lies inside a checkpoint; name a file outside it")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--baseline {path}: is a folder, or lies in none that exists")
    ids = {workload.name: _digest(workload) for workload in workloads}
    if not path.exists():
        return Baseline(path, family, ids, None)
    content = _read(path)
    if content["family"] != family:
        raise UsageError(f"{path}: is of {content['family']}, and this is {family}; name another file")
    for name, own in ids.items():
        if content["workloads"].get(name, {}).get("ids") != own:
            raise UsageError(f"{path}: was recorded on another {name}; remove it and record it again")
    return Baseline(path, family, ids, {name: own["depths"] for name, own in content["workloads"].items()})


def _digest(workload: Workload) -> str:
    ids = hashlib.sha256()
    for passage in workload.passages:
        ids.update(len(passage).to_bytes(8, "little") + passage.tobytes())
    return ids.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != _SCHEMA:
            raise FormatError(f"{path}: schema {content['schema_version']!r}, this mtpcheck knows {_SCHEMA}")
        for own in content["workloads"].values():
            counts = [(int(accepted), int(drafted)) for accepted, drafted in own["depths"]]
            if not isinstance(own["ids"], str) or not all(0 <= a <= d and d for a, d in counts):
                raise ValueError(own)
        if not isinstance(content["family"], str):
            raise ValueError(content["family"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path}: no baseline that mtpcheck wrote ({type(error).__name__}: {error})") from None
    return content
