"""Reports in files: which formats there are, where each goes, and what is refused before anything is judged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpcheck.errors import UsageError
from mtpcheck.report import github, html, junit, machine, markdown
from mtpcheck.report.report import Cases, Report, Unjudged

Told = Report | Cases | Unjudged


@dataclass(frozen=True)
class Format:
    """How a report is rendered, several of them, and an error."""

    report: Callable[[Report], str]
    cases: Callable[[Cases], str]
    error: Callable[[Unjudged], str]

    def render(self, told: Told) -> str:
        if isinstance(told, Unjudged):
            return self.error(told)
        return self.cases(told) if isinstance(told, Cases) else self.report(told)


FORMATS: Mapping[str, Format] = {
    "json": Format(machine.as_json, machine.cases_json, machine.error_json),
    "junit": Format(junit.as_junit, junit.cases_junit, junit.error_junit),
    "github": Format(github.as_github, github.cases_github, github.error_github),
    "markdown": Format(markdown.as_markdown, markdown.cases_markdown, markdown.error_markdown),
    "html": Format(html.as_html, html.cases_html, html.error_html),
}


@dataclass(frozen=True)
class Target:
    """One ``--report``: a format, and a file or, for GitHub's annotations, stdout (None)."""

    format: str
    path: Path | None


def targets_of(texts: Sequence[str], subjects: Sequence[str | Path], as_json: bool) -> list[Target]:
    """Targets of ``--report``. Raises UsageError now for what would fail after an hour, or write into a checkpoint."""
    return [_target(text, subjects, as_json) for text in texts]


def _target(text: str, subjects: Sequence[str | Path], as_json: bool) -> Target:
    kind, _, name = text.partition("=")
    path = Path(name)
    if kind not in FORMATS or not name or (name == "-" and kind != "github"):
        raise UsageError(f"--report {text}: expected one of {', '.join(f'{f}=PATH' for f in FORMATS)}, or github=-")
    if name == "-":
        if as_json:
            raise UsageError(f"--report {text}: --json keeps stdout for one document; name a file, or leave one out")
        return Target(kind, None)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--report {text}: {path} is a folder, or lies in none that exists")
    if any(path.resolve().is_relative_to(Path(subject).resolve()) for subject in subjects):
        raise UsageError(f"--report {text}: lies inside a checkpoint; name a file outside it")
    return Target(kind, path)


def write(targets: Sequence[Target], told: Told) -> None:
    """Write every file, and what GitHub collects in files of its own if one of the targets is for GitHub."""
    for target in targets:
        if target.path is not None:
            rendered = FORMATS[target.format].render(told)
            target.path.write_text(rendered, encoding="utf-8", errors="backslashreplace")
    if any(target.format == "github" for target in targets):
        github.append(told, os.environ)


def printed(targets: Sequence[Target], told: Told) -> Iterator[str]:
    """What goes to stdout, after the result."""
    for target in targets:
        if target.path is None:
            yield FORMATS[target.format].render(told)
