"""One entry of the catalogue: what is done to a sound checkpoint, who judges it, and what has to be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Edit = Callable[[Path], object]
"""Changes a fresh copy of a checkpoint in place."""

VERIFY = "verify hf MUTANT"


@dataclass(frozen=True)
class Case:
    """A mutant, or with exit code 0 a legal variant.

    ``on`` are names of originals (``originals.py``). The mutant is a copy of an original as Hugging Face folder, or,
    with ``made``, of what ``mtpcheck convert --to`` makes of it with these flags. In ``command`` MUTANT stands for the
    edited copy, hf for the original, megatron for the original in torch_dist, and a fixture's name for that fixture;
    TEXT is a file of passages.

    ``expects`` are findings, each as "check" or "check cause", with | between alternatives. The first has to be a
    failure where the exit code is 1. Where they name causes, no finding may name another. ``says`` is a regular
    expression that the cause of the first has to match, or the complaint of a command that could not judge.

    ``source``: the findings have to be told as faults of the original, which no conversion made.
    ``blind``: to Hugging Face and back is byte-identical with this fault, since the way back undoes it.
    """

    id: str
    what: str
    edit: Edit
    on: tuple[str, ...]
    expects: tuple[str, ...] = ()
    command: str = VERIFY
    made: str = ""
    exit: int = 1
    says: str = ""
    blind: bool = False
    source: bool = False


@dataclass(frozen=True)
class Left:
    """An entry of the catalogue that cannot be applied, and why."""

    id: str
    what: str
    why: str


def legal(
    id: str, what: str, edit: Edit, on: tuple[str, ...], command: str = VERIFY, made: str = "", says: str = ""
) -> Case:
    """A variant that has to pass without a failure."""
    return Case(id, what, edit, on, (), command, made, 0, says)


def refused(id: str, what: str, edit: Edit, on: tuple[str, ...], command: str, says: str) -> Case:
    """Input that no command may judge."""
    return Case(id, what, edit, on, (), command, "", 2, says)
