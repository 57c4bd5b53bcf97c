"""Beyond the catalogue: no random damage is missed, and no random rewrite that keeps the model is flagged.

40 examples each, 300 with MTPCHECK_ALL. Examples are the same in every run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.coded import index_again
from tests.conftest import FIXTURES, write_shard
from tests.mutants import hf
from tests.mutants.anatomy import STORED, anatomy
from tests.mutants.damage import Draw, Tensors, damage_hf, damage_megatron
from tests.mutants.originals import Originals
from tests.mutants.run import call

EXAMPLES = 300 if os.environ.get("MTPCHECK_ALL") else 40
generalised = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"), lambda *arguments: call(*arguments)[0])


@contextmanager
def empty_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# ---- damage


@generalised
@given(data=st.data())
def test_no_damage_is_missed(data: Draw, originals: Originals) -> None:
    name, side = data.draw(st.sampled_from(STORED)), data.draw(st.sampled_from(["", "torch_dist"]))
    with empty_folder() as folder:
        edit = damage_megatron if side else damage_hf
        mutant = originals.mutant(name, side, lambda made: edit(data, made), folder / "mutant")
        code, out, err = call("verify", originals.hf(name), mutant, "--json")
        assert code == 1, (out, err)
        assert json.loads(out)["verdict"] == "fails" and json.loads(out)["counts"]["failure"]


# ---- legal rewrites


def shards_anew(data: Draw, folder: Path) -> None:
    """Any shards, any order of tensors and index, other metadata, padded headers; the MTP layer may lie apart."""
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    names = data.draw(st.permutations(sorted(tensors)))
    apart = set(hf.matching(folder, tensors, "{mtp}")) if data.draw(st.booleans()) else set()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    number = data.draw(st.integers(1, 5))
    files: dict[str, list[str]] = {}
    for name in names:
        index = data.draw(st.integers(1, number))
        files.setdefault("mtp.safetensors" if name in apart else f"model-{index:05d}.safetensors", []).append(name)
    if len(files) == 1:
        files = {"model.safetensors": names}
    for file, own in files.items():
        _write(data, folder / file, {name: tensors[name] for name in own})
    if len(files) > 1:
        index_again(folder)
        _spell_json(data, folder / hf.INDEX, ("weight_map",))


def _write(data: Draw, path: Path, tensors: Tensors) -> None:
    entries: dict[str, Any] = {}
    at, raw = 0, b""
    for name, tensor in tensors.items():
        own = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(own)]}
        at, raw = at + len(own), raw + own
    items = list(entries.items())
    if data.draw(st.booleans()):
        items.reverse()
    if data.draw(st.booleans()):
        items.insert(0, ("__metadata__", {"format": "pt", "of": data.draw(st.text("abc", max_size=3))}))
    header = json.dumps(dict(items)).encode()
    write_shard(path, header + b" " * (-len(header) % 8 + 8 * data.draw(st.integers(0, 3))), raw)


def _spell_json(data: Draw, path: Path, below: tuple[str, ...] = ()) -> None:
    """Keys in any order, at the top and ``below`` it; any white space."""
    table = json.loads(path.read_text())
    for key in below:
        table[key] = dict(data.draw(st.permutations(list(table[key].items()))))
    table = dict(data.draw(st.permutations(list(table.items()))))
    path.write_text(
        json.dumps(table, indent=data.draw(st.sampled_from([None, 0, 2, "\t"]))) + "\n" * data.draw(st.integers(0, 2))
    )


def config_spelled(data: Draw, folder: Path) -> None:
    _spell_json(data, folder / "config.json")


def other_keys(data: Draw, folder: Path) -> None:
    """Spellings that transformers reads alike."""
    path = folder / "config.json"
    table = json.loads(path.read_text())
    if "torch_dtype" in table:
        table["dtype"] = table.pop("torch_dtype")
    if table.get("rope_scaling", 0) is None and "rope_theta" in table and data.draw(st.booleans()):
        table["rope_parameters"] = {"rope_theta": table.pop("rope_theta"), "rope_type": "default"}
    if data.draw(st.booleans()):
        table["transformers_version"] = "9.9.9"
    path.write_text(json.dumps(table))


REWRITES = (shards_anew, config_spelled, other_keys)


def flags(data: Draw, name: str) -> list[object]:
    """Any form of Megatron that the fixture fits."""
    moe = anatomy(name).moe
    chosen: list[object] = ["--vocab-multiple", data.draw(st.sampled_from([1, 8, 128, 500]))]
    chosen += ["--spec", data.draw(st.sampled_from(["te", "local"]))]
    chosen += ["--mcore", data.draw(st.sampled_from(["0.16", "0.19"]))]
    chosen += ["--text-only"] * anatomy(name).images
    if data.draw(st.booleans()):
        return ["--to", "torch_dist", *chosen]
    tp, pp, ep = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2]))
    chosen += ["--tp", tp, "--etp", data.draw(st.sampled_from([1, tp])) if moe else tp, "--pp", pp]
    chosen += ["--first-layers", 1] * (pp == 2)
    if moe:
        chosen += ["--ep", ep, "--experts", data.draw(st.sampled_from(["grouped", "sequential"]))]
    return ["--to", "torch", *chosen]


@generalised
@given(data=st.data())
def test_no_legal_rewrite_is_flagged(data: Draw) -> None:
    name = data.draw(st.sampled_from(STORED))
    with empty_folder() as folder:
        rewritten = Path(shutil.copytree(FIXTURES / name, folder / "hf"))
        for rewrite in data.draw(st.lists(st.sampled_from(REWRITES), min_size=1, max_size=3, unique=True)):
            rewrite(data, rewritten)
        sides = [(FIXTURES / name, rewritten)]
        if data.draw(st.booleans()):
            code, out, err = call("convert", rewritten, folder / "megatron", "--quiet", *flags(data, name))
            assert code == 0, (out, err)
            sides = [(FIXTURES / name, folder / "megatron"), (folder / "megatron", rewritten)]
        for reference, candidate in sides:
            code, out, err = call("verify", reference, candidate, "--json")
            assert code == 0, (out, err)
            assert json.loads(out)["counts"]["failure"] == 0
