"""Speculative decoding changes how fast a text is written, and nothing else about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtpcheck.convert import convert
from mtpcheck.draft import decode
from mtpcheck.draft.decode import Decoded, judge, speculate
from mtpcheck.draft.run import Engine, run
from mtpcheck.draft.trunk import Hidden
from mtpcheck.errors import UnsupportedError, UsageError
from tests.test_draft import (
    FIXTURES,
    IDS,
    NAMES,
    engine,
    every_fixture,
    in_memory,
    mtp_of_transformers,
    of_transformers,
    one_thread,
    without_ties,
)

__all__ = ["one_thread"]
PROMPT, NEW = IDS[:8], 12


@every_fixture
def test_greedy_with_drafts_is_greedy_without(name: str) -> None:
    own = engine(name, resident=True)
    plain = speculate(own, PROMPT, NEW, drafts=0)
    assert len(plain.tokens) == plain.passes == NEW
    assert (plain.rounds, plain.drafted, plain.acceptance_rate, plain.mean_acceptance_length) == (0, 0, None, None)
    for drafts in (1, 2) if len(own.heads) == 2 else (1, 3):
        drafted = speculate(own, PROMPT, NEW, drafts)
        assert drafted.tokens == plain.tokens
        assert drafted.passes == NEW - drafted.accepted
        assert 0 < drafted.rounds < drafted.passes
        assert drafted.drafted <= drafts * drafted.rounds
        assert list(drafted.accepted_at) == sorted(drafted.accepted_at, reverse=True)
        assert drafted.mean_acceptance_length == 1 + drafted.accepted / drafted.rounds


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mimo"])
def test_plain_greedy_is_that_of_transformers(name: str) -> None:
    model = of_transformers(FIXTURES / name)
    ids = torch.tensor([PROMPT])
    stop = {"eos_token_id": None, "pad_token_id": 256}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **stop)
    assert tuple(out[0, len(PROMPT) :].tolist()) == speculate(engine(name, resident=True), PROMPT, NEW).tokens


def test_stop_tokens_end_the_text() -> None:
    own = engine("llama_mtp", resident=True)
    whole = speculate(own, PROMPT, NEW, drafts=2).tokens
    last = whole[5]
    stopped = speculate(own, PROMPT, NEW, drafts=2, stop=frozenset({last})).tokens
    assert stopped == whole[: whole.index(last) + 1]


# ---- which drafts are made


class Judged:
    """Stands before ``judge`` and notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, accept: bool | None = None) -> None:
        self.asked: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []
        self.accept = accept
        monkeypatch.setattr(decode, "judge", self)

    def __call__(
        self, wanted: torch.Tensor, chances: torch.Tensor, guesses: list[int], generator: Any
    ) -> tuple[int, int]:
        self.asked.append((wanted, chances, list(guesses)))
        if self.accept is None:
            return judge(wanted, chances, guesses, generator)
        return len(guesses) if self.accept else 0, 7


@every_fixture
@pytest.mark.parametrize("accept", [True, False])
def test_a_draft_is_the_one_of_its_position(name: str, accept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts were drawn from is what one pass over the same text gives there, whatever was accepted before."""
    own = Engine(*without_ties(name), resident=True)
    judged = Judged(monkeypatch, accept)
    depths = len(own.heads)
    written = speculate(own, PROMPT, 9, drafts=depths, temperature=1.0, seed=3).tokens
    text = [*PROMPT]
    for wanted, chances, guesses in judged.asked:
        (passage,) = run(own, [[*text, *guesses]], keep_logits=True).passages
        model = softmax(passage.logits[0][len(text) - 1 :])
        np.testing.assert_allclose(wanted.numpy(), model, rtol=0, atol=1e-5)
        for j in range(len(guesses)):
            np.testing.assert_allclose(
                chances[j].numpy(), softmax(passage.logits[1 + j][len(text) - 2]), rtol=0, atol=1e-5
            )
        text += [*(guesses if accept else []), 7]
    assert text == [*PROMPT, *written]
    assert max(len(guesses) for *_, guesses in judged.asked) == depths


def softmax(logits: Any) -> Any:
    return torch.softmax(torch.from_numpy(logits).double(), dim=-1).numpy()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_layer_that_is_used_again_sees_what_it_saw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second draft of one layer: its own output and the first draft come after all that the first pass saw. So does
    transformers' layer with a cache."""
    from transformers.cache_utils import MtpCache

    judged = Judged(monkeypatch, accept=False)
    speculate(engine(name, resident=True), PROMPT, 4, drafts=2, temperature=1.0)
    (_, _, none), (_, chances, guesses) = judged.asked[:2]
    assert not none and len(guesses) == 2
    model, mtp = mtp_of_transformers(name)
    ids = torch.tensor([[*PROMPT, 7]])
    with torch.no_grad():
        hidden = model.get_decoder()(ids[:, :-1], use_cache=False).last_hidden_state
        cache = MtpCache(config=model.config.get_mtp_config())
        positions = torch.arange(len(PROMPT))[None]
        y = mtp.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1:])[:, -1:]
        z = mtp.forward_layer(0, y, positions[:, -1:] + 1, cache, input_ids=torch.tensor([guesses[:1]]))
        for j, state in enumerate((y, z)):
            expected = softmax(mtp._project_to_logits(state)[0, 0].numpy())
            np.testing.assert_allclose(chances[j].numpy(), expected, rtol=0, atol=1e-6)


