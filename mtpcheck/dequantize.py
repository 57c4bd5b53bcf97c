"""The bf16 values of FP8 codes by arithmetic, where that gives what the tables give (fp8.py), at a third of the time.

A code's bits, moved, are those of an fp16 number: sign, four bits of exponent, three of mantissa. Its value is that of
the code times 2^-8 (the exponent's bias is 15 in place of 7), of subnormal ones too. So

    bf16( fp16 × (scale × 256) )     has the product of     bf16( code × scale ),     and rounds it in the same way.

Steps are so small that what lies between stays in the core's own cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtpcheck.move import scratch

_STEP = 1 << 17
"""Elements of one step: they take 6 bytes each, and more of them the interpreter's lock less often."""

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def widened(scales: F32, wide: int, columns: int) -> F32 | None:
    """Scales of blocks ``wide`` columns wide, [rows of blocks, columns], as ``multiply`` wants them; None if one is so
    large or odd that arithmetic would not do."""
    if ((scales.view(np.uint32) >> 23 & 0xFF) > 245).any():
        return None
    return np.repeat(scales * np.float32(256), min(wide, columns), axis=1)[:, :columns]


def keep_nan(codes: U8, out: NDArray[np.uint16]) -> None:
    """Where there is a NaN among ``codes``, put one of its sign into ``out``: arithmetic takes it for 480."""
    if codes.size and (codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F):
        at = np.flatnonzero(codes & 0x7F == 0x7F)
        out.reshape(-1)[at] = (codes.reshape(-1)[at].astype(np.uint16) & 0x80) << 8 | 0x7FC0


def multiply(codes: U8, scales: F32, out: NDArray[np.uint16]) -> None:
    """Fill ``out`` with the values of ``codes`` [rows, columns] of one row of blocks; ``scales`` [columns] as
    ``widened`` gives them."""
    import torch

    rows, columns = codes.shape
    step = max(1, min(rows, _STEP // columns))
    bits = scratch(2 * step * columns, "bits").view(np.int16).reshape(step, columns)
    floats = torch.from_numpy(scratch(4 * step * columns, "floats").view(np.float32).reshape(step, columns))
    moved, factor = torch.from_numpy(bits), torch.from_numpy(scales)
    target = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    for first in range(0, rows, step):
        n = min(step, rows - first)
        np.copyto(bits[:n], codes[first : first + n].view(np.int8))  # the sign fills the upper byte
        own = moved[:n].mul_(128).bitwise_and_(-0x4001)
        target[first : first + n].copy_(floats[:n].copy_(own.view(torch.float16)).mul_(factor))
    keep_nan(codes, out)
