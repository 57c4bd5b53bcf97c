"""Checkpoints that megatron-core itself wrote: every topology and key form of one family is one tensor map."""

from __future__ import annotations

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.errors import FamilyError, FormatError
from mtpcheck.layouts.zipstore import unpickle
from mtpcheck.megatron import Options
from mtpcheck.tensormap import TensorMap, read_tensor_map
from mtpcheck.verify import verify
from tests.conftest import FIXTURES

SAMPLES = Path(__file__).parent.parent / "fixtures" / "megatron"
FAMILIES = {
    "dense": ("qwen2", 1),
    "dense_te": ("qwen2", 1),
    "tied": ("qwen3", 1),
    "dense2": ("llama", 2),
    "moegqa": ("glm4_moe", 1),
    "moegqa_te": ("glm4_moe", 1),
    "moeall": ("glm4_moe", 1),
    "moe": ("deepseek_v3", 1),
    "moe_te": ("deepseek_v3", 1),
}
CASES = sorted(path.parent for path in SAMPLES.glob("core-*/*/torch_dist"))


def group(case: Path) -> str:
    """Cases whose weights are the same: everything before the topology, the TE spec apart."""
    stem = case.name.split("_")[0]
    return stem + "_te" if "_te_" in case.name else stem


def parent(case: Path) -> Path:
    return SAMPLES / "core-0.16.1" / f"{group(case)}_tp1" / "torch_dist"


def open_map(folder: Path) -> TensorMap:
    """Of the families that fit by arguments and keys (Qwen2 and MiMo fit the dense ones), the one we made it as."""
    family = next((name for stem, (name, _) in FAMILIES.items() if f"/{stem}_" in str(folder)), None)
    return read_tensor_map(open_checkpoint(folder), family)


def read(tensor_map: TensorMap) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {part: (ref.dtype, ref.shape, ref.read()) for part, ref in tensor_map.parts.items()}


