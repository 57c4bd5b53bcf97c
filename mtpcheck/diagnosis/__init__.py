"""What happened to tensors that differ, are missing or are new: findings in, findings with causes out.

    findings ─▶ case ─▶ theories ─▶ causes by piece ─▶ findings, those of one cause joined

A cause is an id of ``configs/causes.yaml`` and is named only where it gives every bit of the candidate; what none
explains is described (``nearest``). Work is bounded: theories that hold for one tensor are tried first on the next,
and once many tensors of a component have resisted all theories, the rest of them are held against these alone.
"""

from __future__ import annotations

from mtpcheck.diagnosis.causes import diagnose

__all__ = ["diagnose"]
