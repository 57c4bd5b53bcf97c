"""Whatever is wrong with the input: one sentence, the right exit code, and nothing left behind."""

from __future__ import annotations

import collections
import enum
import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    Outcome,
    Yard,
    digest,
    edit_json,
    edit_tensors,
    fixture_path,
    flip_byte,
    read_shard,
    write_shard,
)

Cli = Callable[..., Outcome]
MakeYard = Callable[[str], Yard]
Damage = Callable[[Path], object]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMMANDS = ("convert", "roundtrip", "verify", "inspect")


def arguments(command: str, yard: Yard) -> list[Path]:
    more = {"convert": [yard.target], "verify": [fixture_path("qwen2_mtp")]}
    return [yard.source, *more.get(command, [])]


def check_refused(outcome: Outcome, yard: Yard, before: dict[str, str], words: tuple[str, ...], code: int = 2) -> None:
    """The sentence, the code, an empty target and an unchanged source."""
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err
    first = outcome.err.splitlines()[0]
    assert first.startswith("mtpcheck: "), outcome.err
    assert code == 1 or outcome.err.count("\n") == 1, outcome.err
    assert outcome.out == ""
    for word in words:
        assert word in first, (word, first)
    assert yard.left_behind == []
    assert digest(yard.source) == before


# ---- Hugging Face folders


def header(edit: Callable[[dict[str, Any], str, str], object]) -> Damage:
    """Edit the header of the one shard; ``edit`` gets it with the names of the first two tensors."""

    def damage(folder: Path) -> None:
        table, data = read_shard(folder / SINGLE)
        table.pop("__metadata__", None)
        a, b = sorted(table, key=lambda name: table[name]["data_offsets"])[:2]
        edit(table, a, b)
        write_shard(folder / SINGLE, table, data)

    return damage


def raw_header(raw: bytes, claim: int | None = None) -> Damage:
    return lambda folder: write_shard(folder / SINGLE, raw, b"\0" * 64, claim)


def shift(by: int) -> Damage:
    def edit(table: dict[str, Any], a: str, b: str) -> None:
        table[b]["data_offsets"] = [n + by for n in table[b]["data_offsets"]]

    return header(edit)


def entry(**changes: object) -> Damage:
    return header(lambda table, a, b: table[a].update(changes))


def resized(by: int) -> Damage:
    def damage(folder: Path) -> None:
        raw = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(raw[:by] if by < 0 else raw + b"\0" * by)

    return damage


