"""The closed set of rules that tie a fact to a Megatron argument, each with its inverse beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpcheck.errors import UnsupportedError

MISSING = object()

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ArgRow:
    """One Megatron argument. ``rule`` turns the fact into the argument and back."""

    keys: tuple[str, ...]
    fact: str | None = None
    rule: str = "same"
    default: Any = MISSING
    equals: Any = MISSING
    value: Any = None
    by: str = ""
    beside: str = ""
    write_only: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """``to_arg`` and ``to_fact`` undo each other. ``says_null``: a null argument is written, and not left unsaid."""

    to_arg: Callable[[ArgRow, Any, Facts], Any]
    to_fact: Callable[[ArgRow, Any, Facts, Facts], Any]
    says_null: bool = True


def _keep(row: ArgRow, value: Any, facts: Facts) -> Any:
    return value


def _kept(row: ArgRow, value: Any, facts: Facts, args: Facts) -> Any:
    return value


def _negated(row: ArgRow, value: Any, facts: Facts, args: Facts) -> Any:
    return not value


def _null_if(row: ArgRow, value: Any, facts: Facts) -> Any:
    return None if value == row.value else value


def _if_null(row: ArgRow, value: Any, facts: Facts, args: Facts) -> Any:
    return row.value if value is None else value


def _product(row: ArgRow, value: Any, facts: Facts) -> Any:
    return value * facts[row.by] if value else None


def _first_dense(row: ArgRow, dense: Any, facts: Facts) -> Any:
    if not facts["experts"]:
        return 1  # Megatron's default, without meaning in a dense model
    return [0] * dense + [1] * (facts["layers"] - dense)


def _dense_layers(row: ArgRow, frequency: Any, facts: Facts, args: Facts) -> Any:
    if not facts.get("experts"):
        return None
    if isinstance(frequency, list):
        dense = frequency.index(1) if 1 in frequency else len(frequency)
        if frequency == [0] * dense + [1] * ((facts.get("layers") or len(frequency)) - dense):
            return dense
    elif frequency == 1:
        return 0
    raise UnsupportedError(f"Megatron argument {row.keys[0]} is {frequency!r}; dense layers must come first")


def _divided(row: ArgRow, product: Any, facts: Facts, args: Facts) -> Any:
    by = facts.get(row.by)
    if not product or not by:
        return 0
    if product % by:
        raise UnsupportedError(f"Megatron argument {row.keys[0]} is {product}, no multiple of {row.by} = {by}")
    return product // by


def _torch_dtype(row: ArgRow, name: Any, facts: Facts) -> Any:
    import torch

    if name and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(name)
    return getattr(torch, name) if name else None


def _groups(row: ArgRow, groups: Any, facts: Facts, args: Facts) -> Any:
    """``num_query_groups`` has a meaning only under ``group_query_attention``."""
    return groups if args.get("group_query_attention") else facts.get("heads")


def _unless_one(row: ArgRow, value: Any, facts: Facts) -> Any:
    return None if facts.get(row.by, 1) == 1 else value


def of_layers(value: Any, facts: Facts) -> Any:
    """A list of one entry a layer in one form: without the MTP layers' entries, and null if all are "full"."""
    layers, mtp = facts.get("layers"), facts.get("mtp_layers") or 0
    if not isinstance(value, list) or layers is None or not layers <= len(value) <= layers + mtp:
        return value
    return None if all(kind == "full" for kind in value[:layers]) else value[:layers]


def _indexer_schedule(types: Any) -> tuple[int, int] | None:
    """(frequency, offset) whose schedule is ``types``, or None. Layers count from one, the MTP layer as the next."""
    if types is None:
        return 1, 1
    own = [kind != "shared" for kind in types]
    for frequency in range(1, len(own) + 1):
        for offset in range(1, len(own) + 1):
            if own == [max(n - offset, 0) % frequency == 0 for n in range(1, len(own) + 1)]:
                return frequency, offset
    return None


def resized(kinds: list[Any], facts: Facts, layers: int, mtp: int) -> list[Any]:
    """A list of one entry a layer for another number of layers, in the same order again and again. MTP layers, where it
    speaks of them, are of the kind that the last one was. Indexers that Megatron has no schedule for become layers'
    own."""
    trunk = kinds[: facts["layers"]]
    own = [*(trunk[n % len(trunk)] for n in range(layers)), *[kinds[-1]] * (mtp if len(kinds) > facts["layers"] else 0)]
    return ["full"] * len(own) if "shared" in own and _indexer_schedule(own) is None else own


def _indexer_types(row: ArgRow, frequency: Any, facts: Facts, args: Facts) -> Any:
    offset = max(args.get("dsa_indexer_skip_topk_offset") or 1, 1)
    count = facts.get("layers", 0) + (args.get("mtp_num_layers") or 0)
    if (frequency or 1) == 1:
        return None
    return ["shared" if max(n - offset, 0) % frequency else "full" for n in range(1, count + 1)]


def _renamed(row: ArgRow, value: Any, facts: Facts) -> Any:
    return row.value.get(value, value)


def _named(row: ArgRow, value: Any, facts: Facts, args: Facts) -> Any:
    return {theirs: ours for ours, theirs in row.value.items()}.get(value, value)


def _dtype_name(row: ArgRow, dtype: Any, facts: Facts, args: Facts) -> Any:
    return str(dtype).removeprefix("torch.") if dtype else None


