"""Errors and signals → exit codes.

0 holds, 1 the checkpoint fails a check, 2 could not judge, 130 Ctrl-C, 143 SIGTERM. An error nobody foresaw is a 2,
never a 1.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

import typer

from mtpcheck.errors import COULD_NOT_JUDGE, HOLDS, CheckpointFails, MtpcheckError

_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit code; the one place that turns errors into codes."""
    try:
        result = app(arguments, standalone_mode=False, prog_name="mtpcheck")
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except SystemExit as error:  # from _on_sigterm; typer's own, a 1, means that nobody reads stdout any more
        result = error.code if error.code == _TERMINATED else _pipe_closed()
    except MtpcheckError as error:
        complain(str(error))
        if isinstance(error, CheckpointFails):
            for finding in error.findings[:20]:
                complain(f"  {finding.check}  {finding.subject}: {finding.message}", label="")
        return error.exit_code
    except BrokenPipeError:
        return _pipe_closed()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}; nothing half-written was left behind")
        return COULD_NOT_JUDGE
    except Exception as error:
        if callable(show := getattr(error, "show", None)):  # a usage error; its class is typer's or click's
            show()
            return COULD_NOT_JUDGE
        traceback.print_exc()
        complain("this is a fault of mtpcheck, not of the checkpoint; please report it with the lines above")
        return COULD_NOT_JUDGE
    if result in (_INTERRUPTED, _TERMINATED):
        complain("interrupted; nothing half-written was left behind")
    return result if isinstance(result, int) else HOLDS


def _pipe_closed() -> int:
    """Keep the interpreter from complaining, at its end, that stdout cannot be flushed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return COULD_NOT_JUDGE


def complain(sentence: str, label: str = "mtpcheck: ") -> None:
    from mtpcheck.report.finding import printable

    print(label + printable(sentence), file=sys.stderr)


def start(app: typer.Typer) -> NoReturn:
    """Run the command line of this process, and end it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack →, a path may be no UTF-8
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # each try that fails would be a line, and then our sentence
    signal.signal(signal.SIGTERM, _on_sigterm)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a checkpoint may have thousands of files
    sys.exit(run(app))
