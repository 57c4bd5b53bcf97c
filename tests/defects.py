"""Defects of an MTP layer, and what each does to draft acceptance.

    python tests/defects.py            # measure, and write the table into docs/acceptance.md

A defect edits the parts of the first MTP layer, in memory, so that it fits every family and layout. Names of parts are
ours; factored axes are apart: ``attn.q`` is [groups, heads of a group, head_dim, hidden].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from mtpcheck.checkpoint import Checkpoint, open_checkpoint
from mtpcheck.draft.probe import Column, Probing, probe, read_workloads
from mtpcheck.plan import Plan
from mtpcheck.progress import Silent
from mtpcheck.quantize import Given
from mtpcheck.tensormap import TensorMap, TensorRef, read_tensor_map

FIXTURES = Path(__file__).parents[1] / "fixtures"
LAYER = "mtp.0."
_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}

Parts = dict[str, Tensor]


class Absent(Exception):
    """The family has no such part, so the defect cannot be."""


@dataclass(frozen=True)
class Defect:
    """``alone``: whether it has to be seen without a reference, by the rules for a living head."""

    edit: Callable[[Parts, Parts], None]
    """Gets the parts of the MTP layer, to be changed in place, and those of the last decoder layer."""
    alone: bool = False


# ---- the edits


def _exchange(parts: Parts, a: str, b: str) -> None:
    if a not in parts or b not in parts:
        raise Absent
    parts[a], parts[b] = parts[b], parts[a]


def _matrices(parts: Parts, below: str = "") -> list[str]:
    return [name for name, value in parts.items() if value.dim() > 1 and name.startswith(below)]


def _randomize(parts: Parts, names: list[str]) -> None:
    drawn = torch.Generator().manual_seed(1)
    for name in names:
        spread = parts[name].float().std()
        noise = torch.randn(parts[name].shape, generator=drawn) * spread
        parts[name] = noise.to(parts[name].dtype)


def _block(parts: Parts) -> list[str]:
    return [*_matrices(parts, "attn."), *_matrices(parts, "mlp.")]


def _last_layer(parts: Parts, last: Parts) -> None:
    same = [name for name in parts if name in last and last[name].shape == parts[name].shape]
    if not all(name in same for name in _block(parts)):
        raise Absent
    parts.update({name: last[name].clone() for name in same})


def _ones(*names: str) -> Callable[[Parts, Parts], None]:
    return lambda parts, last: parts.update({name: torch.ones_like(parts[name]) for name in names})


def _heads_reversed(parts: Parts, last: Parts) -> None:
    name = next((n for n in ("attn.q", "attn.q_b") if n in parts), "")
    if not name:
        raise Absent
    axis = 1 if name == "attn.q" and parts[name].dim() == 4 else 0
    parts[name] = parts[name].flip(axis).contiguous()


def _rope_interleaved(parts: Parts, last: Parts) -> None:
    if parts.get("attn.q", torch.empty(0)).dim() != 4:
        raise Absent
    half = parts["attn.q"].shape[2] // 2
    order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).reshape(-1)
    parts["attn.q"] = parts["attn.q"][:, :, order].contiguous()


def _experts(parts: Parts) -> list[int]:
    found = sorted({int(name.split(".")[2]) for name in parts if name.startswith("mlp.experts.")})
    if not found:
        raise Absent
    return found


def _experts_rolled(parts: Parts, last: Parts) -> None:
    numbers, old = _experts(parts), dict(parts)
    for e in numbers:
        for kind in ("gate", "up", "down"):
            parts[f"mlp.experts.{e}.{kind}"] = old[f"mlp.experts.{(e + 1) % len(numbers)}.{kind}"]


def _experts_alike(parts: Parts, last: Parts) -> None:
    for e in _experts(parts):
        for kind in ("gate", "up", "down"):
            parts[f"mlp.experts.{e}.{kind}"] = parts[f"mlp.experts.0.{kind}"]


def _gate_and_up(parts: Parts, last: Parts) -> None:
    for name in [name for name in parts if name.endswith((".gate", "mlp.gate"))]:
        _exchange(parts, name, name.removesuffix("gate") + "up")


def _zero(*starts: str) -> Callable[[Parts, Parts], None]:
    def edit(parts: Parts, last: Parts) -> None:
        names = [name for name in _matrices(parts) if name.startswith(starts)]
        if not names:
            raise Absent
        parts.update({name: torch.zeros_like(parts[name]) for name in names})

    return edit


def _bias(parts: Parts, last: Parts) -> None:
    if "mlp.router_bias" not in parts:
        raise Absent
    parts["mlp.router_bias"] = torch.linspace(-0.5, 0.5, len(parts["mlp.router_bias"]))


def _lost_shard(parts: Parts, last: Parts) -> None:
    rows = parts["proj.embed"].shape[0] // 8
    for name in ("proj.embed", "proj.hidden"):
        parts[name] = parts[name].clone()
        parts[name][:rows] = 0


def _exchanged_shards(parts: Parts, last: Parts) -> None:
    for name in [name for name in parts if name.endswith("down")]:
        parts[name] = torch.cat(parts[name].chunk(2, dim=1)[::-1], dim=1).contiguous()


def _one_sign(parts: Parts, last: Parts) -> None:
    value = parts["proj.hidden"] = parts["proj.hidden"].clone()
    at = int(value.abs().argmax())
    value.view(-1)[at] *= -1


def _fp8(parts: Parts, last: Parts) -> None:
    for name in _matrices(parts):
        scale = parts[name].float().abs().max() / 448
        coarse = (parts[name].float() / scale).to(torch.float8_e4m3fn).float() * scale
        parts[name] = coarse.to(parts[name].dtype)


def _values_for_keys(parts: Parts, last: Parts) -> None:
    _exchange(parts, "attn.k", "attn.v")
    if "attn.k_bias" in parts:
        _exchange(parts, "attn.k_bias", "attn.v_bias")


def _output_norm(parts: Parts, last: Parts) -> None:
    parts["final_norm"] = last["final_norm"].clone()


DEFECTS: Mapping[str, Defect] = {
    "halves of the projection exchanged": Defect(lambda p, _: _exchange(p, "proj.embed", "proj.hidden"), alone=True),
    "all matrices random": Defect(lambda p, _: _randomize(p, _matrices(p)), alone=True),
    "all matrices zero": Defect(_zero(""), alone=True),
    "projection random": Defect(lambda p, _: _randomize(p, _matrices(p, "proj."))),
    "block random": Defect(lambda p, _: _randomize(p, _block(p)), alone=True),
    "block := last decoder layer": Defect(_last_layer, alone=True),
    "output norm := 1": Defect(_ones("final_norm")),
    "output norm := the model's own": Defect(_output_norm),
    "input norms exchanged": Defect(lambda p, _: _exchange(p, "embed_norm", "hidden_norm")),
    "input norms := 1": Defect(_ones("embed_norm", "hidden_norm")),
    "norms of the block exchanged": Defect(lambda p, _: _exchange(p, "pre_attn_norm", "pre_mlp_norm")),
    "gate and up exchanged": Defect(_gate_and_up),
    "query heads reversed": Defect(_heads_reversed),
    "queries interleaved for rope": Defect(_rope_interleaved),
    "keys and values exchanged": Defect(_values_for_keys),
    "experts rolled by one, router not": Defect(_experts_rolled),
    "all experts := expert 0": Defect(_experts_alike),
    "shared expert zero": Defect(_zero("mlp.shared.")),
    "router bias := -0.5 … 0.5": Defect(_bias),
    "one of 8 shards of the projection zero": Defect(_lost_shard),
    "shards of the down projections exchanged": Defect(_exchanged_shards),
    "one sign in the projection": Defect(_one_sign),
    "fp8 and back, one scale a tensor": Defect(_fp8),
}


# ---- running them


def with_defect(tensor_map: TensorMap, defect: Defect) -> TensorMap:
    """The same map with the first MTP layer edited. Raises Absent if the family has nothing to edit."""
    own = {name.removeprefix(LAYER): _read(ref) for name, ref in tensor_map.parts.items() if name.startswith(LAYER)}
    last_layer = f"layers.{tensor_map.facts['layers'] - 1}."
    last = {n.removeprefix(last_layer): _read(r) for n, r in tensor_map.parts.items() if n.startswith(last_layer)}
    last["final_norm"] = _read(tensor_map.parts["final_norm"])
    before = dict(own)
    defect.edit(own, last)
    edited = {LAYER + name: _given(name, value) for name, value in own.items() if value is not before[name]}
    return replace(tensor_map, parts={**tensor_map.parts, **edited})


def _read(ref: TensorRef) -> Tensor:
    return torch.frombuffer(bytearray(ref.read()), dtype=_TORCH[ref.dtype]).reshape(ref.plan.shape)


def _given(name: str, value: Tensor) -> TensorRef:
    dtype = next(ours for ours, theirs in _TORCH.items() if theirs == value.dtype)
    raw = value.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorRef(dtype, Plan.region(Given(name, raw), 0, tuple(value.shape), value.element_size()))


def drafts_of(checkpoint: Checkpoint, tensor_map: TensorMap, probing: Probing | None = None) -> Column:
    workloads = read_workloads(checkpoint, tensor_map, (probing or Probing()).files)
    return probe("", checkpoint, tensor_map, workloads, Silent())


def agreement(one: Column, other: Column) -> float:
    """Share of positions where both draft the same."""
    pairs = [(a.drafts[0], b.drafts[0]) for a, b in zip(one.passages, other.passages, strict=True)]
    return float(sum((a == b).sum() for a, b in pairs)) / sum(len(a) for a, _ in pairs)


# ---- the table

SHOWN = ("deepseek_v3", "glm4_moe", "qwen2_mtp")
_PAGE = Path(__file__).parents[1] / "docs" / "acceptance.md"
_BEGIN, _END = "<!-- made by tests/defects.py -->\n", "<!-- end -->\n"


def table() -> str:
    """Acceptance rate, agreement with the drafts of the sound head, and what sees the defect."""
    lines = ["| defect | " + " | ".join(SHOWN) + " |", "|---|" + "---|" * len(SHOWN)]
    opened = {name: open_checkpoint(FIXTURES / name) for name in SHOWN}
    maps = {name: read_tensor_map(checkpoint) for name, checkpoint in opened.items()}
    sound = {name: drafts_of(opened[name], maps[name]) for name in SHOWN}
    lines.append("| none | " + " | ".join(_cell(sound[name], sound[name]) for name in SHOWN) + " |")
    for title, defect in DEFECTS.items():
        print(title, file=sys.stderr)
        cells = []
        for name in SHOWN:
            try:
                cells.append(_cell(drafts_of(opened[name], with_defect(maps[name], defect)), sound[name]))
            except Absent:
                cells.append("")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(column: Column, sound: Column) -> str:
    seen = "" if column.digests == sound.digests else " ≠"
    dead = " †" if column.verdict.alive is False else ""
    return f"{column.overall.depths[0].rate:.3f} / {agreement(column, sound):.3f}{seen}{dead}"


def main() -> None:
    torch.set_num_threads(1)
    text = _PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _PAGE.write_text(f"{before}{_BEGIN}\n{table()}\n{_END}{after}")


if __name__ == "__main__":
    main()
