"""All mutants, with what has to be said of each; what is legal; pairs of faults; a sample over every fixture; what
cannot be applied, and why."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants import cases_files, cases_megatron, cases_quantized, cases_source, cases_values, hf
from tests.mutants.anatomy import STORED
from tests.mutants.case import Case, Left
from tests.mutants.families import CASES as FAMILIES
from tests.mutants.legal import LEGAL

MUTANTS: list[Case] = [
    *cases_files.LOST,
    *cases_files.DECLARED,
    *cases_files.DTYPES,
    *cases_values.HF,
    *cases_values.SCALES,
    *cases_quantized.CASES,
    *cases_source.CASES,
    *cases_megatron.NAMES,
    *cases_megatron.VALUES,
    *cases_megatron.DRAFTS,
    *cases_megatron.RANKS,
]

LEFT = [
    Left("M24", "rows of a gated QKV are dropped", "tests/test_gated.py has it, with gated models"),
    Left("M30", "MTP experts stacked, those of the trunk apart", "tests/test_gated.py has it, with packed experts"),
    Left("M58", "the hidden state is taken after the final norm", "a fault of what runs the head, not of files"),
]  # fmt: skip


def _of(id: str) -> Case:
    return next(case for case in MUTANTS if case.id == id)


def pair(one: str, other: str, on: str, made: str = "") -> Case:
    """Two faults in one checkpoint: what has to be said of either has to be said of both."""
    a, b = _of(one), _of(other)
    what = f"{a.what}; {b.what}"
    both = replace(a, id=f"{one}+{other}", what=what, edit=hf.both(a.edit, b.edit), on=(on,), made=made or a.made)
    return replace(both, expects=(*a.expects, *b.expects))


PAIRS = [
    pair("M56", "M65m", "glm4_moe"),
    pair("M60", "M71", "qwen2_mtp"),
    pair("M59", "M62", "glm4_moe"),
    pair("X15", "M56", "qwen2_mtp"),
    pair("M56", "M82", "qwen2_mtp", "torch --pp 2"),
    pair("X02", "M12", "qwen3_mtp"),
    pair("M32", "M41", "qwen3_mtp"),
    pair("M49", "M15", "qwen3_mtp"),
    pair("M34", "X06", "glm4_moe"),
    pair("M36", "M34", "deepseek_v3"),
    pair("M59h", "M13", "glm4_moe"),
    pair("M67", "M14", "deepseek_v3 in FP8"),
]


def applied(cases: list[Case]) -> list[tuple[Case, str]]:
    """Every case on every original it fits."""
    return [(case, name) for case in cases for name in case.on]


def in_every_fixture() -> list[tuple[Case, str]]:
    """What is done, or legal, whatever the family: every case on every fixture that has a place for it."""
    everywhere = [case for case in LEGAL if case.on == STORED]
    return [(case, name) for case, name in applied([*FAMILIES, *everywhere]) if name in STORED]


__all__ = ["FAMILIES", "LEFT", "LEGAL", "MUTANTS", "PAIRS", "Case", "applied", "in_every_fixture"]
