"""Checkpoints on the Hub whose bits are needed: fetched into the Hub's cache, and opened there."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.hub import HubTree
from mtpcheck.layouts.hf import read_hf
from mtpcheck.progress import bar


def is_remote(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is one on the Hub, of which the cache may hold a part."""
    return checkpoint.hf is not None and isinstance(checkpoint.hf.tree, HubTree)


def fetched(
    checkpoint: Checkpoint, show: bool = False, tensors: Collection[str] | None = None, others: bool = True
) -> Checkpoint:
    """The same checkpoint, of whose shards all, or those that hold some of ``tensors``, lie on disk; and, with
    ``others``, every file without weights.

    Only what the cache lacks is fetched; with ``show`` stderr tells how much. A local checkpoint is given back as it
    is. Raises UsageError if the disk is too small, HubError as the Hub fails.
    """
    from rich.filesize import decimal

    if checkpoint.hf is None or not isinstance(checkpoint.hf.tree, HubTree):
        return checkpoint
    tree = checkpoint.hf.tree
    wanted = [s.file for s in checkpoint.hf.shards if tensors is None or not set(s.names).isdisjoint(tensors)]
    if missing := tree.missing([*wanted, *(checkpoint.hf.others if others else ())]):
        size = sum(tree.sizes[file] for file in missing)
        if show:
            files = f"{len(missing):,} file{'s' * (len(missing) != 1)}, {decimal(size)}"
            print(f"fetching {files}, of {tree.name} into {tree.folder}", file=sys.stderr)
        with bar("fetching", size, show) as progress:
            tree.fetch(missing, progress)
    hf = read_hf(tree)
    return replace(checkpoint, tensors=hf.tensors, hf=hf, findings=hf.findings)
