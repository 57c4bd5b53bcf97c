"""Text that the model writes with its drafts, workload by workload: tokens a pass, as serving would see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtpcheck.checkpoint import Checkpoint
from mtpcheck.draft.workloads import Workload
from mtpcheck.errors import UsageError
from mtpcheck.progress import Progress
from mtpcheck.tensormap import TensorMap


@dataclass(frozen=True)
class Writing:
    """``tokens`` new tokens after each prompt. A prompt is the first half of a passage of a workload, of ``prompts``
    passages of each; greedy at ``temperature`` 0."""

    tokens: int
    drafts: int = 1
    temperature: float = 0.0
    seed: int = 0
    prompts: int = 2

    def check(self, layers: int) -> None:
        """Raise UsageError for counts that make no sense with so many MTP layers."""
        if self.tokens < 2:
            raise UsageError(f"--decode {self.tokens}: expected 2 or more, since the first token is the model's own")
        if self.drafts > layers > 1:
            raise UsageError(f"--drafts {self.drafts}: each of the {layers} MTP layers drafts one token")


@dataclass(frozen=True)
class Written:
    """Counts over the prompts of one workload. Rates are those of vLLM; None where nothing was drafted."""

    name: str
    tokens: int
    passes: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def tokens_a_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.name, "tokens": self.tokens, "passes": self.passes, "drafted": self.drafted,
            "accepted": self.accepted, "tokens_a_pass": self.tokens_a_pass, "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_length,
        }  # fmt: skip


def write_all(
    checkpoint: Checkpoint, tensor_map: TensorMap, workloads: Sequence[Workload], how: Writing, progress: Progress
) -> list[Written]:
    """Write after prompts of every workload; all weights stay in memory meanwhile.

    Raises UsageError for counts that make no sense, UnsupportedError if the model cannot be run.
    """
    from mtpcheck.draft.decode import speculate
    from mtpcheck.draft.run import Engine

    how.check(tensor_map.facts["mtp_stored"])
    engine = Engine(checkpoint, tensor_map, resident=True, progress=progress)
    found = []
    for workload in workloads:
        texts = [
            speculate(engine, passage[: -(-len(passage) // 2)].tolist(), how.tokens, how.drafts, how.temperature,
                      how.seed + number)
            for number, passage in enumerate(workload.passages[: how.prompts])
        ]  # fmt: skip
        found.append(
            Written(workload.name, sum(len(t.tokens) for t in texts), sum(t.passes for t in texts),
                    sum(t.rounds for t in texts), sum(t.drafted for t in texts), sum(t.accepted for t in texts))
        )  # fmt: skip
    return found