def written(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def removed(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def config(**changes: object) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **changes)


def linked_out(name: str) -> Damage:
    """Move a file out of the folder and leave a link to it."""

    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return damage


def named(file: str, exists: bool = False) -> Damage:
    """Let the index name another file for one tensor."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / INDEX).read_text())
        table["weight_map"][next(iter(table["weight_map"]))] = file
        (folder / INDEX).write_text(json.dumps(table))
        if exists:
            shutil.copyfile(next(folder.glob("*.safetensors")), folder / file)

    return damage


HF: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    "cut off": ("qwen2_mtp", resized(-100), (SINGLE, "cut off")),
    "too long": ("qwen2_mtp", resized(5), (SINGLE, "belong to no tensor")),
    "empty shard": ("qwen2_mtp", written(SINGLE, b""), (SINGLE, "0 bytes", "cut off")),
    "header cut off": ("qwen2_mtp", written(SINGLE, b"\x40" + b"\0" * 20), (SINGLE, "claims 64 bytes", "21")),
    "header huge": ("qwen2_mtp", raw_header(b"{}", 1 << 60), (SINGLE, f"{1 << 60} bytes", "cut off")),
    "header no JSON": ("qwen2_mtp", raw_header(b"{no"), (SINGLE, "not valid JSON")),
    "header deep": ("qwen2_mtp", raw_header(b"[" * 200_000), (SINGLE, "not valid JSON")),
    "header no object": ("qwen2_mtp", raw_header(b"[]"), (SINGLE, "not a JSON object")),
    "header not UTF-8": ("qwen2_mtp", raw_header(b'{"\xff": 1}'), (SINGLE, "not valid JSON")),
    "header UTF-16": ("qwen2_mtp", raw_header("{}".encode("utf-16")), (SINGLE, "not valid JSON")),
    "name half a character": ("qwen2_mtp", raw_header(b'{"\\ud800": 1}'), (SINGLE, "not valid JSON")),
    "twice the same name": ("qwen2_mtp", raw_header(b'{"a": 1, "a": 1}'), (SINGLE, "'a' stands twice")),
    "overlap": ("qwen2_mtp", shift(-2), (SINGLE, "overlaps")),
    "gap": ("qwen2_mtp", shift(2), (SINGLE, "gap")),
    "size against shape": ("qwen2_mtp", entry(shape=[3]), (SINGLE, "BF16 [3], 6 bytes", "offsets span")),
    "negative shape": ("qwen2_mtp", entry(shape=[-1, -2]), (SINGLE, "malformed")),
    "fractional shape": ("qwen2_mtp", entry(shape=[1.5]), (SINGLE, "malformed")),
    "true in the shape": ("qwen2_mtp", entry(shape=[True]), (SINGLE, "malformed")),
    "backward offsets": ("qwen2_mtp", entry(data_offsets=[8, 0]), (SINGLE, "malformed")),
    "three offsets": ("qwen2_mtp", entry(data_offsets=[0, 1, 2]), (SINGLE, "malformed")),
    "entry no object": ("qwen2_mtp", header(lambda table, a, b: table.update({a: 7})), (SINGLE, "malformed")),
    "unknown dtype": ("qwen2_mtp", entry(dtype="Q7"), (SINGLE, "unknown dtype 'Q7'")),
    "dtype no name": ("qwen2_mtp", entry(dtype=[]), (SINGLE, "malformed")),
    "beyond the file": ("qwen2_mtp", entry(shape=[1 << 50], data_offsets=[0, 1 << 51]), (SINGLE, "starts at data")),
    "no config": ("qwen2_mtp", removed("config.json"), ("config.json", "no such file")),
    "no weights": ("qwen2_mtp", removed(SINGLE), ("no safetensors",)),
    "config no JSON": ("qwen2_mtp", written("config.json", b"{"), ("config.json", "not valid JSON")),
    "config a list": ("qwen2_mtp", written("config.json", b"[]"), ("config.json", "expected a JSON object, got list")),
    "config not UTF-8": ("qwen2_mtp", written("config.json", b"\xff"), ("config.json", "not valid JSON")),
    "unknown family": (
        "qwen2_mtp", config(model_type="qwen2_vl", architectures=["X"]), ("'qwen2_vl'", "nearest", "'qwen2'")
    ),
    "model_type a list": ("qwen2_mtp", config(model_type=[1], architectures=["X"]), ("unknown family", "[1]")),
    "architectures a number": ("qwen2_mtp", config(model_type="x", architectures=5), ("unknown family", "'x'")),
    "architectures of lists": ("qwen2_mtp", config(model_type="x", architectures=[[1]]), ("unknown family", "'x'")),
    "no hidden size": ("qwen2_mtp", config(hidden_size=None), ("config.json", "hidden_size is missing")),
    "layers a word": ("qwen2_mtp", config(num_hidden_layers="4"), ("config.json", "num_hidden_layers", "'4'")),
    "layers negative": ("qwen2_mtp", config(num_hidden_layers=-4), ("config.json", "num_hidden_layers", "-4")),
    "layers without end": ("qwen2_mtp", config(num_hidden_layers=10**9), ("num_hidden_layers", "1000000000")),
    "no heads": ("qwen2_mtp", config(num_attention_heads=0, head_dim=None), ("num_attention_heads", "0")),
    "MTP layers a word": ("qwen2_mtp", config(num_nextn_predict_layers="1"), ("num_nextn_predict_layers", "'1'")),
    "shard leads out": ("qwen2_mtp", linked_out(SINGLE), (SINGLE, "leads out of the folder")),
    "tokenizer leads out": ("qwen2_mtp", linked_out("tokenizer.json"), ("tokenizer.json", "leads out of the folder")),
    "single and index": (
        "llama_mtp", lambda folder: shutil.copyfile(next(folder.glob("*.safetensors")), folder / SINGLE),
        (SINGLE, INDEX, "remove one"),
    ),
    "index gone": ("llama_mtp", removed(INDEX), ("the index is missing",)),
    "index no JSON": ("llama_mtp", written(INDEX, b"?"), (INDEX, "not valid JSON")),
    "index without map": ("llama_mtp", written(INDEX, b"{}"), (INDEX, "no weight_map")),
    "index of numbers": ("llama_mtp", written(INDEX, b'{"weight_map": {"a": 1}}'), (INDEX, "no weight_map")),
    "index names a missing file": ("llama_mtp", named("gone.safetensors"), (INDEX, "'gone.safetensors'")),
    "index leads out": ("llama_mtp", named("../x.safetensors", exists=True), ("'../x.safetensors'", "leads out")),
    "index absolute": ("llama_mtp", named("/x.safetensors"), ("'/x.safetensors'", "leads out")),
    "index with NUL": ("llama_mtp", named("a\0b.safetensors"), ("a\\x00b.safetensors", "no file name")),
    "index with a long name": ("llama_mtp", named("a" * 5000), ("a" * 5000,)),
}  # fmt: skip


# ---- Megatron folders


def iteration(damage: Damage) -> Damage:
    return lambda folder: damage(next(folder.glob("iter_*")))


def tracker(text: str) -> Damage:
    return written("latest_checkpointed_iteration.txt", text.encode())


def metadata(edit: Callable[[Any], object]) -> Damage:
    """Edit ``.metadata``; what ``edit`` returns replaces it if it is not None."""

    def damage(folder: Path) -> None:
        path = next(folder.glob("iter_*")) / ".metadata"
        content = pickle.loads(path.read_bytes())
        changed = edit(content)
        path.write_bytes(pickle.dumps(content if changed is None else changed))

    return damage


def relocated(**changes: object) -> Damage:
    """Change the storage entry of the embedding."""

    def edit(content: Any) -> None:
        index = next(i for i in content.storage_data if "word_embeddings" in i.fqn)
        content.storage_data[index].__dict__.update(changes)

    return metadata(edit)


def described(**changes: object) -> Damage:
    """Change what ``.metadata`` says of the embedding."""
    return metadata(
        lambda content: next(
            e for k, e in content.state_dict_metadata.items() if "word_embeddings" in k
        ).__dict__.update(changes)
    )


class Evil:
    """Runs a command where it is unpickled by an ordinary unpickler."""

    sentinel = Path("unset")

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{Evil.sentinel}'",)


def common(state: Callable[[], object]) -> Damage:
    def damage(folder: Path) -> None:
        import torch

        torch.save(state(), next(folder.glob("iter_*")) / "common.pt")

    return damage


def compressed(folder: Path) -> None:
    path = next(folder.glob("iter_*")) / "common.pt"
    with zipfile.ZipFile(path) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in members.items():
            new.writestr(name, data)


def truncated(name: str, to: int) -> Damage:
    return iteration(lambda folder: os.truncate(folder / name, to))


MEGATRON: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    "tracker to nowhere": ("dense2_tp1", tracker("7"), ("latest_checkpointed_iteration.txt", "iter_0000007")),
    "tracker garbage": ("dense2_tp1", tracker("one\n"), ("latest_checkpointed_iteration.txt", "'one'", "expected")),
    "tracker endless": ("dense2_tp1", tracker("9" * 5000), ("latest_checkpointed_iteration.txt", "9999")),
    "interrupted": ("dense2_tp1", iteration(removed("metadata.json")), ("no metadata.json", "interrupted")),
    "no .metadata": ("dense2_tp1", iteration(removed(".metadata")), ("no .metadata", "hidden")),
    "zarr": (
        "dense2_tp1", iteration(written("metadata.json", b'{"sharded_backend": "zarr"}')),
        ("metadata.json", "'zarr'", "only 'torch_dist'"),
    ),
    "metadata.json no JSON": ("dense2_tp1", iteration(written("metadata.json", b"")), ("metadata.json", "not valid")),
    "a rank is missing": ("dense2_tp1", iteration(removed("__0_1.distcp")), ("__0_1.distcp is missing",)),
    "cut off": ("dense2_tp1", truncated("__0_0.distcp", 1000), ("__0_0.distcp", "the file has 1000", "cut off")),
    ".metadata empty": ("dense2_tp1", truncated(".metadata", 0), (".metadata", "damaged pickle")),
    ".metadata cut off": ("dense2_tp1", truncated(".metadata", 1000), (".metadata", "damaged pickle")),
    ".metadata a list": ("dense2_tp1", metadata(lambda content: [1]), (".metadata", "not the metadata")),
    ".metadata evil": ("dense2_tp1", metadata(lambda content: Evil()), (".metadata", "posix.system", "refused")),
    ".metadata of words": (
        "dense2_tp1", metadata(lambda content: content.storage_data.update(a="b")), (".metadata", "malformed")
    ),
    "entry of nothing": (
        "dense2_tp1", metadata(lambda content: content.state_dict_metadata.update(a=None)), (".metadata", "malformed")
    ),
    "size a word": ("dense2_tp1", described(size=("a", "b")), (".metadata", "malformed")),
    "chunk outside": ("dense2_tp1", described(size=(1, 1)), (".metadata", "outside its shape")),
    "chunk missing": ("dense2_tp1", described(size=(10**9, 64)), (".metadata", "word_embeddings", "is missing")),
    "unknown dtype": (
        "dense2_tp1", metadata(lambda content: [
            setattr(e.properties, "dtype", __import__("torch").complex64)
            for e in content.state_dict_metadata.values() if hasattr(e, "properties")
        ] and None),
        (".metadata", "complex64"),
    ),
    "leads out": ("dense2_tp1", relocated(relative_path="../x.distcp"), (".metadata", "'../x.distcp'", "leads out")),
    "absolute": ("dense2_tp1", relocated(relative_path="/etc/passwd"), (".metadata", "'/etc/passwd'", "leads out")),
    "offset negative": ("dense2_tp1", relocated(offset=-5), ("word_embeddings", "bytes -5")),
    "offset a word": ("dense2_tp1", relocated(offset="x"), (".metadata", "malformed", "word_embeddings")),
    "transform": ("dense2_tp1", relocated(transform_descriptors=["zstd"]), ("word_embeddings", "transform")),
    "common.pt evil": (
        "dense2_tp1", common(lambda: {"args": Evil()}), ("common.pt", "posix.system", "nothing was run")
    ),
    "common.pt compressed": ("dense2_tp1", compressed, ("common.pt", "is compressed")),
    "common.pt cut off": ("dense2_tp1", truncated("common.pt", 4000), ("common.pt", "not a sound zip")),
    "common.pt empty": ("dense2_tp1", truncated("common.pt", 0), ("common.pt", "not a sound zip")),
    "common.pt without arguments": ("dense2_tp1", common(lambda: {}), ("no training arguments",)),
    "common.pt no state": ("dense2_tp1", common(lambda: 5), ("no training arguments",)),
    "no common.pt": ("dense2_tp1", iteration(removed("common.pt")), ("no training arguments",)),
    "arguments of words": (
        "dense2_tp1", common(lambda: {"args": Namespace(num_layers="4", hidden_size="x")}), ("no known family fits",)
    ),
}  # fmt: skip


@pytest.fixture
def sentinel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that ``Evil`` would make."""
    monkeypatch.setattr(Evil, "sentinel", tmp_path / "was run")
    return Evil.sentinel


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("name", "damage", "words"), [*HF.values(), *MEGATRON.values()], ids=[*HF, *MEGATRON])
def test_damaged(
    name: str, damage: Damage, words: tuple[str, ...], command: str, yard: MakeYard, cli: Cli, sentinel: Path
) -> None:
    place = yard(name)
    damage(place.source)
    before = digest(place.source)
    check_refused(cli(command, *arguments(command, place)), place, before, words)
    assert not sentinel.exists()


