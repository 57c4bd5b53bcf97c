"""Damage at random: hypothesis picks the tensor, the place and the kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.mutants import hf, megatron

Draw = st.DataObject
Tensors = dict[str, torch.Tensor]
VOCABULARY = 260  # of every fixture

# ---- tensors, in either layout


def pick(data: Draw, tensors: Tensors, fits: Callable[[torch.Tensor], bool] = lambda tensor: True) -> str:
    names = sorted(name for name, tensor in tensors.items() if fits(tensor))
    assume(bool(names))
    return data.draw(st.sampled_from(names))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the bytes, an axis of them last."""
    return tensor.view(torch.uint8).reshape(*tensor.shape, tensor.itemsize)


def true_rows(tensor: torch.Tensor) -> int:
    """Rows that mean something: those that pad a vocabulary are judged by nobody."""
    return VOCABULARY if tensor.dim() == 2 and tensor.shape[0] > VOCABULARY else tensor.shape[0]


def one_byte(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors)
    tensors[name] = new = tensors[name].clone()
    raw = new[: true_rows(new)].view(torch.uint8).view(-1)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= data.draw(st.integers(1, 255))


def two_rows(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors, lambda tensor: tensor.dim() > 1 and true_rows(tensor) > 1)
    tensor = tensors[name]
    a, b = data.draw(st.lists(st.integers(0, true_rows(tensor) - 1), min_size=2, max_size=2, unique=True))
    assume(not torch.equal(bits(tensor)[a], bits(tensor)[b]))
    tensors[name] = new = tensor.clone()
    new[[a, b]] = tensor[[b, a]]


def region_zero(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors)
    tensors[name] = new = tensors[name].clone()
    flat = new[: true_rows(new)].view(-1)
    start = data.draw(st.integers(0, flat.numel() - 1))
    end = start + data.draw(st.integers(1, flat.numel() - start))
    assume(bool(flat[start:end].view(torch.uint8).any()))
    flat[start:end] = 0


def exchanged(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors)
    tensor = tensors[name]
    alike = [n for n, t in sorted(tensors.items()) if (t.dtype, t.shape) == (tensor.dtype, tensor.shape)]
    unlike = [n for n in alike if not torch.equal(bits(tensors[n]), bits(tensor))]
    assume(bool(unlike))
    other = data.draw(st.sampled_from(unlike))
    tensors[name], tensors[other] = tensors[other].clone(), tensor.clone()


VALUES = (one_byte, two_rows, region_zero, exchanged)


def dropped(data: Draw, tensors: Tensors) -> None:
    del tensors[pick(data, tensors)]


def renamed(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors)
    tensors[data.draw(st.sampled_from([name + "_", "model." + name, name.replace(".", "", 1)]))] = tensors.pop(name)


def another_dtype(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors)
    kinds = {torch.float32, torch.float16, torch.bfloat16, torch.float64} - {tensors[name].dtype}
    tensors[name] = tensors[name].to(data.draw(st.sampled_from(sorted(kinds, key=str))))


def another_shape(data: Draw, tensors: Tensors) -> None:
    name = pick(data, tensors)
    shapes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[None],
        lambda t: t[:-1],
        lambda t: t.reshape(-1, 1),
    ]
    tensors[name] = data.draw(st.sampled_from(shapes))(tensors[name])


def config_key(data: Draw, folder: Path) -> None:
    path = folder / "config.json"
    table = json.loads(path.read_text())
    key = data.draw(st.sampled_from(sorted(table.keys() - {"transformers_version", "model_type", "architectures"})))
    value = table[key]
    others = [None, "other", not value if isinstance(value, bool) else 12345, [1]]
    table[key] = data.draw(st.sampled_from([other for other in others if other != value]))
    if data.draw(st.booleans()) and key != "num_hidden_layers":
        del table[key]
    path.write_text(json.dumps(table))


def argument(data: Draw, folder: Path) -> None:
    numbers = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "rotary_base", "vocab_size")
    name = data.draw(st.sampled_from([*numbers, "mtp_num_layers", "swiglu", "normalization"]))
    megatron.args(**{name: data.draw(st.integers(1000, 2000))})(folder)


def index_entry(data: Draw, folder: Path) -> None:
    """An entry goes, is new, names another file; or the total is wrong."""
    table = json.loads((folder / hf.INDEX).read_text())
    names = table["weight_map"]
    kind, name = (
        data.draw(st.sampled_from(["gone", "new", "total", "moved"])),
        data.draw(st.sampled_from(sorted(names))),
    )
    files = sorted(set(names.values()) - {names[name]})
    if kind == "gone":
        assume(list(names.values()).count(names.pop(name)) > 1)
    elif kind == "new":
        names[name + "_scale_inv"] = names[name]
    elif kind == "total":
        table["metadata"]["total_size"] += data.draw(st.sampled_from([-1, 1, 1 << 20]))
    else:
        names[name] = data.draw(st.sampled_from(files))
    (folder / hf.INDEX).write_text(json.dumps(table))


def damage_hf(data: Draw, folder: Path) -> None:
    kind = data.draw(st.integers(0, 6))
    if kind == 0 or (kind == 1 and not (folder / hf.INDEX).exists()):
        config_key(data, folder)
        return
    if kind == 1:
        index_entry(data, folder)
        return
    change = data.draw(st.sampled_from([*VALUES, dropped, renamed, another_dtype, another_shape]))
    hf.edit(folder, lambda tensors: change(data, tensors))


def damage_megatron(data: Draw, folder: Path) -> None:
    kind = data.draw(st.integers(0, 7))
    if kind == 0:
        argument(data, folder)
    elif kind == 1:
        keys: list[str] = []
        megatron.edit(r".*(weight|bias)$", lambda tensors: keys.extend(sorted(tensors)))(folder)
        gone, other = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(["", "_", ".more"]))
        megatron.spell(lambda name: name if name != gone else other and name + other)(folder)
    else:
        change = data.draw(st.sampled_from(VALUES))
        megatron.edit(r".*(weight|bias)$", lambda tensors: change(data, tensors))(folder)
