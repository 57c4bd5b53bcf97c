"""Checkpoints on the Hub, with huggingface_hub's own client against a Hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from mtpcheck.accept import accept
from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.convert import convert
from mtpcheck.errors import FormatError, HubError, UsageError
from mtpcheck.fetch import fetched
from mtpcheck.graft import extract, graft
from mtpcheck.hub import HubTree
from mtpcheck.inspect import inspect
from mtpcheck.layouts.hf import read_hf
from mtpcheck.proof import prove
from mtpcheck.roundtrip import roundtrip
from mtpcheck.verify import verify
from tests import packed
from tests.conftest import FIXTURES, Outcome, digest, edit_json, edit_tensors, flip_byte
from tests.fake_hub import Hub, Repo, serving

Cli = Callable[..., Outcome]
CopyOf = Callable[[str], Path]
GLM = "glm4_moe"
KB = 1000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one repository, ``org/glm``, an empty cache, and no waiting between tries."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, "")
    with serving() as hub:
        hub.repos["org/glm"] = Repo(FIXTURES / GLM)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # both are read from HF_ENDPOINT as it is imported
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield hub


def environment(hub: Hub, cache: Path, **more: str) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache / "home"), **more}
    return {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, **own}


def run(hub: Hub, cache: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, as its environment variables tell."""
    command = [sys.executable, "-m", "mtpcheck", *args]
    return subprocess.run(command, env=environment(hub, cache, **more), capture_output=True, text=True)


def unlike(hub: Hub, name: str, copy: Path) -> Path:
    hub.repos[name] = Repo(copy)
    return copy


def sent(hub: Hub, ranges: bool) -> Counter[str]:
    """Shards of which bytes were sent, in ranges or whole."""
    shards = (asked for asked in hub.asked if asked.nbytes and asked.path.endswith(".safetensors"))
    return Counter(asked.path.rpartition("/")[2] for asked in shards if bool(asked.span) is ranges)


def whole(hub: Hub) -> Counter[str]:
    return sent(hub, ranges=False)


# ---- headers


def test_inspect_tells_what_it_tells_of_a_folder(hub: Hub) -> None:
    local, remote = inspect(FIXTURES / GLM), inspect("org/glm")
    commit = hub.repos["org/glm"].commit
    assert remote.path == f"org/glm@{commit}"
    assert vars(remote) | {"path": ""} == vars(local) | {"path": ""}
    assert not whole(hub) and set(sent(hub, ranges=True).values()) == {1}


def test_the_command_line_says_which_commit_it_looked_at(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path / "cache", "inspect", "org/glm@main", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["path"] == f"org/glm@{hub.repos['org/glm'].commit}"
    again = run(hub, tmp_path / "cache", "inspect", f"org/glm@{hub.repos['org/glm'].commit}")
    assert again.returncode == 0 and "MTP stored   1" in again.stdout


def test_inspect_at_full_size_reads_headers_alone(hub: Hub, tmp_path: Path) -> None:
    script = [sys.executable, FIXTURES / "full_size.py", tmp_path / "glm", "GLM-5.2"]
    subprocess.run(script, check=True, capture_output=True)
    hub.repos["org/large"] = Repo(tmp_path / "glm")
    shards = sorted((tmp_path / "glm").glob("*.safetensors"))
    headers = sum(len(shard.header) for shard in read_hf(tmp_path / "glm").shards)
    assert len(shards) >= 282
    hub.latency = 0.02
    started = time.monotonic()
    found = inspect("org/large")
    print(f"{len(shards)} shards in {time.monotonic() - started:.1f} s")
    assert (found.tensors, found.elements, found.mtp_stored) == (59_585, 753_329_940_480, 1)
    of_shards = [asked for asked in hub.asked if asked.path.endswith(".safetensors")]
    assert len(of_shards) <= 2 * len(shards)
    assert sum(asked.nbytes for asked in of_shards) <= headers + 200 * KB * len(shards)
    assert len(hub.asked) - len(of_shards) <= 8  # the listing; config and index, each asked for and sent


def test_a_folder_goes_before_a_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "mimo", tmp_path / "org/glm")
    assert inspect("org/glm").family == "mimo" and not hub.asked
    shutil.rmtree(tmp_path / "org")
    with pytest.raises(UsageError, match="no such folder"):
        inspect("./org/glm")
    assert not hub.asked


