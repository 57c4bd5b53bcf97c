"""Tensors that no catalogue of damage has: odd names, dtypes and values, many alike, and few elements."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from mtpcheck.convert import convert
from mtpcheck.report.junit import as_junit
from mtpcheck.report.report import Component, Report
from mtpcheck.verify import verify
from tests.megatron_edit import drop_keys
from tests.test_diagnosis import EH, EXPERTS, KINDS, MTP, OUT, Change, K, Q, Tensors, changed, of_experts

NORM = MTP + "enorm.weight"
Sides = tuple[Path, Path]


def sides(folder: Path, before: Change, after: Change) -> Sides:
    """A reference after ``before``, and a candidate after both."""

    def both(t: Tensors) -> None:
        before(t)
        after(t)

    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
    return changed(folder / "a", before), changed(folder / "b", both)


def nothing(t: Tensors) -> None:
    pass


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda t: t.update({name: tensor})


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def causes(found: Sides) -> list[str]:
    return [f.cause_id for f in verify(*found).failures]


# ---- dtypes


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda v: v * 3, "scaled"),
        (lambda v: (v.float() + 1).double(), "offset"),
        (lambda v: v.bfloat16().double(), "cast"),
        (lambda v: v * 2 + 1e-12, ""),
    ],
)
def test_a_tensor_of_f64(change: object, cause: str, tmp_path: Path) -> None:
    before = noise(16, 16).double()
    assert callable(change)
    assert causes(sides(tmp_path, put("wide", before), put("wide", change(before)))) == [cause]


def test_parts_of_two_dtypes_that_megatron_joins(tmp_path: Path) -> None:
    source = changed(tmp_path, lambda t: t.update({K: t[K].float()}))
    convert(source, tmp_path / "megatron", "torch_dist")
    iteration = next(path for path in (tmp_path / "megatron").iterdir() if path.is_dir())
    assert verify(source, iteration).verdict == "holds"
    assert drop_keys(iteration, lambda key: key.startswith("mtp") and "linear_qkv.weight" in key) == 1
    (lost,) = verify(source, iteration).failures
    assert lost.check == "presence.missing"


# ---- names


def test_a_name_like_that_of_a_part_hides_none(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        t["mtp.0.attn.q"] = torch.zeros(8, 8)
        t[Q] = t[Q].flip(1)

    found = verify(*sides(tmp_path, put("mtp.0.attn.q", noise(8, 8)), change)).failures
    assert {f.subject: f.cause_id for f in found} == {"mtp.0.attn.q": "zeroed", Q: "columns-permuted"}


@pytest.mark.parametrize("lead", ["layers.99", "mtp.7", "x.experts.1"])
def test_layers_and_experts_that_the_model_has_not(lead: str, tmp_path: Path) -> None:
    other = f"{lead[:-1]}{int(lead[-1]) - 1}"
    before = {f"{lead}.w": noise(8, 8), f"{other}.w": noise(8, 8) * 2}
    taken = put(f"{lead}.w", before[f"{other}.w"])
    (cause,) = causes(sides(tmp_path, lambda t: t.update(before), taken))
    assert cause in ("taken-from", "experts-duplicated")


def test_experts_numbered_from_one(tmp_path: Path) -> None:
    before = {f"x.experts.{i}.w": noise(8, 8) * i for i in range(1, 5)}
    after = {f"x.experts.{i}.w": before[f"x.experts.{i % 4 + 1}.w"] for i in range(1, 5)}
    assert causes(sides(tmp_path, lambda t: t.update(before), lambda t: t.update(after))) == ["experts-permuted"]


# ---- values


@pytest.mark.parametrize("equal", [(1, 2), (1, 3)])
def test_equal_experts_are_not_taken_for_duplicated(equal: tuple[int, int], tmp_path: Path) -> None:
    alike = of_experts({equal[1]: equal[0]})
    (cause,) = causes(sides(tmp_path, alike, of_experts({i: (i + 1) % 4 for i in range(4)})))
    assert cause in ("experts-rolled", "experts-permuted")


def test_one_element_is_no_constant_for_all(tmp_path: Path) -> None:
    def large(t: Tensors) -> None:
        t[NORM].fill_(100)[3] = 0.01

    def one(t: Tensors) -> None:
        t[NORM] = t[NORM].clone()
        t[NORM][3] = 0.02  # 0.01 added to 100 is 100 in bf16

    assert causes(sides(tmp_path, large, one)) == [""]


def test_a_single_number_is_not_traced(tmp_path: Path) -> None:
    scales = {"a.scale": torch.tensor([1.5]), "b.scale": torch.tensor([2.5])}
    assert causes(sides(tmp_path, lambda t: t.update(scales), put("a.scale", torch.tensor([2.5])))) == [""]


def test_nan_has_no_distance(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        t[EH] = t[EH].clone()
        t[EH].view(-1)[5:9] = torch.nan

    (found,) = verify(*sides(tmp_path, nothing, change)).failures
    assert found.cause == "0.0488 % of the elements differ; 4 became NaN or infinite"


# ---- zeros


def matrices_times_zero(t: Tensors) -> None:
    t.update({name: tensor * 0 for name, tensor in t.items() if name.startswith(MTP) and tensor.dim() > 1})


def test_a_trained_head_of_signed_zeros_is_dead(tmp_path: Path) -> None:
    def trained(t: Tensors) -> None:
        t[EH] = t[EH] * 0
        t["model.layers.0.self_attn.q_proj.weight"] = t["model.layers.0.self_attn.q_proj.weight"] * 2

    found = verify(*sides(tmp_path, nothing, trained), values="changed")
    assert [(f.check, f.subject) for f in found.failures] == [("values.zero", EH)]


def test_zero_matrices_of_the_reference_are_a_warning_and_biases_none(tmp_path: Path) -> None:
    same, zero = sides(
        tmp_path / "bias", lambda t: t.update({n: v * 0 for n, v in t.items() if "proj.bias" in n}), nothing
    )
    report = verify(same, zero)
    assert report.verdict == "holds" and not report.source_faults
    report = verify(*sides(tmp_path / "one", lambda t: t.update({OUT: t[OUT] * 0}), nothing))
    assert report.verdict == "holds" and [(f.check, f.subject) for f in report.source_faults] == [("values.zero", OUT)]
    report = verify(*sides(tmp_path / "all", matrices_times_zero, nothing))
    assert report.verdict == "fails" and {f.check for f in report.failures} == {"values.zero"}


# ---- components


def differing(report: Report) -> dict[str, int]:
    return {own.name: own.differing for own in report.components if own.differing}


def test_only_the_part_that_differs_counts(tmp_path: Path) -> None:
    def one(t: Tensors) -> None:
        name = f"{EXPERTS}1.{KINDS[0]}"
        t[name] = t[name].clone()
        t[name][3] = 0

    for name, folder in zip("ab", sides(tmp_path, nothing, one), strict=True):
        convert(folder, tmp_path / f"{name}-megatron", "torch_dist")
    report = verify(tmp_path / "a-megatron", tmp_path / "b-megatron")
    assert differing(report) == {"mtp.0": 1}


def test_what_megatron_holds_wider_does_not_differ(tmp_path: Path) -> None:
    source, wide = sides(tmp_path, nothing, lambda t: t.update({K: t[K].float()}))
    convert(wide, tmp_path / "megatron", "torch_dist")
    report = verify(source, tmp_path / "megatron")
    assert report.verdict == "holds" and not differing(report)
    assert isinstance(report.components[0], Component) and "<failure" not in as_junit(report)


# ---- many


def seconds(found: Sides) -> float:
    start = time.process_time()
    assert verify(*found).verdict == "fails"
    return time.process_time() - start


def test_many_equal_scales_take_no_quadratic_time(tmp_path: Path) -> None:
    def many(count: int) -> Sides:
        old = {f"x.{i}.input_scale": torch.tensor([1.5]) for i in range(count)}

        def renamed(t: Tensors) -> None:
            t.update({name.replace("x.", "y."): t.pop(name) for name in old})

        return sides(tmp_path / str(count), lambda t: t.update(old), renamed)

    assert seconds(many(1200)) < 12 * seconds(many(200)) + 1


def test_rows_in_another_order_are_read_in_blocks(tmp_path: Path) -> None:
    before = noise(60_000)
    start = time.process_time()
    (found,) = verify(*sides(tmp_path, put("v", before), put("v", before.flip(0)))).failures
    assert found.cause_id == "rows-permuted" and time.process_time() - start < 10
