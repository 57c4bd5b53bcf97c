"""What a diagnosis looks at: every piece of weight on both sides, under one key, and the findings' names for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtpcheck.checks.changed import component_of
from mtpcheck.diagnosis.same import same
from mtpcheck.dialect import KeyForm
from mtpcheck.dialects import load_dialect
from mtpcheck.dtypes import NARROW, WIDE, cast
from mtpcheck.encoding import as_codes
from mtpcheck.model import Model
from mtpcheck.normalise import stored_rows
from mtpcheck.rows import Row
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorMap, TensorRef


@dataclass(frozen=True)
class Cause:
    """What happened: an id of ``configs/causes.yaml``, empty where nothing was confirmed, and a sentence."""

    id: str
    what: str


_STORED = "stored "
"""What a stored name begins with as a key: a file may call anything ``layers.3.attn.q``."""

Told = dict[str, Cause]
"""Key of a piece → what happened to it."""


@dataclass(frozen=True)
class Case:
    """Two sides piece by piece.

    A key is a part of the tensor map; ``PART_scale_inv`` for the FP8 scales of one; or, behind a mark that no part has,
    the stored name of what no part has. ``before`` are the reference's pieces, ``after`` the candidate's. Codes stand
    for values where both have them.
    """

    a: Side
    b: Side
    before: Mapping[str, TensorRef]
    after: Mapping[str, TensorRef]
    names: Mapping[str, str]
    """Key → stored name in the reference, in the order of the model."""
    codes: Mapping[str, TensorRef]
    """FP8 codes of the reference's pieces that stand in ``before`` as values."""
    scales: Mapping[str, str]
    """Key of FP8 scales → that of their codes."""

    @property
    def readable(self) -> bool:
        """Whether bits may be looked at."""
        return self.a.readable and self.b.readable

    @property
    def model(self) -> Model:
        return self.a.tensor_map.model

    @cached_property
    def keys_of(self) -> Mapping[str, list[str]]:
        """Stored name in the reference → keys of its pieces."""
        found: dict[str, list[str]] = {}
        for key, name in self.names.items():
            found.setdefault(name, []).append(key)
        return found

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Key → its place in the order of the model."""
        return {key: i for i, key in enumerate(self.model.shapes)}

    def comparable(self, key: str) -> bool:
        a, b = self.before.get(key), self.after.get(key)
        return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)

    def differing(self, name: str, part: str) -> list[str]:
        """Keys of what differs in a stored tensor, or the part of it that a finding named."""
        if part:
            return [part] if part in self.before else []
        keys = self.keys_of.get(name, [])
        if len(keys) < 2 or not all(map(self.comparable, keys)):
            return keys
        return [key for key in keys if not same(self.before[key].plan, self.after[key].plan)]

    def component(self, key: str) -> str:
        """The component of a piece; one for all that no part has."""
        part = self.scales.get(key, key)
        return component_of(part) if part in self.model.shapes else ""

    @cached_property
    def spellings(self) -> Sequence[Mapping[str, Row]]:
        """Key → the row that it is stored in: as HF joins parts, and as Megatron does."""
        megatron = next((side.checkpoint for side in (self.b, self.a) if side.checkpoint.layout != "hf"), None)
        if megatron is not None:
            rows = stored_rows(megatron, self.model)
        else:
            rows = load_dialect().rows(self.model, self.model.facts.get("vocab") or 1, KeyForm()).rows
        return [{part: row for row in table for part in row.parts} for table in (self.model.rows, rows)]

    @cached_property
    def candidate_rows(self) -> Mapping[str, Row]:
        """The candidate's own names → rows."""
        table = self.spellings[0 if self.b.checkpoint.layout == "hf" else 1]
        return {row.name: row for row in table.values()}

    def joined(self, row: Row) -> TensorRef | None:
        """A stored tensor made of the reference's parts, of several dtypes as Megatron joins them; None if it lacks
        one, or no dtype holds all."""
        parts = {part: self.before[part] for part in row.parts if part in self.before}
        dtypes = {ref.dtype for ref in parts.values()}
        if len(parts) < len(row.parts) or (len(dtypes) > 1 and not dtypes <= {WIDE, *NARROW}):
            return None
        if len(dtypes) > 1:
            parts = {part: cast(ref, WIDE) for part, ref in parts.items()}
        own = {part: ref for part, ref in self.a.tensor_map.padding.items() if part in parts}
        padding = {part: ref.plan for part, ref in own.items() if ref.dtype == parts[part].dtype}
        plans = {part: ref.plan for part, ref in parts.items()}
        return TensorRef(parts[row.parts[0]].dtype, row.join(plans, self.model.shapes, padding))


def make_case(a: Side, b: Side) -> Case:
    """Pair up the pieces of two sides. Reads nothing."""
    common = a.tensor_map.encoded.keys() & b.tensor_map.encoded.keys()
    left, right = as_codes(a.tensor_map, common), as_codes(b.tensor_map, common)
    before, after, names = dict(left.parts), dict(right.parts), dict(left.names)
    scales: dict[str, str] = {}
    for key, name, scale, weight in _scales(left, common):
        before[key], names[key] = left.encoded[name].beside[scale], scale
        if scale in right.encoded[name].beside:
            after[key] = right.encoded[name].beside[scale]
        if weight:
            scales[key] = weight
    if a.checkpoint.layout == b.checkpoint.layout == "hf":
        claimed = {*names.values(), *(s for own in left.encoded.values() for s in own.beside)}
        for name, ref in a.checkpoint.tensors.items():
            if name not in claimed:
                key = _STORED + name
                before[key], names[key] = ref, name
                if name in b.checkpoint.tensors:
                    after[key] = b.checkpoint.tensors[name]
    elif b.checkpoint.layout != "hf":  # Megatron may hold what is narrow as fp32
        for part, ref in before.items():
            if part in after and ref.dtype in NARROW and after[part].dtype == WIDE:
                before[part] = cast(ref, WIDE)
    as_values = {part for part in left.parts if left.parts[part].dtype != "F8_E4M3"}
    coded = as_codes(a.tensor_map).parts
    codes = {part: coded[part] for part in as_values if coded[part] is not left.parts[part]}
    return Case(a, b, before, after, _in_order(names, before), codes, scales)


def _scales(tensor_map: TensorMap, names: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Of all that lies beside codes: its key, the stored name of the codes, its own, and the key of the codes."""
    for row in tensor_map.model.rows:
        for scale in tensor_map.encoded[row.name].beside if row.name in names else ():
            if len(row.parts) == 1 and scale.startswith(row.name):
                yield row.parts[0] + scale.removeprefix(row.name), row.name, scale, row.parts[0]
            else:
                yield scale, row.name, scale, ""


def _in_order(names: Mapping[str, str], before: Mapping[str, TensorRef]) -> dict[str, str]:
    """Names of what the reference has; those of scales directly behind their codes."""
    return {key: names[key] for key in before if key in names}
