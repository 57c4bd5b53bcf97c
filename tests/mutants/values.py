"""Ways to damage the values of one tensor: functions from a tensor to another of its dtype, and mostly of its shape."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def drawn(tensor: Tensor) -> torch.Generator:
    """Seeded by the tensor's own bytes, so that two tensors are changed differently, and one always alike."""
    return torch.Generator().manual_seed(zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))


def fresh(tensor: Tensor) -> Tensor:
    """As an initialisation leaves it: matrices normal with deviation 0.02, vectors one."""
    if tensor.dim() < 2:
        return torch.ones_like(tensor)
    return (torch.randn(tensor.shape, generator=drawn(tensor)) * 0.02).to(tensor.dtype)


def zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def ones(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor)


def constant(value: float) -> Change:
    return lambda tensor: torch.full_like(tensor, value)


def plus(constant: float) -> Change:
    return lambda tensor: (tensor.float() + constant).to(tensor.dtype)


def times(factor: float) -> Change:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def through(dtype: torch.dtype) -> Change:
    """Rounded to a narrower dtype and widened again."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def to(dtype: torch.dtype) -> Change:
    return lambda tensor: tensor.to(dtype)


def four_bits(tensor: Tensor) -> Tensor:
    """Rounded to 16 levels for every 64 elements of a row, the largest magnitude at level 7."""
    if tensor.dim() < 2:
        return tensor
    groups = tensor.float().reshape(-1, gcd(64, tensor.shape[-1]))
    scale = (groups.abs().amax(1, keepdim=True) / 7).clamp_min(1e-12)
    return ((groups / scale).round().clamp(-8, 7) * scale).reshape(tensor.shape).to(tensor.dtype)


def matrices(change: Change) -> Change:
    """Vectors stay."""
    return lambda tensor: change(tensor) if tensor.dim() > 1 else tensor


def only(index: int, change: Change) -> Change:
    """One entry of the leading axis alone."""

    def changed(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        new[index] = change(tensor[index])
        return new

    return changed


# ---- rows and columns


def halves(axis: int) -> Change:
    """The two halves along an axis stand in each other's place."""
    return lambda tensor: torch.cat(tensor.chunk(2, axis)[::-1], axis)


def second_half_zero(axis: int) -> Change:
    """As if the second of two shards had never been read."""

    def changed(tensor: Tensor) -> Tensor:
        first, second = tensor.chunk(2, axis)
        return torch.cat([first, torch.zeros_like(second)], axis)

    return changed


def interleaved(block: int) -> Change:
    """Gate over up (the second last axis) becomes blocks of gate and up in turns."""

    def changed(tensor: Tensor) -> Tensor:
        *lead, rows, columns = tensor.shape
        return tensor.reshape(*lead, 2, rows // 2 // block, block, columns).transpose(-4, -3).reshape(tensor.shape)

    return changed


def regrouped(groups: int, *rows: int) -> Change:
    """Of ``groups`` groups, with so many ``rows`` of each kind: all of the first kind, then all of the next."""

    def changed(tensor: Tensor) -> Tensor:
        kinds = tensor.reshape(groups, sum(rows), *tensor.shape[1:]).split(rows, 1)
        return torch.cat([kind.reshape(-1, *tensor.shape[1:]) for kind in kinds])

    return changed


def by_group(groups: int, *rows: int) -> Change:
    """The other way: where all of each kind stood together, group by group."""

    def changed(tensor: Tensor) -> Tensor:
        kinds = tensor.split([groups * own for own in rows])
        return torch.cat([kind.reshape(groups, -1, *tensor.shape[1:]) for kind in kinds], 1).reshape(tensor.shape)

    return changed


def in_turns(groups: int, rows: int, block: int) -> Change:
    """Of each group two kinds of so many ``rows``, with others after them, stand in blocks of the one and the other."""

    def changed(tensor: Tensor) -> Tensor:
        grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
        both = grouped[:, : 2 * rows].reshape(groups, 2, rows // block, block, -1).transpose(1, 2)
        return torch.cat([both.reshape(groups, 2 * rows, -1), grouped[:, 2 * rows :]], 1).reshape(tensor.shape)

    return changed


def reversed_heads(heads: int) -> Change:
    return lambda tensor: tensor.reshape(heads, -1, *tensor.shape[1:]).flip(0).reshape(tensor.shape)


def rope_interleaved(heads: int) -> Change:
    """From halves that rotate together to pairs that do, in every head."""
    return lambda t: t.reshape(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous()


def permuted(axis: int) -> Change:
    """In another order without any system."""
    return lambda tensor: tensor.index_select(axis, torch.randperm(tensor.shape[axis], generator=drawn(tensor)))


def rolled(by: int) -> Change:
    """Along the leading axis, which is that of stacked layers or experts."""
    return lambda tensor: tensor.roll(by, 0)


def reordered(*order: int) -> Change:
    """The leading axis in this order; an index that comes twice takes the place of one that is lost."""
    return lambda tensor: tensor[list(order)]


def padded(rows: int) -> Change:
    return lambda tensor: torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])


def cut(rows: int) -> Change:
    return lambda tensor: tensor[:-rows]
