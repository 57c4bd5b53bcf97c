"""The decoder: transformers' own model, run from parts of a checkpoint. No other module touches transformers.

The model is built on the meta device, where it has shapes and no weights. Hooks read the weights of a module when it is
called and drop them when it returns: attention of any kind as a whole, every other matrix or norm by itself, and of the
experts those that a token is routed to, one after the other. So masks, rotary embedding and the arithmetic of every
family are transformers', bit for bit, and memory holds one module.

The embedding and the LM head, whose size is that of the vocabulary, are not called: ``vocabulary.py`` looks up rows and
multiplies chunks. What a family has between hidden state and logits besides its head would be missed; none has.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtpcheck.draft.config import model_config, refused
from mtpcheck.draft.twin import Twin, renamed, twin
from mtpcheck.draft.weights import Weights
from mtpcheck.errors import MtpcheckError, UnsupportedError
from mtpcheck.family import Family, load_family
from mtpcheck.rows import Row

ATTENTION, MLP, EXPERTS = ("self_attn", "linear_attn"), "mlp", "experts"
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""transformers keeps all experts in two tensors; most files have two or one matrices of each for a slice of them."""


@dataclass(frozen=True)
class Hidden:
    """What the decoder gives for a batch: [texts, positions, hidden], before and after the final norm."""

    raw: Tensor
    normed: Tensor


