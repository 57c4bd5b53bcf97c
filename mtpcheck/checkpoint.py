"""A checkpoint on disk in any layout: what it stores under its own names, what it declares, what lies beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mtpcheck.dialects import CORE, check_name, load_dialect, told_by
from mtpcheck.errors import FormatError, UsageError
from mtpcheck.gather import Gathered, gather
from mtpcheck.hub import is_repo, open_repo
from mtpcheck.layouts.hf import HfFolder, is_hf, read_hf
from mtpcheck.layouts.torch_dist import TRACKER, is_torch_dist, read_torch_dist
from mtpcheck.layouts.torch_ranks import is_torch, read_torch
from mtpcheck.manifest import Manifest, read_manifest, recorded_dialect
from mtpcheck.report.finding import Finding
from mtpcheck.tensormap import TensorRef

Layout = Literal["hf", "torch_dist", "torch"]


@dataclass(frozen=True)
class Checkpoint:
    """One opened checkpoint. Nothing but headers has been read."""

    path: Path
    """As the user named it; ``org/name@commit`` of a repository on the Hub."""
    folder: Path
    """Where the files are: the HF folder, Megatron's iteration folder, or that of a commit in the Hub's cache."""
    layout: Layout
    tensors: Mapping[str, TensorRef]
    config: Mapping[str, Any] | None = None
    """config.json (``hf``)."""
    args: Mapping[str, Any] | None = None
    """Training arguments (Megatron); None if the checkpoint stores none."""
    dialect: str = CORE
    """In whose order and under whose names tensors are read (Megatron)."""
    dialect_known: bool = False
    """Whether that was asked for, recorded or told by keys, and not taken for granted."""
    hf: HfFolder | None = None
    fsdp: bool = False
    """Saved by Megatron-FSDP (``torch_dist``)."""
    ranks: Gathered | None = None
    """The files of every rank (``torch``)."""
    manifest: Manifest | None = None
    passed_over: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.tensors.values())

    @property
    def told_dialect(self) -> str | None:
        """The dialect that keys tell. Those of modules, in the files of ranks and of Megatron-FSDP, tell none."""
        return told_by(self.tensors) if self.layout == "torch_dist" and not self.fsdp else None


def open_checkpoint(path: str | Path, iteration: int | None = None, dialect: str | None = None) -> Checkpoint:
    """Open a folder in any layout: an HF folder, a Megatron root, or an iteration folder; or a repository on the Hub
    (``org/name``, ``org/name@revision``), whose weights stay where they are (``fetch.fetched``).

    ``iteration`` chooses one of a Megatron root; by default it is the one that the tracker file names.
    ``dialect`` is the one that Megatron tensors are read in; by default the one that keys tell, else megatron-core's.
    Raises UsageError if there is nothing, or no such dialect, FormatError if what is there cannot be trusted, HubError
    as the Hub fails.
    """
    if dialect is not None:
        check_name(dialect)
    text, path = str(path), Path(path)
    if not path.exists():
        if is_repo(text):
            return _open_repo(text)
        raise UsageError(f"{path}: no such folder")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; name the checkpoint's folder")
    folder = _iteration_folder(path, iteration)
    if is_torch_dist(folder):
        dialect = _sure_of(dialect, folder, recorded_dialect(folder), "mtpcheck wrote it")
        found = read_torch_dist(folder, load_dialect(dialect or CORE).prefixes)
        opened = Checkpoint(
            path, folder, "torch_dist", found.tensors,
            args=found.args, passed_over=found.passed_over, fsdp=found.fsdp, manifest=read_manifest(folder),
        )  # fmt: skip
        dialect = _sure_of(dialect, folder, opened.told_dialect, "its keys are")
        return replace(opened, dialect=dialect or CORE, dialect_known=dialect is not None)
    if is_hf(folder):
        hf = read_hf(folder)
        return Checkpoint(path, folder, "hf", hf.tensors, config=hf.config, hf=hf, findings=hf.findings)
    if is_torch(folder):
        dialect = _sure_of(dialect, folder, recorded_dialect(folder), "mtpcheck wrote it")
        own = read_torch(folder, load_dialect(dialect or CORE))
        return Checkpoint(
            path, folder, "torch", own.tensors, dialect=dialect or CORE, dialect_known=dialect is not None,
            args=own.ranks.args, ranks=own,
            passed_over=own.passed_over, findings=(*own.strangers, *own.findings), manifest=read_manifest(folder),
        )  # fmt: skip
    if ranks := sorted(path.name for path in folder.glob("mp_rank_*")):
        raise FormatError(
            f"{folder}: {ranks[0]} and other folders of ranks hold no model_optim_rng.pt; copy them again"
        )
    if (folder / "model_optim_rng.pt").is_file():
        raise FormatError(f"{folder}: is the folder of one rank; name the iteration folder above it")
    what = "the folder is empty" if not any(folder.iterdir()) else "no config.json, safetensors or Megatron metadata"
    raise FormatError(f"{folder}: not a checkpoint: {what}")


def _sure_of(asked: str | None, folder: Path, known: str | None, why: str) -> str | None:
    """The dialect that is asked for, or the one that is known. Raises UsageError if these are two."""
    if known is not None:
        check_name(known)
    if asked is not None and known is not None and asked != known:
        raise UsageError(f"{folder}: {why} in the order of {known}, and --dialect says {asked}; leave it out")
    return asked or known


def _open_repo(text: str) -> Checkpoint:
    tree = open_repo(text)
    hf = read_hf(tree)
    return Checkpoint(Path(tree.name), tree.folder, "hf", hf.tensors, config=hf.config, hf=hf, findings=hf.findings)


def in_dialect(checkpoint: Checkpoint, dialect: str) -> Checkpoint:
    """The same files, read in another dialect. Raises what putting shares of ranks together raises."""
    if checkpoint.ranks is None:
        return replace(checkpoint, dialect=dialect)
    again = gather(checkpoint.ranks.ranks, load_dialect(dialect))
    own = replace(again, strangers=checkpoint.ranks.strangers, passed_over=checkpoint.ranks.passed_over)
    findings = (*own.strangers, *own.findings)
    return replace(checkpoint, dialect=dialect, tensors=own.tensors, ranks=own, findings=findings)


def _iteration_folder(path: Path, iteration: int | None) -> Path:
    """Follow Megatron's tracker file from a root to its newest iteration, or go to the one asked for."""
    if iteration is not None and not is_hf(path):
        if (folder := path / f"iter_{iteration:07d}").is_dir():
            return folder
        have = ", ".join(sorted(p.name for p in path.glob("iter_*"))) or "none"
        raise UsageError(f"{path}: has no iteration {iteration} (there: {have})")
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not (text.isdecimal() and len(text) < 20):
        raise FormatError(f"{tracker}: expected an iteration number or 'release', got {text[:40]!r}")
    name = text if text == "release" else f"iter_{int(text):07d}"
    if not (path / name).is_dir():
        raise FormatError(f"{tracker}: points to {name}, which is not in {path}")
    return path / name
