"""What goes wrong between here and the Hub, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from mtpcheck.errors import HubError


def transport_error() -> type[Exception]:
    """What every failure of a connection is derived from: HTTPError of httpx, or of httpx2, by huggingface_hub's
    version."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast(type[Exception], HfHubHTTPError.__bases__[0])


@contextmanager
def told(where: str, opening: bool = False) -> Iterator[None]:
    """Raise HubError for what huggingface_hub raises inside. ``where``: the repository or its file, as it is to be
    called. ``opening``: whether ``where`` could as well have been meant as a folder."""
    from huggingface_hub import constants, errors

    hub, lead = constants.ENDPOINT, f"{where}: no such folder, and " if opening else f"{where}: "
    try:
        yield
    except errors.GatedRepoError as error:
        page = f"{hub}/{where.partition('@')[0]}"
        raise HubError(f"{where}: is gated; ask for access on {page}, and set HF_TOKEN or run hf auth login") from error
    except errors.RepositoryNotFoundError as error:
        more = "or a private one, which takes HF_TOKEN or hf auth login"
        raise HubError(f"{lead}{hub} has no repository of that name, {more}") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{where}: the repository has no such revision") from error
    except (errors.LocalEntryNotFoundError, transport_error()) as error:
        cause = error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        raise HubError(f"{lead}{_cut_short(cause, hub) if status is None else _refused(status, hub)}") from error
    except (errors.EntryNotFoundError, RuntimeError, ValueError) as error:  # RuntimeError: whatever Xet meets
        raise HubError(f"{lead}{hub} does not give it ({_first_line(error)})") from error
    except OSError as error:
        if error.errno is not None:  # of this machine, such as a full disk
            raise
        raise HubError(f"{lead}{hub} does not give it ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _cut_short(error: BaseException, hub: str) -> str:
    what = f"{type(error).__name__}: {_first_line(error)}"
    return f"no whole answer came from {hub} ({what}); try again, or set HF_HUB_OFFLINE=1 if the cache holds it"


def _refused(status: int, hub: str) -> str:
    if status == 429:
        return f"{hub} limits requests (429), after several tries too; wait, or set HF_TOKEN"
    if status in (401, 403):
        return f"{hub} refuses access ({status}); set HF_TOKEN, or run hf auth login"
    if status >= 500:
        return f"{hub} answers {status}, after several tries too; try again later"
    return f"{hub} answers {status}"
