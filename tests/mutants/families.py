"""A sample of the catalogue over every fixture, whatever its family: each kind of damage wherever it can be done.

A sample makes its edit from a fixture's anatomy, and makes none where the fixture has no such part. So a new fixture is
sampled as soon as it lies in ``fixtures/``. What is legal for every fixture stands in ``legal.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.mutants import hf
from tests.mutants import megatron as m
from tests.mutants import values as v
from tests.mutants.anatomy import NONE_STORED, STEPS, STORED, Anatomy, anatomy
from tests.mutants.case import VERIFY, Case, Edit, legal, refused
from tests.mutants.originals import ERNIE

DIST = "torch_dist"
HEAD, BLOCK = r"mtp\.layers\.0\.", r"mtp\.layers\.0\.transformer_layer\."
NORMS = r"mtp\.layers\.\d+\.(?!final)(.*norm\.weight|.*layer_norm_weight)$"
FC1 = BLOCK + r"mlp\.(experts\.experts\.)?linear_fc1\.weight$"


@dataclass(frozen=True)
class Sample:
    """One kind of damage. ``edit`` is None for a fixture that has nothing to be damaged so; the rest as in a Case."""

    id: str
    what: str
    edit: Callable[[Anatomy], Edit | None]
    expects: tuple[str, ...] = ()
    made: str = ""
    exit: int = 1
    blind: bool = False


def always(edit: Edit) -> Callable[[Anatomy], Edit | None]:
    return lambda own: edit


def where(has: Callable[[Anatomy], object], edit: Edit) -> Callable[[Anatomy], Edit | None]:
    return lambda own: edit if has(own) else None


def _named(*names: str) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})$"


def _flip(tensor: torch.Tensor) -> torch.Tensor:
    """The lowest bit of the last element is another."""
    new = tensor.clone().contiguous()
    new.view(-1).view(torch.uint8)[-new.itemsize] ^= 1
    return new


def _fp32(change: v.Change) -> Callable[[Anatomy], Edit | None]:
    return lambda own: hf.values(_named(*own.fp32), change) if own.fp32 else None


def _last_layer_again(own: Anatomy) -> Edit | None:
    """The first MTP layer holds what the last decoder layer holds, as far as that has the same tensors."""
    into, source = own.layers[0], own.trunk[-1]
    twins = {name: source + name.removeprefix(into) for name in own.first("")}
    rest = [name.removeprefix(into) for name, twin in twins.items() if own.shapes.get(twin) == own.shapes[name]]
    return hf.take(f"{re.escape(into)}({'|'.join(map(re.escape, rest))})$", rf"{source}\1")


def _other_layer(own: Anatomy) -> Edit | None:
    return hf.drop(re.escape(own.layers[-1]) + r"\.") if len(own.layers) > 1 else None


def _regrouped(own: Anatomy) -> Edit | None:
    return own.qkv and m.values(BLOCK + r"self_attention\.linear_qkv\.weight$", v.regrouped(own.qkv[0], *own.qkv[1]))


def _latent_regrouped(own: Anatomy) -> Edit | None:
    """All keys, then all values, in place of head after head."""
    if not own.latent:
        return None
    heads, key, value = (own.config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    return m.values(BLOCK + r"self_attention\.linear_kv_up_proj\.weight$", v.regrouped(heads, key, value))


def _rotated_first(own: Anatomy) -> Edit | None:
    """The rows that are rotated stand before the latent ones."""
    if not own.latent:
        return None
    return m.values(BLOCK + r"self_attention\.linear_kv_down_proj\.weight$", v.rolled(own.config["qk_rope_head_dim"]))


def _head_by_head(own: Anatomy) -> Edit | None:
    """Of each group query and gate in turns, as Hugging Face has them."""
    if own.qkv is None or len(own.qkv[1]) < 4:
        return None
    groups, (queries, *_) = own.qkv
    return m.values(BLOCK + r"self_attention\.linear_qkv\.weight$", v.in_turns(groups, queries, own.config["head_dim"]))


def _fused_by_group(own: Anatomy) -> Edit | None:
    fused = own.first(r".*\.query_key_value\.weight$")
    return hf.values(_named(*fused), v.by_group(own.qkv[0], *own.qkv[1])) if fused and own.qkv else None


def _gates_apart(own: Anatomy) -> Edit | None:
    """All queries, then all gates, in place of head after head."""
    if own.qkv is None or len(own.qkv[1]) < 4:
        return None
    heads, width = own.config["num_attention_heads"], own.config["head_dim"]
    return hf.values(_named(*own.first(r"self_attn\.q_proj\.weight$")), v.regrouped(heads, width, width))


def _delta_as_others(own: Anatomy) -> Edit | None:
    """Head after head where all queries, all keys and all values stood; the other way round where they did not."""
    if own.delta is None:
        return None
    heads, (query, key, value, gate, *_) = own.delta
    apart = [name for name in own.shapes if name.endswith(".in_proj_qkv.weight")]
    by_head = [name for name in own.shapes if name.endswith(".in_proj_qkvz.weight")]
    if apart:
        return hf.values(_named(*apart), v.by_group(heads, query, key, value))
    return hf.values(_named(*by_head), v.regrouped(heads, query, key, value, gate))


def _delta_by_head(own: Anatomy) -> Edit | None:
    pattern = r"decoder\.layers\.0\.self_attention\.in_proj\.weight$"
    return own.delta and m.values(pattern, v.by_group(own.delta[0], *own.delta[1]))


def _a_layer_for_each_step(own: Anatomy) -> Edit | None:
    path, _, number = own.layers[0].rpartition(".")
    layers = [f"{path}.{int(number) + step}" for step in range(1, own.steps)]
    return hf.both(*(hf.again(re.escape(own.layers[0]), layer) for layer in layers)) if layers else None


HF = [
    Sample("F01", "every MTP tensor is deleted", always(hf.drop("{mtp}")), ("presence.missing dropped|shard-lost",)),
    Sample("F02", "no key declares the layer", where(
        lambda own: own.declared, hf.count(lambda table, key: table.pop(key))),
           ("declaration.mtp|declaration.count",)),
    Sample("F03", "the last of several MTP layers is deleted", _other_layer, ("presence.missing dropped",)),
    Sample("F04", "MTP tensors get another prefix", always(hf.rename("({mtp})", r"model.\1")),
           ("presence.missing renamed",)),
    Sample("F05", "the halves of the projection are exchanged",
           lambda own: hf.values(_named(own.projection), v.halves(1)), ("values.bits halves-exchanged",)),
    Sample("F06", "the norms of embedding and hidden state are exchanged",
           lambda own: hf.exchange(_named(own.embed_norm), own.hidden_norm), ("values.bits exchanged",)),
    Sample("F07", "two MTP experts are exchanged", where(
        lambda own: own.experts, hf.experts(lambda e: {0: 1, 1: 0}.get(e, e))), ("values.bits experts-permuted",)),
    Sample("F08", "one bit of the projection is another", lambda own: hf.values(_named(own.projection), _flip),
           ("values.bits",)),
    Sample("F09", "one norm is zero", lambda own: hf.values(_named(own.hidden_norm), v.zeros), ("values.bits zeroed",)),
    Sample("F10", "what is fp32 was rounded to bf16", _fp32(v.through(torch.bfloat16)), ("values.bits cast",)),
    Sample("F11", "what is fp32 is stored as bf16", _fp32(v.to(torch.bfloat16)), ("values.dtype cast",)),
    Sample("F12", "the MTP layer is the last decoder layer again", _last_layer_again, ("values.bits taken-from",)),
    Sample("F13", "one is added to all MTP norms", always(hf.values(r"{mtp}.*norm.*\.weight", v.plus(1.0))),
           ("values.bits offset",)),
    Sample("F14", "sinks are deleted", where(lambda own: own.first(r".*sink"), hf.drop(r".*sink")),
           ("presence.missing dropped",)),
    Sample("F15", "a layer that is run for every step is stored for each", _a_layer_for_each_step,
           ("presence.unclaimed",)),
    Sample("F16", "nothing says that a layer is run for every step", where(
        lambda own: own.steps, hf.config(lambda table: table.pop(STEPS))), ("declaration.config|declaration.mtp",)),
    Sample("F17", "queries, keys and values that are kept in one stand group by group", _fused_by_group,
           ("values.bits qkv-regrouped",)),
    Sample("F18", "all queries, then all gates", _gates_apart, ("values.bits qkv-regrouped",)),
    Sample("F19", "a delta net's projection is ordered as in the other generation of the model", _delta_as_others,
           ("values.bits qkv-regrouped",)),
]  # fmt: skip

MEGATRON = [
    Sample("F20", "every MTP tensor is dropped", always(m.drop(r"mtp\.")), ("presence.missing dropped",), DIST),
    Sample("F21", "the halves of the projection are exchanged", always(
        m.values(HEAD + r"eh_proj\.weight", v.halves(1))), ("values.bits halves-exchanged",), DIST, blind=True),
    Sample("F22", "gate and up are exchanged", always(m.values(FC1, v.halves(-2))),
           ("values.bits gate-up-exchanged",), DIST, blind=True),
    # not to the last, which a family may lack: then a round trip is not blind to it
    Sample("F23", "one is added to all MTP norms but the last", always(m.values(NORMS, v.plus(1.0))),
           ("values.bits offset",), DIST, blind=True),
    Sample("F24", "MTP experts are off by one", where(lambda own: own.experts, m.values(
        BLOCK + r"mlp\.experts\.experts\.linear_fc\d\.weight$", v.rolled(-1))), ("values.bits experts-rolled",), DIST,
        blind=True),
    Sample("F25", "queries, keys and values are joined one after the other", _regrouped,
           ("values.bits qkv-regrouped",), DIST, blind=True),
    Sample("F26", "queries and gates stand in turns", _head_by_head, ("values.bits qkv-regrouped",), DIST, blind=True),
    Sample("F27", "all latent keys, then all latent values", _latent_regrouped, ("values.bits qkv-regrouped",), DIST,
           blind=True),
    Sample("F28", "the rotated rows stand before the latent ones", _rotated_first, ("values.bits rows-permuted",), DIST,
           blind=True),
    Sample("F29", "one norm of a delta net is held as it is, not as its distance from one", where(
        lambda own: own.delta, m.values(r"decoder\..*self_attention\.out_norm\.weight$", v.plus(1.0))),
        ("values.bits offset",), DIST),
    Sample("F30", "queries and keys of a delta net are exchanged", where(
        lambda own: own.delta, m.exchange("decoder.layers.0.self_attention.in_proj.weight.query",
                                          "decoder.layers.0.self_attention.in_proj.weight.key")),
        ("values.bits exchanged",), DIST, blind=True),
    Sample("F31", "a delta net's projection is joined head by head", _delta_by_head, ("values.bits qkv-regrouped",),
           "torch", blind=True),
    Sample("F32", "a layer that is run for every step is said to be one of several", where(
        lambda own: own.steps, m.args(mtp_use_repeated_layer=False)), ("declaration.count|declaration.mtp",), DIST),
    Sample("F33", "two MTP layers are exchanged", where(
        lambda own: len(own.layers) > 1, m.swap_names("mtp.layers.0.", "mtp.layers.1.")),
        ("values.bits layers-exchanged",), DIST, blind=True),
    Sample("F34", "one bit of the last norm is another", always(m.values(HEAD + r"final_layernorm\.weight$", _flip)),
           ("values.bits",), DIST),
]  # fmt: skip

LEGAL = [
    Sample("F44", "two tensor-parallel ranks", where(lambda own: not own.experts, hf.unchanged),
           made="torch --tp 2", exit=0),
    Sample("F45", "two tensor-parallel and two expert-parallel ranks", where(lambda own: own.experts, hf.unchanged),
           made="torch --tp 2 --ep 2 --etp 1", exit=0),
]  # fmt: skip


def cases(samples: list[Sample]) -> list[Case]:
    """A case for each sample and fixture that fit."""
    return [
        Case(s.id, s.what, edit, (name,), s.expects, VERIFY, s.made, s.exit, blind=s.blind)
        for s in samples
        for name in STORED
        if (edit := s.edit(anatomy(name))) is not None
    ]


NOT_SHIPPED = refused("F50", "a release that declares layers and ships none", hf.unchanged, NONE_STORED, VERIFY,
                      "declares .* and stores none")  # fmt: skip
SIBLINGS = [
    Case("F51", "of two layers what stands in lists beside theirs is exchanged", hf.exchange(
        r"model\.mtp_(emb_norm|hidden_norm|linear_proj)\.0\.", r"model.mtp_\1.1."), (ERNIE,),
        ("values.bits exchanged",)),
    legal("F52", "as F51, with nothing exchanged", hf.unchanged, (ERNIE,), made=DIST),
]  # fmt: skip
CASES = [*cases([*HF, *MEGATRON, *LEGAL]), NOT_SHIPPED, *SIBLINGS]
