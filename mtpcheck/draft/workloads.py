"""Workloads: JSON Lines files of passages to run a model on, ``{"text": …}`` or ``{"ids": [n, …]}`` a line.

Text becomes ids through the checkpoint's own ``tokenizer.json``, with the special tokens that it puts round a text.
The bundled files (prose, code, chat, maths) are made by ``fixtures/workload_text.py``, out of whose other split the
fixtures' training text comes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtpcheck.draft.alive import FEWEST_DRAFTS
from mtpcheck.draft.passage import Ids
from mtpcheck.errors import FormatError, MtpcheckError, UsageError

FORM = '{"text": "…"} or {"ids": [n, …]}'
NAMES = ("prose", "code", "chat", "maths")
LONGEST = 4096
"""Tokens of a passage: attention takes memory by their square."""
PADDED = 1 << 18
"""Tokens of all passages, each as long as the longest: they run together."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Workload:
    """``passages``: token ids, int64 [n] each with n of 2 or more."""

    name: str
    passages: tuple[Ids, ...]

    @property
    def drafts(self) -> int:
        """How many drafts of depth 1 can be made: at every token but each passage's first."""
        return sum(len(passage) - 1 for passage in self.passages)


def bundled() -> dict[str, Path]:
    """The workloads that come with mtpcheck, by name."""
    return {name: Path(__file__).parent.parent / "workloads" / f"{name}.jsonl" for name in NAMES}


def read_workload(name: str, path: Path, encode: Encode, vocabulary: int) -> Workload:
    """A workload as ids below ``vocabulary``. ``encode`` is called for passages that are text.

    Raises UsageError if the file cannot be read, and FormatError with file and line if it holds no passage, or one
    that is not of the form above, too short to draft for, or has ids that the model has no embedding for.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"workload {name}: {path} cannot be read: it is no file")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"workload {name}: {path} cannot be read: {error.strerror}") from None
    passages = tuple(
        _passage(f"{path}:{number}", line, encode, vocabulary) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not passages:
        raise FormatError(f"{path}: the workload is empty; expected a line of {FORM} for every passage")
    return Workload(name, passages)


def need_enough(workloads: Iterable[Workload]) -> None:
    """Raise UsageError unless there are drafts enough to judge a head by."""
    workloads = list(workloads)
    drafts = sum(workload.drafts for workload in workloads)
    if drafts < FEWEST_DRAFTS:
        raise UsageError(
            f"{', '.join(workload.name for workload in workloads)}: too short to judge draft acceptance: expected "
            f"{FEWEST_DRAFTS} tokens after the first of their passages, got {drafts}; add text"
        )
    lengths = [len(passage) for workload in workloads for passage in workload.passages]
    if (padded := len(lengths) * max(lengths)) > PADDED:
        raise UsageError(
            f"{len(lengths):,} passages, each padded to the longest with {max(lengths):,} tokens, are {padded:,} "
            f"tokens, expected at most {PADDED:,}: cut the longest, or use fewer"
        )


def encoder(folder: Path) -> Encode:
    """How the checkpoint in ``folder`` makes ids of a text.

    Raises UsageError if it has no tokenizer.json and FormatError if that cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{path} is missing, so text cannot be made tokens: add it, or give workloads of ids")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other class
        raise FormatError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text).ids)


def _passage(where: str, line: bytes, encode: Encode, vocabulary: int) -> Ids:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON ({error}); expected {FORM}") from None
    if not isinstance(content, dict) or len(content) != 1 or not content.keys() <= {"text", "ids"}:
        got = f"keys {', '.join(map(repr, content))}" if isinstance(content, dict) else type(content).__name__
        raise FormatError(f"{where}: expected {FORM}, got {got}")
    if "text" in content:
        ids: Sequence[int] = _encoded(where, content["text"], encode)
    else:
        ids = content["ids"]
        odd = [i for i in ids if type(i) is not int] if isinstance(ids, list) else [ids]
        if odd:
            raise FormatError(f"{where}: ids are whole numbers in a list, got {json.dumps(odd[0])[:40]}")
    outside = next((i for i in ids if not 0 <= i < vocabulary), None)
    if outside is not None:
        raise FormatError(f"{where}: id {outside} is not in the model's vocabulary, 0 to {vocabulary - 1}")
    if len(ids) > LONGEST:
        raise FormatError(f"{where}: {len(ids):,} tokens, expected at most {LONGEST:,}: cut the passage")
    if len(ids) < 2:
        raise FormatError(f"{where}: {len(ids)} token(s), and a draft is made knowing 2")
    return np.array(ids, np.int64)


def _encoded(where: str, text: Any, encode: Encode) -> list[int]:
    try:
        sound = isinstance(text, str) and text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{where}: the text has half a surrogate pair, which no tokenizer takes") from None
    if sound:
        try:
            return encode(text)
        except MtpcheckError:
            raise
        except Exception as error:  # the tokenizers library raises no other class
            raise FormatError(f"{where}: the checkpoint's tokenizer cannot take this text: {error}") from None
    raise FormatError(f"{where}: text is a string that is not empty, got {json.dumps(text)[:40]}")