def test_there_are_samples() -> None:
    assert len(CASES) >= 19
    assert {group(case) for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_every_key_form_and_topology_gives_the_same_map(case: Path) -> None:
    found = open_map(case / "torch_dist")
    assert (found.family, found.facts["mtp_layers"]) == FAMILIES[group(case)]
    assert found.findings == ()
    assert read(found) == read(open_map(parent(case)))
    assert sum(part.startswith("mtp.") for part in found.parts) > 0


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("name", [*FAMILIES])
def test_to_hf_and_back_gives_it_again(name: str, spec: str, tmp_path: Path) -> None:
    source = SAMPLES / "core-0.16.1" / f"{name}_tp1" / "torch_dist"
    family = FAMILIES[name][0]
    convert(source, tmp_path / "hf", family=family)
    convert(tmp_path / "hf", tmp_path / "back", options=Options(spec=spec))  # type: ignore[arg-type]
    assert read(open_map(source)) == read(read_tensor_map(open_checkpoint(tmp_path / "back"), family))
    assert verify(source, tmp_path / "hf", family).verdict == "holds"
    assert verify(source, tmp_path / "back", family).verdict == "holds"


def test_rows_beyond_the_vocabulary_are_reported(tmp_path: Path) -> None:
    source = SAMPLES / "core-0.16.1" / "tied_tp1" / "torch_dist"
    found = open_map(source)
    assert found.parts["embed"].shape == (200, 64)
    assert found.padding["embed"].shape == (56, 64)
    assert any(found.padding["embed"].read())
    converted = convert(source, tmp_path / "hf")
    assert [f.check for f in converted.findings] == ["values.padding"]
    convert(tmp_path / "hf", tmp_path / "back")
    back = open_map(tmp_path / "back")
    assert not any(back.padding["embed"].read())
    report = verify(source, tmp_path / "back")
    assert (report.verdict, [f.check for f in report.findings]) == ("holds", ["values.padding"])


def test_optimizer_state_is_passed_over_and_counted(tmp_path: Path) -> None:
    """The sample is kept without its weights, which take 4 MB: what there is shows in its metadata."""
    import os
    import shutil

    root = tmp_path / "dense_tp1_optim"
    shutil.copytree(SAMPLES / "core-0.16.1" / "dense_tp1_optim" / "metadata_only", root)
    for number, size in enumerate((1_969_341, 1_968_080)):
        file = root / "iter_0000001" / f"__0_{number}.distcp"
        file.touch()
        os.truncate(file, size)
    opened = open_checkpoint(root)
    assert opened.passed_over["optimizer and training state"][0] == 63
    assert not any("optimizer" in name for name in opened.tensors)


@pytest.mark.parametrize("prefix", ["module.", "model.", "model.module.", "language_model."])
def test_wrapper_prefixes_and_the_other_inner_name(prefix: str, tmp_path: Path) -> None:
    """NeMo and VL models prefix their keys; hybrid models keep ``mtp_model_layer``."""
    import shutil

    from tests.megatron_edit import edit_metadata

    folder = tmp_path / "iter_0000001"
    shutil.copytree(parent(SAMPLES / "dense_tp1") / "iter_0000001", folder)

    def respell(key: str) -> str:
        return prefix + key.replace("transformer_layer", "mtp_model_layer")

    def change(metadata: object) -> None:
        metadata.state_dict_metadata = {respell(k): v for k, v in metadata.state_dict_metadata.items()}  # type: ignore[attr-defined]
        for index in metadata.storage_data:  # type: ignore[attr-defined]
            object.__setattr__(index, "fqn", respell(index.fqn))

    edit_metadata(folder, change)
    found = read_tensor_map(open_checkpoint(folder), "qwen2")
    assert found.findings == ()
    assert read(found) == read(open_map(parent(SAMPLES / "dense_tp1")))


def test_two_families_that_fit_are_named_and_not_chosen_between() -> None:
    source = SAMPLES / "core-0.16.1" / "dense_tp1" / "torch_dist"
    with pytest.raises(FamilyError, match="fit mimo, qwen2; --family decides"):
        read_tensor_map(open_checkpoint(source))
    qwen, mimo = (read_tensor_map(open_checkpoint(source), name) for name in ("qwen2", "mimo"))
    assert read(qwen) == read(mimo)


def test_megatron_fsdp_s_names_give_the_same_map_and_export() -> None:
    """The sample is emulated: names and uneven shards are those of megatron-core's source, its writer is torch's."""
    source = SAMPLES / "core-0.16.1" / "dense_fsdp_emulated" / "fsdp_dtensor"
    opened = open_checkpoint(source)
    assert (opened.layout, opened.fsdp) == ("torch_dist", True)
    found = open_map(source)
    assert found.findings == ()
    assert read(found) == read(open_map(parent(SAMPLES / "dense_tp1")))
    report = verify(parent(SAMPLES / "dense_tp1"), source, "qwen2")
    assert report.verdict == "holds", report.findings
    assert "torch_dist (Megatron-FSDP)" in report.summary


class _AsInPython3112(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_enums_are_read_in_the_form_of_an_older_python_too(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3, that of Debian 12 among them, pickles members of enums as attributes of their class."""
    convert(FIXTURES / "glm4_moe", tmp_path / "megatron")
    path = tmp_path / "megatron" / "release" / ".metadata"
    out = io.BytesIO()
    _AsInPython3112(out, protocol=4).dump(pickle.loads(path.read_bytes()))
    assert b"getattr" in out.getvalue()
    path.write_bytes(out.getvalue())
    assert verify(FIXTURES / "glm4_moe", tmp_path / "megatron").verdict == "holds"


@pytest.mark.parametrize("of", [(dict, "fromkeys"), ("text", "join"), (print, "__call__")])
def test_no_other_attribute_is_looked_up(of: tuple[Any, str]) -> None:
    class Looked:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, of

    with pytest.raises(FormatError, match="which no checkpoint needs; refused"):
        unpickle(pickle.dumps(Looked()), "here")
