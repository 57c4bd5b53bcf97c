"""Index, headers and folder: what a candidate has wrong fails it, what its reference had wrong before does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpcheck.report.finding import Finding
from mtpcheck.report.report import Report
from mtpcheck.roundtrip import roundtrip
from mtpcheck.verify import verify
from tests.conftest import Outcome, edit_tensors, fixture_path, flip_byte, read_shard

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SOUND = fixture_path("glm4_moe")
Copy = Callable[[str], Path]
Cli = Callable[..., Outcome]


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def found(report: Report, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("same", [True, False])
def test_a_tensor_in_two_shards(same: bool, copy_of: Copy, cli: Cli, tmp_path: Path) -> None:
    candidate = copy_of("glm4_moe")
    first, last = shards(candidate)[0], shards(candidate)[-1]
    name = next(iter(name for name in read_shard(first)[0] if name != "__metadata__"))
    stray = {}
    edit_tensors(first, lambda tensors: stray.update({name: tensors[name] if same else tensors[name] + 1}))
    edit_tensors(last, lambda tensors: tensors.update(stray))
    (finding,) = found(verify(SOUND, candidate), "structure.duplicate")
    assert (finding.severity, finding.subject, finding.where) == ("failure", name, last.name)
    assert finding.message.endswith("the same bits" if same else "other bits")
    report = roundtrip(candidate)
    assert (report.exit_code, [f.source for f in found(report, "structure.duplicate")]) == (1, [True])
    assert (cli("convert", candidate, tmp_path / "new").code, (tmp_path / "new").exists()) == (1, False)
    shown = cli("inspect", candidate)
    assert (shown.code, "structure.duplicate" in shown.out) == (0, True)


def test_the_index_decides_which_of_two_counts(copy_of: Copy) -> None:
    candidate = copy_of("glm4_moe")
    first, last = shards(candidate)[0], shards(candidate)[-1]
    name = next(iter(name for name in read_shard(last)[0] if name != "__metadata__"))
    stray = {}
    edit_tensors(last, lambda tensors: stray.update({name: tensors[name] + 1}))
    edit_tensors(first, lambda tensors: tensors.update(stray))  # read first, and not what the index names
    report = verify(SOUND, candidate)
    assert ([f.subject for f in found(report, "structure.duplicate")], found(report, "values.bits")) == ([name], [])


def test_a_wrong_total_is_the_fault_of_whoever_made_it(copy_of: Copy) -> None:
    wrong = copy_of("glm4_moe")
    edit_index(wrong, lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] + 1))
    assert [f.severity for f in found(verify(SOUND, wrong), "structure.size")] == ["failure"]
    for reference, candidate in ((wrong, SOUND), (wrong, wrong)):
        report = verify(reference, candidate)
        assert report.verdict == "holds"
        assert [(f.severity, f.source) for f in found(report, "structure.size")] == [("warning", True)]
    report = roundtrip(wrong)
    assert (report.verdict, [f.severity for f in found(report, "structure.size")]) == ("holds", ["warning"])
    for nothing in (lambda index: index.pop("metadata"), lambda index: index.update(metadata={"total_size": 0})):
        edit_index(wrong, nothing)
        assert found(verify(SOUND, wrong), "structure.size") == []


def test_a_shard_of_another_run(copy_of: Copy) -> None:
    candidate = copy_of("glm4_moe")
    shutil.copyfile(shards(candidate)[-1], candidate / "model-00009-of-00009.safetensors")
    flip_byte(candidate / "model-00009-of-00009.safetensors")
    (finding,) = found(verify(SOUND, candidate), "structure.stale")
    assert (finding.severity, finding.subject) == ("failure", "model-00009-of-00009.safetensors")
    assert verify(candidate, candidate).verdict == "holds"
    assert [f.severity for f in found(roundtrip(candidate), "structure.stale")] == ["warning"]


def move_out(folder: Path, keep_entries: bool) -> None:
    """MTP tensors of ``glm4_moe_nocopies`` lie in a file of their own; take its entries out of the index."""
    if not keep_entries:
        edit_index(folder, lambda index: index.update(
            weight_map={k: v for k, v in index["weight_map"].items() if v != "mtp.safetensors"}))  # fmt: skip


def test_a_head_in_a_file_that_the_index_does_not_name(copy_of: Copy, cli: Cli) -> None:
    sound, broken = fixture_path("glm4_moe_nocopies"), copy_of("glm4_moe_nocopies")
    move_out(broken, keep_entries=False)
    report = verify(sound, broken)
    assert [f.subject for f in report.failures if f.check == "structure.orphan_file"] == ["mtp.safetensors"]
    assert "presence.missing" in {f.check for f in report.failures}
    report = roundtrip(broken)
    assert [(f.check, f.source) for f in report.failures] == [("structure.orphan_file", True)]
    assert cli("roundtrip", broken).code == 1


def test_weights_of_no_part_are_left_alone(copy_of: Copy) -> None:
    source = copy_of("qwen2_mtp")
    (source / "original").mkdir()
    shutil.copyfile(source / SINGLE, source / "original" / "consolidated.safetensors")
    stray = source / "original" / "consolidated.safetensors"
    edit_tensors(stray, lambda tensors: [tensors.update({f"x{k}.w": tensors.pop(n)}) for k, n in enumerate([*tensors])])
    (source / "broken.safetensors").write_bytes(b"?")
    report = roundtrip(source)
    assert report.verdict == "holds"
    assert {f.severity for f in found(report, "structure.orphan_file")} == {"warning"}


def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(copy_of: Copy) -> None:
    sound, source = fixture_path("qwen3_mtp"), copy_of("qwen3_mtp")
    name, embedding = "lm_head.weight", "model.embed_tokens.weight"
    shard = next(path for path in shards(source) if embedding in read_shard(path)[0])

    def store(change: float) -> None:
        edit_tensors(shard, lambda tensors: tensors.update({name: tensors[embedding] + change}))
        edit_index(source, lambda index: index["weight_map"].update({name: shard.name}))
        edit_index(source, lambda index: index.pop("metadata", None))

    store(0)
    assert roundtrip(source).verdict == "holds"
    store(1)
    for report in (roundtrip(source), verify(sound, source)):
        assert [f.subject for f in found(report, "presence.tied")] == [name]
        assert report.exit_code == 1


def test_a_list_of_layers_that_was_cut(copy_of: Copy) -> None:
    sound, candidate = copy_of("glm4_moe"), copy_of("glm4_moe")
    for folder, entries in ((sound, 4), (candidate, 3)):
        config = json.loads((folder / "config.json").read_text())
        config["layer_types"] = ["full_attention"] * entries
        (folder / "config.json").write_text(json.dumps(config))
    (finding,) = found(verify(sound, candidate), "declaration.list")
    assert (finding.subject, finding.message) == ("layer_types", "has 3 entries, and had 4")
    assert "cut off" in finding.cause