@pytest.mark.parametrize("case", ["cut off", "index leads out", "cut off ", ".metadata evil"])
def test_damaged_candidate(case: str, yard: MakeYard, cli: Cli) -> None:
    name, damage, words = {**HF, "cut off ": MEGATRON["cut off"], **MEGATRON, "cut off": HF["cut off"]}[case]
    place = yard(name)
    damage(place.source)
    before = digest(place.source)
    check_refused(cli("verify", fixture_path("qwen2_mtp"), place.source), place, before, words)


def swapped(folder: Path) -> None:
    """Let the embedding lie where a norm does."""

    def edit(content: Any) -> None:
        embedding, norm = (
            next(i for i in content.storage_data if what in i.fqn) for what in ("word_emb", "decoder.final_layernorm")
        )
        content.storage_data[embedding] = content.storage_data[norm]

    metadata(edit)(folder)


def evil_item(folder: Path) -> None:
    """Let the embedding be an object that runs a command."""
    import torch

    file = next(folder.glob("iter_*")) / "__0_9.distcp"
    torch.save(Evil(), file)
    relocated(relative_path=file.name, offset=0, length=file.stat().st_size)(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(swapped, (".metadata promises", "the item holds")), (evil_item, ("posix.system", "nothing was run"))],
)
def test_item_is_not_what_it_should_be(
    damage: Damage, words: tuple[str, ...], yard: MakeYard, cli: Cli, sentinel: Path
) -> None:
    """Headers alone look sound; the first read of the payload tells."""
    place = yard("dense2_tp1")
    damage(place.source)
    before = digest(place.source)
    for more in (["convert", place.source, place.target], ["roundtrip", place.source]):
        check_refused(cli(*more), place, before, ("__0_", "word_embeddings", *words))
    check_refused(cli("verify", fixture_path("dense2_tp1"), place.source), place, before, words)
    assert cli("inspect", place.source).code == 0
    assert not sentinel.exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: shutil.rmtree(path), ("no such folder",)),
        (lambda path: (shutil.rmtree(path), path.write_text("x")), ("is a file", "folder")),
        (lambda path: (shutil.rmtree(path), path.mkdir()), ("not a checkpoint", "empty")),
        (lambda path: [p.unlink() for p in path.iterdir() if "token" not in p.name], ("not a checkpoint", "no config")),
        (lambda path: (shutil.rmtree(path), (path / "mp_rank_00").mkdir(parents=True)), ("mp_rank_00", "_rng.pt")),
    ],
    ids=["missing", "a file", "empty", "junk", "per rank"],
)  # fmt: skip
def test_no_checkpoint(make: Damage, words: tuple[str, ...], command: str, yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    make(place.source)
    before = digest(place.source)
    check_refused(cli(command, *arguments(command, place)), place, before, (str(place.source), *words))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["qwen2_mtp", "dense2_tp1"])
