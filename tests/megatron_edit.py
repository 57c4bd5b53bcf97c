"""Edit a Megatron checkpoint on disk with torch's own classes, for tests that damage one."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Load ``.metadata`` as torch does, change it, write it back."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def drop_keys(folder: Path, match: Callable[[str], bool]) -> int:
    """Take tensors out of the metadata; the number of keys that went."""
    gone: list[str] = []

    def change(metadata: Any) -> None:
        gone.extend(key for key in metadata.state_dict_metadata if match(key))
        for key in gone:
            del metadata.state_dict_metadata[key]
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn not in gone}

    edit_metadata(folder, change)
    return len(gone)


def load_pickled(path: Path) -> Any:
    """Unpickle a sample. Its classes make megatron-core import itself, which warns of what is not installed."""
    with warnings.catch_warnings(action="ignore"):
        return torch.load(path, weights_only=False)


def edit_args(folder: Path, **changed: Any) -> None:
    """Change training arguments in ``common.pt``."""
    path = folder / "common.pt"
    state = load_pickled(path)
    for name, value in changed.items():
        setattr(state["args"], name, value)
    torch.save(state, path)


def edit_rank(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what one rank's file holds."""
    path = folder / "model_optim_rng.pt"
    root = load_pickled(path)
    root["args"].attention_backend = None
    change(root)
    torch.save(root, path)


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def payload_of(folder: Path, key: str, chunk: int = 0) -> tuple[Path, int]:
    """The file and first byte of one chunk's tensor data, found through torch and zipfile alone."""
    import io
    import zipfile

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = [v for k, v in metadata.storage_data.items() if k.fqn == key][chunk]
    path = folder / info.relative_path
    raw = path.read_bytes()[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(raw)) as zipped:
        member = next(i for i in zipped.infolist() if i.filename.endswith("/data/0"))
        start = member.header_offset + 30 + int.from_bytes(raw[member.header_offset + 26 :][:2], "little")
        start += int.from_bytes(raw[member.header_offset + 28 :][:2], "little")
    return path, info.offset + start
