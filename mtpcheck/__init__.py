"""mtpcheck: does a converted checkpoint still have its multi-token-prediction layer, bit for bit?

The Python API: functions that judge return a ``Report``, which is true if everything holds. See docs/api.md.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpcheck.accept import accept
    from mtpcheck.draft.probe import Probing
    from mtpcheck.errors import MtpcheckError
    from mtpcheck.graft import extract, graft
    from mtpcheck.megatron import Options
    from mtpcheck.report.finding import Finding
    from mtpcheck.report.report import Report
    from mtpcheck.roundtrip import roundtrip
    from mtpcheck.topology import Topology
    from mtpcheck.verify import verify

__version__ = "0.1.0"
__all__ = [
    "Finding",
    "MtpcheckError",
    "Options",
    "Probing",
    "Report",
    "Topology",
    "accept",
    "extract",
    "graft",
    "roundtrip",
    "verify",
]

_HOMES = {
    "Finding": "report.finding",
    "MtpcheckError": "errors",
    "Options": "megatron",
    "Probing": "draft.probe",
    "Report": "report.report",
    "Topology": "topology",
    "extract": "graft",
}
"""Name → its module, where that has another name."""


class _Package(ModuleType):
    """The package, with the API's names read when they are asked for, so that ``import mtpcheck`` stays light.

    They are properties since a function and the submodule it lives in have one name, and importing a submodule sets
    an attribute of the package.
    """


def _lazy(name: str) -> property:
    def get(package: ModuleType) -> Any:
        return getattr(import_module(f"mtpcheck.{_HOMES.get(name, name)}"), name)

    def keep(package: ModuleType, submodule: Any) -> None:
        return None

    return property(get, keep)


for _name in __all__:
    setattr(_Package, _name, _lazy(_name))
sys.modules[__name__].__class__ = _Package