def test_unknown_family_option(name: str, command: str, yard: MakeYard, cli: Cli) -> None:
    place = yard(name)
    before = digest(place.source)
    outcome = cli(command, *arguments(command, place), "--family", "glm4moe")
    check_refused(outcome, place, before, ("'glm4moe'", "nearest", "'glm4_moe'", "qwen3"))


def test_hub_cache_links_are_followed(tmp_path: Path, cli: Cli) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(fixture_path("qwen2_mtp"), blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert cli("roundtrip", snapshot).code == 0


# ---- foreign classes in training arguments


def foreign_values() -> dict[str, Any]:
    """Objects of classes that only the one who saved the checkpoint has."""
    module = types.ModuleType("mycompany.args")
    bases: dict[str, tuple[type, ...]] = {
        "Plain": (), "Table": (dict,), "Row": (list,), "Bag": (set,), "Ordered": (collections.OrderedDict,)
    }  # fmt: skip
    for name, base in bases.items():
        setattr(module, name, type(name, base, {"__module__": module.__name__}))
    module.Kind = enum.Enum("Kind", ["A", "B"], module=module.__name__)  # type: ignore[attr-defined]
    sys.modules.update({"mycompany": types.ModuleType("mycompany"), module.__name__: module})
    plain = module.Plain()
    plain.inner = module.Plain()
    return {
        "plain": plain, "table": module.Table(a=plain), "row": module.Row([plain, 1]), "bag": module.Bag("ab"),
        "ordered": module.Ordered(a=1), "kind": module.Kind.A, "kinds": [module.Kind.A, module.Kind.B],
    }  # fmt: skip


def own_values() -> dict[str, Any]:
    """Objects of the standard library that arguments may well hold."""
    return {
        "path": Path("/data"), "ordered": collections.OrderedDict(a=1), "defaults": collections.defaultdict(None, a=1),
        "group": Namespace(a=1), "set": {1}, "signal": signal.SIGTERM, "bytes": b"\xff", "complex": None,
    }  # fmt: skip


@pytest.mark.parametrize("values", [foreign_values, own_values])
def test_harmless_classes_in_arguments(values: Callable[[], dict[str, Any]], yard: MakeYard, cli: Cli) -> None:
    import torch

    place = yard("qwen2_mtp")
    assert cli("convert", place.source, place.target).code == 0
    path = place.target / "release" / "common.pt"
    state = torch.load(path, weights_only=False)
    vars(state["args"]).update(values())
    torch.save(state, path)
    for name in ("mycompany", "mycompany.args"):
        sys.modules.pop(name, None)
    outcome = cli("convert", place.target, place.out / "back")
    assert outcome.code == 0, outcome.err
    assert "mycompany.args" not in sys.modules
    assert digest(place.out / "back") == digest(place.source)


# ---- targets


def target_file(place: Yard) -> Path:
    place.target.write_text("mine")
    return place.target


def target_folder(place: Yard) -> Path:
    (place.target / "mine").mkdir(parents=True)
    return place.target


def target_link(place: Yard) -> Path:
    place.target.symlink_to("nowhere")
    return place.target


TARGETS: dict[str, tuple[Callable[[Yard], Path], tuple[str, ...]]] = {
    "file": (target_file, ("exists already", "nothing is ever overwritten")),
    "folder": (target_folder, ("exists already", "nothing is ever overwritten")),
    "dangling link": (target_link, ("exists already",)),
    "source itself": (lambda place: place.source, ("exists already",)),
    "inside the source": (lambda place: place.source / "new", ("inside the source",)),
    "deep inside the source": (lambda place: place.source / "extra" / "new", ("inside the source",)),
    "through a link": (lambda place: link_to(place, place.source) / "new", ("inside the source",)),
    "around the source": (lambda place: place.source.parent, ("exists already",)),
    "no parent": (lambda place: place.out / "no" / "new", ("no such folder",)),
    "parent a file": (lambda place: target_file(place) / "new", ("no such folder",)),
}


def link_to(place: Yard, folder: Path) -> Path:
    (place.out / "link").symlink_to(folder)
    return place.out / "link"


@pytest.mark.parametrize(("where", "words"), TARGETS.values(), ids=TARGETS)
def test_target_refused(
    where: Callable[[Yard], Path], words: tuple[str, ...], yard: MakeYard, cli: Cli, tmp_path: Path
) -> None:
    place = yard("glm4_moe")
    target = where(place)
    before = digest(tmp_path)
    outcome = cli("convert", place.source, target)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), outcome
    assert all(word in outcome.err for word in words), outcome.err
    assert digest(tmp_path) == before
    if target != place.source.parent:
        keep = cli("roundtrip", place.source, "--keep", target)
        assert (keep.code, keep.err.count("\n")) == (2, 1), keep
        assert digest(tmp_path) == before


