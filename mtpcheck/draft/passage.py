"""What a run of model and MTP layers over one passage leaves behind: token ids, and nothing of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Passage:
    """One passage of n tokens, run teacher-forced.

    ``ids`` [n] is the text. ``main`` [n]: the model's own choice (argmax) for the token after ``ids[: i + 1]``.
    ``drafts[d - 1]`` [n - d]: at i the draft of depth d, made knowing ``ids[: i + d + 1]``, for the token at
    i + d + 1; it is accepted where it equals ``main[i + d]``. ``ablated``: by name of what was taken out of the
    head, the drafts of depth 1 [n - 1] without it.
    """

    ids: Ids
    main: Ids
    drafts: tuple[Ids, ...]
    ablated: Mapping[str, Ids]
