"""The gate: other people's conversion commands, run on small checkpoints and judged.

    source ─┬─ copied ──▶ original/ ── both commands again ──▶ acceptance
            └─ perturbed ▶ source/ ─ to_megatron ─▶ megatron/ ─ to_hf ─▶ hf/
                              ▲────────── verify ──────┴──────────────────┘

Both sides are held against the *perturbed* source through our own rows. So a mistake that the way back undoes shows on
the Megatron side, and a tensor that was filled in from the original shows because it is not perturbed.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from mtpcheck.accepted import Known
from mtpcheck.backfill import with_back_filled
from mtpcheck.bundled import bundled, find_bundled
from mtpcheck.checkpoint import open_checkpoint
from mtpcheck.commands import Command, Outcome, run
from mtpcheck.convert import convert
from mtpcheck.draft.probe import Probing
from mtpcheck.errors import MtpcheckError, UnsupportedError, UsageError
from mtpcheck.fetch import fetched
from mtpcheck.hub import is_repo
from mtpcheck.megatron import Options
from mtpcheck.parallel import WORKERS, Alive, in_parallel
from mtpcheck.perturb import copy_checkpoint, perturb
from mtpcheck.report.finding import Finding, failure
from mtpcheck.report.report import Cases, Report
from mtpcheck.settings import Case, Settings
from mtpcheck.target import check_target, new_folder
from mtpcheck.tensormap import TensorMap, read_tensor_map
from mtpcheck.verify import dialects_of, layout_of, require_mtp, summary, verify
from mtpcheck.watch import changes, snapshot

_RESULT = {"to_megatron": "megatron", "to_hf": "hf"}
"""Direction → the folder that its result lies in."""


def gate(
    settings: Settings,
    known: Known,
    only: str | None = None,
    keep: Path | None = None,
    jobs: int = WORKERS,
    acceptance: bool = True,
    show_progress: bool = False,
) -> Cases:
    """Run the cases of ``settings``, ``jobs`` at a time, and judge each; reports come in the order of the cases.

    ``known``: findings that are accepted. ``only`` names one case. All that was made stays in the new folder ``keep``,
    by case. Raises UsageError for what makes no sense before anything is run; why a case could not be judged stands in
    its report.
    """
    cases = [case for case in settings.cases if only in (None, case.name)]
    if not cases:
        names = ", ".join(case.name for case in settings.cases) or "none"
        raise UsageError(f"{settings.path}: " + (f"no case {only!r} (there: {names})" if only else "has no gate"))
    sources = [find_source(case, settings.folder, show_progress) for case in cases]
    if keep is not None:
        for source in sources:
            check_target(source, keep)
    judging = threading.Lock()
    with _workspace(keep) as folder:
        runs = [
            _Run(case, source, folder / case.name, known, judging, acceptance and case.acceptance)
            for case, source in zip(cases, sources, strict=True)
        ]
        reports = list(in_parallel([own.judged for own in runs], jobs))
        for report in reports:  # the folder is gone, or has its own name, when they are read
            _rename(report, f"{folder}/", f"{keep}/" if keep else "")
    if said := known.findings(all_was_judged=only is None):
        about = Report("gate", ["known differences"], summary=f"{settings.path}: accept")
        about.add("accepted", said, known.told)
        reports.append(about)
    return Cases("gate", [str(settings.path)], reports)


def find_source(case: Case, folder: Path, show_progress: bool = False) -> Path:
    """The HF folder of a case: a bundled checkpoint by its name or family, a path, which starts from ``folder``, or
    that of a repository in the Hub's cache, into which it is fetched. Raises UsageError if there is none."""
    path = folder / case.source
    if "/" not in case.source and (found := find_bundled(case.source)) is not None:
        return found
    if path.is_dir():
        return path
    if is_repo(case.source):
        try:
            opened = open_checkpoint(case.source)
            require_mtp(opened, read_tensor_map(opened, case.family), allow_none=False)
            return fetched(opened, show_progress).folder
        except MtpcheckError as error:
            raise UsageError(f"{case.where}: {error}") from error
    known = [*bundled(), *bundled().values()]
    near = get_close_matches(case.source, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"{case.where}: {case.source}: no such folder, and no fixture of that name{hint} "
                     f"(there: {', '.join(bundled())})")  # fmt: skip


