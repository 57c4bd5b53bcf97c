"""Checkpoints on the Hugging Face Hub: read by ranges, and fetched into the Hub's cache where their bits are needed.

Tokens, endpoint, cache, timeouts and retries are huggingface_hub's own, with its environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mtpcheck.errors import FormatError, HubError
from mtpcheck.files import LocalFile, Source, inside
from mtpcheck.hub_errors import told
from mtpcheck.parallel import Alive, in_parallel
from mtpcheck.progress import Progress, Silent
from mtpcheck.target import check_space
from mtpcheck.tree import LocalTree, is_weights

_REPO = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_HEAD = 1 << 17  # the headers of nearly all shards are shorter
_AT_ONCE = 8


def is_repo(text: str) -> bool:
    """Whether ``text`` may be ``org/name`` or ``org/name@revision``. A folder of that name goes first."""
    return _REPO.fullmatch(text) is not None


@dataclass(frozen=True)
class HubTree:
    """The files of a repository at one commit, as the Hub lists them.

    ``sizes``: file → bytes. ``sha256``: those that the Hub stores by their SHA-256 (LFS, Xet): all large ones.
    """

    repo: str
    commit: str
    sizes: Mapping[str, int]
    sha256: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.commit}"

    @property
    def folder(self) -> Path:
        """Where the cache keeps the files of this commit once they are fetched."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(
            constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.repo, repo_type="model"), "snapshots", self.commit
        )

    def names(self) -> list[str]:
        return sorted(name for name in self.sizes if not any(part.startswith(".") for part in name.split("/")[:-1]))

    def has(self, file: str) -> bool:
        return file in self.sizes

    def open(self, file: str) -> Source:
        """A file of the cache; one with weights that is not there yet stays on the Hub, any other is fetched."""
        if (path := self._cached(file)) is None and not is_weights(file):
            self.fetch([file])
            path = inside(self.folder, file)
        return LocalFile(path) if path is not None else HubFile(self, file)

    def open_shards(self, files: Sequence[str]) -> list[Source]:
        """Their headers are read now, several at a time."""
        shards = [self.open(file) for file in files]
        remote = [shard for shard in shards if isinstance(shard, HubFile)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(HubFile.read_head, remote))
        return shards

    def missing(self, files: Collection[str]) -> list[str]:
        """Those of ``files`` that the cache does not hold."""
        return [file for file in files if self._cached(file) is None]

    def _cached(self, file: str) -> Path | None:
        path = inside(self.folder, file)
        return path if path.is_file() and path.stat().st_size == self.sizes[file] else None

    def fetch(self, files: Sequence[str], progress: Progress | None = None) -> None:
        """Fetch files into the cache. Raises UsageError if its disk is too small, HubError for the rest."""
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        check_space(there, sum(self.sizes[file] for file in files), "point HF_HUB_CACHE to another disk")
        jobs = (partial(self._fetch, file, self.commit, progress or Silent()) for file in files)
        list(in_parallel(jobs, _AT_ONCE))
        for file in files:
            if self._cached(file) is None:
                raise HubError(f"{self.name}/{file}: was not fetched whole into {self.folder}; remove it there")

    def _fetch(self, file: str, revision: str, progress: Progress, alive: Alive) -> None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        class Bar(tqdm):
            """Where huggingface_hub counts bytes, and the only place where a download can be stopped."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> bool | None:
                alive()
                progress.advance(int(n or 0))
                return None

        with told(f"{self.name}/{file}"):
            hf_hub_download(self.repo, file, revision=revision, tqdm_class=Bar)

    def remember(self, revision: str) -> None:
        """Let the cache know what a branch or tag stands for, so that it can be named offline too."""
        ref = self.folder.parent.parent / "refs" / revision
        known = revision == self.commit or (ref.is_file() and ref.read_text() == self.commit)
        if not known and self.has("config.json"):
            self._fetch("config.json", revision, Silent(), lambda: None)


class HubFile:
    """A file that is read by ranges. Its first bytes, which hold the header of a shard, are kept."""

    def __init__(self, tree: HubTree, file: str) -> None:
        self.tree, self.file, self.size = tree, file, tree.sizes[file]
        self._head = b""

    @property
    def name(self) -> str:
        return f"{self.tree.name}/{self.file}"

    def __repr__(self) -> str:
        return f"HubFile({self.name!r})"

    def mapped(self, offset: int, length: int) -> memoryview | None:
        return None

    def place_of(self, offset: int) -> str:
        return f"{self.name}, byte {offset:,}"

    def read_head(self) -> None:
        """Read as much as the header of a shard most likely takes, and keep what belongs to it."""
        if not self._head and self.size:
            head = self._get(0, min(_HEAD, self.size))
            self._head = head[: 8 + int.from_bytes(head[:8], "little")]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.read_head()
        kept = self._head[offset : offset + len(buffer)]
        buffer[: len(kept)] = kept
        if len(kept) < len(buffer):
            buffer[len(kept) :] = self._get(offset + len(kept), offset + len(buffer))

    def _get(self, begin: int, end: int) -> bytes:
        """Bytes ``begin <= i < end``. Raises FormatError if the server gives others."""
        from huggingface_hub import constants, hf_hub_url

        if end > self.size:
            raise FormatError(f"{self.name}: ends at byte {self.size}, and byte {end} was asked for")
        url = hf_hub_url(self.tree.repo, self.file, revision=self.tree.commit)
        with told(self.name):
            answer = _ask(url, constants.HF_HUB_DOWNLOAD_TIMEOUT, f"bytes={begin}-{end - 1}")
        if answer.status_code != 206 or len(answer.content) != end - begin:
            raise FormatError(
                f"{self.name}: asked for bytes {begin} to {end}, the server answered {answer.status_code} with "
                f"{len(answer.content)} bytes; it has to support ranges"
            )
        content: bytes = answer.content
        return content


def _ask(url: str, timeout: float, span: str = "", **params: Any) -> Any:
    """One GET with huggingface_hub's token and retries."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

    headers = {**build_hf_headers(), "Accept-Encoding": "identity", **({"Range": span} if span else {})}
    answer = http_backoff("GET", url, headers=headers, timeout=timeout, params=params or None)
    hf_raise_for_status(answer)
    return answer