def test_workdir_inside_the_source_is_refused(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    before = digest(place.source)
    words = ("inside the source",)
    check_refused(cli("roundtrip", place.source, "--workdir", place.source), place, before, words)
    check_refused(cli("roundtrip", place.source, "--workdir", place.out / "no"), place, before, ("no such folder",))


def test_parent_not_writable(yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = yard("qwen2_mtp")
    before = digest(place.source)
    if os.geteuid():  # root may write anywhere
        place.out.chmod(0o555)
        check_refused(cli("convert", place.source, place.target), place, before, ("not writable", str(place.out)))
        place.out.chmod(0o755)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, *more, **kw: path != place.out and real(path, *more, **kw))
    check_refused(cli("convert", place.source, place.target), place, before, ("not writable", str(place.out)))


def test_target_that_appears_meanwhile_is_kept(yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = yard("dense2_tp1")
    monkeypatch.setattr("mtpcheck.export.derived_config", lambda *_: target_folder(place) and {})
    outcome = cli("convert", place.source, place.target)
    assert (outcome.code, outcome.out) == (2, "")
    assert "appeared" in outcome.err
    assert place.left_behind == [place.target, place.target / "mine"]


# ---- disks that fill up, interruptions, crashes


@pytest.mark.parametrize("name", ["qwen2_mtp", "dense2_tp1"])
@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("command", ["convert", "roundtrip"])
def test_disk_full(
    name: str, after: int, command: str, yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = yard(name)
    before, left, real = digest(place.source), [after], os.pwrite

    def pwrite(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    where = str(place.target) if command == "convert" else str(place.tmp)
    words = (where, "No space left on device", "nothing half-written was left behind")
    check_refused(cli(command, *arguments(command, place)), place, before, words)


def test_disk_full_at_allocation(yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = yard("qwen2_mtp")

    def fallocate(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    before = digest(place.source)
    check_refused(cli("convert", place.source, place.target), place, before, ("No space left", str(place.target)))


@pytest.mark.parametrize("command", ["convert", "roundtrip"])
def test_disk_too_small(command: str, yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = yard("qwen2_mtp")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    words = ("bytes are needed", "1,000 are free", "another disk")
    check_refused(cli(command, *arguments(command, place)), place, digest(place.source), words)


def test_file_size_limit(yard: MakeYard) -> None:
    """The kernel itself refuses a write in the middle, whoever runs the test."""
    place = yard("qwen2_mtp")
    before = digest(place.source)
    done = subprocess.run(
        [sys.executable, "-m", "mtpcheck", "convert", str(place.source), str(place.target)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True, text=True,
    )  # fmt: skip
    check_refused(Outcome(done.returncode, done.stdout, done.stderr), place, before, ("File too large",))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root, where mounting is allowed")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_really_full(yard: MakeYard, cli: Cli) -> None:
    """A disk with room for the weights and not for what Megatron keeps beside them, then one smaller than that."""
    place = yard("qwen2_mtp")
    before = digest(place.source)
    for size, words in ((520_192, ("No space left on device",)), (131_072, ("bytes are needed",))):
        with small_disk(place.out, size):
            check_refused(cli("convert", place.source, place.target), place, before, words)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some 400 MB, mostly hole."""
    from mtpcheck.facts import facts_from_config
    from mtpcheck.family import load_family

    folder = tmp_path_factory.mktemp("large")
    shutil.copyfile(fixture_path("llama_mtp") / "config.json", folder / "config.json")
    edit_json(folder / "config.json", hidden_size=2048, intermediate_size=32768, num_attention_heads=32,
              head_dim=64, num_nextn_predict_layers=1)  # fmt: skip
    family = load_family("llama")
    facts = facts_from_config(family.all_config, json.loads((folder / "config.json").read_text()), family.all_fixed)
    model = family.model({**facts, "mtp_stored": 1})
    table, at = {}, 0
    for row in model.rows:
        shape = row.shape(model.shapes)
        size = 2
        for axis in shape:
            size *= axis
        table[row.name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    write_shard(folder / SINGLE, table, b"")
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size + at)
    assert at > 1 << 30  # a third of a second to write
    return folder


@pytest.mark.parametrize(
    ("command", "number"), [("convert", signal.SIGINT), ("convert", signal.SIGTERM), ("roundtrip", signal.SIGTERM)]
)
def test_signals(
    command: str, number: signal.Signals, large: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    target = [out / "new"] if command == "convert" else ["--workdir", out]
    process = started(command, large, *target)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in out.rglob("*.distcp")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + number, stderr
    assert (stdout, list(out.iterdir())) == ("", [])
    assert "Traceback" not in stderr
    assert "nothing half-written was left behind" in stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_crash_is_no_verdict(command: str, yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = yard("qwen2_mtp")
    monkeypatch.setattr("mtpcheck.claim.claim", lambda *_, **__: 1 // 0)
    outcome = cli(command, *arguments(command, place))
    assert (outcome.code, outcome.out, place.left_behind) == (2, "", [])
    assert "ZeroDivisionError" in outcome.err
    assert "fault of mtpcheck" in outcome.err


@pytest.mark.parametrize("command", ["convert", "roundtrip"])
@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError, 2), (MemoryError, 2), (KeyboardInterrupt, 130)])
def test_crash_while_writing(
    error: type[BaseException], code: int, command: str, yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = yard("qwen2_mtp")

    def crash(*given: object) -> None:
        raise error

    monkeypatch.setattr("mtpcheck.megatron.write_manifest", crash)
    outcome = cli(command, *arguments(command, place))
    assert (outcome.code, outcome.out, place.left_behind) == (code, "", [])


def test_keep_is_emptied_after_a_failure(yard: MakeYard, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    place = yard("qwen2_mtp")
    monkeypatch.setattr("mtpcheck.megatron.write_manifest", lambda *_: 1 // 0)
    assert cli("roundtrip", place.source, "--keep", place.target).code == 2
    assert place.left_behind == []
    place.target.mkdir()
    assert cli("roundtrip", place.source, "--keep", place.target).code == 2
    assert place.left_behind == [place.target]


# ---- sound checkpoints that cannot be carried, or have no MTP layer


def quantize(tensors: dict[str, Any]) -> None:
    import torch

    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[name + "_scale_inv"] = torch.ones(1, 1)


QUANTIZED: dict[str, tuple[Damage, str]] = {
    "FP8": (lambda folder: edit_tensors(folder / SINGLE, quantize), "F8_E4M3"),
    "quantization_config": (config(quantization_config={"quant_method": "awq"}), "'awq'"),
}


@pytest.mark.parametrize(("damage", "word"), QUANTIZED.values(), ids=QUANTIZED)
def test_quantized(damage: Damage, word: str, yard: MakeYard, cli: Cli, copy_of: Callable[[str], Path]) -> None:
    place = yard("qwen2_mtp")
    damage(place.source)
    before = digest(place.source)
    for command in ("convert", "roundtrip"):
        check_refused(cli(command, *arguments(command, place)), place, before, ("quantized", word, "verify"))
    other = shutil.copytree(place.source, place.source.parent / "other")
    outcome = cli("verify", place.source, other)
    assert outcome.code == 1
    assert outcome.out.count("FAILURE quantization.declared") == 2 and "FAILS: 2 failures" in outcome.out
    flip_byte(other / SINGLE)
    outcome = cli("verify", place.source, other)
    assert outcome.code == 1 and "FAILS: 3 failures" in outcome.out
    assert "1 of" in outcome.out and "elements differ" in outcome.out


def drop(*words: str) -> Damage:
    """Remove the tensors whose names begin with one of ``words``."""

    def edit(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(words)]:
            del tensors[name]

    return lambda folder: edit_tensors(folder / SINGLE, edit)


def test_model_without_mtp(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    drop("mtp.")(place.source)
    config(num_nextn_predict_layers=0)(place.source)
    before = digest(place.source)
    for command in (["roundtrip", place.source], ["verify", place.source, place.source]):
        check_refused(cli(*command), place, before, ("no MTP layer", "--allow-no-mtp"))
        assert cli(*command, "--allow-no-mtp").code == 0
    assert cli("convert", place.source, place.target).code == 0


def test_declared_and_lost(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    drop("mtp.")(place.source)
    before = digest(place.source)
    for command in ("roundtrip", "verify"):
        words = ("declares 1 MTP layer", "stores none")
        check_refused(cli(command, *arguments(command, place)), place, before, words)
        check_refused(cli(command, *arguments(command, place), "--allow-no-mtp"), place, before, words)
    outcome = cli("convert", place.source, place.target)
    check_refused(outcome, place, before, ("declares 1 MTP layer, stores 0", "nothing was written"), 1)


def test_partly_lost(yard: MakeYard, cli: Cli) -> None:
    place = yard("qwen2_mtp")
    drop("mtp.fc.")(place.source)
    before = digest(place.source)
    outcome = cli("convert", place.source, place.target)
    check_refused(outcome, place, before, ("mtp.fc.weight", "MTP layer is missing", "nothing was written"), 1)
    outcome = cli("roundtrip", place.source)
    assert (outcome.code, place.left_behind) == (1, [])
    assert "mtp.fc.weight" in outcome.out and "FAILS" in outcome.out
    assert cli("roundtrip", place.source, "--exit-zero").code == 0


def test_unclaimed_tensor(yard: MakeYard, cli: Cli) -> None:
    import torch

    place = yard("qwen2_mtp")
    edit_tensors(place.source / SINGLE, lambda tensors: tensors.update(stray=torch.ones(2)))
    before = digest(place.source)
    check_refused(cli("convert", place.source, place.target), place, before, ("stray", "nothing was written"), 1)


def test_fewer_layers_stored_than_declared(yard: MakeYard, cli: Cli) -> None:
    """Converted as it is: exit 1, and said so even when quiet."""
    place = yard("qwen2_mtp")
    config(num_nextn_predict_layers=2)(place.source)
    outcome = cli("convert", place.source, place.target, "--quiet")
    assert outcome.code == 1
    assert "declares 2 MTP layers, stores 1" in outcome.out + outcome.err
    assert place.target.is_dir()


# ---- the manifest inside a checkpoint of ours


MANIFEST: dict[str, tuple[str, Callable[[str], str], tuple[str, ...]]] = {
    "no JSON": ("manifest.json", lambda text: text[:40], ("manifest.json", "not valid JSON")),
    "newer": ("manifest.json", lambda text: text.replace('"schema": 1', '"schema": 9'), ("schema 9", "knows 1")),
    "no files": ("manifest.json", lambda text: text.replace('"files"', '"fils"'), ("damaged", "files")),
    "leads out": ("manifest.json", lambda text: text.replace("tokenizer.json", "../t.json"), ("leads out",)),
    "shard leads out": ("manifest.json", lambda text: text.replace(SINGLE, f"/{SINGLE}"), ("leads out",)),
    "file gone": ("manifest.json", lambda text: text.replace("tokenizer.json", "gone.json"), ("gone.json",)),
    "header lies": ("headers/0.json", lambda text: text.replace('s":[0,', 's":[2,'), ("0.json", "offsets span")),
    "header no JSON": ("headers/0.json", lambda text: "[", ("0.json", "not valid JSON")),
    "config no JSON": ("files/config.json", lambda text: "{", ("config.json", "not valid JSON")),
}


@pytest.mark.parametrize(("file", "edit", "words"), MANIFEST.values(), ids=MANIFEST)
def test_damaged_manifest(
    file: str, edit: Callable[[str], str], words: tuple[str, ...], yard: MakeYard, cli: Cli, tmp_path: Path
) -> None:
    place = yard("qwen2_mtp")
    ours = tmp_path / "ours"
    assert cli("convert", place.source, ours).code == 0
    path = ours / "release" / "mtpcheck" / file
    text = path.read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    before = digest(ours)
    check_refused(cli("convert", ours, place.target), place, digest(place.source), words)
    assert digest(ours) == before