@dataclass
class _Run:
    """One case on its way. ``judging`` is held while it judges, so that one case at a time takes the memory."""

    case: Case
    source: Path
    folder: Path
    known: Known
    judging: threading.Lock
    acceptance: bool
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report("gate", [self.case.name])

    def judged(self, alive: Alive) -> Report:
        """The whole case. What it cannot be judged for is told by its report."""
        try:
            self._judge(alive)
        except (MtpcheckError, OSError) as error:  # of this case alone; the others are judged all the same
            self.report.could_not("commands", str(error))
        return self.report

    @property
    def original(self) -> Path:
        return self.folder / "original"

    @property
    def perturbed(self) -> Path:
        return self.folder / "source"

    def _judge(self, alive: Alive) -> None:
        tensor_map = self._prepare()
        made = self._through(self.perturbed, self.folder, tensor_map, alive)
        opened = [open_checkpoint(folder, dialect=self.case.dialect) for folder in made.values()]
        self.report.dialects = dialects_of(*opened)
        self.report.summary = summary(open_checkpoint(self.perturbed), tensor_map, *map(layout_of, opened))
        for way, folder in made.items():
            self._hold(way, self.perturbed, folder)
        if not self.acceptance:
            self.report.skip("acceptance", "was not asked for")
        elif self.report.verdict != "holds" or len(made) < len(self.case.commands):
            self.report.skip("acceptance", "something else fails already")
        else:
            again = self._through(self.original, self.folder / "unperturbed", tensor_map, alive)
            if len(again) == len(made):
                self._hold("unperturbed", self.original, list(again.values())[-1], Probing())

    def _prepare(self) -> TensorMap:
        """The original and its perturbed copy. Raises UnsupportedError for a source that the gate cannot use."""
        opened = open_checkpoint(self.source)
        if opened.layout != "hf":
            raise UnsupportedError(f"{self.source}: is a Megatron checkpoint; a source of the gate is a Hugging Face "
                                   "folder, from which it makes the Megatron side itself")  # fmt: skip
        tensor_map = read_tensor_map(opened, self.case.family)
        self.report.family, self.report.summary = tensor_map.family, summary(opened, tensor_map)
        require_mtp(opened, tensor_map, allow_none=False)
        self.folder.mkdir()
        (self.folder / "unperturbed").mkdir()
        copy_checkpoint(opened, self.original)
        changed = perturb(self.original, self.perturbed, tensor_map.family, self.case.seed)
        if self.source.parent.name == "snapshots":
            self.report.notes.append(f"{self.case.source} is commit {self.source.name}")
        self.report.notes.append(f"{len(changed):,} of {len(opened.tensors):,} tensors were perturbed")
        return tensor_map

    # ---- the commands

    def _through(self, src: Path, into: Path, tensor_map: TensorMap, alive: Alive) -> dict[str, Path]:
        """Direction → result, of each command that did what it should. The first that did not ends it."""
        made: dict[str, Path] = {}
        findings: list[Finding] = []
        if self.case.to_megatron is None:
            with self.judging:
                options = Options(topology=self.case.topology, dialect=self.case.dialect)
                convert(src, into / "megatron", self.case.layout, tensor_map.family, options)
            src = into / "megatron"
        for way, command in self.case.commands.items():
            dst = into / _RESULT[way]
            with self._source_hidden(way):
                findings = self._run(way, command, src, dst, tensor_map.family, alive)
            if findings:
                break
            made[way] = src = dst
        if findings or not any(check.group == "commands" for check in self.report.checks):
            self.report.add("commands", findings, f"{' and '.join(self.case.commands)} ran")
        return made

    @contextmanager
    def _source_hidden(self, way: str) -> Iterator[None]:
        """While a way back runs, the original lies where the perturbed source was: a converter that noted that path on
        the way there fills in from it, and what it fills in is not perturbed."""
        if way != "to_hf":
            yield
            return
        original = open_checkpoint(self.original)
        with tempfile.TemporaryDirectory(prefix=".", dir=self.folder.parent) as aside:
            hidden = self.perturbed.rename(Path(aside) / "source")
            try:
                copy_checkpoint(original, self.perturbed)
                yield
            finally:
                shutil.rmtree(self.perturbed, ignore_errors=True)
                hidden.rename(self.perturbed)

    def _run(self, way: str, command: Command, src: Path, dst: Path, family: str, alive: Alive) -> list[Finding]:
        """Run one command; what it did wrong."""
        log = self.folder / f"{way}.log"
        sizes = {key: getattr(self.case.topology, key) for key in ("tp", "pp", "vpp", "ep", "etp")}
        values = {"src": src, "dst": dst, "original": self.original, "family": family, **sizes}
        before = snapshot(self.folder, (dst, log))
        outcome = run(command.filled(values), self.case.cwd, log, self.case.timeout, alive)
        found = _of_outcome(way, command, outcome, self.case.timeout)
        strays = tuple(changes(before, snapshot(self.folder, (dst, log))))
        if strays:
            told = f"wrote outside {{dst}}: {strays[0]}" + (f" and {len(strays) - 1:,} more" * (len(strays) > 1))
            members = strays if len(strays) > 1 else ()
            found.append(failure("commands.outside", way, told, where=command.where, members=members))
        if not found:
            found += _of_result(way, command, dst)
        if found:
            self.report.notes += [f"{way} printed: {line}" for line in outcome.tail.splitlines()]
        return found

    # ---- what they wrote

    def _hold(self, leg: str, reference: Path, candidate: Path, probing: Probing | None = None) -> None:
        """Hold a result against a source; known differences are accepted, what is left is the case's."""
        family = self.report.family
        with self.judging:
            judged = verify(reference, candidate, family, probing=probing, dialect=self.case.dialect)
            if reference == self.perturbed:
                judged.findings = with_back_filled(
                    judged.findings, str(reference), str(self.original), str(candidate), family, self.case.dialect
                )
            self.known.accept(judged)
        if probing is not None and judged.acceptance and judged.acceptance[0].verdict.alive is False:
            why = "the source's own head drafts no better than a guess, so there is nothing to compare"
            judged.checks = [check for check in judged.checks if check.group != "acceptance"]
            judged.findings = [f for f in judged.findings if not f.check.startswith("acceptance.")]
            judged.acceptance = []
            judged.skip("acceptance", why)
        self._take(leg, judged, probing is not None)

    def _take(self, leg: str, judged: Report, drafted: bool) -> None:
        """Add what one comparison told. A fault of the way there that shows again on the way back is told once."""
        for check in judged.checks:
            if check.group == "acceptance" and not drafted:
                continue
            if check.status == "skipped":
                self.report.skip(check.group, check.detail)
            else:
                self.report.checks.append(replace(check, detail=f"{leg}: {check.detail}"))
        told = {(f.check, f.subject, f.cause_id) for f in self.report.findings}
        self.report.findings += [f for f in judged.findings if (f.check, f.subject, f.cause_id) not in told]
        self.report.accepted += judged.accepted
        self.report.components = self.report.components or judged.components
        self.report.declared = self.report.declared or judged.declared
        self.report.acceptance = judged.acceptance


