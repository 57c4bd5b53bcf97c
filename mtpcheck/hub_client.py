"""Requests to the Hub through huggingface_hub's client, within bounds that a server cannot stretch.

Tokens, endpoint, proxies and what is tried again are huggingface_hub's. Bounds are ours: how much is read, how long a
body may take, how long the Hub may ask to wait, and what an answer may call a file in the cache.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtpcheck.errors import FormatError, HubError
from mtpcheck.hub_errors import told, transport_error
from mtpcheck.parallel import Alive
from mtpcheck.progress import Progress

_LONGEST_WAIT = 60  # seconds that the Hub may ask for
_SLOWEST = 10_000  # bytes a second; with half a minute to begin with
_TRIES = 3
_CHUNK = 1 << 18


def get(url: str, where: str, most: int, span: tuple[int, int] | None = None, alive: Alive = lambda: None,
        opening: bool = False, **params: Any) -> bytes:  # fmt: skip
    """The body of a GET: at most ``most`` bytes, or just the bytes ``begin <= i < end`` of ``span``.

    ``where`` and ``opening`` are for messages (``hub_errors.told``). Raises HubError, and FormatError for an answer
    that is another than was asked for.
    """
    with told(where, opening):
        for left in reversed(range(_TRIES)):
            try:
                return _get(url, where, most, span, alive, params)
            except transport_error():
                if not left:
                    raise
                time.sleep(_TRIES - left)
    raise AssertionError


def _get(url: str, where: str, most: int, span: tuple[int, int] | None, alive: Alive, params: Any) -> bytes:
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    guard()
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if span is not None:
        headers["Range"], most = f"bytes={span[0]}-{span[1] - 1}", span[1] - span[0]
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    broken: Exception | None = None
    asked = http_stream_backoff(
        "GET", url, retry_on_exceptions=(), headers=headers, params=params or None, timeout=timeout
    )
    with asked as answer:
        hf_raise_for_status(answer)
        _require_asked(answer, where, span)
        try:  # what breaks in here must not reach the library's own loop, which cannot begin again
            body = _body(answer, where, most, alive)
        except Exception as error:
            broken = error
    if broken is not None:
        raise broken
    if span is not None and len(body) != most:
        raise FormatError(f"{where}: asked for bytes {span[0]} to {span[1]}, the server gave {len(body)} bytes")
    return body


def _require_asked(answer: Any, where: str, span: tuple[int, int] | None) -> None:
    coded = answer.headers.get("content-encoding", "identity")
    if coded != "identity":
        raise FormatError(f"{where}: the server sent {coded[:20]!r} where plain bytes were asked for")
    if span is None:
        return
    given = answer.headers.get("content-range", "")
    if answer.status_code != 206 or not given.startswith(f"bytes {span[0]}-{span[1] - 1}/"):
        raise FormatError(
            f"{where}: asked for bytes {span[0]} to {span[1]}, the server answered {answer.status_code} "
            f"{given[:60]!r}; it has to support ranges"
        )


def _body(answer: Any, where: str, most: int, alive: Alive) -> bytes:
    body, until = bytearray(), time.monotonic() + 30
    for chunk in answer.iter_raw(_CHUNK):
        alive()
        body += chunk
        if len(body) > most:
            raise FormatError(f"{where}: the server sends more than {most:,} bytes")
        if time.monotonic() > until + len(body) / _SLOWEST:
            raise HubError(f"{where}: the server sends fewer than {_SLOWEST:,} bytes a second; try again later")
    return bytes(body)


def download(repo: str, file: str, revision: str, most: int, progress: Progress, alive: Alive) -> None:
    """Fetch one file of at most ``most`` bytes into the Hub's cache."""
    from huggingface_hub import hf_hub_download

    where = f"{repo}@{revision}/{file}"
    guard()
    with told(where):
        hf_hub_download(repo, file, revision=revision, tqdm_class=_counting(where, most, progress, alive))


def _counting(where: str, most: int, progress: Progress, alive: Alive) -> Any:
    """The class of bars that huggingface_hub counts bytes with, the only place where a download can be stopped."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.done = 0

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            try:
                alive()
                if self.done > most:
                    raise HubError(f"{where}: the server sends more than the {most:,} bytes that it lists")
            except BaseException:
                _abort_xet()
                raise
            progress.advance(int(n or 0))
            return None

        def update_transfer(self, n: int) -> None:
            """Bytes on their way, before Xet puts them together: counted once they are."""

        def set_transfer_postfix_str(self, *args: Any, **kwargs: Any) -> None:
            """Of a bar that is not shown."""

    return Bar


def _abort_xet() -> None:
    """Xet downloads on threads of its own, which an exception here does not end."""
    with suppress(ImportError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()  # type: ignore[no-untyped-call]


def guard() -> None:
    """Refuse answers that name a file in the cache outside of it, or ask to wait for ever; in any request of
    huggingface_hub's client."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    client = get_session()
    hooks: dict[str, list[Callable[..., None]]] = client.event_hooks
    if _require_sound not in hooks.get("response", []):
        client.event_hooks = {**hooks, "response": [*hooks.get("response", []), _require_sound]}


def _require_sound(answer: Any) -> None:
    host = answer.request.url.host
    for name in ("etag", "x-linked-etag"):
        value = answer.headers.get(name, "").removeprefix("W/").strip('"')
        if not re.fullmatch(r"[\w.+=:-]*", value, re.ASCII) or value in (".", ".."):
            raise HubError(f"{host}: calls a file {value[:80]!r}, which is no name for one; refused")
    commit = answer.headers.get("x-repo-commit")
    if commit is not None and not is_commit(commit):
        raise HubError(f"{host}: calls a commit {commit[:80]!r}; refused")
    limited = answer.headers.get("ratelimit", "")
    waits = [answer.headers.get("retry-after", ""), *re.findall(r";\s*t\s*=\s*(\d+)", limited)]
    longest = max((int(wait) for wait in waits if wait.isdecimal() and len(wait) < 12), default=0)
    if answer.status_code in (429, 503) and longest > _LONGEST_WAIT:
        raise HubError(f"{host}: limits requests ({answer.status_code}), and asks to wait {longest:,} seconds")


def is_commit(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{40}", text) is not None


def cached_folder(repo: str, commit: str) -> Path:
    """Where the cache keeps the files of a commit once they are fetched."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"), "snapshots", commit)