class Trunk:
    """A decoder, and a decoder layer for each MTP layer, that read their weights as they run."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        """``config``: config.json of the checkpoint, or one derived from its facts.

        Raises UnsupportedError if transformers lacks the model, refuses the config, or expects other tensors.
        """
        self._weights = weights
        self._padding: Tensor | None = None
        self._called: dict[int, dict[str, Any]] = {}
        model = weights.tensor_map.model
        self._family = load_family(model.family)
        self._rows = {row.name: row for row in model.rows}
        self._decoder = _on_meta(self._family, config)
        layers = self._decoder.layers
        self._twins = [twin(model, i) for i in range(model.facts["mtp_stored"])]
        self._blocks = [_like(layers, of_twin) for of_twin in self._twins]
        names = {module: f"model.{name}" for name, module in self._decoder.named_modules()}
        for k in {of_twin.attention for of_twin in self._twins}:
            layers[k].register_forward_pre_hook(self._note_call(k), with_kwargs=True)
        for module in (*layers, self._decoder.norm):
            self._attach(module, names[module], lambda part: part)
        for i, (block, of_twin) in enumerate(zip(self._blocks, self._twins, strict=True)):
            rename = renamed(of_twin, i)
            for own, child in block.named_children():
                k = of_twin.mlp if own == MLP else of_twin.attention
                self._attach(child, f"{names[layers[k]]}.{own}", rename)

    def run(self, embedded: Tensor, padding: Tensor) -> Hidden:
        """All decoder layers over [texts, positions, hidden]; ``padding`` [texts, positions] is true beyond a text.

        Raises UnsupportedError if transformers fails, as with numbers in a config that cannot be.
        """
        raw: list[Tensor] = []
        handle = self._decoder.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
        self._padding = padding
        try:
            with torch.no_grad(), self._explained():
                normed = self._decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        finally:
            handle.remove()
        return Hidden(raw[0], normed)

    def block(self, i: int, x: Tensor, padding: Tensor) -> Tensor:
        """The decoder layer of MTP layer ``i`` over [texts, positions, hidden], at the positions and under the mask of
        the last ``run``, which must have had as many."""
        self._padding = padding
        with torch.no_grad(), self._explained():
            out = self._blocks[i](x, **self._called[self._twins[i].attention])
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from transformers.utils.logging import get_verbosity, set_verbosity

        before = get_verbosity()
        set_verbosity(logging.ERROR)  # it recommends kernels that a CPU has no use for
        try:
            yield
        except (MtpcheckError, MemoryError, OSError):
            raise
        except Exception as error:
            raise refused(self._family, error) from None
        finally:
            set_verbosity(before)

    # ---- fitting modules with readers

    def _note_call(self, k: int) -> Callable[..., None]:
        """Keep what the decoder passes to layer ``k`` besides the hidden states, for its twins."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(args) != 1:
                raise UnsupportedError(f"could not judge: transformers calls {type(module).__name__} in an unknown way")
            self._called[k] = kwargs

        return hook

    def _attach(self, module: nn.Module, name: str, rename: Callable[[str], str]) -> None:
        for path, unit, whole in list(_units(module, name)):
            if path.endswith("." + EXPERTS):
                self._stream_experts(unit, path, rename)
                continue
            if whole and path.endswith(f".{ATTENTION[0]}"):  # the other's memory does not grow so
                one_text_at_a_time(unit)
            rows = {own: self._row(f"{path}.{own}", shape, rename) for own, shape in _shapes(unit, deep=whole)}
            unit.register_forward_pre_hook(self._loader(rows, whole))
            unit.register_forward_hook(self._dropper(rows))

    def _row(self, name: str, shape: torch.Size, rename: Callable[[str], str]) -> Row:
        row = self._rows.get(self._family.in_release(self._in_files(name)))
        model = self._weights.tensor_map.model
        if row is None:
            raise UnsupportedError(f"could not judge: transformers' {model.family} has {name}, our family has no part")
        return self._checked(row, name, shape, rename)

    def _checked(self, row: Row, name: str, shape: torch.Size, rename: Callable[[str], str]) -> Row:
        model = self._weights.tensor_map.model
        if row.shape(model.shapes) != tuple(shape):
            ours, theirs = list(row.shape(model.shapes)), list(shape)
            raise UnsupportedError(f"could not judge: {name} is {ours} in the checkpoint, {theirs} in transformers")
        return replace(row, parts=tuple(rename(part) for part in row.parts))

    def _in_files(self, name: str) -> str:
        """The name that files have for what transformers holds under another."""
        lead, layers, below = name.partition(".layers.")
        number, _, own = below.partition(".")
        starts = [start for start in self._family.modules if f"{own}.".startswith(f"{start}.")]
        longest = max(starts, key=len, default=None)
        if not layers or longest is None:
            return name
        return f"{lead}{layers}{number}.{self._family.modules[longest]}{own.removeprefix(longest)}"

    def _loader(self, rows: Mapping[str, Row], whole: bool) -> Callable[..., None]:
        def load(module: nn.Module, *_: object) -> None:
            values = {own: self._weights.joined(row) for own, row in rows.items()}
            alone = whole or not any(True for _ in module.children())  # else these load the rest by themselves
            module.load_state_dict(values, strict=alone, assign=True)

        return load

    def _dropper(self, rows: Mapping[str, Row]) -> Callable[..., None]:
        def drop(module: nn.Module, *_: object) -> None:
            module.to("meta")

        return drop

    def _stream_experts(self, experts: nn.Module, path: str, rename: Callable[[str], str]) -> None:
        shapes = dict(_shapes(experts))
        if shapes.keys() != STACKED.keys():
            raise UnsupportedError(f"could not judge: transformers keeps {path} as {', '.join(shapes)}")
        for stacked, shape in shapes.items():
            rows = self._expert_rows(path, stacked, shape, rename)
            delattr(experts, stacked)
            setattr(experts, stacked, OneAtATime(self._weights, rows))
        experts.register_forward_pre_hook(self._skip_padding(next(iter(shapes.values()))[0]))

    def _expert_rows(self, path: str, stacked: str, shape: torch.Size, rename: Callable[[str], str]) -> list[Row]:
        """For every expert, what makes up its slice: of a tensor that is stacked in files too, or of its matrices."""
        if whole := self._rows.get(self._family.in_release(f"{path}.{stacked}")):
            groups = self._checked(whole, whole.name, shape, rename).groups()
            return [Row(f"{path}.{e}.{stacked}", parts) for e, parts in enumerate(groups)]
        count, height, width = shape
        matrices, rows = STACKED[stacked], []
        for e in range(count):
            one = torch.Size((height // len(matrices), width))
            own = [self._row(f"{path}.{e}.{matrix}.weight", one, rename) for matrix in matrices]
            rows.append(Row(f"{path}.{e}.{stacked}", tuple(part for row in own for part in row.parts)))
        return rows

    def _skip_padding(self, count: int) -> Callable[..., tuple[Any, ...]]:
        """Send tokens that pad a text to no expert; transformers' eager loop passes over index ``count``."""

        def skip(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            states, chosen, shares = args
            if self._padding is not None and self._padding.any():
                chosen = chosen.masked_fill(self._padding.reshape(-1, 1), count)
            return states, chosen, shares

        return skip


class OneAtATime:
    """Stands where all experts were stacked: the eager loop indexes it with one expert and gets the slice of that."""

    def __init__(self, weights: Weights, rows: list[Row]) -> None:
        self._weights, self._rows = weights, rows

    def __getitem__(self, expert: Tensor) -> Tensor:
        return self._weights.joined(self._rows[int(expert)])


def one_text_at_a_time(attention: nn.Module) -> None:
    """Have attention take a batch text by text: its scores grow with the square of a text and are the largest thing in
    memory after the weights."""
    whole = attention.forward

    def pick(value: Any, text: int, texts: int) -> Any:
        if isinstance(value, tuple):
            return tuple(pick(each, text, texts) for each in value)
        return value[text : text + 1] if isinstance(value, Tensor) and value.shape[:1] == (texts,) else value

    def forward(hidden_states: Tensor, **others: Any) -> Any:
        texts = len(hidden_states)
        if texts == 1:
            return whole(hidden_states=hidden_states, **others)
        results = [
            whole(hidden_states=hidden_states[text : text + 1], **pick_all(others, text, texts))
            for text in range(texts)
        ]
        attended, _, *rest = zip(*results, strict=True)  # the second is the scores, which nobody reads
        return torch.cat(attended), None, *(None if each[0] is None else torch.cat(each) for each in rest)

    def pick_all(others: dict[str, Any], text: int, texts: int) -> dict[str, Any]:
        return {name: pick(value, text, texts) for name, value in others.items()}

    attention.forward = forward


def _like(layers: nn.ModuleList, of_twin: Twin) -> nn.Module:
    """A decoder layer of its own, made as the twin is."""
    block = copy.deepcopy(layers[of_twin.attention])
    if of_twin.mlp != of_twin.attention:
        setattr(block, MLP, copy.deepcopy(layers[of_twin.mlp].get_submodule(MLP)))
    return block


def _units(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules that are loaded by themselves: attention with all it holds (true), others that hold tensors directly."""
    if name.rpartition(".")[2] in ATTENTION:
        yield name, module, True
        return
    if any(True for _ in _shapes(module, deep=False)):
        yield name, module, False
    for own, child in module.named_children():
        yield from _units(child, f"{name}.{own}")


def _shapes(module: nn.Module, deep: bool = True) -> Iterator[tuple[str, torch.Size]]:
    for name, value in module.state_dict().items():
        if deep or "." not in name:
            yield name, value.shape


# ---- building


def _on_meta(family: Family, config: Mapping[str, Any]) -> Any:
    """transformers' decoder without weights. Tables that no file holds (rotary frequencies) are real."""
    from transformers import AutoModel

    known = model_config(family, config)
    try:
        with torch.device("meta"):
            model: Any = AutoModel.from_config(  # type: ignore[no-untyped-call]
                known, dtype=torch.float32, attn_implementation="eager"
            )
        model.config._experts_implementation = "eager"
        for name, module in list(model.named_modules()):
            if module._non_persistent_buffers_set:
                model.set_submodule(name, type(module)(config=model.config))
    except Exception as error:  # values come from untrusted files, and checks of many kinds meet them
        raise refused(family, error) from None
    return model.eval()