def test_a_long_header_is_read_to_its_end(hub: Hub, copy_of: CopyOf) -> None:
    copy = unlike(hub, "org/long", copy_of("qwen3_mtp"))
    shard = next(copy.glob("*.safetensors"))
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "much": "x" * 300_000}
    told = json.dumps(header).encode()
    shard.write_bytes(len(told).to_bytes(8, "little") + told + raw[8 + length :])
    assert inspect("org/long").tensors == inspect(copy).tensors
    assert sum(asked.nbytes for asked in hub.asked if asked.path.endswith(shard.name)) <= len(told) + 200 * KB


# ---- verify


def test_two_repositories_by_headers(hub: Hub, copy_of: CopyOf) -> None:
    lost = unlike(hub, "org/lost", copy_of("glm4_moe_nocopies"))
    unlike(hub, "org/sound", copy_of("glm4_moe_nocopies"))
    names = json.loads((lost / constants.SAFETENSORS_INDEX_FILE).read_text())
    kept = {name: file for name, file in names["weight_map"].items() if not name.startswith("model.layers.4.")}
    for file in {*names["weight_map"].values()} - {*kept.values()}:
        (lost / file).unlink()
    edit_json(lost / constants.SAFETENSORS_INDEX_FILE, weight_map=kept)
    assert verify("org/sound", "org/sound").verdict == "holds"
    report = verify("org/sound", "org/lost")
    assert {f.check for f in report.failures} >= {"presence.missing", "declaration.count"}
    assert "dropped" in {f.cause_id for f in report.failures}
    assert report.subjects == [f"org/{name}@{hub.repos[f'org/{name}'].commit}" for name in ("sound", "lost")]
    assert not whole(hub)


def test_headers_never_count_as_values(hub: Hub, copy_of: CopyOf) -> None:
    changed = unlike(hub, "org/changed", copy_of(GLM))
    flip_byte(next(changed.glob("*.safetensors")))
    report = verify(FIXTURES / GLM, "org/changed")
    assert report.verdict == "holds" and "values" in report.skipped
    assert verify(FIXTURES / GLM, "org/changed", values="exact").verdict == "fails"


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (lambda t: t.update({k: v.half() for k, v in t.items() if "eh_proj" in k}), "values.dtype"),
        (lambda t: t.update({k: v[:-1].clone() for k, v in t.items() if "eh_proj" in k}), "values.shape"),
        (lambda t: [t.pop(k) for k in list(t) if "eh_proj" in k], "presence.missing"),
        (lambda t: t.update({k + "_": t.pop(k) for k in list(t) if "eh_proj" in k}), "presence.unclaimed"),
    ],
)
def test_what_headers_tell(hub: Hub, copy_of: CopyOf, damage: Callable[[dict[str, Any]], Any], check: str) -> None:
    damaged = copy_of(GLM)
    for shard in damaged.glob("*.safetensors"):
        edit_tensors(shard, damage)
    report = verify("org/glm", damaged)
    assert check in {f.check for f in report.failures}
    local = verify(FIXTURES / GLM, damaged, values="headers")
    assert [f.check for f in local.findings] == [f.check for f in report.findings]


def test_headers_of_a_megatron_checkpoint(hub: Hub, tmp_path: Path) -> None:
    convert(FIXTURES / GLM, tmp_path / "megatron")
    report = verify("org/glm", tmp_path / "megatron")
    assert report.verdict == "holds" and "values" in report.skipped and not whole(hub)


def test_a_declaration_of_quantization_is_compared(hub: Hub, copy_of: CopyOf, tmp_path: Path) -> None:
    stored = tmp_path / "awq"
    packed.make(stored, GLM, "awq", lambda n: packed.is_linear(n) and not n.startswith("model.layers.3."), [])
    hub.repos["org/awq"] = Repo(stored)
    report = verify("org/awq", "org/awq")
    local = verify(stored, stored, values="headers")
    assert [(f.check, f.subject) for f in report.findings] == [(f.check, f.subject) for f in local.findings]
    assert any(f.check.startswith("quantization.") for f in report.findings)


def test_checksums_prove_every_bit(hub: Hub) -> None:
    report = verify(FIXTURES / GLM, "org/glm", values="sha256")
    assert report.verdict == "holds" and "values" not in report.skipped
    assert not whole(hub)


