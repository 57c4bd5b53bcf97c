"""Writing layout ``hf``: safetensors shards with a given header, each tensor streamed to its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory

from mtpcheck.layouts.hf import INDEX, SINGLE, header_entries, make_header
from mtpcheck.move import fill, scratch, slabs, write_at
from mtpcheck.parallel import JOB, WORKERS, Alive, batches, in_parallel, in_turn
from mtpcheck.plan import Plan
from mtpcheck.progress import Progress
from mtpcheck.tensormap import TensorRef


@dataclass(frozen=True)
class Form:
    """How an HF folder looks besides its weights: shard files with their raw headers, and the index."""

    headers: Mapping[str, bytes]
    index: bytes | None

    def fits(self, tensors: Mapping[str, TensorRef]) -> bool:
        """Whether the headers describe exactly these tensors."""
        entries = {file: header_entries(raw) for file, raw in self.headers.items()}
        described = {name: entry[:2] for own in entries.values() for name, entry in own.items()}
        same = described == {name: (ref.dtype, ref.shape) for name, ref in tensors.items()}
        return same and self._index_fits({name: file for file, own in entries.items() for name in own})

    def _index_fits(self, file_of: Mapping[str, str]) -> bool:
        if self.index is None:
            return list(self.headers) == [SINGLE]
        try:
            index = json.loads(self.index)
        except ValueError:
            return False
        return isinstance(index, dict) and index.get("weight_map") == file_of


def default_form(tensors: Mapping[str, TensorRef]) -> Form:
    """Shards of at most 5 GB in the order of the model, named as huggingface_hub names them."""
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda ref: ref.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size="5GB",
        get_storage_id=lambda ref: None,
    )
    headers = {
        file: make_header((name, tensors[name]) for name in names) for file, names in split.filename_to_tensors.items()
    }
    if not split.is_sharded:
        return Form(headers, None)
    total = sum(ref.nbytes for ref in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
    return Form(headers, (json.dumps(index, indent=2) + "\n").encode())


Written = Callable[[str, Path], Path | None]
"""Called with the name and the path of every shard once it is whole. What it returns is written over: a file in the
same folder that nobody needs any more, whose pages and blocks another shard can have."""


def write_shards(
    folder: Path, form: Form, tensors: Mapping[str, TensorRef], progress: Progress, written: Written | None = None
) -> None:
    """Write every shard of ``form`` and the index."""
    shards = list(form.headers.items())
    spare: list[Path] = []
    for i in range(0, len(shards), WORKERS):
        with ExitStack() as files:
            queues = []
            for file, header in shards[i : i + WORKERS]:
                entries = header_entries(header)
                size = 8 + len(header) + sum(tensors[name].nbytes for name in entries)
                fd = files.enter_context(_new_file(folder / file, header, size, spare.pop() if spare else None))
                queues.append(_jobs(fd, progress, _pieces(8 + len(header), entries, tensors)))
            for _ in in_parallel(in_turn(queues)):  # a file takes one write at a time, so no two workers in one file
                pass
        if written is not None:
            for file, _ in shards[i : i + WORKERS]:
                spare += filter(None, [written(file, folder / file)])
    for path in spare:
        path.unlink()
    if form.index is not None:
        (folder / INDEX).write_bytes(form.index)


@contextmanager
def _new_file(path: Path, header: bytes, size: int, spare: Path | None) -> Iterator[int]:
    """A new shard, open for writing, that holds its header. Space is not reserved: it halves the speed here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(spare or path, os.O_WRONLY | (0 if spare else os.O_CREAT | os.O_EXCL), 0o644)
    try:
        if spare:
            spare.rename(path)
            os.ftruncate(fd, size)
        write_at(fd, len(header).to_bytes(8, "little") + header, 0)
        yield fd
    finally:
        os.close(fd)


_Piece = tuple[int, Plan]  # first byte in the file, and what goes there


def _pieces(
    data: int, entries: Mapping[str, tuple[str, tuple[int, ...], int]], tensors: Mapping[str, TensorRef]
) -> Iterator[tuple[int, _Piece]]:
    for name, (_, _, begin) in entries.items():
        for at, part in slabs(tensors[name].plan, JOB):
            yield part.nbytes, (data + begin + at, part)


def _jobs(fd: int, progress: Progress, pieces: Iterable[tuple[int, _Piece]]) -> Iterator[Callable[[Alive], None]]:
    for batch in batches(pieces):
        yield partial(_write, fd, progress, batch)


def _write(fd: int, progress: Progress, pieces: list[_Piece], alive: Alive) -> None:
    for start, plan in pieces:
        for at, part in slabs(plan):
            alive()
            slab = scratch(part.nbytes, "slab")
            fill(part, slab.data)
            write_at(fd, slab.data, start + at)
            progress.advance(part.nbytes)
