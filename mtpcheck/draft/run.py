"""One pass over the weights for a batch of texts: what the model chooses, and what its MTP head drafts, everywhere.

Given the ids, all drafts of a depth come from one causal pass of its layer. On text that the model did not write itself
this is *teacher-forced*: each draft is judged after the text's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.draft.config import config_of
from mtpcheck.draft.head import Head, HeadFacts, Step, head_of
from mtpcheck.draft.memory import return_freed_memory
from mtpcheck.draft.passage import Passage, Run, Touched
from mtpcheck.draft.trunk import Hidden, Trunk
from mtpcheck.draft.vocabulary import Scored, score
from mtpcheck.draft.weights import Weights
from mtpcheck.errors import UnsupportedError, UsageError
from mtpcheck.family import load_family
from mtpcheck.model import BESIDE
from mtpcheck.progress import Progress
from mtpcheck.tensormap import TensorMap


class Engine:
    """A checkpoint of any layout, ready to run. Building it reads no weights.

    ``resident`` keeps all weights once they are read. Raises UnsupportedError if the checkpoint has no MTP layer, if
    transformers has no such model, or if its config cannot be had; the sentences begin with "could not judge".
    """

    def __init__(
        self, checkpoint: Checkpoint, tensor_map: TensorMap, resident: bool = False, progress: Progress | None = None
    ) -> None:
        family = load_family(tensor_map.family)
        if not tensor_map.facts["mtp_stored"]:
            raise UnsupportedError(f"could not judge: {checkpoint.path} holds no MTP layer that could draft")
        return_freed_memory()
        self.tensor_map = tensor_map
        self.weights = Weights(tensor_map, resident, progress)
        self.trunk = Trunk(config_of(checkpoint, tensor_map), self.weights)
        facts = HeadFacts.of(family)
        self.heads = [Head(i, facts, self.trunk, self.weights) for i in range(tensor_map.facts["mtp_stored"])]

    @property
    def head(self) -> str:
        """The part that is the model's LM head."""
        return head_of(self.weights)

    def hidden(self, ids: Tensor, padding: Tensor) -> Hidden:
        """The decoder over [texts, positions]."""
        return self.trunk.run(self.weights.lookup("embed", ids), padding)


def run(engine: Engine, texts: Sequence[Sequence[int]], ablate: bool = True, keep_logits: bool = False) -> Run:
    """Run texts of token ids, all at once; shorter ones are padded, and padding reaches no expert.

    Bits depend on the texts that run together and on the number of threads: rounding does, and so does which of equal
    scores an indexer prefers. Two checkpoints are comparable bit for bit under the same texts, in one process.

    ``ablate`` also drafts with pieces of the head taken away. Raises UsageError for an empty text or an id out of
    range, UnsupportedError as the weights are read.
    """
    check_ids(texts, engine.tensor_map.facts["vocab"])
    ids, lengths = _batch(texts)
    engine.weights.note_anew()
    hidden = engine.hidden(ids, _beyond(lengths, ids.shape[1]))
    steps = list[Step]()
    before: Hidden | Step = hidden
    for depth, head in enumerate(engine.heads, start=1):
        before = head.run(_later(ids, depth), head.fed(before), _beyond(_shorter(lengths, depth), ids.shape[1]))
        steps.append(before)
    ablated: dict[str, Tensor] = {}
    ran, embedding_rows = frozenset(engine.weights.read), len(engine.weights.embedding_rows)
    if ablate:
        first = engine.heads[0]
        ablated = first.ablated(_later(ids, 1), first.fed(hidden), _beyond(_shorter(lengths, 1), ids.shape[1]))
    features = {"main": (engine.head, hidden.normed, lengths)}
    for depth, (head, step) in enumerate(zip(engine.heads, steps, strict=True), start=1):
        features[f"{_DEPTH}{depth}"] = (head.head, step.normed, _shorter(lengths, depth))
    for name, x in ablated.items():
        features[name] = (engine.heads[0].head, x, _shorter(lengths, 1))
    scored = _score(engine.weights, features, keep_logits)
    if not scored["main"].finite:
        raise UnsupportedError("could not judge: the model's logits are not finite, so it chooses no token")
    passages = tuple(_passage(scored, text, ablated, own) for text, own in enumerate(texts))
    touched = _touched(engine, ran | {part for part, _, _ in features.values()}, embedding_rows, ids.shape[1])
    return Run(passages, touched, engine.weights.nbytes)


