"""The HTML report: sound and self-contained, and readable at every width, in light and in dark."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from mtpcheck.report.html import as_html, error_html
from mtpcheck.report.machine import as_dict
from mtpcheck.report.report import Component, Report
from tests import browser, reports
from tests.schema import faults

needs_chromium = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"
)
pytestmark = pytest.mark.xdist_group("html")  # one browser for all
PAGES = {
    "sound": as_html(reports.sound()),
    "failing": as_html(reports.failing()),
    "error": error_html(reports.ENDED),
    "huge": as_html(reports.huge()),
}
VOID = {"meta", "line", "rect", "br"}


class Page(HTMLParser):
    """Elements of a page that are closed as they were opened, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.inside.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads("".join(self.inside["script"]))
        return found


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_sound_and_stands_for_itself(name: str) -> None:
    page = Page(PAGES[name])
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [str(attributes["href"]) for _, attributes in page.elements if "href" in attributes]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    loud = {"src", "srcset", "data", "action", "background", "poster"}
    for tag, attributes in page.elements:
        assert not loud & set(attributes) and not any(key.startswith("on") for key in attributes)
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "base", "a" if not links else "")
        assert tag != "script" or attributes["type"] == "application/json"
    style = "".join(page.inside["style"])
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert [tag for tag, _ in page.elements].count("script") == 1


@pytest.mark.parametrize("made", [reports.sound, reports.failing], ids=["sound", "failing"])
def test_the_document_lies_inside(made: Any) -> None:
    report = made()
    found = Page(as_html(report)).document
    left = found.pop("left_out", {})
    assert list(faults(found)) == [] and left == ({"members": 28} if report.verdict == "fails" else {})
    expected = as_dict(report)
    for finding in expected["findings"]:
        finding.update({"members": finding["members"][:100]} if "members" in finding else {})
    assert found == expected


def test_names_stay_text() -> None:
    page = Page(PAGES["failing"])
    assert not any("onclick" in attributes for _, attributes in page.elements)
    assert sum("</script><b onclick=x>&amp;|" in text for text in page.inside["code"]) == 1
    assert "\u202e" not in PAGES["failing"] and "\x1b" not in PAGES["failing"]
    PAGES["failing"].encode()


def test_a_page_tells_what_the_report_has() -> None:
    page = PAGES["failing"]
    for told in ("<title>FAILS: 5 failures; the reference has 2 faults of its own; not judged: files</title>",
                 "Cause: gate and up stand in each other&#x27;s place", "<dt>to do</dt><dd>join gate first, then",
                 "Faults of the reference itself", "✗ 128 differing, 1 missing of 405 tensors", "<em>not there</em>",
                 "tokenizer and other files were not looked at", "120 more</summary>", "all, depth 2"):  # fmt: skip
        assert told in page, told
    holds = PAGES["sound"]
    assert "<title>HOLDS</title>" in holds and 'class="lead"' not in holds and "bit-equal" in holds


def test_bars_show_the_rates() -> None:
    report = reports.sound()
    bars = re.findall(r'<rect class="bar" width="([\d.]+)%"', as_html(report))
    rates = [own.depths[0].rate for name in (*reports.WORKLOADS, "")
             for column in report.acceptance for own in [column.workloads.get(name, column.overall)]]  # fmt: skip
    assert [float(width) for width in bars] == [round(100 * rate, 2) for rate in rates]


def test_cells_tell_what_was_not_compared() -> None:
    own = [Component("embed", 1, 0), Component("layers.0", 2, 9, 2, 1), Component("mtp.0", 3, 4)]
    page = as_html(Report("verify", ["a", "b"], components=own))
    assert (
        "embed: 1 tensor, not compared; 0 bytes" in page and "✗ 1</b>" in page and "– 3 tensors, not compared" in page
    )


def test_a_huge_page_is_cut() -> None:
    page = PAGES["huge"]
    assert len(page.encode()) < 2_200_000 and re.search(r"and [\d,]+ more findings", page)
    document = Page(page).document
    left = document["left_out"]
    assert list(faults(document)) == []
    assert len(document["findings"]) + left["findings"] == sum(document["counts"].values()) == 5000
    assert left["members"] == 59_760 - 100 and left["parts_not_run"] == 59_761 - 100


# ---- in a browser


Seen = dict[tuple[str, int, str], dict[str, Any]]
BAD = """<body style="color: #888; background: #fff"><h1 style="margin-top: 2000px">late</h1>
<p style="width: 2000px">wide</p></body>"""


@pytest.fixture(scope="module")
def measures(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """All pages, the huge one with fewer findings and all its layers, and one where everything is wrong."""
    huge = reports.huge()
    layers = as_html(replace(huge, findings=huge.findings[3900:4100]))
    return browser.measured({**PAGES, "huge": layers, "bad": BAD}, tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def seen(measures: Seen) -> Seen:
    return {key: page for key, page in measures.items() if key[0] != "bad"}


@needs_chromium
def test_measures_tell_a_bad_page(measures: Seen) -> None:
    for (name, width, _), page in measures.items():
        if name == "bad":
            assert page["scroll"] > width and page["wide"] and page["verdict"] > 2000
            assert 3.4 < page["contrast"][0] < 3.6


@needs_chromium
def test_nothing_is_wider_than_the_page(seen: Seen) -> None:
    for (name, width, scheme), page in seen.items():
        assert page["scroll"] <= page["width"] <= width, (name, width, scheme, page["wide"])
        assert page["wide"] == [] and page["cut"] == 0, (name, width, scheme)


@needs_chromium
def test_verdict_and_cause_are_seen_first(seen: Seen) -> None:
    heights = dict(browser.SIZES)
    for (name, width, _), page in seen.items():
        assert 0 < page["verdict"] < heights[width] / 2
        assert (page["lead"] is None) == (name == "sound")
        assert name == "sound" or page["verdict"] < page["lead"] < heights[width]


@needs_chromium
def test_text_is_told_from_its_ground(seen: Seen) -> None:
    for key, page in seen.items():
        ratio, where = page["contrast"]
        assert ratio >= 4.5, (key, where)
        assert page["texts"] > (3 if key[0] == "error" else 50)
    grounds = {
        scheme: {page["page"] for (_, _, own), page in seen.items() if own == scheme} for scheme in ("light", "dark")
    }
    assert grounds == {"light": {"rgb(253, 253, 251)"}, "dark": {"rgb(23, 23, 22)"}}


@needs_chromium
def test_nothing_is_fetched_and_the_map_is_whole(seen: Seen) -> None:
    assert {page["requests"] for page in seen.values()} == {0}
    cells = {name: page["cells"] for (name, _, _), page in seen.items()}
    assert cells == {"sound": 49, "failing": 49, "error": 0, "huge": 120}
