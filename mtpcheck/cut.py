"""Cuts: how tensor parallelism deals one tensor out to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mtpcheck.plan import Plan, concat


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut along ``axis``. A tensor of several ``pieces`` (gate over up) is cut piece by piece: each rank has
    its share of every piece, so the whole is not what the ranks hold one after the other. ``pieces`` are the
    proportions of their lengths."""

    axis: int
    pieces: tuple[int, ...] = (1,)

    def share(self, plan: Plan, ranks: int, rank: int) -> Plan:
        """The shard of one rank. Raises ValueError if the axis cannot be cut so."""
        size = plan.shape[self.axis]
        lengths = self._lengths(size)
        if any(length % ranks for length in lengths):
            raise ValueError(f"{size} in {len(lengths)} pieces cannot be cut into {ranks}")
        mine = [(start + rank * (n // ranks), n // ranks) for start, n in _spans(lengths)]
        return self._join([plan.slice(self.axis, start, start + n) for start, n in mine])

    def _lengths(self, size: int) -> list[int]:
        """Lengths of the pieces of a tensor, or of a share, of this size. Raises ValueError if there are none."""
        whole = sum(self.pieces)
        if any(piece * size % whole for piece in self.pieces):
            raise ValueError(f"{size} cannot be cut into pieces of proportions {self.pieces}")
        return [piece * size // whole for piece in self.pieces]

    def join(self, shards: Sequence[Plan]) -> Plan:
        """The whole tensor; the inverse of ``share``. Raises ValueError if the shards do not fit together."""
        if len(self.pieces) == 1 or len(shards) == 1:
            return self._join(shards)
        spans = [list(_spans(self._lengths(shard.shape[self.axis]))) for shard in shards]
        return self._join(
            [
                shard.slice(self.axis, start, start + n)
                for piece in zip(*spans, strict=True)
                for shard, (start, n) in zip(shards, piece, strict=True)
            ]
        )

    def _join(self, plans: Sequence[Plan]) -> Plan:
        return plans[0] if len(plans) == 1 else concat(plans, self.axis).normalise()


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each length starts when they are laid end to end, and the length."""
    return zip(accumulate([0, *lengths]), lengths, strict=False)