def test_checksums_find_one_bit(hub: Hub, copy_of: CopyOf) -> None:
    copy = copy_of(GLM)
    flip_byte(copy / "model-00002-of-00003.safetensors")
    for a, b in ((copy, "org/glm"), ("org/glm", copy)):
        report = verify(a, b, values="sha256")
        assert [(f.check, f.subject) for f in report.failures] == [
            ("values.sha256", "model-00002-of-00003.safetensors")
        ]


def test_shards_with_other_headers_cannot_be_judged_by_checksums(hub: Hub, copy_of: CopyOf) -> None:
    copy = copy_of(GLM)
    shard = copy / "model-00002-of-00003.safetensors"
    save_file(load_file(shard), shard, {"format": "pt", "written": "by another hand"})
    report = verify(copy, "org/glm", values="sha256")
    assert report.verdict == "could not judge" and not report.findings
    told = next(check.detail for check in report.checks if check.group == "values")
    assert told.startswith("model-00002-of-00003.safetensors: no counterpart with the same header")
    assert verify(copy, "org/glm", values="exact").verdict == "holds"


def test_usage(hub: Hub, cli: Cli) -> None:
    assert "one of them on the Hub" in cli("verify", FIXTURES / GLM, FIXTURES / GLM, "--sha256").err
    assert "at once" in cli("verify", FIXTURES / GLM, "org/glm", "--sha256", "--headers").err
    told = cli("verify", FIXTURES / GLM, "org/glm", "--acceptance").err
    assert "--values exact fetches" in told


# ---- fetched


def test_a_round_trip_fetches_once(hub: Hub, copy_of: CopyOf) -> None:
    unlike(hub, "org/qwen", copy_of("qwen3_mtp"))
    report = roundtrip("org/qwen")
    assert report.verdict == "holds" and report.subjects == [f"org/qwen@{hub.repos['org/qwen'].commit}"]
    assert set(whole(hub).values()) == {1}
    hub.asked.clear()
    assert roundtrip("org/qwen").verdict == "holds"
    assert not whole(hub) and not sent(hub, ranges=True)


def test_a_proof_by_plan_fetches_nothing(hub: Hub) -> None:
    assert prove("org/glm").verdict == "holds" and not whole(hub)


def test_convert_and_like(hub: Hub, tmp_path: Path) -> None:
    convert("org/glm", tmp_path / "a")
    assert verify(FIXTURES / GLM, tmp_path / "a").verdict == "holds"
    convert(tmp_path / "a", tmp_path / "back", like="org/glm")
    assert digest(tmp_path / "back") == digest(FIXTURES / GLM)


def test_like_fetches_no_weights_but_copies(hub: Hub, tmp_path: Path) -> None:
    convert(FIXTURES / "glm4_moe_nocopies", tmp_path / "a")
    hub.repos["org/form"] = Repo(FIXTURES / "glm4_moe_nocopies")
    convert(tmp_path / "a", tmp_path / "back", like="org/form")
    assert digest(tmp_path / "back") == digest(FIXTURES / "glm4_moe_nocopies")
    assert not whole(hub)


def test_acceptance_of_a_repository(hub: Hub, copy_of: CopyOf) -> None:
    unlike(hub, "org/qwen", copy_of("qwen3_mtp"))
    report = accept("org/qwen")
    assert report.verdict == "holds" and report.acceptance[0].label == "qwen"


def test_graft_fetches_the_shards_of_the_head(hub: Hub, copy_of: CopyOf, tmp_path: Path) -> None:
    name = "glm4_moe_nocopies"
    hub.repos["org/donor"] = Repo(FIXTURES / name)
    index = json.loads((FIXTURES / name / constants.SAFETENSORS_INDEX_FILE).read_text())["weight_map"]
    own = {file for tensor, file in index.items() if tensor.startswith("model.layers.4.")}
    broken = copy_of(name)
    for shard in broken.glob("*.safetensors"):
        edit_tensors(shard, lambda t: [t.pop(k) for k in list(t) if k.startswith("model.layers.4.")])
    for file in own:
        if file not in {f for t, f in index.items() if not t.startswith("model.layers.4.")}:
            (broken / file).unlink()
    edit_json(
        broken / constants.SAFETENSORS_INDEX_FILE,
        weight_map={t: f for t, f in index.items() if not t.startswith("model.layers.4.")},
    )
    edit_json(broken / "config.json", num_nextn_predict_layers=None)
    report = graft(broken, "org/donor", tmp_path / "grafted")
    assert report.verdict == "holds", str(report)
    assert set(whole(hub)) == own
    assert verify(FIXTURES / name, tmp_path / "grafted").verdict == "holds"
    nbytes = sum(asked.nbytes for asked in hub.asked if asked.span)
    assert nbytes <= 4 * 200 * KB + 64 * (1 << 16)  # headers, and the beginnings of a few tensors


