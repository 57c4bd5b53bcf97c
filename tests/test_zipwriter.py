"""Zips of a size that no test wants to write: the holes of a sparse file stand for the weights."""

from __future__ import annotations

import os
import random
import zipfile
from pathlib import Path

import pytest
import torch
from zlib_ng.zlib_ng import crc32

from mtpcheck.files import LocalFile
from mtpcheck.layouts.zipstore import Window, read_archive
from mtpcheck.layouts.zipwriter import Frame, Pending, frame, pickled

GIB = 1 << 30


def written(path: Path, around: Frame) -> Path:
    """Everything but the storages, which stay holes and read as zeros."""
    with path.open("wb") as file:
        for at, data in around.pieces:
            file.seek(at)
            file.write(data)
    assert path.stat().st_size == around.length
    return path


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 8191, 8192, 9000])
def test_a_part_of_a_file_reads_as_the_file(length: int, tmp_path: Path) -> None:
    path, start = tmp_path / "file", 5
    path.write_bytes(data := random.Random(0).randbytes(start + length + 40))
    edges = sorted({at for edge in (0, 4096, length - 4096, length) for at in range(edge - 2, edge + 3)})
    for first in edges:
        window = Window(LocalFile(path), start, length)
        for end in edges:
            if 0 <= first <= end <= length + 40:
                piece = bytearray(end - first)
                window.fill(memoryview(piece), first)
                assert piece == data[start + first : start + end]
                window.seek(first)
                assert window.read(end - first) == data[start + first : start + min(end, length)]


def test_a_file_and_a_tensor_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    sizes = (5 * GIB, GIB, 4 * GIB - 2)  # too large for 32 bits, beyond them, just small enough
    zeros, crcs = bytes(1 << 26), []
    for size in sizes:
        crc = 0
        for at in range(0, size, len(zeros)):
            crc = crc32(memoryview(zeros)[: min(len(zeros), size - at)], crc)
        crcs.append(crc)
    root = {"model": {str(i): Pending("BF16", (size // 2,), i) for i, size in enumerate(sizes)}}
    around = frame(pickled(root), list(zip(sizes, crcs, strict=True)))
    path = written(tmp_path / "large.pt", around)
    with path.open("r+b") as file:  # a mark at both ends of each storage
        for start, size in zip(around.starts, sizes, strict=True):
            for at in (start, start + size - 2):
                file.seek(at)
                file.write(b"\x80\x3f")
    model = torch.load(path, mmap=True)["model"]
    for i, size in enumerate(sizes):
        assert model[str(i)].shape == (size // 2,)
        assert (model[str(i)][0].item(), model[str(i)][-1].item(), model[str(i)][1].item()) == (1.0, 1.0, 0.0)
    archive = read_archive(file := LocalFile(path), 0, file.size, "large")
    assert [archive.storage(str(i)) for i in range(3)] == list(zip(around.starts, sizes, strict=True))
    assert all(start % 64 == 0 for start in around.starts)
    assert path.stat().st_blocks * 512 < 1 << 20
    with zipfile.ZipFile(written(tmp_path / "zeros.pt", around)) as zipped, zipped.open("archive/data/1") as member:
        while member.read(1 << 26):  # zipfile compares the CRC at the end
            pass
    os.truncate(path, 0)


def test_more_members_than_sixteen_bits_count(tmp_path: Path) -> None:
    count = 65_600
    root = [Pending("U8", (1,), i) for i in range(count)]
    path = written(tmp_path / "many.pt", frame(pickled(root), [(1, crc32(b"\0"))] * count))
    with zipfile.ZipFile(path) as zipped:
        assert len(zipped.namelist()) == count + 3
    records = torch._C.PyTorchFileReader(str(path)).get_all_records()  # type: ignore[attr-defined]
    assert f"data/{count - 1}" in records  # torch.load takes ten seconds for so many
    archive = read_archive(file := LocalFile(path), 0, file.size, "many")
    assert archive.storage(str(count - 1))[1] == 1
