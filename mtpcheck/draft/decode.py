"""Speculative decoding: the MTP head drafts some tokens, one pass of the model judges them all, the longest correct
prefix is kept and the model's own next token added to it.

Greedy, a draft is correct if it is the model's own choice. At a temperature, a draft ``x ~ q`` is kept with probability
``min(1, p(x) / q(x))``, else a token is drawn from what ``p`` has more than ``q`` (Leviathan et al., arXiv 2211.17192),
which leaves the distribution of the text as it is without drafts.

There is no cache: every pass runs the whole text, which is right for small models and short texts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from mtpcheck.draft.head import Step
from mtpcheck.draft.run import Engine, check_ids
from mtpcheck.draft.trunk import Hidden
from mtpcheck.draft.vocabulary import score
from mtpcheck.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class Decoded:
    """A text written with drafts. Counts and rates are those of vLLM (``v1/spec_decode/metrics.py``)."""

    tokens: tuple[int, ...]
    """What was written after the prompt."""
    passes: int
    """Passes of the model: one for the prompt, then one a round."""
    rounds: int
    """Passes that judged drafts."""
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    """[drafts a round]: rounds in which this draft and all before it were accepted."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of all drafted tokens; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round, the model's own included: from 1 to drafts + 1; None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def speculate(
    engine: Engine,
    prompt: Sequence[int],
    new_tokens: int,
    drafts: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
) -> Decoded:
    """Write ``new_tokens`` tokens after ``prompt``, or fewer if one of ``stop`` is among them.

    ``drafts`` tokens a round (0 is plain decoding); more than one come from one MTP layer used again, as in vLLM, or
    from distinct layers in a chain, as in Megatron. Greedy at ``temperature`` 0. Raises UsageError for an empty prompt,
    an id out of range, or more drafts than distinct layers can give, UnsupportedError where logits are not finite.
    """
    check_ids([prompt], engine.tensor_map.facts["vocab"])
    layers = len(engine.heads)
    if drafts < 0 or drafts > layers > 1:
        raise UsageError(f"cannot draft {drafts} tokens: each of the {layers} MTP layers drafts one")
    if temperature and not 1e-3 <= temperature <= 1e3:
        raise UsageError(f"temperature is {temperature}, expected 0 (greedy) or a number from 0.001 to 1000")
    writer = _Writer(engine, drafts, temperature, torch.Generator().manual_seed(seed))
    return writer.write(list(prompt), new_tokens, stop)


_MULTIPLE, _ROWS = 64, 8


class _Writer:
    def __init__(self, engine: Engine, drafts: int, temperature: float, generator: torch.Generator) -> None:
        self.engine, self.drafts = engine, drafts
        self.temperature, self.generator = temperature, generator

    def write(self, text: list[int], new_tokens: int, stop: frozenset[int]) -> Decoded:
        end = len(text) + new_tokens
        start, passes, rounds, drafted, accepted_at = len(text), 0, 0, 0, [0] * self.drafts
        guesses, chances = list[int](), torch.empty(0)
        while len(text) < end:
            ids, padding = self._padded(text + guesses, end)
            hidden = self.engine.hidden(ids, padding)
            passes += 1
            wanted = self._chances(hidden.normed[:, len(text) - 1 : len(text) + len(guesses)], self.engine.head)
            kept, added = judge(wanted, chances, guesses, self.generator)
            if guesses:
                rounds, drafted = rounds + 1, drafted + len(guesses)
                for j in range(kept):
                    accepted_at[j] += 1
            news = [*guesses[:kept], added]
            if done := [j for j, token in enumerate(news) if token in stop]:
                text += news[: done[0] + 1]
                break
            text += news
            count = min(self.drafts, end - len(text) - 1)  # the last token is the model's own
            guesses, chances = self._guess(hidden, text, count) if count > 0 else ([], torch.empty(0))
        return Decoded(tuple(text[start:]), passes, rounds, drafted, sum(accepted_at), tuple(accepted_at))

    def _padded(self, text: list[int], end: int) -> tuple[Tensor, Tensor]:
        """[1, positions] and which of them lie beyond the text.

        Always as many positions, with room for a reused layer's further steps: rounding depends on the shape of what
        is multiplied, and so do the choices of an indexer among equals. A text must not depend on how it is drafted.
        """
        positions = -(-(end + self.drafts) // _MULTIPLE) * _MULTIPLE
        ids = torch.tensor([text + [0] * (positions - len(text))])
        return ids, torch.arange(positions)[None] >= len(text)

    def _chances(self, vectors: Tensor, head: str) -> Tensor:
        """[1, n, hidden] → probabilities [n, vocab]; greedy, all is the first largest logit's."""
        count = vectors.shape[1]
        alike = pad(vectors, (0, 0, 0, -count % _ROWS))  # for the same reason as _padded
        scored = score(self.engine.weights, head, {"": alike}, {"": [count]}, keep=True)[""]
        logits = torch.from_numpy(scored.logits[0]).double()
        if not logits.isfinite().all():
            raise UnsupportedError("could not judge: the model's logits are not finite, so it writes no text")
        if self.temperature:
            return torch.softmax(logits / self.temperature, dim=-1)
        return one_hot(torch.from_numpy(scored.choices[0]), logits.shape[-1]).double()

    def _guess(self, hidden: Hidden, text: list[int], count: int) -> tuple[list[int], Tensor]:
        """Draft ``count`` tokens after ``text``, whose last token the model has just added: ids, and the probabilities
        [count, vocab] that they were drawn with."""
        heads, known, positions = self.engine.heads, list(text), hidden.normed.shape[1]
        slots = len(text) - 1  # positions that have a hidden state and a token after it
        before: Hidden | Step = hidden
        states, drawn = heads[0].fed(hidden), list[Tensor]()
        again = len(heads) == 1
        for depth in range(count):
            head = heads[0 if again else depth]
            if depth and again:  # one more slot, fed with what the last one gave
                states = states.clone()
                states[:, slots] = head.fed(before)[:, slots - 1]
                slots += 1
            elif depth:
                states = head.fed(before)
            after = known[1:] if again else known[1 + depth :]
            ids = torch.tensor([(after + [0] * positions)[:positions]])
            before = head.run(ids, states, torch.arange(positions)[None] >= slots)
            drawn.append(self._chances(before.normed[:, slots - 1 : slots], head.head))
            known.append(draw(drawn[-1][0], self.generator))
        return known[len(text) :], torch.cat(drawn)


def judge(wanted: Tensor, chances: Tensor, guesses: Sequence[int], generator: torch.Generator) -> tuple[int, int]:
    """How many of ``guesses`` to keep, and the token that follows them.

    ``wanted`` [n + 1, vocab] are the model's probabilities at each guess and after the last, ``chances`` [n, vocab]
    those that the guesses were drawn with.
    """
    for j, guess in enumerate(guesses):
        p, q = wanted[j], chances[j]
        if torch.rand((), dtype=torch.float64, generator=generator) * q[guess] >= p[guess]:
            return j, draw((p - q).clamp(min=0), generator)
    return len(guesses), draw(wanted[len(guesses)], generator)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """One index, drawn in proportion to ``weights`` [vocab]."""
    return int(torch.multinomial(weights, 1, generator=generator))
