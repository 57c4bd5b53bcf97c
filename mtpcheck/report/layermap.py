"""The model as a map: a cell for each component, the MTP layers apart. What is wrong is told by mark and number."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal

from mtpcheck.report.elements import text
from mtpcheck.report.report import Component
from mtpcheck.report.words import counted, listed

_CELLS = 2000
_NAMED = 12
_LEGEND = (
    "A number is a decoder layer. A bar grows with the bytes of the component, the largest filling its cell. "
    "✗ n: so many tensors differ or are missing. Dashed: not compared."
)


def model(components: Sequence[Component]) -> str:
    """HTML of the whole model; empty if there are no components."""
    if not components:
        return ""
    largest = max(component.nbytes for component in components) or 1
    mtp = [component for component in components if component.name.split(".")[0] == "mtp"]
    trunk = [component for component in components if component not in mtp]
    cells = "".join(_cell(component, largest) for component in trunk[:_CELLS])
    more = f"<p>and {len(trunk) - _CELLS:,} more components</p>" if len(trunk) > _CELLS else ""
    own = "".join(_large(component, largest) for component in mtp) or "<p>There is none.</p>"
    return "\n".join([
        '<div class="model">',
        f'<div class="trunk"><h3>Trunk</h3><ol class="cells">{cells}</ol>{more}</div>',
        f'<div class="mtp"><h3>{"MTP layers" if len(mtp) > 1 else "MTP layer"}</h3><ol>{own}</ol></div>',
        "</div>",
        f'<p class="legend">{text(_LEGEND)}</p>',
        _bad([component for component in components if _wrong(component)]),
    ])  # fmt: skip


def _wrong(component: Component) -> int:
    return component.differing + component.missing


def _state(component: Component) -> str:
    if _wrong(component):
        return "bad"
    return "good" if component.compared or not component.tensors else "unseen"


def _told(component: Component) -> str:
    """How the tensors of a component fared, in words."""
    if _wrong(component):
        counts = {"differing": component.differing, "missing": component.missing}
        told = ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)
        return f"{told} of {counted(component.tensors, 'tensor')}"
    if _state(component) == "unseen":
        return f"{counted(component.tensors, 'tensor')}, not compared"
    return f"{component.compared:,} of {counted(component.tensors, 'tensor')} compared, none differs"


def _cell(component: Component, largest: int) -> str:
    first, _, number = component.name.partition(".")
    layer = first == "layers" and number.isdigit()
    told = f"{component.name}: {_told(component)}; {decimal(component.nbytes)}"
    wrong = f" <b>✗ {_wrong(component):,}</b>" if _wrong(component) else ""
    return (
        f'<li class="{_state(component)}{"" if layer else " named"}" title="{text(told)}">'
        f"<span>{text(number if layer else component.name, 40)}</span>{wrong}{_size(component, largest)}</li>"
    )


def _large(component: Component, largest: int) -> str:
    mark = {"bad": "✗", "good": "✓", "unseen": "–"}[_state(component)]
    return (
        f'<li class="{_state(component)}"><span class="name">{text(component.name)}</span>'
        f"<span>{decimal(component.nbytes)}</span>"
        f'<b class="told">{mark} {_told(component)}</b>{_size(component, largest)}</li>'
    )


def _size(component: Component, largest: int) -> str:
    return f'<i style="width:{100 * component.nbytes / largest:.1f}%"></i>'


def _bad(components: Sequence[Component]) -> str:
    lines = [f"<li><code>{text(c.name)}</code> {text(_told(c))}</li>" for c in components]
    return f'<ul class="bad">{"".join(listed(lines, _NAMED))}</ul>' if lines else ""
