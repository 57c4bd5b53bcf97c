"""Sound file by file, but contradicting themselves: no garbage is read, nothing leaks, nothing is lost."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.errors import FormatError, MtpcheckError, UnsupportedError, UsageError
from mtpcheck.layouts.torch_dist import _overlap
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import read_tensor_map
from mtpcheck.verify import verify
from tests.megatron_edit import edit_args, edit_metadata
from tests.test_verify import changed_tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"
NORM = "decoder.final_layernorm.weight"


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    return tmp_path / "megatron" / "release"


def append_item(folder: Path, metadata: Any, key: str, tensor: torch.Tensor, offset: tuple[int, ...]) -> None:
    """Add one chunk, written by torch.save, to a file of its own."""
    import io

    from torch.distributed.checkpoint.filesystem import _StorageInfo

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    name = f"__9_{len(list(folder.glob('__9_*')))}.distcp"
    (folder / name).write_bytes(buffer.getvalue())
    info = _StorageInfo(name, 0, len(buffer.getvalue()))
    metadata.storage_data[MetadataIndex(key, torch.Size(offset))] = info


def test_chunks_that_leave_a_gap_and_overlap_elsewhere_are_refused(megatron: Path) -> None:
    """The volumes add up and no neighbour in reading order overlaps; element (0, 127) is in no chunk."""
    key = "mtp.layers.0.eh_proj.weight"
    boxes = [((0, 0), (2, 1)), ((0, 1), (1, 126)), ((1, 0), (1, 128)), ((2, 0), (62, 128))]
    assert sum(a * b for _, (a, b) in boxes) == 64 * 128
    assert _overlap(boxes)

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[key]
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        metadata.state_dict_metadata[key] = TensorStorageMetadata(entry.properties, entry.size, chunks)
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != key}
        for at, size in boxes:
            append_item(megatron, metadata, key, torch.zeros(size, dtype=torch.bfloat16), at)

    edit_metadata(megatron, change)
    with pytest.raises(FormatError, match=r"chunks of mtp\.layers\.0\.eh_proj\.weight"):
        open_checkpoint(megatron)


def test_a_chunk_saved_transposed_is_read_as_what_it_is(megatron: Path) -> None:
    key = "mtp.layers.0.eh_proj.weight"
    part = "mtp.0.proj.embed"
    before = read_tensor_map(open_checkpoint(megatron)).parts
    whole = np.concatenate(
        [np.frombuffer(before[p].read(), "<i2").reshape(64, 64) for p in (part, "mtp.0.proj.hidden")], 1
    )
    transposed = torch.from_numpy(whole.T.copy()).view(torch.bfloat16).T
    assert not transposed.is_contiguous()

    def change(metadata: Any) -> None:
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != key}
        append_item(megatron, metadata, key, transposed, (0, 0))

    edit_metadata(megatron, change)
    after = read_tensor_map(open_checkpoint(megatron)).parts
    assert after[part].read() == before[part].read()
    assert verify(FIXTURES / "glm4_moe", megatron).verdict == "holds"


def test_one_key_with_and_without_a_prefix_is_refused(megatron: Path) -> None:
    def change(metadata: Any) -> None:
        prefixed = {"module." + k: v for k, v in metadata.state_dict_metadata.items()}
        metadata.state_dict_metadata = {NORM: metadata.state_dict_metadata[NORM], **prefixed}
        for index in list(metadata.storage_data):
            info = metadata.storage_data.pop(index)
            metadata.storage_data[MetadataIndex("module." + index.fqn, index.offset)] = info
        append_item(megatron, metadata, NORM, torch.zeros(64, dtype=torch.bfloat16), (0,))

    edit_metadata(megatron, change)
    with pytest.raises(FormatError, match="stored twice"):
        open_checkpoint(megatron)


def test_a_weight_is_not_passed_over_for_its_name(megatron: Path) -> None:
    key = "mtp.layers.0.eh_proj._extra_state.weight"

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[NORM]
        append_item(megatron, metadata, key, torch.zeros(64, dtype=torch.bfloat16), (0,))

    edit_metadata(megatron, change)
    report = verify(FIXTURES / "glm4_moe", megatron)
    assert ("presence.unclaimed", key) in [(f.check, f.subject) for f in report.failures]


def test_parts_that_no_dtype_holds_together_are_not_joined(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    source = changed_tensors("glm4_moe", tmp_path, lambda t: t.update({name: t[name].double()}))
    with pytest.raises(UnsupportedError, match="different dtypes"):
        convert(source, tmp_path / "megatron")


@pytest.mark.parametrize("what", ["files/tokenizer.json", "headers/0.json", ""])
def test_links_out_of_a_manifest_are_refused(megatron: Path, what: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    linked = megatron / "mtpcheck" / what
    if what:
        secret.write_text("secret")
        linked.unlink()
    else:
        shutil.copytree(megatron / "mtpcheck", secret)
        shutil.rmtree(megatron / "mtpcheck")
        linked = megatron / "mtpcheck"
    linked.symlink_to(secret)
    with pytest.raises(FormatError, match="leads out of the folder"):
        convert(megatron, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_index_in_the_manifest_that_hides_the_layer_is_not_used(megatron: Path, tmp_path: Path) -> None:
    path = megatron / "mtpcheck/files/model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith("model.layers.3.")}
    path.write_text(json.dumps(index))
    converted = convert(megatron, tmp_path / "hf")
    assert "result.form" in {f.check for f in converted.findings}
    assert verify(FIXTURES / "glm4_moe", tmp_path / "hf").verdict == "holds"


def test_keep_removes_only_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("mtpcheck.roundtrip")

    def fails(source: Path, target: Path, *options: Any, **more: Any) -> Any:
        (tmp_path / "kept" / "mine").mkdir(exist_ok=True)
        raise UsageError("stop")

    monkeypatch.setattr(module, "convert", fails)
    with pytest.raises(UsageError, match="stop"):
        roundtrip(FIXTURES / "qwen2_mtp", keep=tmp_path / "kept")
    assert (tmp_path / "kept" / "mine").is_dir()


@pytest.mark.parametrize("kind", ["linked folder", "dangling link", "fifo"])
def test_what_cannot_be_carried_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    import os

    source = Path(shutil.copytree(FIXTURES / "qwen2_mtp", tmp_path / "source"))
    odd = source / "odd"
    if kind == "linked folder":
        (source / ".real").mkdir()
        odd.symlink_to(source / ".real")
    elif kind == "dangling link":
        odd.symlink_to(source / "nothing")
    else:
        os.mkfifo(odd)
    with pytest.raises(MtpcheckError, match="odd: is a"):
        roundtrip(source)


def test_two_reports_of_one_input_are_alike(tmp_path: Path) -> None:
    """No path of a temporary folder, no time, no order of threads."""
    from mtpcheck.report.machine import as_json

    source = changed_tensors("glm4_moe", tmp_path, lambda t: t["model.layers.3.eh_proj.weight"].zero_())
    assert as_json(roundtrip(source)) == as_json(roundtrip(source))
    assert as_json(verify(FIXTURES / "glm4_moe", source)) == as_json(verify(FIXTURES / "glm4_moe", source))


def test_big_endian_tensors_are_refused(megatron: Path) -> None:
    import io
    import zipfile

    buffer = io.BytesIO()
    torch.save(torch.zeros(64, dtype=torch.bfloat16), buffer)
    turned = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(turned, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else old.read(info))

    def change(metadata: Any) -> None:
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != NORM}
        append_item(megatron, metadata, NORM, torch.zeros(64, dtype=torch.bfloat16), (0,))
        (index,) = (k for k in metadata.storage_data if k.fqn == NORM)
        info = metadata.storage_data[index]
        (megatron / info.relative_path).write_bytes(turned.getvalue())
        object.__setattr__(info, "length", len(turned.getvalue()))

    edit_metadata(megatron, change)
    with pytest.raises(FormatError, match="big-endian"):
        verify(FIXTURES / "glm4_moe", megatron)


def test_an_export_with_a_copy_of_its_own_fails(megatron: Path, tmp_path: Path) -> None:
    """Megatron has no such tensor; what stands in its place must repeat what Megatron has."""
    name = "model.layers.3.embed_tokens.weight"
    candidate = changed_tensors("glm4_moe", tmp_path, lambda t: t[name].add_(1))
    assert [(f.check, f.subject) for f in verify(megatron, candidate).failures] == [("presence.copy", name)]


def test_a_tensor_of_the_reference_that_nobody_claims_fails(megatron: Path, tmp_path: Path) -> None:
    source = changed_tensors("glm4_moe", tmp_path, lambda t: t.update(extra=torch.zeros(3)))
    assert [(f.check, f.subject) for f in verify(source, megatron).failures] == [("presence.unclaimed", "extra")]


def test_a_family_whose_facts_do_not_fit_is_refused() -> None:
    source = FIXTURES / "megatron/core-0.16.1/dense2_tp1/torch_dist"
    with pytest.raises(MtpcheckError, match="qwen3 has qk_norm True, this checkpoint's arguments say False"):
        read_tensor_map(open_checkpoint(source), "qwen3")


def test_an_argument_that_is_no_number_is_a_sentence(megatron: Path) -> None:
    edit_args(megatron, num_layers="three")
    with pytest.raises(FormatError, match="num_layers is 'three', expected a whole number"):
        read_tensor_map(open_checkpoint(megatron))
