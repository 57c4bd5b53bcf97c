"""Which piece of the reference does a differing piece hold? And what do all these answers together say?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mtpcheck.diagnosis.case import Case, Cause, Told
from mtpcheck.diagnosis.same import same, samples
from mtpcheck.diagnosis.words import component, layers, numbers, split_layer
from mtpcheck.tensormap import TensorRef

_MOST = 8  # origins looked for; many tensors may be alike
_ALIKE = 32  # of those, how many are looked at
_LEAST = 4  # elements: fewer are soon those of another tensor, and tell nothing by themselves

Origins = Mapping[str, Sequence[str]]
"""Key of a differing piece → keys of the reference whose bits it holds."""


class Index:
    """Pieces of the reference by some of their elements. Reads a few runs of every piece that is asked for."""

    def __init__(self, case: Case, keys: Iterable[str]) -> None:
        self.case = case
        wanted = {_kind(case.after[key]) for key in keys}
        self._whole: dict[tuple[object, ...], list[str]] = {}
        self._named: dict[tuple[object, ...], list[str]] = {}  # by what they are called in their layer, too
        self._runs: dict[tuple[object, ...], list[str]] = {}
        for key, ref in case.before.items():
            if _kind(ref) in wanted:
                layer, rest = split_layer(key)
                runs = list(samples(ref.plan))
                self._whole.setdefault((_kind(ref), *runs), []).append(key)
                if layer:
                    self._named.setdefault((rest, _kind(ref), *runs), []).append(key)
                for i, run in enumerate(runs):
                    if len(set(run)) > ref.plan.itemsize:  # a constant run tells nothing
                        self._runs.setdefault((_kind(ref), i, run), []).append(key)

    def held_by(self, key: str) -> list[str]:
        """Reference pieces whose bits a candidate's piece holds, all of them; at most a few."""
        ref = self.case.after[key]
        runs = (_kind(ref), *samples(ref.plan))
        near = self._named.get((split_layer(key)[1], *runs), [])[:_ALIKE]
        alike = dict.fromkeys([*near, *self._whole.get(runs, [])[:_ALIKE]])
        found: list[str] = []
        for other in sorted(alike, key=lambda other: (other in self.case.model.copies, *_nearness(key, other))):
            if len(found) < _MOST and other != key and same(self.case.before[other].plan, ref.plan):
                found.append(other)
        return found

    def shares_runs(self, key: str) -> bool:
        """Whether any sampled run of a candidate's piece stands in the reference at the same place of some piece."""
        ref = self.case.after[key]
        return any((_kind(ref), i, run) in self._runs for i, run in enumerate(samples(ref.plan)))


def _kind(ref: TensorRef) -> tuple[object, ...]:
    return ref.dtype, ref.shape


def _nearness(key: str, other: str) -> tuple[bool, bool]:
    """Sort first what has the same place in another layer, then what is in the same layer."""
    (layer, rest), (its_layer, its_rest) = split_layer(key), split_layer(other)
    return rest != its_rest, layer != its_layer


def moved(case: Case, keys: Sequence[str], index: Index) -> Told:
    """Causes of pieces that hold another piece's bits."""
    origins = {key: found for key in keys if (found := index.held_by(key))}
    weights = {key: found for key, found in origins.items() if key not in case.scales}
    told: Told = {}
    for theory in (_twins, _experts, _layers, _exchanged, _taken):
        if theory is _exchanged:
            weights = {key: found for key, found in weights.items() if case.after[key].elements >= _LEAST}
        told.update(theory(case, {key: found for key, found in weights.items() if key not in told}))
    return told | _scales(case, origins, told)


_TWINS = (
    (re.compile(r"(.*\.)(gate|up)"), {"gate": "up", "up": "gate"}, "gate-up-exchanged", "gate and up"),
    (re.compile(r"(.*\.proj\.)(embed|hidden)"), {"embed": "hidden", "hidden": "embed"}, "halves-exchanged",
     "the embedding half and the hidden half of the projection"),
)  # fmt: skip


def _twins(case: Case, origins: Origins) -> Told:
    """Two parts that go together, in each other's place."""
    told: Told = {}
    for pattern, other, cause, both in _TWINS:
        for key, found in origins.items():
            match = pattern.fullmatch(key)
            twin = match[1] + other[match[2]] if match else ""
            if twin in found and key in origins.get(twin, ()):
                told[key] = Cause(cause, f"{both} stand in each other's place")
    return told


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def _experts(case: Case, origins: Origins) -> Told:
    """Experts of one layer among themselves, kind by kind of their tensors."""
    groups: dict[tuple[str, str], dict[int, list[int]]] = {}
    for key, found in origins.items():
        if match := _EXPERT.fullmatch(key):
            near = [int(m[2]) for m in map(_EXPERT.fullmatch, found) if m and (m[1], m[3]) == (match[1], match[3])]
            if near:
                groups.setdefault((match[1], match[3]), {})[int(match[2])] = near
    told: Told = {}
    for (stem, kind), held in groups.items():
        cause = _rolled(held, case.model.facts.get("experts") or 0) or _mixed(held)
        told.update({f"{stem}.{expert}.{kind}": cause for expert in held})
    return told


def _rolled(held: Mapping[int, Sequence[int]], count: int) -> Cause | None:
    if not count or held.keys() != set(range(count)):
        return None
    for step in held[0]:
        if all((expert + step) % count in held[expert] for expert in range(count)):
            step = step if step <= count // 2 else step - count
            way = "before" if step < 0 else "after"
            return Cause(
                "experts-rolled",
                f"each of the {count} experts holds what the one {abs(step)} {way} it held, going round",
            )
    return None


