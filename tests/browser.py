"""Pages as Chromium lays them out: every page in frames of several sizes, light and dark, measured from inside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = ((1200, 800), (400, 700))
SCHEMES = ("light", "dark")

_PROBE = """
const alpha = c => { const n = (c.match(/[\\d.]+/g) || []).map(Number); return n.length > 3 ? n[3] : 1 };
const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = e => { while (e && alpha(getComputedStyle(e).backgroundColor) === 0) e = e.parentElement;
  return e ? getComputedStyle(e).backgroundColor : "rgb(255, 255, 255)" };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05) };
const texts = [];
for (const e of document.querySelectorAll("body *")) {
  if (e.tagName === "SCRIPT" || !e.getClientRects().length) continue;
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  const before = getComputedStyle(e, "::before");
  if (own) texts.push([ratio(getComputedStyle(e).color, behind(e)), e.textContent.slice(0, 40)]);
  if (before.content !== "none") texts.push([ratio(before.color, behind(e)), "::before " + before.content]);
}
const bottom = s => { const e = document.querySelector(s); return e && e.getBoundingClientRect().bottom };
const root = document.documentElement;
parent.postMessage([FRAME, {
  width: root.clientWidth, scroll: Math.max(root.scrollWidth, document.body.scrollWidth),
  wide: [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > root.clientWidth + 1)
    .map(e => e.tagName + " " + e.textContent.slice(0, 40)).slice(0, 5),
  verdict: bottom("h1"), lead: bottom(".lead"), texts: texts.length,
  contrast: texts.sort((a, b) => a[0] - b[0])[0],
  page: behind(document.body), requests: performance.getEntriesByType("resource").length,
  mtp: bottom(".mtp"), cells: document.querySelectorAll(".cells li").length,
  cut: [...document.querySelectorAll(".model li")].filter(e => e.scrollWidth > e.clientWidth + 1).length,
}], "*");
"""

_COLLECT = """
const found = {}; addEventListener("message", e => { found[e.data[0]] = e.data[1];
  document.querySelector("#found").textContent = JSON.stringify(found) });
"""


def measured(pages: Mapping[str, str], folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Measures of each page by its name, the width of its frame and the colour scheme.

    Copies are measured: a scheme is chosen by rewriting the query for it, and a script is let in.
    """
    frames = []
    for name, page in pages.items():
        for scheme in SCHEMES:
            for width, height in SIZES:
                file = folder / f"{name}-{width}-{scheme}.html"
                copy = re.sub(r"<meta http-equiv=[^>]*>", "", page)
                copy = copy.replace("(prefers-color-scheme: dark)", "all" if scheme == "dark" else "not all")
                probe = _PROBE.replace("FRAME", json.dumps(file.stem))
                file.write_text(
                    copy.replace("</body>", f"<script>{{{probe}}}</script></body>"), errors="backslashreplace"
                )
                frames.append(f'<iframe src="{file.name}" style="width:{width}px;height:{height}px;border:0"></iframe>')
    outer = folder / "outer.html"
    outer.write_text(f'<script>{_COLLECT}</script><pre id="found"></pre>{"".join(frames)}')
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=20000"]
    options += [f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run([str(CHROMIUM), *options, outer.as_uri()], capture_output=True, text=True, timeout=240)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match and match[1], done.stderr[-2000:]
    found = {tuple(frame.rsplit("-", 2)): measures for frame, measures in json.loads(unescape(match[1])).items()}
    assert len(found) == len(frames), sorted(found)
    return {(name, int(width), scheme): measures for (name, width, scheme), measures in found.items()}
