"""Checkpoints on the Hugging Face Hub: read by ranges, and fetched into the Hub's cache where their bits are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mtpcheck.errors import FormatError, HubError
from mtpcheck.files import LocalFile, Source, inside
from mtpcheck.hub_client import cached_folder, download, get, is_commit
from mtpcheck.parallel import Alive, in_parallel
from mtpcheck.progress import Progress, Silent
from mtpcheck.target import check_space
from mtpcheck.tree import LocalTree, is_weights

_REPO = re.compile(r"(?P<id>\w[\w.-]*/(?P<name>\w[\w.-]*))(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_HEAD = 1 << 17  # the headers of nearly all shards are shorter
_LISTING = 100 << 20  # bytes that a listing may have; one of 10,000 files has 3 MB
_AT_ONCE = 8


def is_repo(text: str) -> bool:
    """Whether ``text`` may be ``org/name`` or ``org/name@revision``. A folder of that name goes first."""
    return _REPO.fullmatch(text) is not None


def short_name(text: str) -> str:
    """The last part of a path, or of a repository's name without its revision."""
    match = _REPO.fullmatch(text)
    return match["name"] if match and not Path(text).exists() else Path(text).name


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
        return cached_folder(self.repo, self.commit)

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
        list(in_parallel((shard.read_head for shard in shards if isinstance(shard, HubFile)), _AT_ONCE))
        return shards

    def missing(self, files: Collection[str]) -> list[str]:
        """Those of ``files`` that the cache does not hold."""
        return [file for file in files if self._cached(file) is None]

    def _cached(self, file: str) -> Path | None:
        path = inside(self.folder, file)
        return path if path.is_file() and path.stat().st_size == self.sizes[file] else None

    def fetch(self, files: Sequence[str], progress: Progress | None = None) -> None:
        """Fetch files into the cache. Raises UsageError if its disk is too small, HubError for the rest."""
        there = next(folder for folder in self.folder.parents if folder.is_dir())
        check_space(there, sum(self.sizes[file] for file in files), "point HF_HUB_CACHE to another disk")
        list(in_parallel((partial(self._fetch, file, progress or Silent()) for file in files), _AT_ONCE))

    def _fetch(self, file: str, progress: Progress, alive: Alive) -> None:
        path = self.folder / file
        if path.is_file():  # of another size than listed, and the client would take it as it is
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        download(self.repo, file, self.commit, self.sizes[file], progress, alive)
        if self._cached(file) is None:
            blob = path.resolve()
            raise HubError(f"{self.name}/{file}: was not fetched whole; remove {blob} and try again")

    def remember(self, revision: str) -> None:
        """Let the cache know what a branch or tag stands for, so that it can be named offline too."""
        ref = self.folder.parent.parent / "refs" / revision
        known = revision == self.commit or (ref.is_file() and ref.read_text() == self.commit)
        if not known and self.has("config.json"):
            download(self.repo, "config.json", revision, _LISTING, Silent(), lambda: None)


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

    def read_head(self, alive: Alive = lambda: None) -> None:
        """Read as much as the header of a shard most likely takes, and keep what belongs to it."""
        if not self._head and self.size:
            head = self._get(0, min(_HEAD, self.size), alive)
            self._head = head[: 8 + int.from_bytes(head[:8], "little")]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.read_head()
        kept = self._head[offset : offset + len(buffer)]
        buffer[: len(kept)] = kept
        if len(kept) < len(buffer):
            buffer[len(kept) :] = self._get(offset + len(kept), offset + len(buffer))

    def _get(self, begin: int, end: int, alive: Alive = lambda: None) -> bytes:
        from huggingface_hub import constants, hf_hub_url

        if end > self.size:
            raise FormatError(f"{self.name}: ends at byte {self.size}, and byte {end} was asked for")
        url = hf_hub_url(self.tree.repo, self.file, revision=self.tree.commit, endpoint=constants.ENDPOINT)
        return get(url, self.name, end - begin, (begin, end), alive)


def open_repo(text: str) -> HubTree | LocalTree:
    """What a repository holds at a revision, by default ``main``; offline what the cache has of it.

    Raises HubError where the Hub, or the way to it, does not give an answer.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    match = _REPO.fullmatch(text)
    assert match is not None  # is_repo
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
    tree = _listed(repo, get(url, text, _LISTING, opening=True, blobs=True), f"{text}: {constants.ENDPOINT}")
    tree.remember(revision or "main")
    return tree


def _listed(repo: str, raw: bytes, who: str) -> HubTree:
    """The Hub's listing of a repository. Raises HubError for one that makes no sense."""
    try:
        table: Any = json.loads(raw)
        files = {entry["rfilename"]: entry for entry in table["siblings"]}
        sizes = {name: entry["size"] for name, entry in files.items()}
        hashes = {name: entry["lfs"]["sha256"] for name, entry in files.items() if entry.get("lfs")}
        sound = is_commit(table["sha"]) and all(re.fullmatch("[0-9a-f]{64}", told) for told in hashes.values())
        sound &= all(bool(name.encode()) and type(size) is int and size >= 0 for name, size in sizes.items())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise HubError(f"{who} gives no listing of a repository: no commit, or files without names and sizes")
    return HubTree(repo, table["sha"], sizes, hashes)
