"""torch's own distributed checkpoint, without Megatron, reads what mtpcheck wrote."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .independent import Config, Tensors, hf_to_megatron
from .support import FIXTURES, NAMES, assert_same_bits, convert, read_hf

GROUPED = [pytest.param(name, marks=pytest.mark.xdist_group(f"dcp-{name}")) for name in NAMES]


@pytest.fixture(scope="module", params=GROUPED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(name, tmp_path_factory.mktemp(name) / "megatron", "te")


@pytest.fixture(scope="module")
def metadata(checkpoint: Path) -> Metadata:
    return FileSystemReader(checkpoint).read_metadata()


def stored(memory: Tensors, config: Config) -> Tensors:
    """As torch_dist holds them: experts are stacked, and so are the layers of a decoder if all are alike."""
    out = dict(memory)
    for experts in {key.split(".experts.")[0] for key in memory if ".mlp.experts." in key}:
        for linear in ("linear_fc1", "linear_fc2"):
            count = config["n_routed_experts" if "n_routed_experts" in config else "num_experts"]
            rows = [out.pop(f"{experts}.experts.{linear}.weight{expert}") for expert in range(count)]
            out[f"{experts}.experts.experts.{linear}.weight"] = torch.stack(rows)
    if "first_k_dense_replace" in config:
        return out
    first = "decoder.layers.0."
    for part in [key.removeprefix(first) for key in memory if key.startswith(first)]:
        layers = [out.pop(f"decoder.layers.{k}.{part}") for k in range(config["num_hidden_layers"])]
        out[f"decoder.layers.{part}"] = torch.stack(layers)
    return out


# There is no process group, and that is meant.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loads_every_tensor(name: str, checkpoint: Path, metadata: Metadata) -> None:
    loaded = {
        key: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(loaded, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    config = json.loads((FIXTURES / name / "config.json").read_text())
    assert_same_bits(loaded, stored(hf_to_megatron(read_hf(name), config, "te"), config))


def test_every_item_is_a_whole_zip_that_torch_loads_safely(checkpoint: Path, metadata: Metadata) -> None:
    files = {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}
    assert metadata.storage_data
    for index, place in metadata.storage_data.items():
        item = files[place.relative_path][place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None, index
        value = torch.load(io.BytesIO(item), weights_only=True)
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            (chunk,) = (c for c in entry.chunks if c.offsets == index.offset)
            assert value.shape == chunk.sizes, index
            assert value.dtype == entry.properties.dtype, index


def test_items_lie_in_their_files_and_apart(checkpoint: Path, metadata: Metadata) -> None:
    ends = {path.name: 0 for path in checkpoint.glob("*.distcp")}
    for place in sorted(metadata.storage_data.values(), key=lambda place: (place.relative_path, place.offset)):
        assert place.offset >= ends[place.relative_path]
        ends[place.relative_path] = place.offset + place.length
    for name, end in ends.items():
        assert end <= (checkpoint / name).stat().st_size