@every_fixture
def test_accepted_are_those_that_one_pass_accepts(name: str) -> None:
    """Greedy rounds of one draft, replayed from the drafts of one pass over the text that was written."""
    own = engine(name, resident=True)
    written = speculate(own, PROMPT, 24, drafts=1)
    text = [*PROMPT, *written.tokens]
    (passage,) = run(own, [text]).passages
    rounds = accepted = 0
    known = len(PROMPT) + 1  # the pass over the prompt adds one token
    while known < len(text) - 1:
        rounds += 1
        right = passage.drafts[0][known - 2] == passage.main[known - 1]
        accepted += right
        known += 1 + right
    assert (written.rounds, written.accepted) == (rounds, accepted)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_accepts_as_many(name: str, tmp_path: Path) -> None:
    """``generate(use_mtp=True)`` of what went through Megatron: each pass of its model adds a token of its own, so
    that all further tokens are accepted drafts."""
    convert(FIXTURES / name, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "hf")
    model = of_transformers(tmp_path / "hf")
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    passes: list[int] = []
    model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    for prompt in (PROMPT, PROMPT[: len(PROMPT) // 2], PROMPT[5:]):
        passes.clear()
        ids = torch.tensor([prompt])
        stop = {"eos_token_id": None, "pad_token_id": 256}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, use_mtp=True, **stop
        )
        ours = speculate(engine(name, resident=True), prompt, 24, drafts=1)
        assert tuple(out[0, len(prompt) :].tolist()) == ours.tokens
        assert (len(passes), 24 - len(passes)) == (ours.passes, ours.accepted)
        assert ours.accepted > 0


# ---- sampling


def chi_square(counts: dict[Any, int], expected: dict[Any, float]) -> float:
    """Statistic minus degrees of freedom, in standard deviations of it."""
    total = sum(counts.values())
    assert counts.keys() <= {key for key, chance in expected.items() if chance > 0}
    assert min(expected.values()) * total >= 5
    statistic = sum((counts.get(key, 0) - total * p) ** 2 / (total * p) for key, p in expected.items())
    freedom = len(expected) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


class Toy(decode._Writer):
    """A model and a head that are two tables of what comes after each token; all else is the real thing."""

    def __init__(self, vocab: int, drafts: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        drawings = torch.randn(2, vocab, vocab, generator=drawn, dtype=torch.float64)
        self.model, self.drafter = (drawings * 0.5).softmax(-1)
        super().__init__(self, drafts, 1.0, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        self.head = ""

    def hidden(self, ids: torch.Tensor, padding: torch.Tensor) -> Hidden:
        return Hidden(ids[..., None], ids[..., None])

    def _chances(self, vectors: torch.Tensor, head: str) -> torch.Tensor:
        return self.model[vectors[0, :, 0]]

    def _guess(self, hidden: Hidden, text: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        known = list(text)
        for _ in range(count):
            known.append(decode.draw(self.drafter[known[-1]], self.generator))
        return known[len(text) :], self.drafter[known[len(text) - 1 : -1]]


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_sampling_leaves_the_distribution_as_it_is(drafts: int) -> None:
    """Texts of three tokens after token 0, against the exact probability of each."""
    vocab, texts = 3, 5_000
    toy = Toy(vocab, drafts, seed=5)
    written = [toy.write([0], 3 + drafts, frozenset()) for _ in range(texts)]
    counts = Counter(own.tokens[:3] for own in written)
    triples = list(product(range(vocab), repeat=3))

    def chances(table: torch.Tensor) -> dict[Any, float]:
        return {(a, b, c): float(table[0, a] * table[a, b] * table[b, c]) for a, b, c in triples}

    assert abs(chi_square(counts, chances(toy.model))) < 4
    assert chi_square(counts, chances(toy.drafter)) > 50  # so the test would see a rule that keeps every draft
    kept = sum(own.accepted_at[0] for own in written) / sum(own.rounds for own in written)
    assert kept < 0.95


def test_a_draft_is_kept_as_often_as_the_distributions_agree() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]), torch.tensor([[0.1, 0.2, 0.7]])
    generator = torch.Generator().manual_seed(0)
    results = [judge(p, q, [decode.draw(q[0], generator)], generator) for _ in range(4_000)]
    kept = sum(count for count, _ in results) / len(results)
    assert kept == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=0.03)
    assert {added for count, added in results if count} == {0}  # all kept: the model's next, which is sure
    assert {added for count, added in results if not count} == {0, 1}  # what p has more than q


def test_the_seed_decides() -> None:
    own = engine("glm4_moe", resident=True)
    once, again, other = (speculate(own, PROMPT, 8, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2))
    assert once == again != other


# ---- figures, and what is refused


def test_figures_are_those_of_vllm() -> None:
    decoded = Decoded(tokens=(1,) * 20, passes=9, rounds=8, drafted=16, accepted=11, accepted_at=(7, 4))
    assert decoded.acceptance_rate == 11 / 16
    assert decoded.mean_acceptance_length == 1 + 11 / 8


@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ([], {}, "has no tokens"),
        ([260], {}, "id 260"),
        (PROMPT, {"drafts": 3}, "cannot draft 3 tokens: each of the 2 MTP layers"),
        (PROMPT, {"drafts": -1}, "cannot draft -1"),
        (PROMPT, {"temperature": -0.5}, "temperature is -0.5"),
        (PROMPT, {"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_what_makes_no_sense_is_refused(prompt: list[int], options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        speculate(engine("llama_mtp"), prompt, 4, **options)


def test_logits_that_are_no_numbers_write_no_text() -> None:
    own = engine("llama_mtp")
    head = own.tensor_map.parts["head"]
    nan = in_memory("BF16", torch.full(head.shape, float("nan"), dtype=torch.bfloat16))
    own.weights.tensor_map = replace(own.tensor_map, parts={**own.tensor_map.parts, "head": nan})
    with pytest.raises(UnsupportedError, match="not finite"):
        speculate(own, PROMPT, 4)
