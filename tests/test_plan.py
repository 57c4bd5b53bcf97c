"""Plans against numpy: whatever an operation does to an array, it does to a plan; and every row undoes itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpcheck import move
from mtpcheck.box import Box
from mtpcheck.move import fill, read_plan, slabs
from mtpcheck.plan import Plan, concat, stack
from mtpcheck.rows import Row, factored

ITEMSIZES = st.sampled_from([1, 2, 4, 8])
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes as a source."""

    data: bytes
    name: str = "memory"

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        assert offset >= 0 and offset + len(buffer) <= len(self.data)
        buffer[:] = self.data[offset : offset + len(buffer)]

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return f"byte {offset}"


def specimen(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> tuple[np.ndarray, Plan]:
    """An array of distinct elements and the plan that reads it, at an odd place of a bigger source."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, 3 + prod(shape) * itemsize, dtype="u1").tobytes()
    array = np.frombuffer(raw, f"V{itemsize}", prod(shape), 3).reshape(shape)
    return array, Plan.region(Memory(raw), 3, shape, itemsize)


def read(plan: Plan) -> bytes:
    return bytes(read_plan(plan))


@st.composite
def programs(draw: st.DrawFn) -> tuple[np.ndarray, Plan]:
    """An array and a plan after the same few random operations."""
    array, plan = specimen(draw(SHAPES), draw(ITEMSIZES))
    for _ in range(draw(st.integers(0, 5))):
        axis = draw(st.integers(0, array.ndim - 1)) if array.ndim else 0
        match draw(st.sampled_from(["slice", "permute", "reshape", "concat", "stack", "zeros"])):
            case "slice" if array.ndim and array.shape[axis] > 1:
                lo = draw(st.integers(0, array.shape[axis] - 1))
                hi = draw(st.integers(lo + 1, array.shape[axis]))
                array, plan = np.take(array, range(lo, hi), axis), plan.slice(axis, lo, hi)
            case "permute":
                order = draw(st.permutations(range(array.ndim)))
                array, plan = array.transpose(order), plan.permute(order)
            case "reshape":
                shape = draw(reshapes(array.size))
                array, plan = array.reshape(shape), plan.reshape(shape)
            case "concat" if array.ndim:
                array, plan = np.concatenate([array, array], axis), concat([plan, plan], axis)
            case "stack":
                array, plan = np.stack([array, array]), stack([plan, plan])
            case "zeros" if array.ndim:
                zeros = np.zeros(array.shape, array.dtype)
                array = np.concatenate([array, zeros], axis)
                plan = concat([plan, Plan.zeros(zeros.shape, plan.itemsize)], axis)
    return array, plan


@st.composite
def reshapes(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    shape: list[int] = []
    while size > 1 and len(shape) < 5:
        factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        shape.append(factor)
        size //= factor
    return (*shape, size)


@given(programs())
@settings(deadline=None, max_examples=300)
def test_operations_do_what_numpy_does(program: tuple[np.ndarray, Plan]) -> None:
    array, plan = program
    assert plan.shape == array.shape
    assert read(plan) == array.tobytes()
    assert read(plan.normalise()) == array.tobytes()
    assert len(plan.normalise().boxes) <= len(plan.boxes)


@given(programs(), st.integers(1, 64))
@settings(deadline=None)
def test_slabs_cover_the_tensor_once_and_in_order(program: tuple[np.ndarray, Plan], limit: int) -> None:
    array, plan = program
    whole, at = bytearray(), 0
    for start, part in slabs(plan, limit):
        assert start == at
        assert part.nbytes <= max(limit, plan.itemsize)
        whole += read_plan(part)
        at += part.nbytes
    assert bytes(whole) == array.tobytes()


@given(programs())
@settings(deadline=None)
def test_unstack_is_one_slice_an_index(program: tuple[np.ndarray, Plan]) -> None:
    array, plan = program
    if array.ndim:
        assert [read(part) for part in plan.unstack()] == [array[i].tobytes() for i in range(len(array))]
        assert read(stack(plan.unstack())) == array.tobytes()


@pytest.mark.parametrize("direct", [1, 1 << 30])
def test_long_and_short_runs_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch, direct: int) -> None:
    monkeypatch.setattr(move, "_DIRECT", direct)
    array, plan = specimen((4, 6, 8), 2)
    assert read(plan.permute((1, 0, 2)).slice(2, 1, 5)) == array.transpose(1, 0, 2)[:, :, 1:5].tobytes()
    _, wide = specimen((3, 5000), 8)
    buffer = bytearray(3 * 8)
    fill(wide.slice(1, 0, 1), memoryview(buffer))
    assert bytes(buffer) == read(wide)[0:8] + read(wide)[40000:40008] + read(wide)[80000:80008]


@given(SHAPES, ITEMSIZES, st.data())
@settings(deadline=None, max_examples=200)
def test_every_operation_composed_with_its_inverse_is_the_identity(
    shape: tuple[int, ...], itemsize: int, data: st.DataObject
) -> None:
    _, plan = specimen(shape, itemsize)
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(i) for i in range(len(shape))]
    assert plan.permute(order).permute(back).normalise() == plan
    other = data.draw(reshapes(prod(shape)))
    assert plan.reshape(other).reshape(shape).normalise() == plan
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    halves = [plan.slice(axis, 0, cut), plan.slice(axis, cut, shape[axis])]
    assert concat([half for half in halves if half.boxes], axis).normalise() == plan
    assert stack(plan.unstack()).normalise() == plan
    padded = concat([plan, Plan.zeros(shape, itemsize)], axis)
    assert padded.slice(axis, 0, shape[axis]).normalise() == plan
    assert plan.permute(order).reshape(other).reshape([shape[i] for i in order]).permute(back).normalise() == plan


@given(
    groups=st.integers(1, 4), per_group=st.integers(1, 4), dim=st.integers(1, 4), hidden=st.integers(1, 5),
    itemsize=ITEMSIZES, tp=st.sampled_from([1, 2, 4, 8]), bias=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_grouped_qkv_cut_for_any_tp_comes_back(
    groups: int, per_group: int, dim: int, hidden: int, itemsize: int, tp: int, bias: bool
) -> None:
    tail = () if bias else ((hidden,),)
    shapes = {
        "q": ((groups, per_group, dim), *tail),
        "k": ((groups, 1, dim), *tail),
        "v": ((groups, 1, dim), *tail),
    }
    assert_row_inverts(Row("qkv", ("q", "k", "v"), axis=1), shapes, itemsize, tp)


@given(
    stacked=st.lists(st.integers(1, 3), max_size=2), rows=st.integers(1, 5), hidden=st.integers(1, 4),
    axis=st.integers(0, 1), itemsize=ITEMSIZES, tp=st.sampled_from([1, 2, 4]), pad=st.none() | st.integers(0, 6),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_stacked_halves_cut_for_any_tp_come_back(
    stacked: list[int], rows: int, hidden: int, axis: int, itemsize: int, tp: int, pad: int | None
) -> None:
    count = prod(stacked)
    parts = tuple(f"{half}{i}" for i in range(count) for half in ("gate", "up"))
    shapes = {part: ((rows,), (hidden,)) for part in parts}
    joined = 2 * rows if axis == 0 else rows
    row = Row("fc1", parts, axis, tuple(stacked), None if pad is None or stacked else joined + pad)
    assert_row_inverts(row, shapes, itemsize, tp)


def assert_row_inverts(row: Row, shapes: dict[str, tuple[tuple[int, ...], ...]], itemsize: int, tp: int) -> None:
    """Join, cut into ``tp`` shards of unequal size if need be, put together again, split: the identity."""
    sources = {part: specimen(factored(shapes[part]), itemsize, seed)[1] for seed, part in enumerate(shapes)}
    stored = row.join(sources, shapes)
    assert stored.shape == row.shape(shapes)
    n = stored.shape[0]
    cuts = [n * r // tp for r in range(tp + 1)]
    shards = [stored.slice(0, a, b) for a, b in pairwise(cuts) if b > a]
    back = row.split(concat(shards, 0), shapes)
    assert {part: plan.normalise() for part, plan in back.items()} == sources


def test_normalise_does_not_call_a_swap_the_identity() -> None:
    _, plan = specimen((2, 6), 2)
    swapped = concat([plan.slice(1, 3, 6), plan.slice(1, 0, 3)], 1)
    assert swapped.as_region() is None
    back = concat([swapped.slice(1, 3, 6), swapped.slice(1, 0, 3)], 1)
    assert back.as_region() == (plan.boxes[0].source, 3)
    assert back.normalise() == plan


def test_a_plan_that_reads_another_place_is_not_the_identity() -> None:
    _, plan = specimen((4, 4), 2)
    shifted = Plan(plan.shape, 2, tuple(Box(b.lo, b.size, b.source, b.offset + 2, b.steps) for b in plan.boxes))
    assert shifted.normalise() != plan
    assert Plan.zeros((2, 2), 2).as_region() is None


def test_place_of_names_the_byte() -> None:
    _, plan = specimen((4, 4), 2)
    assert plan.permute((1, 0)).place_of((1, 2)) == f"byte {3 + (2 * 4 + 1) * 2}"
