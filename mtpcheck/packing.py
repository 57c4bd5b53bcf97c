"""Which modules of an HF checkpoint are stored plain, and which as codes with what belongs to them.

    X.weight             plain, or the codes of X where its dtype is no float of 16 bits or more
    X.weight_packed      codes, with X.weight_scale ... (compressed-tensors)
    X.qweight            codes, with X.scales, X.qzeros ... (GPTQ, AWQ)
    X_blocks             codes, with X_scales (MXFP4)

The names stand in ``configs/packings.yaml``. Nothing is unpacked here; FP8 in blocks is, in ``encoding.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from mtpcheck.data import check_keys, configs, load
from mtpcheck.tensormap import TensorRef

WEIGHT = "weight"
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class Method:
    """How one method of quantization stores a weight, and how it declares exclusions."""

    name: str
    methods: tuple[str, ...]
    with_key: str
    needs: Mapping[str, tuple[tuple[str, ...], ...]]
    """Codes → scales that must stand beside them; of each inner tuple one."""
    nested: tuple[str, ...]
    exclude: Mapping[str, str]
    only: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    codes: tuple[str, ...]
    scales: frozenset[str]
    beside: frozenset[str]
    fused: Mapping[str, tuple[str, ...]]
    methods: Mapping[str, Method]

    @cached_property
    def known(self) -> frozenset[str]:
        return frozenset(self.codes) | self.scales | self.beside


@dataclass(frozen=True)
class Module:
    """The weight of one module: its stored tensors by their ends, and which of them is plain, which codes."""

    name: str
    tensors: Mapping[str, str]
    """End of a name (``weight_scale``) → the whole name."""
    plain: str = ""
    codes: str = ""
    codes_end: str = ""

    @property
    def stored(self) -> str:
        """The tensor to name in a message."""
        return self.codes or self.plain or next(iter(self.tensors.values()))


@lru_cache(maxsize=1)
def packings() -> Table:
    """``configs/packings.yaml``. Raises FamilyError if it is not well-formed."""
    path = configs() / "packings.yaml"
    table = load(path)
    check_keys(str(path), table, {"codes", "scales", "beside", "fused", "methods"})
    methods = {name: _method(f"{path}: {name}", name, entry) for name, entry in table["methods"].items()}
    fused = {name: tuple(members) for name, members in table["fused"].items()}
    return Table(tuple(table["codes"]), frozenset(table["scales"]), frozenset(table["beside"]), fused, methods)


def _method(what: str, name: str, entry: dict[str, Any]) -> Method:
    check_keys(what, entry, {"methods", "with", "needs", "nested", "exclude", "only"})
    needs = {codes: tuple(map(_either, scales)) for codes, scales in entry["needs"].items()}
    nested = _either(entry.get("nested", ""))
    listed = entry.get("exclude", {}), entry.get("only", {})
    return Method(name, tuple(entry["methods"]), entry.get("with", ""), needs, nested, *listed)


def _either(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def modules_of(tensors: Mapping[str, TensorRef]) -> dict[str, Module]:
    """Every module that stores a weight, or anything that belongs to one."""
    found: dict[str, dict[str, str]] = {}
    for stored in tensors:
        if taken := _take_apart(stored):
            found.setdefault(taken[0], {})[taken[1]] = stored
    return {name: _module(name, own, tensors) for name, own in found.items()}


def _take_apart(stored: str) -> tuple[str, str] | None:
    """Module and end of a tensor's name, if the end is a known one."""
    known = packings().known
    module, _, end = stored.rpartition(".")
    if module and end in known:
        return module, end
    module, found, end = stored.rpartition(f".{WEIGHT}.")
    if found and f"{WEIGHT}.{end}" in known:
        return module, f"{WEIGHT}.{end}"
    module, _, end = stored.rpartition("_")
    return (module, "_" + end) if "_" + end in known else None


def _module(name: str, own: Mapping[str, str], tensors: Mapping[str, TensorRef]) -> Module:
    plain = own.get(WEIGHT, "")
    if plain and tensors[plain].dtype not in _FLOATS:
        return Module(name, own, "", plain, WEIGHT)
    codes = next((end for end in packings().codes if end != WEIGHT and end in own), "")
    return Module(name, own, plain, own.get(codes, ""), codes)


def known_as(module: str) -> tuple[str, ...]:
    """Names under which engines know a module: its own, what they fuse it into, all experts of its layer."""
    parent, _, last = module.rpartition(".")
    fused = (f"{parent}.{name}" for name, members in packings().fused.items() if last in members)
    experts, found, _ = module.rpartition(".experts.")
    return module, *fused, *([experts + ".experts"] if found else [])