def open_repo(text: str) -> HubTree | LocalTree:
    """What a repository holds at a revision, by default ``main``; offline what the cache has of it.

    Raises HubError where the Hub, or the way to it, does not give an answer.
    """
    from huggingface_hub import ModelInfo, constants, try_to_load_from_cache

    match = _REPO.fullmatch(text)
    if match is None:
        raise HubError(f"{text}: is no folder, and no repository either, which would be org/name or org/name@revision")
    repo, revision = match["id"], match["revision"]
    if constants.HF_HUB_OFFLINE:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
        if not isinstance(found, str):
            raise HubError(
                f"{text}: no such folder, and as a repository it is not in the cache {constants.HF_HUB_CACHE}; "
                "HF_HUB_OFFLINE is set, so it was not asked for"
            )
        folder = Path(found).parent
        return LocalTree(folder, f"{repo}@{folder.name}")
    url = f"{constants.ENDPOINT}/api/models/{repo}/revision/{quote(revision or 'main', safe='')}"
    with told(text, opening=True):
        told_of = _ask(url, constants.HF_HUB_ETAG_TIMEOUT, blobs=True).json()
    info = ModelInfo(**told_of)  # type: ignore[no-untyped-call]
    files = info.siblings or []
    if not info.sha or any(file.size is None for file in files):
        raise HubError(f"{text}: {constants.ENDPOINT} does not tell the commit or the sizes of files")
    sizes = {file.rfilename: file.size or 0 for file in files}
    tree = HubTree(repo, info.sha, sizes, {file.rfilename: file.lfs.sha256 for file in files if file.lfs})
    tree.remember(revision or "main")
    return tree
