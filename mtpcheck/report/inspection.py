"""Terminal renderings of ``inspect`` and ``convert``."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from mtpcheck.convert import Converted
from mtpcheck.inspect import Inspection
from mtpcheck.report.finding import printable
from mtpcheck.report.terminal import render_finding
from mtpcheck.verify import layout_of


def render(found: Inspection, console: Console) -> None:
    """Print an inspection as aligned lines."""
    declared = ", ".join(f"{key} = {value}" for key, value in found.mtp_declared_by.items()) or "by no key"
    share = found.mtp_elements / found.elements if found.elements else 0
    depth = found.mtp_stored / (found.layers + found.mtp_stored)
    shares = f"{share:.1%} of all weights, {depth:.1%} of all layers"
    beside = found.topology or "Megatron-FSDP" * found.fsdp
    lines = {
        "checkpoint": found.path,
        "layout": found.layout + (f" ({beside})" if beside else ""),
        "dialect": "; or ".join([found.dialect, *(f"{name}, by names and shapes" for name in found.dialect_alike)]),
        "family": found.family,
        "tensors": f"{found.tensors:,}, {decimal(found.nbytes)} in {found.files:,} file{'s' * (found.files != 1)}",
        "dtypes": ", ".join(f"{dtype} × {count:,}" for dtype, count in found.dtypes.items()),
        "layers": f"{found.layers} decoder layers",
        "MTP declared": f"{found.mtp_declared} ({declared})",
        "MTP stored": f"{found.mtp_stored} ({found.mtp_parts:,} parts; {shares})",
    }
    if packed := found.packed:
        own = f"({packed.mtp_modules:,} MTP); {packed.mtp_plain:,} MTP matrices plain"
        lines["packed"] = f"{packed.method}: {packed.modules:,} modules {own}"
    if found.copies:
        lines["copies"] = ", ".join(f"{part} {state}" for part, state in found.copies.items())
    if found.passed_over:
        kinds = (f"{count:,} {kind} ({decimal(nbytes)})" for kind, (count, nbytes) in found.passed_over.items())
        lines["passed over"] = ", ".join(kinds)
    if not found.dialect:
        del lines["dialect"]
    for name, value in lines.items():
        console.print(Text.assemble((f"{name:<13}", "bold"), printable(value)))
    structure = [finding for finding in found.findings if finding.check.startswith("structure.")]
    if found.layout == "hf" and not structure:
        console.print(Text.assemble((f"{'structure':<13}", "bold"), "index, headers and folder agree"))
    for finding in found.findings:
        console.print()
        render_finding(finding, console)


def render_converted(converted: Converted, console: Console) -> None:
    """Print what was written, and what could not be carried."""
    tensor_map = converted.tensor_map
    console.print(
        Text.assemble(
            (printable(str(converted.target)), "bold"),
            f"  {tensor_map.family}, {layout_of(converted.source)} → {converted.layout}, "
            f"{len(tensor_map.parts):,} parts, {decimal(tensor_map.nbytes)}",
        )
    )
    for finding in converted.findings:
        console.print()
        render_finding(finding, console)
