"""Apply the whole catalogue to the fixtures and tell what caught what.

python -m tests.mutants.run            # a table and the mutation score; exit code 1 below 100 %
python -m tests.mutants.run M56 M60    # some entries
python -m tests.mutants.run --docs     # also write the tables into docs/faults.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mtpcheck.cli import run as mtpcheck
from tests.mutants.anatomy import STORED
from tests.mutants.case import Case
from tests.mutants.catalogue import FAMILIES, LEFT, LEGAL, MUTANTS, PAIRS, applied, in_every_fixture
from tests.mutants.judge import Judged, judge
from tests.mutants.originals import Originals
from tests.mutants.reports import reported

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- made by make mutants: {} -->\n", "<!-- end: {} -->\n"


@dataclass(frozen=True)
class Line:
    """One case on one original."""

    case: Case
    original: str
    judged: Judged

    @property
    def caught(self) -> str:
        return ", ".join(self.judged.caught) or {0: "passes", 2: "refused"}.get(self.judged.code, "")


def call(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = mtpcheck([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def lines(cases: list[Case], folder: Path) -> Iterator[Line]:
    originals = Originals(folder / "originals", lambda *arguments: call(*arguments)[0])
    for number, (case, name) in enumerate(applied(cases)):
        at = folder / f"mutant{number}"
        yield Line(case, name, judge(case, name, originals, at, call))
        shutil.rmtree(at)


def show(line: Line, heading: bool) -> None:
    """Mostly within 80 columns; what was missed is told in full. ``heading``: what is done and who judges it first."""
    if heading:
        made = f" of {line.case.made}" * bool(line.case.made)
        print(f"{line.case.id}  {line.case.what}\n    {line.case.command}{made}")
    print(f"  {'✓' if line.judged.ok else '✗'} {line.original:<34} {line.caught}")
    for missed in line.judged.missed:
        print(f"    missed: {missed}")
    if line.judged.missed:
        print(f"    found:  {'; '.join(line.judged.found) or 'nothing'}")


def score(done: Iterable[Line]) -> str:
    """Share of cases that were judged as they have to be."""
    own = list(done)
    right = sum(line.judged.ok for line in own)
    return f"{right:,} of {len(own):,} ({right / len(own):.1%})" if own else "none"


def table(cases: list[Case], done: list[Line]) -> str:
    """A row for each entry, with every original it was applied to."""
    rows = ["| id | what is done | to | judged by | caught by | exit | met in |", "|---|---|---|---|---|---|---|"]
    for case in {case.id: case for case in cases}.values():
        own = [line for line in done if line.case.id == case.id]
        to = [line.original for line in own]
        caught = "<br>".join(dict.fromkeys(_code(told) for line in own for told in line.judged.caught))
        missed = "<br>**missed**" if any(not line.judged.ok for line in own) else ""
        made = f"MUTANT ({case.made})" if case.made else "MUTANT"
        where = ", ".join(to) if len(to) < 10 else f"{len(to)} fixtures"
        told = [
            case.id + " ◦" * case.blind, case.what, where, _code(case.command.replace("MUTANT", made)),
            caught + missed, str(case.exit), reported(case.id),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(told)} |")
    return "\n".join(rows)


def matrix(done: Iterable[Line]) -> str:
    """A row for each fixture with MTP layers, a column for each entry of the sample and for what is legal for all."""
    marks = {(line.original, line.case.id): "✓" if line.judged.ok else "✗" for line in done}
    ids = list(dict.fromkeys(case.id for case, _ in in_every_fixture()))
    rows = [["", *ids], ["---"] * (len(ids) + 1)]
    rows += [[name, *(marks.get((name, id), "") for id in ids)] for name in STORED]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def left() -> str:
    rows = [f"| {entry.id} | {entry.what} | {entry.why} | {reported(entry.id)} |" for entry in LEFT]
    return "\n".join(["| id | what | why not | met in |", "|---|---|---|---|", *rows])


def write(done: dict[str, list[Line]]) -> None:
    """Put the tables between their markers in docs/faults.md."""
    text = PAGE.read_text()
    parts = {name: table(cases, done[name]) for name, cases in GROUPS.items()}
    parts["left out"] = left()
    parts["matrix"] = matrix([*done["families"], *done["legal"]])
    parts["score"] = (
        f"Mutation score: {score([*done['mutants'], *done['pairs']])}. Legal: {score(done['legal'])}. "
        f"Over every family: {score(done['families'])}."
    )
    for name, part in parts.items():
        before, _, rest = text.partition(BEGIN.format(name))
        _, _, after = rest.partition(END.format(name))
        text = f"{before}{BEGIN.format(name)}\n{part}\n\n{END.format(name)}{after}"
    PAGE.write_text(text)


GROUPS = {"mutants": MUTANTS, "pairs": PAIRS, "legal": LEGAL, "families": FAMILIES}


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply the catalogue of faults to the fixtures.")
    parser.add_argument("ids", nargs="*", help="only these entries")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/faults.md")
    wanted = parser.parse_args()
    if wanted.docs and wanted.ids:
        parser.error("--docs needs all entries")
    os.environ["COLUMNS"] = "80"
    done: dict[str, list[Line]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for group, cases in GROUPS.items():
            chosen = [case for case in cases if not wanted.ids or case.id in wanted.ids]
            done[group] = []
            for line in lines(chosen, Path(folder) / group):
                show(line, heading=not done[group] or done[group][-1].case.id != line.case.id)
                done[group].append(line)
    print("\n" + ", ".join(f"{group} {score(own)}" for group, own in done.items()))
    if wanted.docs:
        write(done)
    return 0 if all(line.judged.ok for own in done.values() for line in own) else 1


if __name__ == "__main__":
    sys.exit(main())
