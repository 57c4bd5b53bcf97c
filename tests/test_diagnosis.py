"""Whatever is done to a checkpoint is named, if it can be confirmed; what cannot is described, and never joined."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpcheck.convert import convert
from mtpcheck.diagnosis import causes
from mtpcheck.diagnosis.numbers import floats, half_step, rounded
from mtpcheck.diagnosis.same import same, samples
from mtpcheck.diagnosis.words import components, listed, numbers
from mtpcheck.plan import Plan
from mtpcheck.report.finding import Finding
from mtpcheck.report.report import cause_table
from mtpcheck.verify import verify
from tests import coded
from tests.conftest import FIXTURES, edit_json
from tests.megatron_edit import drop_keys, edit_metadata, payload_of

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Any]

SOURCE = FIXTURES / "glm4_moe"
MTP = "model.layers.3."
EH, DOWN, Q, K, OUT = (
    MTP + name + ".weight"
    for name in ("eh_proj", "mlp.shared_experts.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj")
)
BIAS = MTP + "mlp.gate.e_score_correction_bias"
EXPERTS, SHARED = MTP + "mlp.experts.", MTP + "mlp.shared_experts."
KINDS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def changed(folder: Path, change: Change, source: Path = SOURCE) -> Path:
    """A copy of an HF checkpoint, in one file, after ``change``."""
    target = folder / "candidate"
    shutil.copytree(source, target)
    tensors: Tensors = {}
    for shard in sorted(target.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def failures(reference: Path, candidate: Path) -> list[Finding]:
    found = verify(reference, candidate).failures
    return [f for f in found if f.check.split(".")[0] in ("values", "presence")]


# ---- edits of HF tensors


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda t: t.update({name: change(t[name])})


def exchange(t: Tensors, a: str, b: str) -> None:
    t[a], t[b] = t[b], t[a]


def of_experts(source: Mapping[int, int]) -> Change:
    """Every expert gets all tensors of another."""

    def change(t: Tensors) -> None:
        old = dict(t)
        for expert, other in source.items():
            t.update({f"{EXPERTS}{expert}.{kind}": old[f"{EXPERTS}{other}.{kind}"] for kind in KINDS})

    return change


def of_layers(source: Mapping[int, int]) -> Change:
    def change(t: Tensors) -> None:
        old = dict(t)
        for name in old:
            words = name.split(".")
            if words[1] == "layers" and int(words[2]) in source:
                other = ".".join([*words[:2], str(source[int(words[2])]), *words[3:]])
                t[name] = old.get(other, old[name])

    return change


def below(lead: str, change: Callable[[torch.Tensor], torch.Tensor], dims: int) -> Change:
    return lambda t: t.update({n: change(v) for n, v in t.items() if n.startswith(lead) and v.dim() == dims})


def interleaved(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Rows of two halves in turn."""
    halves = (half.reshape(-1, block, *rows.shape[1:]) for half in rows.chunk(2))
    return torch.stack(list(halves), 1).reshape(rows.shape)


def alternating(block: int) -> Change:
    def change(t: Tensors) -> None:
        both = torch.cat([t[SHARED + KINDS[0]], t[SHARED + KINDS[1]]])
        t[SHARED + KINDS[0]], t[SHARED + KINDS[1]] = interleaved(both, block).chunk(2)

    return change


def flat_qkv(rows: torch.Tensor) -> torch.Tensor:
    """From group by group to all queries, all keys, all values; 4 groups of 2 query heads, 16 rows a head."""
    groups = rows.reshape(4, 4, 16, -1)
    pieces = (groups[:, :2], groups[:, 2], groups[:, 3])
    return torch.cat([piece.reshape(-1, *rows.shape[1:]) for piece in pieces])


def qkv_as_flat(t: Tensors) -> None:
    """Flat rows that were taken to be group by group."""
    names = [f"{MTP}self_attn.{kind}_proj.weight" for kind in "qkv"]
    groups = torch.cat([t[name] for name in names]).reshape(4, 64, 64)
    for name, rows in zip(names, groups.split([32, 16, 16], 1), strict=True):
        t[name] = rows.reshape(-1, 64)


def heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(8, 16, -1).flip(0).reshape(rows.shape)


def in_pairs(rows: torch.Tensor, rotated: int) -> torch.Tensor:
    """Of every head of 16 rows the first ``rotated`` from halves to pairs."""
    apart = rows.reshape(-1, 16, rows.shape[1])
    pairs = apart[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, apart[:, rotated:]], 1).reshape(rows.shape)


def in_halves(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1, 8, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def shuffled(matrix: torch.Tensor, axis: int) -> torch.Tensor:
    order = torch.randperm(matrix.shape[axis], generator=torch.Generator().manual_seed(1))
    return matrix.index_select(axis, order)


def shards(matrix: torch.Tensor, axis: int, order: list[int]) -> torch.Tensor:
    """Shards in another order; -1 is one of zeros."""
    cut = matrix.chunk(len(order), axis)
    return torch.cat([cut[i] if i >= 0 else torch.zeros_like(cut[0]) for i in order], axis)


def symmetric(matrix: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    values = matrix.float().reshape(-1, group)
    step = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((values / step).round() * step).reshape(matrix.shape).to(matrix.dtype)


def asymmetric(matrix: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    values = matrix.float().reshape(-1, group)
    low = values.amin(1, keepdim=True)
    step = (values.amax(1, keepdim=True) - low) / (2**bits - 1)
    return (((values - low) / step).round() * step + low).reshape(matrix.shape).to(matrix.dtype)


def noise(matrix: torch.Tensor, spread: float) -> torch.Tensor:
    drawn = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(2))
    return (matrix.float() + drawn * spread).to(matrix.dtype)


def initialised(t: Tensors) -> None:
    drawn = torch.Generator().manual_seed(0)
    for name, tensor in t.items():
        if name.startswith(MTP) and tensor.dim() == 2:
            t[name] = (torch.randn(tensor.shape, generator=drawn) * 0.02).to(tensor.dtype)
        elif name.startswith(MTP) and "norm" in name:
            t[name] = torch.ones_like(tensor)


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone().contiguous()
    tensor.view(torch.int16).view(-1)[77] ^= 1
    return tensor


CAUSES: dict[str, tuple[Change, str, str, int]] = {
    # name: (edit, cause, words of its sentence, tensors)
    "halves": (edit(EH, lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)), "halves-exchanged", "embedding half", 1),
    "gate and up": (
        lambda t: [exchange(t, f"{EXPERTS}{e}.{KINDS[0]}", f"{EXPERTS}{e}.{KINDS[1]}") for e in range(4)],
        "gate-up-exchanged", "gate and up", 8,
    ),
    "experts rolled": (of_experts({e: (e + 1) % 4 for e in range(4)}), "experts-rolled", "the one 1 after it", 12),
    "experts rolled back": (of_experts({e: (e - 1) % 4 for e in range(4)}), "experts-rolled", "the one 1 before", 12),
    "experts exchanged": (of_experts({1: 3, 3: 1}), "experts-permuted", "experts 1, 3 hold what 3, 1 held", 6),
    "experts twice": (of_experts({2: 0, 3: 1}), "experts-duplicated", "experts 2, 3 hold what 0, 1 held", 6),
    "layers exchanged": (of_layers({1: 2, 2: 1}), "layers-exchanged", "decoder layer 1 and decoder layer 2", 56),
    "layers shifted": (of_layers({1: 2, 2: 3}), "layers-shifted", "layers 1, 2 each hold what the layer 1 higher", 56),
    "layer taken": (of_layers({3: 2}), "taken-from", "MTP layer 0 holds what decoder layer 2 held", 28),
    "tensors exchanged": (
        lambda t: exchange(t, MTP + "enorm.weight", MTP + "hnorm.weight"), "exchanged", "embed_norm and hidden_norm", 2,
    ),
    "tensor taken": (lambda t: t.update({K: t[K.replace("k_", "v_")]}), "taken-from", "v_proj.weight held", 1),
    "embedding for head": (
        lambda t: t.update({MTP + "shared_head.head.weight": t["model.embed_tokens.weight"]}),
        "taken-from", "holds what model.embed_tokens.weight held", 1,
    ),
    "gate and up in turn": (alternating(4), "gate-up-interleaved", "alternate, in blocks of 4", 2),
    "gate and up cut as one": (alternating(8), "gate-up-interleaved", "alternate, in blocks of 8", 2),
    "queries, keys, values": (qkv_as_flat, "qkv-regrouped", "queries, keys, values of all groups", 3),
    "heads": (edit(Q, heads), "heads-reversed", "the 8 heads", 1),
    "heads of the output": (edit(OUT, lambda x: heads(x.T).T), "heads-reversed", "the 8 heads", 1),
    "rotary pairs": (edit(Q, lambda x: in_pairs(x, 16)), "rope-permuted", "in pairs and stood in halves", 1),
    "rotary pairs of some": (edit(K, lambda x: in_pairs(x, 8)), "rope-permuted", "rows 0 to 7 of each head", 1),
    "rotary halves": (edit(K, in_halves), "rope-permuted", "in halves and stood in pairs", 1),
    "transposed square": (edit(K, lambda x: x.T), "transposed", "is transposed", 1),
    "transposed": (edit(Q, lambda x: x.T), "transposed", "is transposed", 1),
    "transposed in its shape": (edit(Q, lambda x: x.T.reshape(x.shape)), "transposed", "old shape all the same", 1),
    "rows": (edit(DOWN, lambda x: shuffled(x, 0)), "rows-permuted", "the 64 rows", 1),
    "columns": (edit(DOWN, lambda x: shuffled(x, 1)), "columns-permuted", "the 32 columns", 1),
    "shards": (edit(OUT, lambda x: shards(x, 1, [0, 2, 1, 3])), "shards-exchanged", "4 shards of columns", 1),
    "shards of rows": (edit(DOWN, lambda x: shards(x, 0, [1, 0])), "shards-exchanged", "2 shards of rows", 1),
    "shard of zeros": (edit(OUT, lambda x: shards(x, 1, [0, -1, 2, 3])), "shard-missing", "number 1 is zero", 1),
    "shard twice": (edit(OUT, lambda x: shards(x, 1, [0, 0])), "shard-missing", "number 0 stands there", 1),
    "padded": (edit("lm_head.weight", lambda x: torch.cat([x, torch.zeros_like(x[:4])])), "rows-padded", "4 rows", 1),
    "cut": (edit("lm_head.weight", lambda x: x[:-2]), "rows-cut", "the last 2 rows", 1),
    "norms": (below(MTP, lambda x: x + 1, 1), "offset", "exactly 1 was added to every element", 11),
    "offset": (edit(MTP + "enorm.weight", lambda x: x - 0.1), "offset", "0.1 was subtracted", 1),
    "offset of fp32": (edit(BIAS, lambda x: x + 0.3), "offset", "0.3", 1),
    "scaled": (edit(EH, lambda x: x * 0.3), "scaled", "0.3 times", 1),
    "doubled": (edit(EH, lambda x: x * 2), "scaled", "2 times", 1),
    "root": (edit(EH, lambda x: x * 64**0.5 / 3), "scaled", "2.6", 1),
    "fp32 as bf16": (edit(BIAS, lambda x: x.bfloat16().float()), "cast", "rounded to BF16 and widened", 1),
    "fp32 as fp16": (edit(BIAS, lambda x: x.half().float()), "cast", "rounded to F16 and widened", 1),
    "fp32 cut off": (
        edit(BIAS, lambda x: (x.view(torch.int32) & -65536).view(torch.float32)), "cast", "cut off to BF16", 1,
    ),
    "to bf16": (edit(BIAS, lambda x: x.bfloat16()), "cast", "rounded to BF16", 1),
    "to fp32": (edit(EH, lambda x: x.float()), "cast", "widened to F32", 1),
    "e4m3": (edit(EH, lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)), "cast", "F8_E4M3", 1),
    "e5m2": (edit(EH, lambda x: x.to(torch.float8_e5m2).to(x.dtype)), "cast", "F8_E5M2", 1),
    "4 bits": (below(MTP, lambda x: symmetric(x, 4, 64), 2), "quantized", "4 bits in groups of 64", 23),
    "4 bits with offsets": (edit(OUT, lambda x: asymmetric(x, 4, 32)), "quantized", "4 bits in groups of 32", 1),
    "8 bits": (edit(EH, lambda x: symmetric(x, 8, 128)), "quantized", "8 bits in groups of 128", 1),
    "8 bits with offsets": (edit(OUT, lambda x: asymmetric(x, 8, 64)), "quantized", "8 bits in groups of 64", 1),
    "zeros": (edit(EH, torch.zeros_like), "zeroed", "every element is zero", 1),
    "a constant": (edit(MTP + "enorm.weight", torch.ones_like), "constant", "every element is 1", 1),
    "a new layer": (initialised, "random", "freshly initialised", 30),
    "lost layer": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith(MTP)], "dropped", "MTP layer 0: 34 tensors, 195.3 kB", 34,
    ),
    "lost experts": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith(EXPERTS)], "dropped", "mlp.experts of MTP layer 0", 12,
    ),
    "lost embedding": (lambda t: t.pop("model.embed_tokens.weight"), "dropped", "the embedding", 1),
    "prefix": (
        lambda t: [t.update({"model." + n: t.pop(n)}) for n in list(t) if n.startswith(MTP)],
        "renamed", "with model added to the name", 34,
    ),
    "another word": (
        lambda t: [t.update({n.replace("self_attn", "attention"): t.pop(n)}) for n in list(t) if MTP + "self" in n],
        "renamed", "attention in place of self_attn", 9,
    ),
    "one renamed": (lambda t: t.update({MTP + "gain": t.pop(MTP + "enorm.weight")}), "renamed", MTP + "gain", 1),
    "renumbered": (
        lambda t: [t.update({n.replace("layers.3", "layers.5"): t.pop(n)}) for n in list(t) if n.startswith(MTP)],
        "renumbered", "layers.3 became layers.5", 34,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CAUSES)
