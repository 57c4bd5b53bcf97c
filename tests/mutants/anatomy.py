"""What a checkpoint calls its MTP layers, told from names, shapes and config alone, whatever its family.

Nothing here comes from mtpcheck or its family files, so what they get wrong is not repeated here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.conftest import FIXTURES

NORM = ".input_layernorm.weight"
"""Every decoder layer has one, under this name."""
FP32 = "F32"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Config keys that count MTP layers."""
STEPS = "mtp_num_speculative_steps"
"""For how many steps one layer is run."""


@dataclass(frozen=True)
class Anatomy:
    """Names of one checkpoint.

    ``config`` is that of the text model, ``shapes`` and ``dtypes`` those of the stored tensors, ``mtp`` the names
    that belong to MTP layers; ``trunk`` and ``layers`` are paths of decoder layers and of those inside MTP layers.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    mtp: tuple[str, ...]
    trunk: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def begins(self) -> str:
        """A pattern of how names of MTP tensors begin."""
        at = re.match(r"(.*\.layers\.)(\d+)$", self.layers[0]) if self.layers else None
        if at and self.trunk and self.trunk[0].startswith(at[1]):
            return "|".join(re.escape(layer + ".") for layer in self.layers)
        return r"(?:model\.)?mtp[._]"

    @property
    def projection(self) -> str:
        """Of the first MTP layer: from embedding and hidden state to one hidden state."""
        width = self.config["hidden_size"]
        return self._own(lambda name: self.shapes[name] == (width, 2 * width))

    @property
    def embed_norm(self) -> str:
        return self._own(lambda name: len(self.shapes[name]) == 1 and re.search(r"enorm|emb|token", name) is not None)

    @property
    def hidden_norm(self) -> str:
        return self._own(lambda name: len(self.shapes[name]) == 1 and re.search(r"hnorm|hidden", name) is not None)

    def _own(self, fits: Callable[[str], bool]) -> str:
        """The first tensor that fits of those that an MTP layer has beside attention and MLP."""
        found = [n for n in self.mtp if fits(n) and not re.search(r"\.(self_attn|attention|mlp)\.", n)]
        if not found:
            raise LookupError(f"no such tensor among {', '.join(self.mtp)}")
        return min(found, key=lambda name: (len(name), name))

    def first(self, pattern: str) -> list[str]:
        """Tensors of the first MTP layer's decoder layer whose names below it match."""
        path = re.escape(self.layers[0]) + r"\."
        return [name for name in self.mtp if re.match(path + pattern, name)]

    @property
    def experts(self) -> int:
        """Experts of the first MTP layer."""
        return len({re.split(r"\.experts\.(\d+)\.", name)[1] for name in self.first(r".*\.experts\.\d+\.")})

    @property
    def moe(self) -> bool:
        """Whether any layer has experts."""
        return any(".experts." in name for name in self.shapes)

    @property
    def images(self) -> bool:
        """Whether it also holds what belongs to no text model."""
        return any(".visual." in name for name in self.shapes)

    @property
    def fp32(self) -> list[str]:
        return [name for name, dtype in self.dtypes.items() if dtype == FP32]

    @property
    def latent(self) -> bool:
        """Whether attention of the first MTP layer goes through a low rank."""
        return bool(self.first(r"self_attn\.kv_a_proj"))

    @property
    def declared(self) -> bool:
        """Whether the config counts MTP layers."""
        return any(key in self.config for key in COUNTS)

    @property
    def steps(self) -> int:
        """For how many steps the one MTP layer is run; 0 where each step has its own."""
        return int(self.config.get(STEPS, 0))

    @property
    def delta(self) -> tuple[int, tuple[int, ...]] | None:
        """Key heads of the gated delta nets, and how many rows of each a head has: query, key, value, gate, beta,
        alpha. None where there are no such nets."""
        if not any(".linear_attn." in name for name in self.shapes):
            return None
        keys, values = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        key, value = self.config["linear_key_head_dim"], self.config["linear_value_head_dim"] * values // keys
        return keys, (key, key, value, value, values // keys, values // keys)

    @property
    def qkv(self) -> tuple[int, tuple[int, ...]] | None:
        """Groups of the first MTP layer, and how many rows of each a group has: query, gate if there is one, key,
        value. None where attention is latent."""
        if self.latent:
            return None
        heads, width = self.config["num_attention_heads"], self.config.get("head_dim")
        width = width or self.config["hidden_size"] // heads
        if self.first(r".*\.query_key_value\."):
            groups = self.config["num_key_value_heads"]
            return groups, (heads // groups * width, width, width)
        query, key, value = (self.shapes[self.first(rf"self_attn\.{kind}_proj\.weight")[0]][0] for kind in "qkv")
        groups, own = key // width, heads * width
        return groups, (*[own // groups] * (query // own), key // groups, value // groups)


@cache
def anatomy(fixture: str) -> Anatomy:
    return of(FIXTURES / fixture)


def of(folder: Path) -> Anatomy:
    """Read config and headers of a Hugging Face folder."""
    table = json.loads((folder / "config.json").read_text())
    config = table.get("text_config", table)
    shapes, dtypes = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                held = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(held.get_shape()), held.get_dtype()
    mtp = tuple(name for name in sorted(shapes) if _of_mtp(name, config.get("num_hidden_layers", 0)))
    trunk, layers = (tuple(sorted(_layers(names), key=_number)) for names in (shapes.keys() - {*mtp}, mtp))
    return Anatomy(config, shapes, dtypes, mtp, trunk, layers)


def _of_mtp(name: str, layers: int) -> bool:
    """Named so, or a layer after the last."""
    numbered = re.search(r"(?<!visual)\.layers\.(\d+)\.", name)
    return re.search(r"(^|\.)mtp[._]", name) is not None or (numbered is not None and int(numbered[1]) >= layers)


def _layers(names: Iterable[str]) -> Iterator[str]:
    return (name.removesuffix(NORM) for name in names if name.endswith(NORM))


def _number(path: str) -> int:
    return int(path.rpartition(".")[2])


FOLDERS = tuple(path.parent.name for path in sorted(FIXTURES.glob("*/config.json")))
STORED = tuple(name for name in FOLDERS if anatomy(name).mtp)
"""Fixtures that store MTP layers."""
NONE_STORED = tuple(name for name in FOLDERS if not anatomy(name).mtp)
"""Those of releases that ship none."""