def _mixed(held: Mapping[int, Sequence[int]]) -> Cause:
    """Experts in another order, or some of them more than once."""
    source: dict[int, int] = {}
    taken: set[int] = set()
    for expert, found in sorted(held.items()):
        left = [other for other in found if other not in taken]  # equal experts stand for one another
        source[expert] = next((other for other in left if other in held), next(iter(left), found[0]))
        taken.add(source[expert])
    told = f"experts {numbers(list(source))} hold what {numbers(list(source.values()))} held"
    return Cause("experts-permuted" if set(source) == set(source.values()) else "experts-duplicated", told)


# ---- layers


def _layers(case: Case, origins: Origins) -> Told:
    """Tensors that hold what those of the same name in another layer held."""
    votes: dict[str, Counter[str]] = {}
    for key, found in origins.items():
        layer, rest = split_layer(key)
        for other, its_rest in map(split_layer, found):
            if layer and other and its_rest == rest:
                votes.setdefault(layer, Counter())[other] += 1
    source = {layer: count.most_common(1)[0][0] for layer, count in votes.items()}
    whole = {layer: other for layer, other in source.items() if _all_of(case, origins, layer, other)}
    causes = _of_whole_layers(case, whole)
    told: Told = {}
    for key, found in origins.items():
        layer, rest = split_layer(key)
        other = source.get(layer, "")
        if f"{other}.{rest}" not in found:
            continue
        if layer in causes:
            told[key] = causes[layer]
        elif key not in origins.get(f"{other}.{rest}", ()):  # else two tensors were exchanged
            told[key] = Cause("taken-from", f"{component(layer)} holds what {component(other)} held")
    return told


def _all_of(case: Case, origins: Origins, layer: str, other: str) -> bool:
    """Whether everything that two layers both have was taken over; what is alike in both shows nothing."""
    for part in case.model.layers.get(layer, []):
        key, its = f"{layer}.{part}", f"{other}.{part}"
        if its in origins.get(key, ()) or key in case.model.copies or not case.comparable(key):
            continue
        a, b = case.before[key], case.before.get(its)
        if b is not None and _kind(a) == _kind(b) and not same(a.plan, b.plan):
            return False
    return True


def _of_whole_layers(case: Case, whole: Mapping[str, str]) -> dict[str, Cause]:
    """Layer → what happened, where it was exchanged or shifted."""
    causes: dict[str, Cause] = {}
    for layer, other in whole.items():
        if whole.get(other) == layer:
            a, b = sorted((layer, other), key=_number)
            causes[layer] = Cause("layers-exchanged", f"{component(a)} and {component(b)} stand in each other's place")
    order = list(case.model.layers)  # the MTP layers behind the last of the decoder, as HF often numbers them
    places = {order.index(a): order.index(b) for a, b in whole.items() if a not in causes}
    for step in sorted({other - layer for layer, other in places.items()}, key=abs):
        shifted = sorted(n for n, other in places.items() if other - n == step)
        vacated = order[shifted[-1 if step > 0 else 0] + step]
        if len(shifted) < 2 and any(key.startswith(vacated + ".") for key in case.after):
            continue
        round_ = [n for n in places if n not in shifted] if set(places) == set(places.values()) else []
        way = f"{abs(step)} {'higher' if step > 0 else 'lower'}{' (going round)' * bool(round_)}"
        told = f"{layers(order[n] for n in sorted([*shifted, *round_]))} each hold what the layer {way} held"
        causes.update({order[n]: Cause("layers-shifted", told) for n in (*shifted, *round_) if order[n] not in causes})
    return causes


def _number(layer: str) -> tuple[str, int]:
    kind, number = layer.split(".")
    return kind, int(number)


# ---- single tensors


def _exchanged(case: Case, origins: Origins) -> Told:
    told: Told = {}
    for key, found in origins.items():
        twin = next((other for other in found if key in origins.get(other, ())), "")
        if twin and key not in told:
            (layer, rest), (its_layer, its_rest) = split_layer(key), split_layer(twin)
            if layer and layer == its_layer:
                both = f"{rest} and {its_rest}"
            elif layer and its_layer and rest == its_rest:
                both = f"the tensors of {component(layer)} and {component(its_layer)}"
            else:
                both = f"{case.names[key]} and {case.names[twin]}"
            told[key] = told[twin] = Cause("exchanged", f"{both} stand in each other's place")
    return told


def _taken(case: Case, origins: Origins) -> Told:
    def named(key: str, other: str) -> str:
        return case.names[other] if case.names[other] != case.names[key] else other

    return {key: Cause("taken-from", f"holds what {named(key, found[0])} held") for key, found in origins.items()}


def _scales(case: Case, origins: Origins, told: Told) -> Told:
    """Scales that went with their codes share their cause; others were taken alone."""
    causes: Told = {}
    for key, weight in case.scales.items():
        if key not in origins:
            continue
        sources = {case.scales.get(other, "") for other in origins[key]}
        if weight in told and sources & set(origins.get(weight, ())):
            causes[key] = told[weight]
        else:
            first = origins[key][0]
            whose = case.names[case.scales[first]] if first in case.scales else case.names[first]
            causes[key] = Cause("scales-taken", f"these are the scales of {whose}")
    return causes