def _indexer_frequency(row: ArgRow, types: Any, facts: Facts) -> Any:
    schedule = _indexer_schedule(types)
    return schedule[0] if schedule else None  # a pattern that has no schedule stays in the manifest


def _indexer_offset(row: ArgRow, types: Any, facts: Facts) -> Any:
    schedule = _indexer_schedule(types)
    return schedule[1] if schedule else None


def _every(n: int, layers: int) -> list[int]:
    """Which of ``layers`` layers have linear attention (1), where every ``n``-th has full attention (0)."""
    return [int((k + 1) % n != 0) for k in range(layers)]


def linear_layers(told: Any, facts: Facts) -> list[int]:
    """The same from a config: kinds of attention layer by layer, or ``n``. Raises UnsupportedError otherwise."""
    layers, kinds = facts.get("layers") or 0, ("full_attention", "linear_attention")
    if type(told) is int and told > 0:
        return _every(told, layers)
    if isinstance(told, list) and len(told) == layers and all(kind in kinds for kind in told):
        return [kinds.index(kind) for kind in told]
    raise UnsupportedError(
        f"config.json: layers have the attention {told!r:.200}, expected {layers} entries of {' or '.join(kinds)}, or "
        "every which layer has full attention"
    )


def layer_types(linear: Any) -> Any:
    """The inverse: kinds of attention layer by layer."""
    return [("full_attention", "linear_attention")[one] for one in linear] if linear else linear


CONFIG_RULES = {"linear_layers": (linear_layers, layer_types)}
"""Rule of a config row → what makes a fact of its value, and a value of the fact."""


def _linear_frequency(row: ArgRow, linear: Any, facts: Facts) -> Any:
    if not linear:
        return None
    return next((n for n in range(1, len(linear) + 1) if _every(n, len(linear)) == linear), linear)


def _linear_pattern(row: ArgRow, frequency: Any, facts: Facts, args: Facts) -> Any:
    if frequency is None:
        return None
    if type(frequency) is int and frequency > 0:
        return _every(frequency, facts["layers"])
    if not isinstance(frequency, list) or len(frequency) != facts["layers"] or not set(frequency) <= {0, 1}:
        raise ValueError(frequency)
    return frequency


def _window(row: ArgRow, width: Any, facts: Facts) -> Any:
    """Megatron counts the tokens before a token and after it; a window counts the token itself too."""
    return None if width is None else (width - 1, 0)


def _width(row: ArgRow, window: Any, facts: Facts, args: Facts) -> Any:
    if window is None:
        return None
    before, after = window
    if after != 0 or before < 0:
        raise UnsupportedError(f"Megatron argument {row.keys[0]} is {window!r}, expected tokens before and none after")
    return before + 1


def _window_layers(row: ArgRow, kinds: Any, facts: Facts) -> Any:
    return [int(kind == SLIDING) for kind in kinds[: facts["layers"]]]


def _layer_kinds(row: ArgRow, skip: Any, facts: Facts, args: Facts) -> Any:
    """utils.py, is_layer_window_attention: every ``skip``-th layer is full, or a list says which have the window."""
    if not isinstance(skip, list):
        skip = [not skip or n % skip != 0 for n in range(1, facts["layers"] + 1)]
    return [SLIDING if windowed else FULL for windowed in skip]


def _full_layers(row: ArgRow, kinds: Any, facts: Facts) -> Any:
    return [int(kind == FULL) for kind in kinds[: facts["layers"]]]


def _steps(row: ArgRow, layers: Any, facts: Facts) -> Any:
    return (facts["mtp_steps"] if _repeated(row, facts.get("mtp_steps"), facts) else layers) or None


def _stored_layers(row: ArgRow, steps: Any, facts: Facts, args: Facts) -> Any:
    return 1 if args.get("mtp_use_repeated_layer") and steps else steps or 0


def _repeated(row: ArgRow, steps: Any, facts: Facts) -> Any:
    return bool(steps and steps > facts["mtp_layers"])


def _repeats(row: ArgRow, repeated: Any, facts: Facts, args: Facts) -> Any:
    return args.get("mtp_num_layers") if repeated else None


SLIDING, FULL = "sliding_attention", "full_attention"

RULES: Mapping[str, Rule] = {
    "same": Rule(_keep, _kept, says_null=False),
    "optional": Rule(_keep, _kept),
    "not": Rule(lambda row, value, facts: not value, _negated),
    "none_is": Rule(_null_if, _if_null),
    "unless_one": Rule(_unless_one, lambda row, value, facts, args: 1 if value is None else value),
    "renamed": Rule(_renamed, _named),
    "groups": Rule(_keep, _groups, says_null=False),
    "linear_freq": Rule(_linear_frequency, _linear_pattern, says_null=False),
    "times": Rule(_product, _divided),
    "first_dense": Rule(_first_dense, _dense_layers),
    "torch_dtype": Rule(_torch_dtype, _dtype_name),
    "window": Rule(_window, _width),
    "window_layers": Rule(_window_layers, _layer_kinds),
    "full_layers": Rule(_full_layers, _layer_kinds),
    "steps": Rule(_steps, _stored_layers),
    "repeated": Rule(_repeated, _repeats),
    "indexer_freq": Rule(_indexer_frequency, _indexer_types, says_null=False),
    "indexer_offset": Rule(_indexer_offset, _indexer_types, says_null=False),
}
"""Rule of an argument row → how it works. No file may name another."""
