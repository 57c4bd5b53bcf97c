"""Writing layout ``torch_dist``: files that stock torch.distributed.checkpoint and megatron-core open.

One chunk a layer, one an expert, so that memory is bounded by a slab and not by a stacked tensor. Needs torch for
the pickles beside the payloads; the payloads themselves go from plan to file.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mtpcheck.box import Shape
from mtpcheck.dialect import ExtraState
from mtpcheck.files import LocalFile
from mtpcheck.layouts.zipwriter import DTYPES, Pending, frame, pickled, stream
from mtpcheck.move import write_at
from mtpcheck.parallel import WORKERS, Alive, in_parallel
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.roles import Spec

_FILE_BYTES = 16 << 30
_COMPUTED = 2  # what is computed, such as bf16 values of FP8 codes, takes at least twice as long as what is moved


@dataclass(frozen=True)
class StoredChunks:
    """One tensor to write: its chunks tile ``shape`` along the leading ``stack`` axes."""

    name: str
    dtype: str
    shape: Shape
    stack: Shape
    chunks: Sequence[Plan]


@dataclass(frozen=True)
class _Job:
    """One item to write: its index, its bytes in the file, and a function that writes them at a place of a file."""

    index: MetadataIndex
    nbytes: int
    write: Callable[[int, int, Alive], None]
    work: int
    """How long it takes, in bytes that are only moved."""


def write_torch_dist(
    folder: Path,
    tensors: Sequence[StoredChunks],
    extras: Sequence[ExtraState],
    args: Mapping[str, Any],
    spec: Spec,
    mcore: str,
    progress: Progress,
) -> None:
    """Write an iteration folder. ``mcore`` is "0.16" (common.pt) or "0.19" (common state among the items)."""
    common = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": args.get("iteration") or 0,
              "content_metadata": {"singleton_local_shards": False}}  # fmt: skip
    jobs: list[_Job] = []
    entries: dict[str, Any] = {}
    for tensor in tensors:
        entries[tensor.name] = _entry(tensor)
        jobs += _tensor_jobs(tensor, progress)
    payload = _save([torch.empty(0, dtype=torch.uint8) if spec == "te" else None])
    objects = {name: payload for extra in extras for name in _extra_names(extra)}
    if mcore == "0.19":
        objects["common_state/shard_0_1"] = _save([common])
    for name, data in objects.items():
        entries[name] = BytesStorageMetadata()
        jobs.append(_Job(MetadataIndex(name), len(data), partial(_write_object, data), len(data)))
    where = {}
    files = _spread(jobs)
    for written in in_parallel([partial(_write_file, folder, n, own) for n, own in enumerate(files)]):
        where.update(written)
    metadata = Metadata(state_dict_metadata=entries, storage_data=where, storage_meta=StorageMeta())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    marker: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if mcore == "0.16":
        torch.save(common, folder / "common.pt")
        marker.update(common_backend="torch", common_backend_version=1)
    (folder / "metadata.json").write_text(json.dumps(marker))


def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _entry(tensor: StoredChunks) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size((*(1 for _ in tensor.stack), *plan.shape)))
        for at, plan in _placed(tensor)
    ]
    properties = TensorProperties(dtype=DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties=properties, size=torch.Size(tensor.shape), chunks=chunks)


def _placed(tensor: StoredChunks) -> Iterator[tuple[Shape, Plan]]:
    inner = (0,) * (len(tensor.shape) - len(tensor.stack))
    for index, plan in zip(product(*(range(n) for n in tensor.stack)), tensor.chunks, strict=True):
        yield (*index, *inner), plan


def _tensor_jobs(tensor: StoredChunks, progress: Progress) -> Iterator[_Job]:
    for at, plan in _placed(tensor):
        shape = (*(1 for _ in tensor.stack), *plan.shape)
        nbytes = plan.nbytes + _around(tensor.dtype, shape, plan.nbytes)
        write = partial(_write_tensor, plan, tensor.dtype, shape, progress)
        computed = not all(box.source is None or isinstance(box.source, LocalFile) for box in plan.boxes)
        work = nbytes * (_COMPUTED if computed else 1)
        yield _Job(MetadataIndex(tensor.name, torch.Size(at)), nbytes, write, work)


@cache
def _around(dtype: str, shape: Shape, nbytes: int) -> int:
    """Bytes that an item adds to those of its tensor."""
    return frame(_pickled_tensor(dtype, shape), [(nbytes, 0)]).length - nbytes


def _write_tensor(plan: Plan, dtype: str, shape: Shape, progress: Progress, fd: int, start: int, alive: Alive) -> None:
    around = frame(_pickled_tensor(dtype, shape), [(plan.nbytes, 0)])
    crc = stream(plan, fd, start + around.starts[0], progress, alive)
    for at, data in frame(_pickled_tensor(dtype, shape), [(plan.nbytes, crc)]).pieces:
        write_at(fd, data, start + at)


@cache
def _pickled_tensor(dtype: str, shape: Shape) -> bytes:
    return pickled(Pending(dtype, shape))


def _write_object(data: bytes, fd: int, start: int, alive: Alive) -> None:
    write_at(fd, data, start)


def _extra_names(extra: ExtraState) -> Iterator[str]:
    """``shard_<i>_<n>``; several axes are written ``i.j`` (ShardedObject.unique_key in megatron-core)."""
    shape = extra.stack or (1,)
    total = ".".join(map(str, shape))
    for index in product(*(range(n) for n in shape)):
        yield f"{extra.module}._extra_state/shard_{'.'.join(map(str, index))}_{total}"


def _spread(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Cut the items, in order, into files of about equal work, as many for every worker."""
    total = sum(job.work for job in jobs)
    count = WORKERS * max(1, -(-total // (WORKERS * _FILE_BYTES)))
    files: list[list[_Job]] = [[] for _ in range(count)]
    done = 0
    for job in jobs:
        files[min(count - 1, done * count // max(total, 1))].append(job)
        done += job.work
    return files


def _write_file(folder: Path, number: int, jobs: Sequence[_Job], alive: Alive) -> dict[MetadataIndex, Any]:
    name = f"__0_{number}.distcp"
    starts = list(accumulate((job.nbytes for job in jobs), initial=0))
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        if starts[-1]:
            os.posix_fallocate(fd, 0, starts[-1])  # a full disk shows now and not after an hour
        for start, job in zip(starts, jobs, strict=False):
            job.write(fd, start, alive)
    finally:
        os.close(fd)
    return {job.index: _StorageInfo(name, start, job.nbytes) for start, job in zip(starts, jobs, strict=False)}
