"""Small pieces of HTML that the sections of the page share. Whatever is not ``str`` of this package is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from mtpcheck.report.words import LONGEST, clipped


def text(plain: str, most: int = LONGEST) -> str:
    """Any text, on one line, as HTML."""
    return html.escape(clipped(plain, most))


def code(plain: str, most: int = LONGEST) -> str:
    return f"<code>{text(plain, most)}</code>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Rows of HTML under plain headings, which stand beside each cell where the page is narrow."""
    titles = "".join(f'<th scope="col">{text(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(map(_cell, head, row))}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'


def _cell(title: str, content: str) -> str:
    return f'<td data-label="{text(title)}">{content}</td>' if content else '<td class="empty"></td>'


def section(name: str, title: str, *content: str) -> str:
    """A section that can be linked to, or nothing where there is no content."""
    inside = "\n".join(part for part in content if part)
    return f'<section id="{name}">\n<h2>{text(title)}</h2>\n{inside}\n</section>' if inside else ""


def lines(plain: Sequence[str]) -> str:
    """Lines whose columns are aligned."""
    return f"<pre>{chr(10).join(map(text, plain))}</pre>" if plain else ""