def test_extract_of_a_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    extract(FIXTURES / GLM, tmp_path / "local")
    assert extract("org/glm").verdict == "holds"
    assert digest(tmp_path / "here/glm-mtp") == digest(tmp_path / "local")


def test_a_gate_on_a_repository(hub: Hub, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/qwen"] = Repo(FIXTURES / "qwen3_mtp")
    settings = tmp_path / "mtpcheck.yaml"
    settings.write_text(
        "gate:\n  cases:\n    - source: org/qwen\n      acceptance: false\n"
        f"      to_megatron: '{sys.executable} -m mtpcheck convert {{src}} {{dst}}'\n"
    )
    monkeypatch.chdir(tmp_path)
    told = cli("gate", "--json")
    assert told.code == 0, told.out + told.err


def test_a_gate_on_a_repository_that_is_not_there(hub: Hub, tmp_path: Path, cli: Cli) -> None:
    settings = tmp_path / "mtpcheck.yaml"
    settings.write_text("gate:\n  cases:\n    - source: org/none\n      to_megatron: 'true {src} {dst}'\n")
    told = cli("gate", "--config", settings)
    assert told.code == 2 and f"{settings}:3: org/none: no such folder, and {hub.url} has no repository" in told.err


def test_space_is_looked_at_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(UsageError, match=r"bytes are needed, 100,000 are free; point HF_HUB_CACHE to another disk"):
        roundtrip("org/glm")
    assert not whole(hub)


def test_what_is_fetched_is_told_first(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path / "cache", "convert", "org/glm", str(tmp_path / "out"))
    assert done.returncode == 0 and "fetching 7 files, 590.6 kB, of org/glm@" in done.stderr
    assert done.stderr.count("\n") == 1  # no bars where there is no terminal


# ---- the cache


def snapshot(hub: Hub, tmp_path: Path, name: str = "org/glm") -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=hub.repos[name].commit))


def test_a_folder_of_the_cache_is_a_checkpoint(hub: Hub, tmp_path: Path) -> None:
    folder = snapshot(hub, tmp_path)
    assert (folder / "config.json").is_symlink()
    assert verify(FIXTURES / GLM, folder).verdict == "holds"
    convert(folder, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "back")
    assert digest(tmp_path / "back") == digest(FIXTURES / GLM)


def test_a_link_out_of_the_cache_is_refused(hub: Hub, tmp_path: Path) -> None:
    folder = snapshot(hub, tmp_path)
    shard = folder / "model-00001-of-00003.safetensors"
    outside = shutil.copy(shard, tmp_path / "outside.safetensors")
    shard.unlink()
    shard.symlink_to(outside)
    for where in (folder, "org/glm"):
        with pytest.raises(FormatError, match="leads out of the folder"):
            open_checkpoint(where)


def test_the_store_of_all_repositories_is_part_of_the_cache(hub: Hub, tmp_path: Path) -> None:
    """The layout of huggingface_hub 2 with Xet: a blob of a repository is a link into ``<cache>/blobs``."""
    folder = snapshot(hub, tmp_path)
    store = tmp_path / "cache/blobs"
    (store / "ab").mkdir(parents=True)
    blob = (folder / "model-00001-of-00003.safetensors").resolve()
    moved = blob.rename(store / "ab" / ("ab" + "0" * 62))
    blob.symlink_to(Path("../../blobs/ab") / moved.name)
    with pytest.raises(FormatError, match="leads out of the folder"):
        open_checkpoint(folder)  # some folder called blobs is no store
    (store / ".huggingface-shared-blobs").write_text("1\n")
    assert verify(FIXTURES / GLM, folder).verdict == "holds"


