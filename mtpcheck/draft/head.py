"""The MTP head: an embedding of the token that came and the hidden state before it, mixed, through one decoder layer.

    z = P · [ Ne(e) ; Nh(g) ]        e  embedding of t_{i+d}, g  hidden state at position i
    y = No( Block(z) )               causal, at positions i
    draft = argmax W · y             for t_{i+d+1}

Depth 1 is fed the decoder's hidden state, depth d + 1 what depth d gave. Positions are those of the decoder, as in vLLM
(``llm_base_proposer.py``) and Megatron; transformers counts from i + 1, which gives the same up to rounding.

The halves of P are parts of their own, and stand here with the embedding first, as transformers has it: one product
over both, so that rounding agrees with ``MtpModel`` too. The order is nothing that a checkpoint could get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from mtpcheck.draft.passage import BLOCK_SKIPPED, EMBEDDING_ZEROED, HIDDEN_ZEROED
from mtpcheck.draft.trunk import Hidden, Trunk
from mtpcheck.draft.weights import Weights
from mtpcheck.errors import FamilyError
from mtpcheck.family import Family
from mtpcheck.rows import Row

State = Literal["raw", "normed"]


@dataclass(frozen=True)
class HeadFacts:
    """How a family's MTP layers are wired: the keys below ``mtp:`` in its file, with what nearly all families do."""

    fed: State = "normed"
    """The decoder's hidden state before (raw) or after (normed) the final norm."""
    passed_on: State = "normed"
    """What a depth hands to the next: its block's output before or after its own output norm."""
    norm: Literal["w", "1+w"] = "w"
    """What a norm multiplies by."""
    separate: tuple[str, ...] = ()
    """Which of ``embed`` and ``head`` each MTP layer has for itself. All engines use the model's where a family does
    not say so, even if the file repeats them."""

    @staticmethod
    def of(family: Family) -> HeadFacts:
        given: dict[str, Any] = {key: family.mtp[key] for key in ("fed", "passed_on", "norm") if key in family.mtp}
        facts = HeadFacts(**given, separate=tuple(family.mtp.get("separate", ())))
        if not (
            {facts.fed, facts.passed_on} <= {"raw", "normed"}
            and facts.norm in ("w", "1+w")
            and set(facts.separate) <= {"embed", "head"}
        ):
            raise FamilyError(f"{family.name}: mtp: says {facts}, of which something is unknown")
        return facts


@dataclass(frozen=True)
class Step:
    """One depth over a batch, [texts, positions, hidden]: before and after the output norm."""

    raw: Tensor
    normed: Tensor


class Head:
    """MTP layer ``i`` of a model."""

    def __init__(self, i: int, facts: HeadFacts, trunk: Trunk, weights: Weights) -> None:
        self.i, self.facts, self._trunk, self._weights = i, facts, trunk, weights
        self._eps: float = weights.tensor_map.facts["norm_eps"]

    @property
    def embed(self) -> str:
        return f"mtp.{self.i}.embed" if "embed" in self.facts.separate else "embed"

    @property
    def head(self) -> str:
        return f"mtp.{self.i}.head" if "head" in self.facts.separate else head_of(self._weights)

    def fed(self, before: Hidden | Step) -> Tensor:
        which = self.facts.fed if isinstance(before, Hidden) else self.facts.passed_on
        return before.raw if which == "raw" else before.normed

    def run(self, ids: Tensor, fed: Tensor, padding: Tensor) -> Step:
        """``ids`` [texts, positions]: the token that came after each position. ``padding`` true where there is none."""
        return self._finish(self._trunk.block(self.i, self._mixed(ids, fed), padding))

    def ablated(self, ids: Tensor, fed: Tensor, padding: Tensor) -> dict[str, Tensor]:
        """Normed output with a piece of the head taken away."""
        whole = self._mixed(ids, fed)
        without_embedding = self._mixed(ids, fed, embedding=False)
        without_hidden = self._mixed(ids, fed, hidden=False)
        return {
            BLOCK_SKIPPED: self._finish(whole).normed,
            EMBEDDING_ZEROED: self._finish(self._trunk.block(self.i, without_embedding, padding)).normed,
            HIDDEN_ZEROED: self._finish(self._trunk.block(self.i, without_hidden, padding)).normed,
        }

    def _mixed(self, ids: Tensor, fed: Tensor, embedding: bool = True, hidden: bool = True) -> Tensor:
        coming = self._norm("embed_norm", self._weights.lookup(self.embed, ids))
        so_far = self._norm("hidden_norm", fed)
        coming, so_far = (x if used else torch.zeros_like(x) for x, used in ((coming, embedding), (so_far, hidden)))
        halves = tuple(f"mtp.{self.i}.proj.{half}" for half in ("embed", "hidden"))
        return linear(torch.cat([coming, so_far], dim=-1), self._weights.joined(Row("projection", halves, axis=1)))

    def _finish(self, x: Tensor) -> Step:
        absent = f"mtp.{self.i}.final_norm" in self._weights.tensor_map.model.constants
        return Step(x, x if absent else self._norm("final_norm", x))

    def _norm(self, part: str, x: Tensor) -> Tensor:
        """RMSNorm, in the order of operations that transformers' norms have."""
        weight = self._weights.part(f"mtp.{self.i}.{part}")
        gain = weight if self.facts.norm == "w" else 1.0 + weight
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps))


def head_of(weights: Weights) -> str:
    """The part that the model's LM head is: a tied head is the embedding, whatever copy is stored."""
    return weights.tensor_map.copies.get("head", "head")
