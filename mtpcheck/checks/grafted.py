"""Does a head that was put into another checkpoint belong there?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mtpcheck.checks.values import compare_maps
from mtpcheck.fetch import is_remote
from mtpcheck.progress import Silent
from mtpcheck.report.finding import Finding, Severity, note, warning
from mtpcheck.side import Side
from mtpcheck.tensormap import TensorMap, TensorRef, is_mtp

_START = 1 << 16  # bytes of each tensor
_PLAIN = ("BF16", "F16", "F32")
_WORSE = "a head that was trained for another trunk drafts worse"


def check_trunk(donor: Side, broken: Side) -> Iterator[Finding]:
    """Whether the trunk is still the one that the head was trained for, told by its last layer without the experts,
    its final norm, embedding and head: whatever trains a model moves some of them."""
    ours, theirs = (_last(side.tensor_map) for side in (donor, broken))
    common = ours.parts.keys() & theirs.parts.keys()
    if not any(part.startswith("layers.") for part in common):
        where = "the donor holds no" if not any(part.startswith("layers.") for part in ours.parts) else "both hold no"
        yield note("graft.trunk", "trunk", f"{where} plain decoder layer to compare; {_WORSE}")
        return
    if is_remote(donor.checkpoint):
        ours, theirs = _start(ours), _start(theirs)
        what = f"of {len(common)} tensors the beginnings were compared with the donor's on the Hub, and not the rest"
        yield note("graft.trunk", "trunk", what)
    found = compare_maps(ours, theirs, Silent(), may_widen=True)
    moved = [finding for finding in found if finding.severity is Severity.FAILURE]
    if moved:
        what = f"{len(moved)} of {len(common)} tensors that were compared differ from the donor's; {_WORSE}"
        yield warning(
            "graft.trunk", moved[0].subject, what, where=str(broken.checkpoint.path),
            todo="hold its acceptance against the donor's (mtpcheck accept), and train the head on if it is much lower",
        )  # fmt: skip


def _last(tensor_map: TensorMap) -> TensorMap:
    last = f"layers.{tensor_map.facts['layers'] - 1}."
    chosen = {
        part: ref
        for part, ref in tensor_map.parts.items()
        if part in ("embed", "head", "final_norm") or (part.startswith(last) and ".experts." not in part)
    }
    return replace(tensor_map, parts=chosen, padding={})


def _start(tensor_map: TensorMap) -> TensorMap:
    """The first rows of every tensor: the rest of a trunk on the Hub would have to be fetched for a warning."""

    def rows(ref: TensorRef) -> int:
        return min(ref.shape[0], max(1, _START * ref.shape[0] // max(ref.nbytes, 1)))

    parts = tensor_map.parts.items()
    cut = {part: TensorRef(ref.dtype, ref.plan.slice(0, 0, rows(ref))) if ref.shape else ref for part, ref in parts}
    return replace(tensor_map, parts=cut)


def check_dtype(donor: Side, broken: Side) -> Iterator[Finding]:
    """Serving engines copy every weight into a parameter of the model's dtype, so another one is kept and said."""
    head, trunk = _dtype(donor.tensor_map, mtp=True), _dtype(broken.tensor_map, mtp=False)
    if head and trunk and head != trunk:
        what = f"are {head} and the trunk is {trunk}; they are kept, and engines cast them when they load"
        yield warning("graft.dtype", "MTP layers", what, expected=trunk, got=head)


def _dtype(tensor_map: TensorMap, mtp: bool) -> str:
    """The dtype that most matrices of the MTP layers, or of the trunk, have; empty where none is plain."""
    counts = Counter(
        ref.dtype
        for part, ref in tensor_map.parts.items()
        if is_mtp(part) is mtp and part not in tensor_map.copies and len(ref.shape) > 1 and ref.dtype in _PLAIN
    )
    return counts.most_common(1)[0][0] if counts else ""