def _of_outcome(way: str, command: Command, outcome: Outcome, timeout: float) -> list[Finding]:
    """What the end of a command tells."""
    last = outcome.tail.rpartition("\n")[2]
    if outcome.code is None:
        what = f"did not end within {timeout:g} s and was stopped, with all that it had started"
        return [failure("commands.timeout", way, what, where=command.where, got=last)]
    if outcome.code:
        how = f"exit code {outcome.code}" if outcome.code > 0 else f"signal {-outcome.code}"
        return [failure("commands.failed", way, f"ended with {how}", where=command.where, got=last)]
    return []


def _of_result(way: str, command: Command, dst: Path) -> list[Finding]:
    """What is wrong with the place a command was to write to, before any tensor is looked at."""
    if dst.is_symlink():
        what = "made {dst} a link to what lies elsewhere"
        return [failure("commands.outside", way, what, where=command.where, got=str(dst.readlink()))]
    if not dst.exists() or (dst.is_dir() and not any(dst.iterdir())):
        return [failure("commands.nothing", way, "ended well and wrote nothing", where=command.where)]
    try:
        layout = open_checkpoint(dst).layout
    except MtpcheckError as error:
        return [failure("commands.output", way, f"what it wrote cannot be read: {error}", where=command.where)]
    if (layout == "hf") is not (way == "to_hf"):
        wanted = "a Hugging Face folder" if way == "to_hf" else "a Megatron checkpoint"
        what = "wrote a checkpoint of the wrong side"
        return [failure("commands.output", way, what, where=command.where, expected=wanted, got=layout)]
    return []


@contextmanager
def _workspace(keep: Path | None) -> Iterator[Path]:
    """A temporary folder, or one that becomes ``keep`` when all is done."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="mtpcheck-") as name:
            yield Path(name).resolve()
        return
    with new_folder(keep) as folder:
        yield folder.resolve()


def _rename(report: Report, folder: str, instead: str) -> None:
    """Take the working folder out of everything a report tells."""

    def told(text: str) -> str:
        return text.replace(folder, instead)

    report.findings = [
        replace(f, where=told(f.where), message=told(f.message), got=told(f.got), subject=told(f.subject))
        for f in report.findings
    ]
    report.checks = [replace(check, detail=told(check.detail)) for check in report.checks]
    report.notes = [told(line) for line in report.notes]
