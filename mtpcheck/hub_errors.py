"""What goes wrong between here and the Hub, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from mtpcheck.errors import HubError


@contextmanager
def told(where: str, opening: bool = False) -> Iterator[None]:
    """Raise HubError for what huggingface_hub raises inside. ``where``: the repository or its file, as it is to be
    called. ``opening``: whether ``where`` could as well have been meant as a folder."""
    from huggingface_hub import constants, errors

    transport = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])  # HTTPError of httpx, or of httpx2
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
    except errors.OfflineModeIsEnabled as error:
        raise HubError(f"{lead}HF_HUB_OFFLINE is set, and the cache lacks what is needed") from error
    except (errors.LocalEntryNotFoundError, errors.XetDownloadError, transport) as error:
        status = getattr(getattr(error.__cause__ or error, "response", None), "status_code", None)
        if status is None:
            raise HubError(f"{lead}{_cut_short(error.__cause__ or error, hub)}") from error
        raise HubError(f"{lead}{_refused(status, hub)}") from error
    except (errors.EntryNotFoundError, errors.FileMetadataError, errors.HFValidationError) as error:
        raise HubError(f"{lead}{hub} does not give it: {str(error).splitlines()[0]}") from error
    except errors.LocalTokenNotFoundError as error:
        raise HubError(f"{lead}{str(error).splitlines()[0]}") from error


def _cut_short(error: BaseException, hub: str) -> str:
    what = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
    return f"no whole answer came from {hub} ({what}); try again, or set HF_HUB_OFFLINE=1 if the cache holds it"


def _refused(status: int, hub: str) -> str:
    if status == 429:
        return f"{hub} limits requests (429), after several tries too; wait, or set HF_TOKEN"
    if status in (401, 403):
        return f"{hub} refuses access ({status}); set HF_TOKEN, or run hf auth login"
    if status >= 500:
        return f"{hub} answers {status}, after several tries too; try again later"
    return f"{hub} answers {status}"
