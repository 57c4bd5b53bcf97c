"""The round trip is file-exact, and no trick: what comes back came through Megatron's files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.checks.files import HollowShards
from mtpcheck.convert import convert
from mtpcheck.errors import CheckpointFails, UnsupportedError, UsageError
from mtpcheck.megatron import Options
from mtpcheck.plan import Plan
from mtpcheck.progress import Silent
from mtpcheck.roundtrip import roundtrip
from mtpcheck.tensormap import read_tensor_map
from mtpcheck.verify import verify
from tests.megatron_edit import drop_keys, edit_args, flip_bit, payload_of

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = ["glm4_moe", "glm4_moe_nocopies", "qwen2_mtp", "qwen3_mtp", "llama_mtp"]


def sha256(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, folder / "source"))


@pytest.mark.parametrize("options", [Options(), Options(spec="local", mcore="0.19", vocab_multiple=64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_file_comes_back_with_its_sha256(name: str, options: Options, tmp_path: Path) -> None:
    report = roundtrip(FIXTURES / name, options=options, keep=tmp_path / "kept")
    copies = 2 if name == "glm4_moe" else 0  # Megatron leaves them out, a note says so
    assert [(f.check, f.severity) for f in report.findings] == [("presence.copy", "note")] * copies
    assert {c.group: c.status for c in report.checks} == {
        "structure": "passed", "presence": "passed", "declaration": "passed", "values": "passed",
        "result": "passed", "acceptance": "skipped",
    }  # fmt: skip
    assert sha256(tmp_path / "kept" / "hf") == sha256(FIXTURES / name)
    assert verify(FIXTURES / name, tmp_path / "kept" / "torch_dist").verdict == "holds"


@pytest.mark.parametrize("name", NAMES)
def test_the_source_may_be_gone_between_the_legs(name: str, tmp_path: Path) -> None:
    expected = sha256(FIXTURES / name)
    source = copied(name, tmp_path)
    convert(source, tmp_path / "megatron")
    source.rename(tmp_path / "moved away")
    shutil.rmtree(tmp_path / "moved away")
    convert(tmp_path / "megatron", tmp_path / "hf")
    assert sha256(tmp_path / "hf") == expected


def megatron(name: str, folder: Path, **options: object) -> Path:
    convert(FIXTURES / name, folder / "megatron", options=Options(**options))  # type: ignore[arg-type]
    return folder / "megatron" / "release"


@pytest.mark.parametrize(
    ("key", "chunk", "offset", "tensor"),
    [
        ("mtp.layers.0.eh_proj.weight", 0, 0, "model.layers.3.eh_proj.weight"),
        ("mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight", 2, 32 * 64 * 2,
         "model.layers.3.mlp.experts.2.up_proj.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", 0, (2 * 16 + 5) * 64 * 2,
         "model.layers.1.self_attn.k_proj.weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight", 0, 0, "model.layers.0.mlp.gate_proj.weight"),
    ],
)  # fmt: skip
def test_one_flipped_bit_in_megatron_changes_exactly_that_tensor(
    key: str, chunk: int, offset: int, tensor: str, tmp_path: Path
) -> None:
    folder = megatron("glm4_moe", tmp_path)
    path, start = payload_of(folder, key, chunk)
    flip_bit(path, start + offset)
    convert(tmp_path / "megatron", tmp_path / "hf")
    report = verify(FIXTURES / "glm4_moe", tmp_path / "hf")
    assert [(f.check, f.subject) for f in report.failures] == [("values.bits", tensor)]
    assert "1 of" in report.failures[0].message
    across = verify(FIXTURES / "glm4_moe", tmp_path / "megatron")
    assert [(f.check, f.subject) for f in across.failures] == [("values.bits", tensor)]
    assert f"{path}, byte {start + offset:,}" in across.failures[0].where


def test_a_flipped_bit_of_the_embedding_reaches_its_copies(tmp_path: Path) -> None:
    """Copies that were equal are made again from what they repeat; nothing else could be their source."""
    folder = megatron("glm4_moe", tmp_path)
    path, start = payload_of(folder, "embedding.word_embeddings.weight")
    flip_bit(path, start)
    convert(tmp_path / "megatron", tmp_path / "hf")
    failures = verify(FIXTURES / "glm4_moe", tmp_path / "hf").failures
    assert {f.subject for f in failures} == {"model.embed_tokens.weight", "model.layers.3.embed_tokens.weight"}


def test_without_the_mtp_keys_the_export_fails_and_restores_nothing(tmp_path: Path) -> None:
    folder = megatron("glm4_moe", tmp_path)
    assert drop_keys(folder, lambda key: key.startswith("mtp.")) > 20
    with pytest.raises(CheckpointFails, match="declares 1 MTP layer, stores 0"):
        convert(tmp_path / "megatron", tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]
    with pytest.raises(UnsupportedError, match="declares 1 MTP layer and stores none"):
        roundtrip(tmp_path / "megatron")


def test_without_one_mtp_key_the_export_names_it(tmp_path: Path) -> None:
    folder = megatron("qwen2_mtp", tmp_path)
    assert drop_keys(folder, lambda key: key == "mtp.layers.0.hnorm.weight") == 1
    with pytest.raises(CheckpointFails, match=r"mtp\.layers\.0\.hnorm\.weight: a tensor of the MTP layer is missing"):
        convert(tmp_path / "megatron", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    report = verify(FIXTURES / "qwen2_mtp", tmp_path / "megatron")
    assert [(f.check, f.subject) for f in report.failures] == [("presence.missing", "mtp.layers.0.hnorm.weight")]


@pytest.mark.parametrize(("value", "declared"), [(2, 2), (None, 0)])
def test_the_declaration_follows_megatrons_argument(value: int | None, declared: int, tmp_path: Path) -> None:
    folder = megatron("glm4_moe", tmp_path)
    edit_args(folder, mtp_num_layers=value)
    converted = convert(tmp_path / "megatron", tmp_path / "hf")
    assert converted.exit_code == (1 if declared else 0)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == declared
    report = verify(FIXTURES / "glm4_moe", tmp_path / "hf")
    subjects = {(f.check, f.subject) for f in report.failures}
    assert ("declaration.mtp", "num_nextn_predict_layers") in subjects
    across = {(f.check, f.subject) for f in verify(FIXTURES / "glm4_moe", tmp_path / "megatron").failures}
    assert ("declaration.mtp", "num_nextn_predict_layers / mtp_num_layers") in across


def test_the_manifest_lends_no_value_that_megatron_has(tmp_path: Path) -> None:
    folder = megatron("glm4_moe", tmp_path)
    edit_args(folder, rotary_base=12345, moe_router_topk_scaling_factor=1.5)
    convert(tmp_path / "megatron", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["rope_theta"], config["routed_scaling_factor"]) == (12345, 1.5)


def test_the_manifest_holds_no_weight_bytes(tmp_path: Path) -> None:
    folder = megatron("glm4_moe", tmp_path)
    carried = b"".join(path.read_bytes() for path in sorted((folder / "mtpcheck").rglob("*")) if path.is_file())
    tensors = open_checkpoint(FIXTURES / "glm4_moe").tensors
    for name, ref in tensors.items():
        for at in range(0, ref.nbytes - 32, max(32, ref.nbytes // 4)):
            assert ref.read()[at : at + 32] not in carried, name
    shutil.rmtree(folder / "mtpcheck")
    convert(tmp_path / "megatron", tmp_path / "hf")
    before = {p: r.read() for p, r in read_tensor_map(open_checkpoint(FIXTURES / "glm4_moe")).parts.items()}
    after = {p: r.read() for p, r in read_tensor_map(open_checkpoint(tmp_path / "hf")).parts.items()}
    assert after == {part: data for part, data in before.items() if part not in ("mtp.0.embed", "mtp.0.head")}


def test_a_copy_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    source = copied("glm4_moe", tmp_path)
    ref = open_checkpoint(source).tensors["model.layers.3.shared_head.head.weight"]
    box = ref.plan.boxes[0]
    flip_bit(Path(box.source.name), box.offset)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"model\.layers\.3\.shared_head\.head\.weight differ"):
        convert(source, tmp_path / "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_copy_that_differs_fails_against_a_megatron_that_dropped_it(tmp_path: Path) -> None:
    source = copied("glm4_moe", tmp_path)
    convert(source, tmp_path / "megatron")
    ref = open_checkpoint(source).tensors["model.layers.3.embed_tokens.weight"]
    flip_bit(Path(ref.plan.boxes[0].source.name), ref.plan.boxes[0].offset)  # type: ignore[union-attr]
    report = verify(source, tmp_path / "megatron")
    assert [(f.check, f.subject) for f in report.failures] == [("presence.copy", "model.layers.3.embed_tokens.weight")]


def test_tied_models_may_store_their_head(tmp_path: Path) -> None:
    """Some tied releases store lm_head all the same; it comes back."""
    source = copied("qwen3_mtp", tmp_path)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    tensors = load_file(source / file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / file)
    index["weight_map"]["lm_head.weight"] = file
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    report = roundtrip(source)
    assert (report.verdict, [f.check for f in report.failures]) == ("holds", [])


def test_megatron_sources_round_trip_too(tmp_path: Path) -> None:
    report = roundtrip(FIXTURES / "megatron/core-0.16.1/moegqa_te_tp1/torch_dist", keep=tmp_path / "kept")
    assert {(f.check, f.severity) for f in report.findings} == {("result.family", "note")}  # others would fit, too
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["hf", "torch_dist"]
    config = json.loads((tmp_path / "kept/hf/config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("glm4_moe", 1)


def test_keep_never_overwrites_and_workdir_is_left_clean(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="nothing is ever overwritten"):
        roundtrip(FIXTURES / "qwen2_mtp", keep=tmp_path / "full")
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    (tmp_path / "work").mkdir()
    assert roundtrip(FIXTURES / "qwen2_mtp", workdir=tmp_path / "work").verdict == "holds"
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_report_fails_when_the_way_back_differs(keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that damages one byte on the way back must be seen, whether the result is kept or not."""
    import mtpcheck.layouts.hf_writer as module

    right = module.write_at

    def wrong(fd: int, data: memoryview | bytes, offset: int) -> None:
        damaged = bytearray(data)
        if offset > 400_000:
            damaged[-1] ^= 128
        right(fd, damaged, offset)

    monkeypatch.setattr(module, "write_at", wrong)
    report = roundtrip(FIXTURES / "qwen2_mtp", keep=tmp_path / "kept" if keep else None)
    assert {f.check for f in report.failures} == {"result.identity", "values.bits"}
    assert next(c.status for c in report.checks if c.group == "result") == "failed"


