"""Other forms of the same Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.coded import index_again


def one_shard(folder: Path) -> None:
    """All tensors in one file, and no index."""
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def many_shards(folder: Path) -> None:
    """A shard for every tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        for number, (name, tensor) in enumerate(load_file(path).items()):
            save_file({name: tensor}, folder / f"{path.stem}-{number}.safetensors")
        path.unlink()
    index_again(folder)


def config_spelled_otherwise(folder: Path) -> None:
    """Keys in another order, other white space, escapes instead of letters."""
    path = folder / "config.json"
    items = sorted(json.loads(path.read_text()).items(), reverse=True)
    path.write_text(json.dumps(dict(items), indent="\t", ensure_ascii=True) + "\n\n")
