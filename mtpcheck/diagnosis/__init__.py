"""What happened to tensors that differ, are missing or are new: findings in, findings with causes out.

    findings ─▶ case ─▶ theories ─▶ causes by piece ─▶ findings, those of one cause joined

A cause is an id of ``configs/causes.yaml`` and is named only where it gives every bit of the candidate; what none
explains is described (``nearest``). Work is bounded: theories that hold for one tensor are tried first on the next,
and once many tensors of a component have resisted all theories, the rest of them are held against these alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtpcheck.diagnosis.causes import with_causes
from mtpcheck.report.finding import Finding
from mtpcheck.side import Side

__all__ = ["diagnose"]


def diagnose(found: Sequence[Finding], a: Side, b: Side) -> list[Finding]:
    """Findings of a comparison of ``b`` with ``a``, with causes; those of one cause are one finding with ``members``.

    What was found holds whether or not it can be explained: an error in here is told in place of the first cause.
    """
    try:
        return with_causes(found, a, b)
    except Exception as error:
        what = f"unknown, since the diagnosis stopped with {type(error).__name__}: {error}; please report this"
        return [replace(found[0], cause=found[0].cause or what), *found[1:]]
