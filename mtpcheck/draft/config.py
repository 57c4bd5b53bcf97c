"""The config that transformers builds a model from: config.json, or what a Megatron checkpoint's arguments say.

A checkpoint is untrusted. No code of it is run, and no key reaches transformers that neither the family's rows nor the
model's own config class name (``auto_map``, ``quantization_config``, …).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.errors import UnsupportedError
from mtpcheck.export import derived_config
from mtpcheck.facts import lookup
from mtpcheck.family import Family, load_family
from mtpcheck.rules import MISSING
from mtpcheck.tensormap import TensorMap


def config_of(checkpoint: Checkpoint, tensor_map: TensorMap) -> dict[str, Any]:
    """config.json as the checkpoint's facts have it; a Megatron checkpoint without the form of an HF one has no more.

    Raises UnsupportedError naming the keys that it cannot tell.
    """
    manifest = checkpoint.manifest.config if checkpoint.manifest else None
    original = manifest if checkpoint.config is None else checkpoint.config
    config = derived_config(tensor_map, original)
    if missing := _lacking(load_family(tensor_map.family), config):
        raise UnsupportedError(
            f"could not judge: {checkpoint.path} does not tell {', '.join(missing)}, without which transformers cannot "
            "run it; accept --like takes them from a checkpoint of the same model"
        )
    return config


def _lacking(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Keys that a config must have and this one, derived from a Megatron checkpoint, has not."""
    return [
        row.keys[0]
        for row in family.all_config
        if row.fact and row.default is MISSING and all(lookup(config, key) is MISSING for key in row.keys)
    ]


def model_config(family: Family, config: Mapping[str, Any]) -> Any:
    """transformers' config of a decoder. Raises UnsupportedError if it has no such model, or refuses a value."""
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig

    # a lazy mapping, whose get() finds only what was loaded before
    kind = CONFIG_MAPPING[family.trunk_type] if family.trunk_type in CONFIG_MAPPING else None  # noqa: SIM401
    # of some models of text and images it has the text model, and no such model with a head
    within = kind is not None and kind.base_config_key == "text_config" and kind in MODEL_MAPPING
    if kind is None or not (within or kind in MODEL_FOR_CAUSAL_LM_MAPPING):
        have = f"transformers {transformers.__version__} has no language model of type {family.trunk_type!r}"
        raise UnsupportedError(f"could not judge: {have}, so {family.name} cannot be run")
    common = PreTrainedConfig.__dataclass_fields__
    keys = {name for name in kind.__dataclass_fields__ if name not in common}
    own = (key.removeprefix(f"{row.lead}.") for row in family.all_config for key in row.keys)
    keys |= {key.split(".")[0] for key in own} - {"torch_dtype", "dtype"}
    given = family.text_config(config)
    try:
        return kind.from_dict({key: value for key, value in given.items() if key in keys} | {"use_cache": False})
    except Exception as error:  # values come from untrusted files, and checks of many kinds meet them
        raise refused(family, error) from None


def refused(family: Family, error: Exception) -> UnsupportedError:
    said = " ".join(str(error).split())
    return UnsupportedError(f"could not judge: transformers cannot run {family.trunk_type} with this config: {said}")