def check_ids(texts: Sequence[Sequence[int]], vocab: int) -> None:
    """Raise UsageError unless there are texts, each has tokens, and all are in the vocabulary."""
    if not len(texts):
        raise UsageError("there is no text to run")
    for number, text in enumerate(texts):
        if not len(text):
            raise UsageError(f"text {number} has no tokens")
        if bad := [i for i in text if not 0 <= i < vocab]:
            raise UsageError(f"text {number} has the token id {bad[0]}, expected 0 to {vocab - 1}")


def _batch(texts: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """[texts, positions], padded with 0, and how long each text is."""
    lengths = [len(text) for text in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.as_tensor(np.asarray(text, np.int64))
    return ids, lengths


def _shorter(lengths: list[int], depth: int) -> list[int]:
    return [max(0, length - depth) for length in lengths]


def _beyond(lengths: list[int], positions: int) -> Tensor:
    """[texts, positions]: true beyond each text."""
    return torch.arange(positions) >= torch.tensor(lengths)[:, None]


def _later(ids: Tensor, depth: int) -> Tensor:
    """Each position gets the id that stands ``depth`` later; the last ones get 0, and do not count."""
    return torch.cat([ids[:, depth:], torch.zeros_like(ids[:, :depth])], dim=1)


Feature = tuple[str, Tensor, list[int]]
_DEPTH = "depth "


def _score(weights: Weights, features: Mapping[str, Feature], keep: bool) -> dict[str, Scored]:
    """Multiply by the heads, each read once."""
    scored: dict[str, Scored] = {}
    for part in dict.fromkeys(part for part, _, _ in features.values()):
        own = {name: feature for name, feature in features.items() if feature[0] == part}
        vectors = {name: x for name, (_, x, _) in own.items()}
        scored |= score(weights, part, vectors, {name: lengths for name, (_, _, lengths) in own.items()}, keep)
    return scored


def _passage(scored: dict[str, Scored], text: int, ablated: Iterable[str], ids: Sequence[int]) -> Passage:
    by_depth = [own for name, own in scored.items() if name.startswith(_DEPTH)]
    return Passage(
        ids=np.asarray(ids, np.int64),
        main=scored["main"].choices[text],
        drafts=tuple(own.choices[text] for own in by_depth),
        ablated={name: scored[name].choices[text] for name in ablated},
        logits_digest=tuple(own.digests[text] for own in by_depth),
        logits=tuple(own.logits[text] for own in (scored["main"], *by_depth) if own.logits),
    )


def _touched(engine: Engine, ran: frozenset[str], embedding_rows: int, positions: int) -> Touched:
    """Sort all parts into those with a say and those without."""
    not_ran: dict[str, str] = {}
    topk = engine.tensor_map.facts.get("index_topk", 0)
    for part in engine.tensor_map.parts:
        if ".attn.indexer." in part and positions <= topk:
            not_ran[part] = f"the indexer chooses all of {positions} positions, since it may choose {topk}"
        elif part in ran:
            continue
        elif part.startswith(BESIDE):
            not_ran[part] = "belongs to no text model"
        elif ".mlp.experts." in part:
            not_ran[part] = "no token was routed to this expert"
        elif part in engine.tensor_map.copies:
            not_ran[part] = f"repeats {engine.tensor_map.repeated_by(part)}, which engines use in its place"
        else:
            not_ran[part] = "is not used"
    return Touched(ran - not_ran.keys(), not_ran, embedding_rows)
