"""Cuts: how tensor parallelism deals one tensor out to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtpcheck.plan import Plan, concat


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut along ``axis``. A tensor of several ``pieces`` (gate over up) is cut piece by piece: each rank has
    its share of every piece, so the whole is not what the ranks hold one after the other."""

    axis: int
    pieces: int = 1

    def share(self, plan: Plan, ranks: int, rank: int) -> Plan:
        """The shard of one rank. Raises ValueError if the axis cannot be cut so."""
        size = plan.shape[self.axis]
        if size % (self.pieces * ranks):
            raise ValueError(f"{size} cannot be cut into {self.pieces} × {ranks}")
        n, piece = size // (self.pieces * ranks), size // self.pieces
        starts = [p * piece + rank * n for p in range(self.pieces)]
        return self._join([plan.slice(self.axis, start, start + n) for start in starts])

    def join(self, shards: Sequence[Plan]) -> Plan:
        """The whole tensor; the inverse of ``share``. Raises ValueError if the shards do not fit together."""
        if self.pieces == 1 or len(shards) == 1:
            return self._join(shards)
        shares = [shard.shape[self.axis] // self.pieces for shard in shards]
        if any(shard.shape[self.axis] % self.pieces for shard in shards):
            raise ValueError(f"{shards[0].shape} is no {self.pieces} pieces")
        return self._join(
            [
                shard.slice(self.axis, p * share, (p + 1) * share)
                for p in range(self.pieces)
                for shard, share in zip(shards, shares, strict=True)
            ]
        )

    def _join(self, plans: Sequence[Plan]) -> Plan:
        return plans[0] if len(plans) == 1 else concat(plans, self.axis).normalise()
