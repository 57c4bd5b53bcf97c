"""Family and block files held to what loading proves, without a checkpoint: for editors and commit hooks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mtpcheck.checks.declaration import mtp_keys
from mtpcheck.data import configs, load
from mtpcheck.dialects import dialect_names, load_dialect, prove_complete
from mtpcheck.errors import FamilyError, UsageError
from mtpcheck.family import NOT_BUILT_SO, Family, not_built_so, read_family, specimens
from mtpcheck.model import load_block


def check_files(paths: list[Path]) -> tuple[list[str], list[str]]:
    """(families that hold, what is wrong): of all that are given, and all that a given block or base is part of.

    What is wrong is one line each, with file and row. Raises UsageError for a path that is no file.
    """
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file; name family or block files")
    held: dict[str, None] = {}
    wrong: dict[str, None] = {}
    for path in paths:
        try:
            for family in _families(path.resolve()):
                if family.name not in held:
                    _prove(family)
                    held[family.name] = None
        except FamilyError as error:
            wrong[_with_file(path, str(error))] = None
        except NOT_BUILT_SO as error:
            wrong[not_built_so(path, error)] = None
    return list(held), list(wrong)


def _families(path: Path) -> Iterator[Family]:
    """The family of a file, or those that use it."""
    home = path.parent.parent
    if path.parent.name == "blocks":
        load_block(path.stem, home)
        yield from (f for f in map(_read, _files(home)) if path.stem in {block.name for block in f.blocks})
    elif path.stem.startswith("_"):
        yield from (_read(file) for file in _files(home) if _extends(file, path.stem))
    else:
        yield _read(path)


def _files(home: Path) -> list[Path]:
    """Family files of a folder of tables; of mtpcheck's own where it has none."""
    own = home / "families" if (home / "families").is_dir() else configs() / "families"
    return [file for file in sorted(own.glob("*.yaml")) if not file.stem.startswith("_")]


def _extends(file: Path, base: str) -> bool:
    table = load(file)
    return isinstance(table, dict) and table.get("extends") == base


@cache
def _read(file: Path) -> Family:
    return read_family(file, file.parent.parent)


def _prove(family: Family) -> None:
    """That Megatron has a place for every part, and that the declaration is one that serving engines know."""
    for key in family.declared_by:
        if key.rsplit(".", 1)[-1] not in mtp_keys():
            raise FamilyError(f"mtp: declared: {key!r} is none of {', '.join(sorted(mtp_keys()))} (mtp_keys.yaml)")
    for model in specimens(family):
        for dialect in map(load_dialect, dialect_names()):
            prove_complete(dialect, model, "te")
            prove_complete(dialect, model, "local")


def _with_file(path: Path, sentence: str) -> str:
    """A sentence that names the file it is about, if it does not yet."""
    return sentence if str(path) in sentence or ".yaml" in sentence.split(":")[0] else f"{path}: {sentence}"