def test_identical_shards_are_freed_and_others_left_to_look_at(tmp_path: Path) -> None:
    source, result = (Path(shutil.copytree(FIXTURES / "glm4_moe", tmp_path / name)) for name in ("source", "result"))
    same, other = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    flip_bit(result / other, (result / other).stat().st_size - 1)
    damaged = (result / other).read_bytes()
    hollow = HollowShards(source, Silent())
    spare = hollow(same, result / same)
    assert spare is not None and spare.read_bytes() == (source / same).read_bytes(), "to be written over"
    assert hollow(other, result / other) is None
    assert hollow.identical == {same}
    assert (result / other).read_bytes() == damaged
    assert (result / same).stat().st_size == (source / same).stat().st_size
    assert not any((result / same).read_bytes()[-100_000:])
    assert open_checkpoint(result).tensors.keys() == open_checkpoint(source).tensors.keys()


def test_a_freed_shard_gives_its_file_to_a_later_one(tmp_path: Path) -> None:
    source, there = FIXTURES / "glm4_moe", tmp_path / "there"
    convert(source, there)
    hollow, files, whole = HollowShards(source, Silent()), set(), {}

    def written(file: str, path: Path) -> Path | None:
        files.add(path.stat().st_ino)
        whole[file] = path.read_bytes()
        return hollow(file, path)

    convert(there, tmp_path / "back", written=written)
    assert whole == {path.name: path.read_bytes() for path in source.glob("*.safetensors")}
    assert len(files) == 2 < len(whole)
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in source.iterdir()}


def test_a_changed_shard_is_explained_beside_hollow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    import mtpcheck.layouts.hf_writer as module

    right, done = module.write_at, []

    def wrong(fd: int, data: memoryview | bytes, offset: int) -> None:
        if len(data) == 64 * 2 and not done:  # the first norm
            done.append(offset)
            data = bytes(len(data))
        right(fd, data, offset)

    monkeypatch.setattr(module, "write_at", wrong)
    report = roundtrip(FIXTURES / "glm4_moe")
    checks = [f.check for f in report.failures]
    assert sorted(checks) == ["result.identity", "values.bits"], report.failures


def test_damage_on_the_way_there_is_located_in_megatrons_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import mtpcheck.layouts.zipwriter as module

    right, done = module.fill, []

    def wrong(plan: Plan, buffer: memoryview) -> None:
        right(plan, buffer)
        if plan.nbytes == 64 * 128 * 2 and not done:
            done.append(plan)
            buffer[0] ^= 1

    monkeypatch.setattr(module, "fill", wrong)
    report = roundtrip(FIXTURES / "glm4_moe")
    assert {f.check for f in report.failures} == {"values.bits", "result.identity"}
    assert ".distcp" in next(f.where for f in report.failures if f.check == "values.bits")
