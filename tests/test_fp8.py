"""Block-scaled FP8: to bf16 as torch does it, back to the very codes, and never codes that the values are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given as given_
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.e4m3 import decode, encode
from mtpcheck.errors import CheckpointFails
from mtpcheck.files import LocalFile
from mtpcheck.fp8 import WHOLE, Coded, Dequantized, Grid, Strange
from mtpcheck.inspect import inspect
from mtpcheck.megatron import Options
from mtpcheck.move import read_plan
from mtpcheck.plan import Plan
from mtpcheck.proof import prove
from mtpcheck.quantize import Given
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import TensorRef
from mtpcheck.topology import Topology
from mtpcheck.verify import verify
from tests import coded
from tests.test_roundtrip import sha256

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
NUMBERS = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
RANKS = Options("local", topology=Topology(tp=2, etp=1, pp=2, ep=2, first=1))


# ---- the arithmetic


def given(name: str, dtype: str, array: np.ndarray[Any, Any]) -> TensorRef:
    return TensorRef(dtype, Plan.region(Given(name, array.tobytes()), 0, array.shape, array.itemsize))


def all_codes(scales: np.ndarray[Any, Any], nan: bool = True) -> tuple[np.ndarray[Any, Any], Grid]:
    """Bits of bf16 values of all 256 codes, or of those that are numbers, in every row, and the grid: a scale a row."""
    codes = np.tile(np.arange(256, dtype=np.uint8) if nan else NUMBERS, (len(scales), 1))
    grid = Grid(given("scales", "F32", scales.astype(np.float32)[:, None]), (1, 256), codes.shape, "x")
    plan = Plan.region(Dequantized(given("codes", "F8_E4M3", codes).plan, grid), 0, codes.shape, 2)
    return np.frombuffer(read_plan(plan), np.uint16).reshape(codes.shape), grid


def codes_of(values: np.ndarray[Any, Any], grid: Grid) -> np.ndarray[Any, Any]:
    source = Coded(given("values", "BF16", values).plan, grid)
    return np.frombuffer(read_plan(Plan.region(source, 0, values.shape, 1)), np.uint8).reshape(values.shape)


@pytest.mark.parametrize("block", [(128, 128), (3, 5), (1, 7), (1 << 62, 1 << 62)])
@pytest.mark.parametrize("nan", [False, True])
def test_any_rows_of_any_blocks(block: tuple[int, int], nan: bool) -> None:
    """Slabs begin and end anywhere in blocks that are ragged at the edges, there and back."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x7F, (300, 1000), dtype=np.uint8) | rng.integers(0, 2, (300, 1000), dtype=np.uint8) << 7
    codes[70, 33] |= 0x7F if nan else 0
    shape = tuple(-(-n // min(edge, n)) for n, edge in zip(codes.shape, block, strict=True))
    scales = rng.random(shape, np.float32) + np.float32(0.5)
    grid = Grid(given("scales", "F32", scales), block if shape != (1, 1) else WHOLE, codes.shape, "x")
    plan = Plan.region(Dequantized(given("codes", "F8_E4M3", codes).plan, grid), 0, codes.shape, 2)
    rows, columns = (np.arange(n) // min(edge, n) for n, edge in zip(codes.shape, block, strict=True))
    products = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scales[rows][:, columns])
    expected = products.bfloat16().view(torch.int16).numpy().view(np.uint16)
    for first, end in ((0, 300), (0, 1), (127, 129), (1, 300), (130, 131)):
        got = np.frombuffer(read_plan(plan.slice(0, first, end)), np.uint16).reshape(end - first, -1)
        odd = codes[first:end] & 0x7F == 0x7F
        assert (got[~odd] == expected[first:end][~odd]).all()
        assert (got[odd] == (codes[first:end][odd].astype(np.uint16) >> 7 << 15 | 0x7FC0)).all()
        coded = Coded(plan, grid)
        back = read_plan(Plan.region(coded, 0, codes.shape, 1).slice(0, first, end))
        assert bytes(back) == codes[first:end].tobytes()
        assert coded.strangers(first, end) == 0


@pytest.mark.parametrize("nan", [False, True])
def test_one_slab_after_another_of_nearly_the_same_form(nan: bool) -> None:
    """What a thread keeps of one slab is never taken for that of the next one."""
    rng = np.random.default_rng(2)
    codes = rng.choice(NUMBERS, (9, 8))
    codes[3, 3] |= 0x7F if nan else 0
    scales = rng.random((3, 2), np.float32) + np.float32(0.5)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    values, back = np.empty(codes.shape, np.uint16), np.empty_like(codes)
    for first in (0, 1, 2, 3, 4, 0):
        for wide in (4, 5, 4):
            rows, columns = (np.arange(9) + first) // 4 - first // 4, np.arange(8) // wide
            expected = (numbers * torch.from_numpy(scales[rows][:, columns])).bfloat16()
            decode(codes, scales, (4, wide), first, values)
            got = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
            assert encode(values, scales, (4, wide), first, back) == 0
            assert (back == codes).all()


@pytest.mark.parametrize("exponent", range(256))
@pytest.mark.parametrize("sign", [0, 1])
def test_all_codes_under_scales_of_every_exponent(exponent: int, sign: int) -> None:
    """Values are torch's; from 2^-124 to 2^118 no two codes have one value, and every code comes back."""
    mantissas = np.array([0, 1, 0x2AAAAA, 0x400000, 0x7FFFFE, 0x7FFFFF], np.uint32)
    scales = (mantissas | np.uint32(exponent << 23 | sign << 31)).view(np.float32)
    ours, grid = all_codes(scales)
    theirs = (CODES.float() * torch.from_numpy(scales)[:, None]).bfloat16()
    number = ~torch.isnan(theirs).numpy()
    assert (ours[number] == theirs.view(torch.int16).numpy().view(np.uint16)[number]).all()
    assert ((ours[~number] & 0x7FFF) == 0x7FC0).all()
    exact = 3 <= exponent <= 245
    assert grid.collapsed == (not exact)
    for row in ours:
        assert len(np.unique(row)) == 256 if exact else len(np.unique(row)) <= 256
    if exact:
        assert (codes_of(ours, grid) == np.arange(256)).all()
    for n, row in enumerate(ours):  # without NaN, and one by one: they are multiplied where that can be
        assert (all_codes(scales[n : n + 1], nan=False)[0] == row[NUMBERS]).all()


@settings(deadline=None)
@given_(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=40))
def test_every_code_comes_back_under_any_scale_in_range(drawn: list[int]) -> None:
    bits = np.array([b for b in drawn if 3 <= b >> 23 & 0xFF <= 245] or [0x3F800000], np.uint32)
    ours, grid = all_codes(bits.view(np.float32))
    assert (codes_of(ours, grid) == np.arange(256)).all()


@pytest.mark.parametrize("scale", [2.0**-124, 3e-5, 1.0, 1.7, -0.3, 2.0**118])
def test_no_value_but_those_of_codes_is_coded(scale: float) -> None:
    """Of all 65,536 bf16 numbers just those pass that a code gives."""
    ours, _ = all_codes(np.array([scale]))
    values = np.arange(1 << 16, dtype=np.uint16)[None]
    grid = Grid(given("scale", "F32", np.array([[scale]], np.float32)), (1, 1 << 16), values.shape, "x")
    source = Coded(given("values", "BF16", values).plan, grid)
    assert source.strangers(0, 1) == (1 << 16) - 256
    with pytest.raises(Strange, match="x"):
        read_plan(Plan.region(source, 0, values.shape, 1))
    own = ours.reshape(1, -1)
    grid = Grid(given("scale", "F32", np.array([[scale]], np.float32)), (1, 256), own.shape, "x")
    assert Coded(given("values", "BF16", own).plan, grid).strangers(0, 1) == 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("scale", [1.0, np.inf])
def test_a_matrix_of_no_elements(shape: tuple[int, int], scale: float) -> None:
    scales = np.full(tuple(-(-n // 2) for n in shape), scale, np.float32)
    empty = np.empty(shape, np.uint8)
    decode(empty, scales, (2, 2), 0, empty.astype(np.uint16))
    assert encode(empty.astype(np.uint16), scales, (2, 2), 0, empty) == 0
    assert not Grid(given("scales", "F32", scales), (2, 2), shape, "x").collapsed


@pytest.mark.parametrize("shape", [(1, 1), (40, 24), (41, 25), (39, 23), (80, 7), (5, 100)])
def test_matrices_of_every_raggedness_there_and_back(shape: tuple[int, int], tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, shape, generator=drawn, dtype=torch.uint8)
    grid = torch.rand(-(-shape[0] // 40), -(-shape[1] // 24), generator=drawn) + 0.5
    path = tmp_path / "raw"
    path.write_bytes(codes.numpy().tobytes() + grid.numpy().tobytes())
    file = LocalFile(path)
    scales = TensorRef("F32", Plan.region(file, codes.numel(), tuple(grid.shape), 4))
    kept = Grid(scales, (40, 24), shape, "x")
    plan = Plan.region(Dequantized(Plan.region(file, 0, shape, 1), kept), 0, shape, 2)
    wide = grid.repeat_interleave(40, 0)[: shape[0]].repeat_interleave(24, 1)[:, : shape[1]]
    expected = (codes.view(torch.float8_e4m3fn).float() * wide).bfloat16()
    got = torch.frombuffer(read_plan(plan), dtype=torch.bfloat16).reshape(shape)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert bytes(read_plan(Plan.region(Coded(plan, kept), 0, shape, 1))) == codes.numpy().tobytes()
    for rows, columns in (((0, 1), (0, 1)), ((shape[0] // 2, shape[0]), (shape[1] // 3, shape[1]))):
        part = plan.slice(0, *rows).slice(1, *columns)
        assert (
            bytes(read_plan(part))
            == got[slice(*rows), slice(*columns)].contiguous().view(torch.int16).numpy().tobytes()
        )


# ---- checkpoints


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coded.make(tmp_path_factory.mktemp("coded") / "hf")


@pytest.mark.parametrize("fp8", ["dequantize", "keep"])
@pytest.mark.parametrize("scales", get_args(coded.Scales))
@pytest.mark.parametrize("via, options", [("torch_dist", Options()), ("torch", RANKS)], ids=["torch_dist", "torch"])
def test_a_release_in_fp8_round_trips_byte_for_byte(
    scales: coded.Scales, via: Any, options: Options, fp8: Any, tmp_path: Path
) -> None:
    made = coded.make(tmp_path / "hf", scales)
    report = roundtrip(made, options=replace(options, fp8=fp8), via=via, keep=tmp_path / "kept")
    assert report.verdict == "holds", report.findings
    assert sha256(tmp_path / "kept" / "hf") == sha256(made)
    (aside,) = (f for f in report.findings if f.check == "quantization.aside")
    assert aside.subject == ("136 tensors" if scales.startswith("one") else "68 tensors")
    dtypes = {ref.dtype for ref in open_checkpoint(tmp_path / "kept" / via).tensors.values()}
    assert ("F8_E4M3" in dtypes) == (fp8 == "keep")


def test_scales_out_of_range_keep_their_codes_beside_megatron(tmp_path: Path) -> None:
    made = coded.make(tmp_path / "hf")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    change(made, name + "_scale_inv", lambda t: t.fill_(2.0**-130))
    report = roundtrip(made, keep=tmp_path / "kept")
    assert report.verdict == "holds", report.findings
    assert sha256(tmp_path / "kept" / "hf") == sha256(made)
    (kept,) = (tmp_path / "kept").rglob("aside.safetensors")
    assert [n for n in load_file(kept) if not n.endswith("_scale_inv")] == [name]


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], Any]) -> None:
    """Change one tensor in its shard; what ``edit`` gives takes its place, if it is a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(folder / index[name])
    made = edit(tensors[name])
    if isinstance(made, torch.Tensor) and made is not tensors[name]:
        tensors[name] = made.contiguous()
    save_file(tensors, folder / index[name], {"format": "pt"})
    coded.index_again(folder)


def test_both_sides_are_read(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "megatron")
    for a, b in ((source, tmp_path / "megatron"), (tmp_path / "megatron", source)):
        report = verify(a, b)
        assert report.verdict == "holds", report.findings
    found = inspect(source)
    assert (found.family, found.mtp_stored, found.dtypes["F8_E4M3"]) == ("deepseek_v3", 1, 68)


@pytest.mark.parametrize("via", ["torch_dist", "torch"])
def test_the_plan_lists_value_nodes_apart(source: Path, via: Any) -> None:
    report = prove(source, options=RANKS if via == "torch" else None, via=via)
    assert report.verdict == "holds"
    details = {check.group: (check.status, check.detail) for check in report.checks}
    assert details["plan"][1].endswith("68 value nodes")
    assert details["quantization"] == ("skipped", "68 value nodes (FP8 to bf16 and back) are proved by bytes alone")


# ---- damage

DOWN = "model.layers.3.mlp.experts.1.down_proj.weight"
KV = "model.layers.3.self_attn.kv_b_proj.weight"
DAMAGE: dict[str, tuple[str, Callable[[torch.Tensor], Any], str]] = {
    "last row missing": (DOWN, lambda t: t[:-1].clone(), "expected [2, 2]: one scale for each block of 40 × 24"),
    "squeezed": (DOWN, lambda t: t.reshape(-1).clone(), "expected [2, 2]: one scale for each block of 40 × 24"),
    "transposed": (KV, lambda t: t.T.clone(), "expected [4, 1]"),
    "transposed square": (DOWN, lambda t: t.T.clone(), "the grid of scales is transposed"),
    "doubled": (DOWN, lambda t: t.mul_(2), "every scale is 2 times what it was"),
    "one block doubled": (DOWN, lambda t: t[1, 1].mul_(2) and None, "the scale of block [1, 1] is 2 times what it was"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_scales_are_caught_and_named(what: str, source: Path, tmp_path: Path) -> None:
    name, edit, told = DAMAGE[what]
    folder = Path(shutil.copytree(source, tmp_path / "bad"))
    change(folder, name + "_scale_inv", edit)
    report = verify(source, folder)
    assert report.exit_code == 1
    assert any(told in f"{f.message} {f.cause}" and name in f.subject for f in report.failures), report.failures


def test_scales_of_another_tensor_are_named(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "bad"))
    other = "model.layers.3.mlp.experts.2.down_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    scales = load_file(folder / index[other + "_scale_inv"])[other + "_scale_inv"]
    change(folder, DOWN + "_scale_inv", lambda t: scales.clone())
    (found,) = verify(source, folder).failures
    assert (found.subject, found.cause) == (DOWN + "_scale_inv", f"these are the scales of {other}")


def test_renamed_scales_are_missed(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "bad"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index[DOWN]
    tensors = load_file(file)
    tensors[DOWN.removesuffix("weight") + "weight_scale"] = tensors.pop(DOWN + "_scale_inv")
    save_file(tensors, file, {"format": "pt"})
    coded.index_again(folder)
    report = verify(source, folder)
    assert any(f"{DOWN}_scale_inv is missing" in f.message for f in report.failures)
    with pytest.raises(CheckpointFails, match="_scale_inv is missing"):
        convert(folder, tmp_path / "megatron")


def test_values_of_megatron_that_no_code_gives_are_seen_against_the_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "megatron", "torch")
    (file,) = (tmp_path / "megatron").rglob("*.pt")
    root = torch.load(file, weights_only=False)
    root["model"]["mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.weight"][0, 0] = 0.123
    torch.save(root, file)
    (found,) = verify(source, tmp_path / "megatron").failures
    assert (found.check, found.subject) == ("values.bits", KV)
    assert open_checkpoint(source).tensors[KV].dtype == "F8_E4M3"
