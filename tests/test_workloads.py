"""Workloads: what is bundled, what a user's file may hold, and the sentence for one that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtpcheck.draft.alive import FEWEST_DRAFTS
from mtpcheck.draft.workloads import Workload, bundled, encoder, need_enough, read_workload
from mtpcheck.errors import FormatError, MtpcheckError, UsageError
from tests.conftest import FIXTURES

VOCABULARY = 260


def as_bytes(text: str) -> list[int]:
    return [*text.encode()]


def no_tokenizer(text: str) -> list[int]:
    raise AssertionError("ids need no tokenizer")


@pytest.mark.parametrize("name", bundled())
def test_bundled_text_is_long_enough_and_fits_a_fixture(name: str) -> None:
    workload = read_workload(name, bundled()[name], encoder(FIXTURES / "glm4_moe"), VOCABULARY)
    assert workload.drafts >= 1024
    assert max(map(len, workload.passages)) <= 256
    assert len({passage.tobytes() for passage in workload.passages}) == len(workload.passages)
    text = [json.loads(line)["text"] for line in bundled()[name].read_text().splitlines()]
    assert [bytes(passage.tolist()).decode() for passage in workload.passages] == text


def test_bundled_text_is_the_held_out_split(tmp_path: Path) -> None:
    """The files are those that the script makes, and what fixtures are trained on has none of their passages."""
    script = (
        "import itertools, json, sys; sys.path.insert(0, sys.argv[1]); import workload_text as w\n"
        "print(json.dumps({k: [w.held_out(k), [*itertools.islice(w.training(k), 2000)]] for k in w.WORKLOADS}))"
    )
    out = subprocess.run([sys.executable, "-c", script, str(FIXTURES)], capture_output=True, check=True, text=True)
    splits = json.loads(out.stdout)
    assert splits.keys() == bundled().keys()
    for name, (held_out, training) in splits.items():
        assert bundled()[name].read_text() == "".join(json.dumps({"text": text}) + "\n" for text in held_out)
        assert not set(held_out) & set(training)


def test_lines_of_text_and_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "h\u00e9"}\n\n{"ids": [259, 0, 7]}')
    workload = read_workload("mine", path, as_bytes, VOCABULARY)
    assert [passage.tolist() for passage in workload.passages] == [[104, 195, 169], [259, 0, 7]]
    assert {passage.dtype for passage in workload.passages} == {np.dtype(np.int64)}
    assert workload.drafts == 4


@pytest.mark.parametrize(
    "line, said",
    [
        ("text", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("[1, 2]", "expected"),
        ('{"prompt": "a b"}', "'prompt'"),
        ('{"text": "a", "ids": [1, 2]}', "'text', 'ids'"),
        ("{}", "expected"),
        ('{"text": 5}', "got 5"),
        ('{"text": ""}', "not empty"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "a"}', "1 token(s)"),
        ('{"ids": []}', "0 token(s)"),
        ('{"ids": 4}', "got 4"),
        ('{"ids": [1, 2.0]}', "got 2.0"),
        ('{"ids": [1, true]}', "got true"),
        ('{"ids": ["1", 2]}', 'got "1"'),
        ('{"ids": [1, 260]}', "id 260 is not in the model's vocabulary, 0 to 259"),
        ('{"ids": [1, -1]}', "id -1"),
        ('{"ids": [1, 1000000000000000000000000000000]}', "vocabulary"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(FormatError) as caught:
        read_workload("bad", path, as_bytes, VOCABULARY)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    for name, content in [("empty", b""), ("blank", b"\n \n"), ("latin", b'{"text": "\xe9\xe9\xe9"}')]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=name):
            read_workload(name, tmp_path / name, as_bytes, VOCABULARY)
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_workload("x", path, as_bytes, VOCABULARY)


def test_ids_need_no_tokenizer_and_text_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"ids": [1, 2]}')
    assert read_workload("ids", path, no_tokenizer, VOCABULARY).drafts == 1
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json is not a tokenizer"):
        encoder(tmp_path)


def test_a_tokenizer_wider_than_the_model(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "az"}')
    with pytest.raises(MtpcheckError, match="id 122 is not in the model's vocabulary, 0 to 99"):
        read_workload("x", path, encoder(FIXTURES / "glm4_moe"), 100)


def test_how_many_tokens_are_needed() -> None:
    passage = np.arange(FEWEST_DRAFTS // 2 + 1)
    need_enough([Workload("a", (passage,)), Workload("b", (passage,))])
    with pytest.raises(UsageError, match=f"a, b: .*{FEWEST_DRAFTS} tokens .* got {FEWEST_DRAFTS - 1}"):
        need_enough([Workload("a", (passage,)), Workload("b", (passage[1:],))])


def test_the_wheel_has_them() -> None:
    """Inside the package, whose every file hatchling packs."""
    import mtpcheck

    assert all(Path(mtpcheck.__file__).parent in path.parents and path.is_file() for path in bundled().values())
