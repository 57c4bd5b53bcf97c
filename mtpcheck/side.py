"""One of the two checkpoints that are held against each other."""

from __future__ import annotations

from dataclasses import dataclass

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.tensormap import TensorMap


@dataclass(frozen=True)
class Side:
    """An opened checkpoint and the tensor map it was read as."""

    checkpoint: Checkpoint
    tensor_map: TensorMap
    readable: bool = True
    """Whether its bits may be read. Where not, only what headers tell is judged."""
