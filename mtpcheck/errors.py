"""Every error mtpcheck raises on purpose. Each knows its sentence and its exit code.

    MtpcheckError            2  could not judge
    ├── UsageError           2  the command does not make sense as given
    ├── FormatError          2  a file is not what it claims to be
    ├── FamilyError          2  a family, block or dialect file is wrong, or no family fits
    ├── UnsupportedError     2  understood, but mtpcheck or the target cannot represent it
    ├── HubError             2  the Hub, or the way to it, does not give what is needed
    └── CheckpointFails      1  the source fails a check, so nothing was written

Findings about a checkpoint are values, not exceptions; ``CheckpointFails`` carries them out of a
conversion that must not go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from mtpcheck.report.finding import Finding

HOLDS, FAILS, COULD_NOT_JUDGE = 0, 1, 2


class MtpcheckError(Exception):
    """Base of all errors with a sentence for the user; ``str(error)`` is that sentence."""

    exit_code = COULD_NOT_JUDGE


class UsageError(MtpcheckError):
    """The arguments contradict each other or the file system."""


def require_one_of(name: str, value: object, allowed: object) -> None:
    """Raise UsageError unless an argument is one of those that its Literal type allows."""
    choices = get_args(allowed)
    if value not in choices:
        raise UsageError(f"{name} is {value!r}, expected {' or '.join(map(repr, choices))}")


class FormatError(MtpcheckError):
    """A file lies about its contents, is cut off, or is of no known kind."""


class FamilyError(MtpcheckError):
    """No family fits, several do, or a family file is not invertible."""


class UnsupportedError(MtpcheckError):
    """Read and understood, but there is no exact way to go on."""


class HubError(MtpcheckError):
    """A repository is not there, closed, offline or cut short."""


class CheckpointFails(MtpcheckError):
    """The source checkpoint fails checks that a conversion depends on."""

    exit_code = FAILS

    def __init__(self, sentence: str, findings: tuple[Finding, ...]) -> None:
        super().__init__(sentence)
        self.findings = findings