def test_what_was_done_to_tensors_is_named(what: str, tmp_path: Path) -> None:
    change, cause, words, count = CAUSES[what]
    (found,) = failures(SOURCE, changed(tmp_path, change))
    assert (found.cause_id, max(1, len(found.members))) == (cause, count), found
    assert words in found.cause
    assert found.todo == cause_table()[cause].get("todo", "")
    assert not found.members or found.subject.startswith(f"{count} tensors of ")


def test_every_cause_is_known_and_tested() -> None:
    elsewhere = {"shard-lost", "raw-codes", "scales-transposed", "scales-scaled", "scales-taken"}
    elsewhere.add("back-filled")  # tests/test_gate.py
    elsewhere.add("other-dialect")  # tests/test_dialects.py
    assert cause_table().keys() == {cause for _, cause, _, _ in CAUSES.values()} | elsewhere


ORDERS = ["heads", "rotary pairs", "transposed square", "rows", "columns", "shards", "tensor taken", "shard of zeros"]


@pytest.mark.parametrize("what", ORDERS)
def test_what_is_almost_so_is_not_named(what: str, tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        before = {name: tensor.clone() for name, tensor in t.items()}
        CAUSES[what][0](t)
        for name in t:
            if not torch.equal(t[name], before[name]):
                t[name] = one_bit(t[name])

    (found,) = failures(SOURCE, changed(tmp_path, change))
    assert (found.cause_id, found.members) == ("", ())
    assert "% of the elements differ, by at most" in found.cause


@pytest.mark.parametrize("what", ["scaled", "e4m3", "8 bits", "norms", "zeros", "a constant"])
def test_values_that_are_almost_so_are_not_named(what: str, tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        CAUSES[what][0](t)
        name = EH if what not in ("norms", "a constant") else MTP + "enorm.weight"
        t[name].view(-1)[5] += 0.37

    found = failures(SOURCE, changed(tmp_path, change))
    unnamed = [f for f in found if not f.cause_id]
    assert [f.subject for f in unnamed] == [EH if what not in ("norms", "a constant") else MTP + "enorm.weight"]
    assert not [f for f in found if unnamed[0].subject in f.members]


def test_two_faults_are_two_findings_and_hide_nothing(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        exchange(t, MTP + "enorm.weight", MTP + "hnorm.weight")
        t[EH], t[OUT] = t[EH] * 2, noise(t[OUT], 0.001)
        t["model.layers.1.self_attn.q_proj.weight"] *= 2

    found = {f.cause_id: f for f in failures(SOURCE, changed(tmp_path, change))}
    assert found.keys() == {"exchanged", "scaled", ""}
    assert found[""].subject == OUT
    assert found["scaled"].members == ("model.layers.1.self_attn.q_proj.weight", EH), "in the order of the model"
    assert found["scaled"].subject == "2 tensors of decoder layer 1 and MTP layer 0"


def test_the_halves_of_one_tensor_may_have_two_causes(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        t[EH] = torch.cat([t[EH][:, :64] * 0, t[EH][:, 64:] * 2], 1)

    found = failures(SOURCE, changed(tmp_path, change))
    assert {(f.subject, f.cause_id) for f in found} == {(EH, "zeroed"), (EH, "scaled")}


@pytest.mark.parametrize("spread", [1e-3, 0.1])
def test_what_was_trained_is_described(spread: float, tmp_path: Path) -> None:
    found = failures(SOURCE, changed(tmp_path, below(MTP, lambda x: noise(x, spread), 2)))
    assert {f.cause_id for f in found} == {""}
    assert all("by at most" in f.cause and "ULP" in f.cause for f in found)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ([1.0, 0.0, 2.0, 3.0], [1.0, -0.0, 2.0, 3.0], "25 % of the elements differ, and only in the sign of zero"),
        ([1.0, 2.0, 3.0, 7.0], [1.0, 2.5, 3.0, 7.125], "50 % of the elements differ, by at most 0.5 (at [1]), 0.25 of"),
        ([1.0, 2.0, 3.0, 7.0], [1.0, float("nan"), 3.0, 7.125], "1 became NaN or infinite"),
    ],
)
def test_how_far_apart_two_tensors_are(before: list[float], after: list[float], words: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    reference = changed(tmp_path / "a", edit(BIAS, lambda x: torch.tensor(before)))
    (found,) = failures(reference, changed(tmp_path, edit(BIAS, lambda x: torch.tensor(after))))
    assert (found.cause_id, words in found.cause) == ("", True), found.cause


def test_a_nan_of_other_bits_is_said(tmp_path: Path) -> None:
    def nan(bits: int) -> Change:
        def change(t: Tensors) -> None:
            t[EH].view(torch.int16)[3, 3] = bits

        return change

    (tmp_path / "a").mkdir()
    (found,) = failures(changed(tmp_path / "a", nan(0x7FC0)), changed(tmp_path, nan(0x7FC1)))
    assert "only in the bits of NaN" in found.cause


def test_a_lost_shard_is_one_finding(copy_of: Callable[[str], Path]) -> None:
    candidate = copy_of("glm4_moe")
    (shard,) = candidate.glob("model-00002-*.safetensors")
    names = set(load_file(shard))
    shard.unlink()
    index = candidate / "model.safetensors.index.json"
    kept = {n: file for n, file in json.loads(index.read_text())["weight_map"].items() if n not in names}
    edit_json(index, weight_map=kept)
    (found,) = failures(SOURCE, candidate)
    assert (found.cause_id, set(found.members)) == ("shard-lost", names)
    assert shard.name in found.cause


def test_a_new_name_and_a_lost_tensor_are_told_apart(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        t[MTP + "gain"] = t.pop(MTP + "enorm.weight")
        t.pop(EH)
        t["stranger"] = torch.zeros(3)

    found = {f.subject: f for f in failures(SOURCE, changed(tmp_path, change))}
    assert {(name, f.check, f.cause_id) for name, f in found.items()} == {
        (MTP + "enorm.weight", "presence.missing", "renamed"),
        (EH, "presence.missing", ""),
        ("stranger", "presence.unclaimed", ""),
    }


def test_what_every_layer_lost_is_one_finding(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        for name in [name for name in t if name.endswith("post_attention_layernorm.weight")]:
            del t[name]

    (found,) = failures(SOURCE, changed(tmp_path, change))
    assert (found.cause_id, len(found.members)) == ("dropped", 4)
    assert found.cause.startswith("pre_mlp_norm of every layer that has it: 4 tensors")


@pytest.mark.parametrize("name", ["attn.kv_b", "x.attn.q", "mtp.0.proj.embed", "*.attn.sink"])
def test_a_stranger_may_be_called_like_a_part(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    reference = changed(tmp_path / "a", lambda t: t.update({name: torch.arange(32.0).reshape(8, 4)}))
    candidate = changed(tmp_path, lambda t: t.update({name: torch.arange(32.0).reshape(8, 4) + 1 / 3}))
    (found,) = failures(reference, candidate)
    assert (found.subject, found.check) == (name, "values.bits")
    assert "report this" not in found.cause


def test_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What resists is tried with everything a limited number of times, and still tried with what held for others."""
    calls: list[str] = []
    monkeypatch.setattr(causes, "reordered", lambda case, key: calls.append(key) or {})
    count = 3 * causes.LIMIT

    def many(change: Callable[[int, torch.Tensor], torch.Tensor]) -> Change:
        drawn = torch.Generator().manual_seed(5)
        own = [torch.randn(4, 8, generator=drawn) for _ in range(count)]
        return lambda t: t.update({f"extra.{i:03}": change(i, tensor) for i, tensor in enumerate(own)})

    (tmp_path / "a").mkdir()
    reference = changed(tmp_path / "a", many(lambda i, x: x))
    damaged = many(lambda i, x: x * 3 if i in (0, count - 1) else x + torch.arange(32.0).reshape(4, 8) / (i + 7))
    found = failures(reference, changed(tmp_path, damaged))
    assert len(calls) == causes.LIMIT
    assert [f.members for f in found if f.cause_id == "scaled"] == [("extra.000", f"extra.{count - 1:03}")]
    assert len(found) == count - 1
    assert sum(bool(f.cause) for f in found) == causes.LIMIT + 1


def test_a_green_comparison_diagnoses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(causes, "make_case", never)
    assert verify(SOURCE, SOURCE).verdict == "holds"


# ---- through Megatron's spelling


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "root"
    convert(SOURCE, folder)
    return folder


LAYER = "mtp.layers.0."
INNER = LAYER + "transformer_layer."


def rewrite(folder: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor of one chunk in its file."""
    own = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata[key]
    (_,) = own.chunks
    path, offset = payload_of(folder, key)
    raw = bytearray(path.read_bytes())
    tensor = torch.frombuffer(raw, dtype=own.properties.dtype, count=own.size.numel(), offset=offset).reshape(own.size)
    tensor.copy_(change(tensor.clone()))
    path.write_bytes(raw)


MEGATRON: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str, str, int]] = {
    "halves": ("@eh_proj", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), "halves-exchanged", "half", 1),
    "norm": ("@enorm", lambda x: x + 1, "offset", "exactly 1 was added", 1),
    "qkv": ("self_attention.linear_qkv", flat_qkv, "qkv-regrouped", "queries, keys, values of all groups", 3),
    "gate over up": (
        "mlp.shared_experts.linear_fc1", lambda x: torch.cat(x.chunk(2)[::-1]), "gate-up-exchanged", "gate and up", 2,
    ),
    "in turn": ("mlp.shared_experts.linear_fc1", lambda x: interleaved(x, 8), "gate-up-interleaved", "blocks of 8", 2),
    "transposed": (
        "mlp.shared_experts.linear_fc2", lambda x: x.T.reshape(x.shape), "transposed", "old shape all the same", 1,
    ),
    "zeros": ("self_attention.linear_proj", torch.zeros_like, "zeroed", "zero", 1),
    "shards": ("self_attention.linear_proj", lambda x: shards(x, 1, [3, 2, 1, 0]), "shards-exchanged", "3, 2, 1, 0", 1),
    "rows": ("self_attention.linear_qkv", lambda x: shuffled(x, 0), "rows-permuted", "rows", 3),
    "4 bits": ("self_attention.linear_qkv", lambda x: symmetric(x, 4, 64), "quantized", "4 bits in groups of 64", 3),
}  # fmt: skip


@pytest.mark.parametrize("what", MEGATRON)
def test_what_was_done_to_megatrons_tensors_is_named(what: str, megatron: Path, tmp_path: Path) -> None:
    key, change, cause, words, count = MEGATRON[what]
    folder = Path(shutil.copytree(megatron, tmp_path / "candidate"))
    rewrite(folder / "release", (LAYER + key[1:] if key.startswith("@") else INNER + key) + ".weight", change)
    (found,) = failures(SOURCE, folder)
    assert (found.cause_id, max(1, len(found.members))) == (cause, count), found
    assert words in found.cause
    if cause not in ("offset", "zeroed", "quantized"):
        (back,) = failures(folder, SOURCE)
        assert back.cause_id == cause, "the other way round it is the same mistake"


def test_stacked_experts_of_megatron(megatron: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(megatron, tmp_path / "candidate"))

    def roll(metadata: Any) -> None:
        for name in ("linear_fc1", "linear_fc2"):
            own = [k for k in metadata.storage_data if k.fqn == f"{INNER}mlp.experts.experts.{name}.weight"]
            own.sort(key=lambda k: k.offset)
            values = [metadata.storage_data[k] for k in own]
            metadata.storage_data.update(zip(own, [*values[1:], values[0]], strict=True))

    edit_metadata(folder / "release", roll)
    (found,) = failures(SOURCE, folder)
    assert (found.cause_id, len(found.members)) == ("experts-rolled", 12)


def renamed_keys(folder: Path, old: str, new: str) -> None:
    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if old in key]:
            metadata.state_dict_metadata[key.replace(old, new)] = metadata.state_dict_metadata.pop(key)
        metadata.storage_data = {
            dataclasses.replace(k, fqn=k.fqn.replace(old, new)): v for k, v in metadata.storage_data.items()
        }

    edit_metadata(folder, change)


def test_names_of_megatron(megatron: Path, tmp_path: Path) -> None:
    for number, (change, cause, words, count) in enumerate(
        (
            (lambda f: drop_keys(f, lambda key: key.startswith("mtp.")), "dropped", "MTP layer 0: 17 tensors", 17),
            (lambda f: renamed_keys(f, "transformer_layer", "inner"), "renamed", "inner in place of transformer", 13),
            (lambda f: renamed_keys(f, "enorm.weight", "e_norm.weight"), "renamed", "mtp.layers.0.e_norm.weight", 1),
            (lambda f: renamed_keys(f, "mtp.layers.0", "mtp.layers.1"), "renumbered", "layers.0 became layers.1", 17),
        )
    ):
        folder = Path(shutil.copytree(megatron, tmp_path / str(number)))
        change(folder / "release")
        found = [f for f in failures(SOURCE, folder) if f.check != "presence.copy"]
        assert [(f.check, f.cause_id, max(1, len(f.members))) for f in found] == [("presence.missing", cause, count)]
        assert words in found[0].cause


# ---- FP8


def test_codes_taken_for_values(tmp_path: Path) -> None:
    source = coded.make(tmp_path / "source", finite=True)
    convert(source, tmp_path / "megatron")
    name = MTP + "self_attn.o_proj.weight"
    codes = next(own[name] for own in map(load_file, source.glob("*.safetensors")) if name in own)
    rewrite(
        tmp_path / "megatron/release", INNER + "self_attention.linear_proj.weight", lambda x: codes.to(torch.bfloat16)
    )
    (found,) = failures(source, tmp_path / "megatron")
    assert (found.subject, found.cause_id) == (name, "raw-codes")


SCALES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "transposed": (lambda x: x.T.clone(), "scales-transposed"),
    "doubled": (lambda x: x * 2, "scales-scaled"),
    "one doubled": (lambda x: torch.where(torch.arange(x.numel()).reshape(x.shape) == 1, x * 2, x), "scales-scaled"),
}


@pytest.mark.parametrize("what", SCALES)
def test_scales(what: str, tmp_path: Path) -> None:
    source = coded.make(tmp_path / "source")
    change, cause = SCALES[what]
    name = f"{EXPERTS}1.down_proj.weight_scale_inv"
    (found,) = failures(source, changed(tmp_path, edit(name, change), source))
    assert (found.subject, found.cause_id) == (name, cause)


def test_scales_go_with_their_codes(tmp_path: Path) -> None:
    """Experts that moved with their scales are one fault; scales that moved alone are another."""
    source = coded.make(tmp_path / "source")

    def roll(ends: tuple[str, ...]) -> Change:
        def change(t: Tensors) -> None:
            old = dict(t)
            for e in range(4):
                for kind in KINDS:
                    for end in ends:
                        t[f"{EXPERTS}{e}.{kind}{end}"] = old[f"{EXPERTS}{(e + 1) % 4}.{kind}{end}"]

        return change

    (found,) = failures(source, changed(tmp_path, roll(("", "_scale_inv")), source))
    assert (found.cause_id, len(found.members)) == ("experts-rolled", 24)
    (tmp_path / "alone").mkdir()
    found_alone = failures(source, changed(tmp_path / "alone", roll(("_scale_inv",)), source))
    assert {f.cause_id for f in found_alone} == {"scales-taken"}


# ---- pieces


def test_samples_stand_at_the_same_places() -> None:
    class Memory:
        name, size = "memory", 1 << 12

        def mapped(self, offset: int, length: int) -> None:
            return None

        def place_of(self, offset: int) -> str:
            return ""

        def read_into(self, buffer: memoryview, offset: int) -> None:
            buffer[:] = bytes((i * 7 + (i >> 5)) % 251 for i in range(offset, offset + len(buffer)))

    plan = Plan.region(Memory(), 0, (8, 64), 4)
    assert list(samples(plan)) == list(samples(plan.reshape((4, 2, 64)).reshape((8, 64))))
    assert same(plan, plan) and not same(plan, plan.permute((1, 0)).reshape((8, 64)))
    assert not same(plan, plan.slice(0, 0, 4))
    assert list(samples(Plan.zeros((), 4))) == [bytes(4)]
    assert list(samples(Plan.zeros((0, 3), 4))) == []


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("BF16", torch.bfloat16),
        ("F16", torch.float16),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
    ],
)
def test_rounding_is_torchs(dtype: str, kind: torch.dtype) -> None:
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 2
    ties = torch.arange(-400, 400) / 64
    values = torch.cat([drawn, drawn * 1e-3, ties, torch.tensor([0.0, -0.0])])
    assert torch.equal(torch.from_numpy(rounded(values.numpy(), dtype)), values.to(kind).float())
    stored = values.to(kind)
    assert (floats(stored.view(torch.uint8).numpy().tobytes(), dtype) == stored.float().numpy()).all()


def test_half_a_step_is_half_the_distance_of_neighbours() -> None:
    values = np.array([1.0, 1.5, 0.75, 1e-3, 3e38, 0.0], np.float32)
    assert (half_step(values, "F32") == np.spacing(values).astype(np.float64) / 2).all()
    assert half_step(np.array([1.0]), "BF16")[0] == 2.0**-8


def test_words() -> None:
    assert numbers([0, 1, 2, 3, 7]) == "0 to 3, 7"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert components(["mtp.0", "mtp.0", "layers.2"]) == "MTP layer 0 and decoder layer 2"
    assert components([f"layers.{i}" for i in range(9)]) == "9 components"


def test_what_was_found_holds_where_the_diagnosis_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(causes, "make_case", fail)
    report = verify(SOURCE, changed(tmp_path, lambda tensors: tensors[EH].neg_()))
    (finding,) = report.failures
    assert (report.exit_code, finding.check, finding.cause_id) == (1, "values.bits", "")
    assert "stopped with KeyError" in finding.cause
