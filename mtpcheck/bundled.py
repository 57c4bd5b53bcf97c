"""The tiny Hugging Face checkpoints that come with mtpcheck: where they lie, and of which family each is."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from mtpcheck.family import family_of_config


@lru_cache(maxsize=1)
def fixtures() -> Path:
    """The ``fixtures`` folder: shipped inside the wheel, beside the package in an editable install."""
    inside = Path(__file__).parent / "fixtures"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "fixtures"


@lru_cache(maxsize=1)
def bundled() -> dict[str, str]:
    """Name → family of every bundled checkpoint. One that has its family's name comes before others of it."""
    named = sorted(path.parent.name for path in fixtures().glob("*/config.json"))
    family = {
        name: family_of_config(json.loads((fixtures() / name / "config.json").read_text(encoding="utf-8"))).name
        for name in named
    }
    return dict(sorted(family.items(), key=lambda item: (item[1], item[0] != item[1], item[0])))


def find_bundled(name: str) -> Path | None:
    """The bundled checkpoint of this name, or of this family."""
    known = bundled()
    found = name if name in known else next((own for own, family in known.items() if family == name), None)
    return fixtures() / found if found else None
