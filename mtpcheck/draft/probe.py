"""Drafts of one checkpoint on all workloads, in numbers. Imports torch and transformers when it runs, not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.draft.acceptance import Acceptance, measure
from mtpcheck.draft.alive import Verdict, judge
from mtpcheck.draft.passage import Passage, Touched
from mtpcheck.draft.workloads import Encode, Workload, bundled, encoder, need_enough, read_workload
from mtpcheck.errors import UsageError, require_one_of
from mtpcheck.progress import Progress, bar
from mtpcheck.tensormap import TensorMap

Columns = Literal["all", "once"]


Subject = tuple[str, Checkpoint, TensorMap]
"""Label, and what to run."""


@dataclass(frozen=True)
class Probing:
    """How to measure acceptance: of every checkpoint that is compared or of the first alone, and on which files."""

    columns: Columns = "all"
    files: Mapping[str, Path] = field(default_factory=bundled)

    def __post_init__(self) -> None:
        require_one_of("columns", self.columns, Columns)


@dataclass(frozen=True)
class Column:
    """What one checkpoint drafts. ``same_as``: the label of another column with the same bytes, which was run."""

    label: str
    workloads: Mapping[str, Acceptance]
    overall: Acceptance
    verdict: Verdict
    passages: tuple[Passage, ...]
    touched: Touched
    nbytes: int
    same_as: str = ""

    @property
    def digests(self) -> list[tuple[str, ...]]:
        """Of each passage, by depth: two runs in one process have the same if all draft logits are bit-equal."""
        return [passage.logits_digest for passage in self.passages]


def read_workloads(checkpoint: Checkpoint, tensor_map: TensorMap, files: Mapping[str, Path]) -> list[Workload]:
    """Workloads as ids of this checkpoint's tokenizer.

    Raises UsageError or FormatError if a file is not sound, all together are too short, or text has no tokenizer.
    """
    folder = checkpoint.manifest.root if checkpoint.manifest else checkpoint.folder

    @cache
    def tokenizer() -> Encode:  # read when the first text is met: ids need none
        return encoder(folder)

    vocab = tensor_map.facts["vocab"]
    made = [read_workload(name, Path(path), lambda text: tokenizer()(text), vocab) for name, path in files.items()]
    if not made:
        raise UsageError("there is no workload to draft on")
    need_enough(made)
    return made


def probe(
    label: str, checkpoint: Checkpoint, tensor_map: TensorMap, workloads: Sequence[Workload], progress: Progress
) -> Column:
    """Run a checkpoint once over its weights. Raises UnsupportedError if that is not possible here."""
    from mtpcheck.draft.run import Engine, run

    engine = Engine(checkpoint, tensor_map, progress=progress)
    done = run(engine, [passage.tolist() for workload in workloads for passage in workload.passages])
    own: dict[str, Acceptance] = {}
    start = 0
    for workload in workloads:
        own[workload.name] = measure(done.passages[start : start + len(workload.passages)])
        start += len(workload.passages)
    overall = measure(done.passages)
    return Column(label, own, overall, judge(overall), done.passages, done.touched, done.nbytes)


def run_all(
    subjects: Sequence[Subject], workloads: Sequence[Workload], probing: Probing, show_progress: bool
) -> list[Column]:
    """One column for each subject, all on the same ids."""
    columns = []
    for label, checkpoint, tensor_map in subjects[: 1 if probing.columns == "once" else None]:
        with bar(f"drafting, {label}", tensor_map.nbytes, show_progress) as progress:
            columns.append(probe(label, checkpoint, tensor_map, workloads, progress))
    return columns
