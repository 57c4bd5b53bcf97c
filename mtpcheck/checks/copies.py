"""Tensors that repeat another one: an MTP layer's embedding and head, a tied head. Each is absent, equal or own."""

from __future__ import annotations

from collections.abc import Iterator

from mtpcheck.compare import differs
from mtpcheck.model import BESIDE
from mtpcheck.report.finding import Finding, failure, note, warning
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp


def check_tied(*tensor_maps: TensorMap) -> Iterator[Finding]:
    """A tied model may store its head all the same, if it is the embedding. Reads both where it does.

    Of two maps the first is the reference: what it has untied itself is its own fault, and none of the candidate's."""
    told: set[str] = set()
    for number, tensor_map in enumerate(tensor_maps, 1):
        for part, original in tensor_map.copies.items():
            ref, main = tensor_map.parts.get(part), tensor_map.parts.get(original)
            if is_mtp(part) or part in told or ref is None or main is None or not differs(ref, main):
                continue
            told.add(part)
            yield failure(
                "presence.tied", tensor_map.names[part], source=number < len(tensor_maps),
                message=f"differs from {tensor_map.names[original]}, and the model is declared tied",
                cause="some loaders use the one and some the other",
                todo="declare the model untied if it was trained so, or store one of the two",
            )  # fmt: skip


def compare_copies(reference: TensorMap, candidate: TensorMap, bits: bool = True) -> Iterator[Finding]:
    """Parts that repeat another, and that one of two checkpoints leaves out. Without ``bits`` nothing is read."""
    for having, lacking in ((reference, candidate), (candidate, reference)):
        for part, ref in having.parts.items():
            if part not in lacking.parts and part in having.copies:
                if bits:
                    yield from _lost_copy(having, part, ref)
                else:
                    what = f"is left out by the other checkpoint; whether it repeats {having.repeated_by(part)} was not"
                    yield note("presence.copy", having.names[part], f"{what} looked at")


def _lost_copy(having: TensorMap, part: str, ref: TensorRef) -> Iterator[Finding]:
    """A part that one side omits: no loss if it equals what it repeats on the side that has it."""
    original = having.repeated_by(part)
    main = having.parts.get(original)
    name = having.names[part]
    if main is None or differs(ref, main):
        yield failure(
            "presence.copy", name, f"differs from {original}, and the other checkpoint does not have it",
            cause="Megatron has no place for an MTP layer's own embedding or head",
        )  # fmt: skip
    else:
        yield note("presence.copy", name, f"repeats {original}, the other checkpoint leaves it out")


def compare_beside(reference: TensorMap, candidate: TensorMap) -> Iterator[Finding]:
    """Tensors of no text model that a Megatron checkpoint does not have beside it: none, as after training, or some."""
    own = [part for part in reference.parts if part.startswith(BESIDE)]
    lost = [reference.names[part] for part in own if part not in candidate.parts]
    if lost and len(lost) == len(own) and not any(part.startswith(BESIDE) for part in candidate.parts):
        what = f"and {len(lost) - 1:,} more belong to no text model, and are not here: not compared"
        yield warning("presence.beside", lost[0], what)
    else:
        yield from (failure("presence.missing", name, "is no longer beside the text model") for name in lost)