def test_offline_the_cache_is_taken(hub: Hub, tmp_path: Path) -> None:
    told = run(hub, tmp_path / "cache", "inspect", "org/glm", HF_HUB_OFFLINE="1")
    assert told.returncode == 2 and "HF_HUB_OFFLINE is set" in told.stderr and told.stderr.count("\n") == 1
    assert run(hub, tmp_path / "cache", "inspect", "org/glm").returncode == 0
    partly = run(hub, tmp_path / "cache", "inspect", "org/glm", HF_HUB_OFFLINE="1")
    assert partly.returncode == 2 and "not in the folder" in partly.stderr
    assert run(hub, tmp_path / "cache", "convert", "org/glm", str(tmp_path / "out"), "-q").returncode == 0
    hub.asked.clear()
    done = run(hub, tmp_path / "cache", "inspect", "org/glm", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(done.stdout)["path"] == f"org/glm@{hub.repos['org/glm'].commit}" and not hub.asked


# ---- what goes wrong


def test_no_such_repository(hub: Hub) -> None:
    with pytest.raises(HubError, match=rf"org/none: no such folder, and {hub.url} has no repository of that name"):
        inspect("org/none")
    with pytest.raises(HubError, match="org/glm@v9: the repository has no such revision"):
        inspect("org/glm@v9")


def test_a_gated_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/gated"] = Repo(FIXTURES / GLM, gated=True)
    with pytest.raises(HubError, match=rf"is gated; ask for access on {hub.url}/org/gated, and set HF_TOKEN"):
        inspect("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="is gated"):
        inspect("org/gated")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert inspect("org/gated").mtp_stored == 1
    assert all(not asked.token for asked in hub.asked if asked.path.startswith("/cdn"))  # another host


def test_a_private_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/private"] = Repo(FIXTURES / GLM, private=True)
    with pytest.raises(HubError, match="or a private one, which takes HF_TOKEN"):
        inspect("org/private")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert inspect("org/private").mtp_stored == 1


def failing(status: int | str, times: int, part: str) -> Callable[[str, str], int | str | None]:
    """A fault of the first requests whose path has ``part`` in it."""
    left = [times]

    def fault(method: str, path: str) -> int | str | None:
        if part not in path or left[0] <= 0 or (status == "cut" and method == "HEAD"):
            return None
        left[0] -= 1
        return status

    return fault


@pytest.mark.parametrize("status", [429, 503, "cut"])
@pytest.mark.parametrize("part", ["/api/models/org", "/cdn/", "/resolve/"])
def test_what_passes_is_tried_again(hub: Hub, status: int | str, part: str) -> None:
    hub.fault = failing(status, 2, part)
    assert inspect("org/glm").mtp_stored == 1


@pytest.mark.parametrize(
    ("status", "part", "told"),
    [
        (429, "/api/models/org", r"org/glm: no such folder, and .* limits requests \(429\), after several tries too"),
        (503, "/cdn/", r"safetensors: .* answers 503, after several tries too; try again later"),
        (403, "/cdn/", r"safetensors: .* refuses access \(403\); set HF_TOKEN"),
        (500, "config.json", r"config.json: .* answers 500, after several tries too"),
        ("cut", "/cdn/", r"safetensors: no whole answer came from .* try again, or set HF_HUB_OFFLINE=1"),
        ("cut", "/api/models/org", r"org/glm: no such folder, and no whole answer came from"),
    ],
)
def test_what_stays_is_told_in_one_sentence(hub: Hub, status: int | str, part: str, told: str) -> None:
    hub.fault = failing(status, 10_000, part)
    with pytest.raises(HubError, match=told) as error:
        inspect("org/glm")
    assert "\n" not in str(error.value)


def test_nobody_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"org/glm: no such folder, and no whole answer came from http://127\.0\.0\.1:9"):
        inspect("org/glm")


def test_a_download_that_breaks_off(hub: Hub, copy_of: CopyOf, tmp_path: Path) -> None:
    opened = open_checkpoint("org/glm")  # the headers are there
    hub.fault = lambda method, path: "cut" if method == "GET" and path.endswith("00002-of-00003.safetensors") else None
    with pytest.raises(HubError, match=r"00002-of-00003\.safetensors: .*no whole answer came from"):
        fetched(opened)
    assert sum(hub_asked.path.endswith("00002-of-00003.safetensors") for hub_asked in hub.asked if not hub_asked.span)
    assert not (tmp_path / "out").exists()
    hub.fault = lambda method, path: None
    convert("org/glm", tmp_path / "out")
    assert verify(FIXTURES / GLM, tmp_path / "out").verdict == "holds"


def test_a_server_without_ranges(hub: Hub) -> None:
    hub.ranges = False
    with pytest.raises(FormatError, match=r"the server answered 200 .* it has to support ranges"):
        inspect("org/glm")


def test_a_header_that_lies(hub: Hub, copy_of: CopyOf) -> None:
    damaged = unlike(hub, "org/bad", copy_of(GLM))
    shard = damaged / "model-00001-of-00003.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes((1 << 60).to_bytes(8, "little") + raw[8:])
    with pytest.raises(FormatError, match=r"org/bad@[0-9a-f]{40}/model-00001-of-00003.safetensors: the header claims"):
        inspect("org/bad")
    shard.write_bytes(raw[:-10])
    with pytest.raises(FormatError, match="cut off"):
        inspect("org/bad")


def test_an_index_that_leads_out_of_the_repository(hub: Hub, copy_of: CopyOf) -> None:
    damaged = unlike(hub, "org/bad", copy_of(GLM))
    index = json.loads((damaged / constants.SAFETENSORS_INDEX_FILE).read_text())["weight_map"]
    first = next(iter(index))
    edit_json(damaged / constants.SAFETENSORS_INDEX_FILE, weight_map={**index, first: "../../other.safetensors"})
    with pytest.raises(FormatError, match="not in the folder"):
        inspect("org/bad")


def test_a_repository_without_safetensors(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/config.json").write_text("{}")
    (tmp_path / "repo/pytorch_model.bin").write_bytes(b"x" * 100)
    hub.repos["org/bin"] = Repo(tmp_path / "repo")
    with pytest.raises(FormatError, match="no safetensors weights"):
        inspect("org/bin")


# ---- what a hostile or slow server may do


def listing(hub: Hub, monkeypatch: pytest.MonkeyPatch, told: bytes) -> None:
    monkeypatch.setattr("tests.fake_hub._Handler._info", lambda self, name, repo, blobs: json.loads(told))


@pytest.mark.parametrize(
    "told",
    [
        b"[]", b'{"sha": "main", "siblings": []}', b'{"sha": "../../../x", "siblings": []}', b'{"siblings": []}',
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json"}]}' % (b"a" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "config.json", "size": -1}]}' % (b"a" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "x", "size": 1, "lfs": {"sha256": "/etc/passwd"}}]}' % (b"a" * 40),
        b'{"sha": "%s", "siblings": [7]}' % (b"a" * 40),
    ],
)  # fmt: skip
def test_a_listing_that_makes_no_sense(hub: Hub, monkeypatch: pytest.MonkeyPatch, told: bytes) -> None:
    listing(hub, monkeypatch, told)
    with pytest.raises(HubError, match=r"org/glm: http.* gives no listing of a repository"):
        inspect("org/glm")


@pytest.mark.parametrize("name", ["../../../../evil", "/tmp/evil", "a/b", ".."])
def test_an_answer_cannot_name_a_file_outside_the_cache(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.headers = {"ETag": f'"{name}"', "X-Linked-Etag": f'"{name}"'}
    with pytest.raises(HubError, match="which is no name for one; refused"):
        inspect("org/glm")
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


def test_the_hub_cannot_ask_to_wait_for_ever(hub: Hub) -> None:
    hub.fault = lambda method, path: 429
    hub.headers = {"Retry-After": "86400"}
    with pytest.raises(HubError, match=r"limits requests \(429\), and asks to wait 86,400 seconds"):
        inspect("org/glm")


def test_a_server_that_sends_drop_by_drop_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 100_000, 20))
    monkeypatch.setattr("mtpcheck.hub_client.time.monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr("mtpcheck.hub_client._CHUNK", 1000)
    with pytest.raises(HubError, match="the server sends fewer than 10,000 bytes a second"):
        inspect("org/glm")


def test_more_than_was_asked_for_is_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpcheck.hub._LISTING", 100)
    with pytest.raises(FormatError, match="org/glm: the server sends more than 100 bytes"):
        inspect("org/glm")


def test_an_answer_in_another_coding_is_refused(hub: Hub) -> None:
    hub.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(FormatError, match="the server sent 'gzip' where plain bytes were asked for"):
        inspect("org/glm")


def test_a_file_of_the_cache_that_was_cut_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    convert("org/glm", tmp_path / "a")
    blob = next((tmp_path / "cache").rglob("model-00002-of-00003.safetensors")).resolve()
    blob.write_bytes(blob.read_bytes()[:-5])
    convert("org/glm", tmp_path / "b")
    assert verify(FIXTURES / GLM, tmp_path / "b").verdict == "holds"


def test_an_interrupted_download_ends_at_once(hub: Hub, tmp_path: Path) -> None:
    class Interrupted:
        def advance(self, nbytes: int) -> None:
            raise KeyboardInterrupt

    tree = open_checkpoint("org/glm").hf.tree  # type: ignore[union-attr]
    assert isinstance(tree, HubTree)
    with pytest.raises(KeyboardInterrupt):
        tree.fetch(["model-00001-of-00003.safetensors"], Interrupted())
    assert tree.missing(["model-00001-of-00003.safetensors"])


def test_an_error_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda method, path: 503 if "/api/models/org" in path else None
    done = run(hub, tmp_path / "cache", "inspect", "org/glm")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


# ---- refused before anything is fetched


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "org/glm", "EXISTING"],
        ["convert", "org/glm", "out", "--to", "hf"],
        ["convert", "org/lost", "out"],
        ["convert", "org/damaged", "out"],
        ["convert", "org/seeing", "out"],
        ["convert", "org/glm", "out", "--to", "torch", "--tp", "3"],
        ["convert", "org/glm", "out", "--dialect", "nobody"],
        ["roundtrip", "org/damaged", "--no-acceptance"],
        ["roundtrip", "org/seeing", "--no-acceptance"],
        ["roundtrip", "org/glm", "--workdir", "nowhere", "--no-acceptance"],
        ["roundtrip", "org/lost", "--no-acceptance"],
        ["accept", "org/lost"],
        ["graft", "org/glm", "--from", "org/glm"],
        ["verify", "org/lost", "org/glm", "--values", "exact"],
        ["verify", "LOCAL", "org/glm", "--only", "mtp", "--sha256"],
    ],
)
def test_nothing_is_fetched_for_what_headers_refuse(
    hub: Hub, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    lost = shutil.copytree(FIXTURES / "minimax_m2", tmp_path / "lost")
    hub.repos["org/lost"] = Repo(lost)
    hub.repos["org/seeing"] = Repo(FIXTURES / "qwen3_5")
    hub.repos["org/damaged"] = Repo(shutil.copytree(FIXTURES / GLM, tmp_path / "damaged"))
    shard = tmp_path / "damaged/model-00001-of-00003.safetensors"
    edit_tensors(shard, lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EXISTING").mkdir()
    named = [str(FIXTURES / GLM) if word == "LOCAL" else word for word in command]
    assert cli(*named).code in (1, 2)
    assert not whole(hub)


def test_checksums_are_not_all_of_a_head(hub: Hub, copy_of: CopyOf) -> None:
    """What the weights of one checkpoint tell by themselves fails it, though both have the same."""
    dead = unlike(hub, "org/dead", copy_of("qwen3_mtp"))
    for shard in dead.glob("*.safetensors"):
        edit_tensors(shard, lambda t: t.update({k: v * 0 for k, v in t.items() if k.startswith("mtp.") and v.ndim > 1}))
    by_hash, exact = verify(dead, "org/dead", values="sha256"), verify(dead, dead)
    assert [f.check for f in by_hash.findings] == [f.check for f in exact.findings] and by_hash.findings
    assert by_hash.verdict == exact.verdict


def test_a_shard_without_a_checksum_is_not_judged(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fake_hub.LARGE", set())
    report = verify(FIXTURES / GLM, "org/glm", values="sha256")
    assert report.verdict == "could not judge" and not whole(hub)


@pytest.mark.parametrize("command", [["graft", "--extract"], ["inspect"]])
def test_a_revision_with_slashes(
    hub: Hub, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.revisions["refs/pr/1"] = "org/glm"
    assert cli(command[0], "org/glm@refs/pr/1", *command[1:]).code == 0
    assert command[0] == "inspect" or (tmp_path / "glm-mtp").is_dir()
