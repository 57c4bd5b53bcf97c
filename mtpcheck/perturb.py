"""A copy of a Hugging Face folder with other bits in it: who fills in from the original then shows.

Every tensor of the model is perturbed, those of the trunk too. It has low mantissa bits of its own, so that values stay
what they nearly were; FP8 codes change places within their block, so that whoever quantizes it anew finds the same
scale. Dtypes, shapes, scales and what is not finite stay, zeros unless a tensor has nothing else, and what repeats
another tensor still repeats it.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from zlib import crc32

import numpy as np

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.encoding import CODES
from mtpcheck.errors import UnsupportedError
from mtpcheck.files import LocalFile, inside
from mtpcheck.move import Bytes, read_plan, slabs, straight_run, write_at
from mtpcheck.plan import Plan
from mtpcheck.tensormap import TensorMap, is_mtp, read_tensor_map

_FLOATS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}
"""dtype → an integer of its width, and the bits of the exponent."""


def perturb(source: Path, target: Path, family: str | None = None, seed: int = 0) -> list[str]:
    """Copy the HF folder ``source`` to the new folder ``target``, with noise in every tensor of the model. Returns the
    stored names of tensors that now differ. A trunk tensor of a dtype that there is no noise for stays as it is.

    Raises UnsupportedError for an MTP tensor of such a dtype, and for what it repeats.
    """
    copy_checkpoint(open_checkpoint(source), target)
    copy = open_checkpoint(target)
    tensor_map = read_tensor_map(copy, family)
    changed = []
    for name, seeded_as in _chosen(copy, tensor_map).items():
        rng = np.random.default_rng([seed, crc32(seeded_as.encode())])
        ref = copy.tensors[name]
        if ref.dtype in _FLOATS:
            differs = _add_noise(ref.plan, ref.dtype, rng)
        elif ref.dtype == CODES:
            own = tensor_map.encoded.get(name)
            differs = _exchange(ref.plan, own.grid.block[1] if own else ref.shape[-1], rng)
        else:
            raise UnsupportedError(f"{source}: {name} is {ref.dtype}; there is no way to perturb it and keep it sound")
        changed += [name] * differs
    return changed


def copy_checkpoint(source: Checkpoint, target: Path) -> None:
    """Copy what a HF folder is made of to a new folder: no hidden files, and nothing that a link leads out to. The
    owner may write all of the copy, even where a cache made the source read-only."""
    assert source.hf is not None
    target.mkdir()
    for name in (*(shard.file for shard in source.hf.shards), *source.hf.others):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(inside(source.folder, name), copy)
        copy.chmod(copy.stat().st_mode | stat.S_IRUSR | stat.S_IWUSR)


def _chosen(copy: Checkpoint, tensor_map: TensorMap) -> dict[str, str]:
    """Stored name → the name its noise is drawn by: the same for a tensor and what repeats it."""
    row_of = {row.parts[0]: row.name for row in tensor_map.model.rows}
    repeated = {tensor_map.repeated_by(part) for part in tensor_map.copies}
    chosen: dict[str, str] = {}
    for row in tensor_map.model.rows:
        part = row.parts[0]
        original = tensor_map.repeated_by(part) if part in tensor_map.copies else part
        dtype = copy.tensors[row.name].dtype if row.name in copy.tensors else ""
        if dtype and (is_mtp(part) or original in repeated or _known(dtype)):
            chosen[row.name] = row_of[original]
    return chosen


def _known(dtype: str) -> bool:
    return dtype in _FLOATS or dtype == CODES


def _add_noise(plan: Plan, dtype: str, rng: np.random.Generator) -> bool:
    """Change the two lowest bits of elements that are finite. Whether any did change."""
    word, exponent = _FLOATS[dtype]
    changed = False
    for _, part in slabs(plan):
        bits = np.frombuffer(read_plan(part), word)
        noise = rng.integers(0, 4, bits.size, dtype=bits.dtype.newbyteorder("="))
        noise |= noise.dtype.type(not noise.any())
        noise[bits & exponent == exponent] = 0
        if (other := np.where(bits << 1 == 0, 0, noise)).any():
            noise = other  # zeros stay, and their signs, unless there is nothing else
        changed |= bool(noise.any())
        _write(part, (bits ^ noise).view(np.uint8))
    return changed


def _exchange(plan: Plan, width: int, rng: np.random.Generator) -> bool:
    """Exchange codes with their neighbours in the row, never across a block of ``width`` columns."""
    before = np.frombuffer(read_plan(plan), np.uint8).reshape(plan.shape)
    after = before.copy()
    for first in range(0, plan.shape[-1], width):
        block = after[..., first : first + width]
        pairs = block[..., : block.shape[-1] // 2 * 2].reshape(*block.shape[:-1], -1, 2)
        moved = rng.random(pairs.shape[:-1]) < 0.5
        pairs[moved] = pairs[moved][:, ::-1]
        after[..., first : first + pairs.shape[-2] * 2] = pairs.reshape(*block.shape[:-1], -1)
    _write(plan, after.reshape(-1))
    return bool((before != after).any())


def _write(plan: Plan, raw: Bytes) -> None:
    """Put bytes where a plan of one straight run reads them."""
    run = straight_run(plan)
    assert run is not None and isinstance(run[0], LocalFile)
    fd = os.open(run[0].path, os.O_WRONLY)
    try:
        write_at(fd, raw.data, run[1])
    finally:
        os.close(fd)
