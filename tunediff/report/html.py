"""Build the report's HTML: escaping elements, tables, and the page with style and script."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path

from tunediff.core import colors

PAGE = "report.html"
WINNER, BASELINE = colors.WINNER, colors.BASELINE
STYLE, SCRIPT = (
    Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js")
)

NARROW = "screen and (max-width: 44rem)"
"""Media query of the screens that get the narrow charts; page.css repeats it."""

_EMPTY_TAGS = ("br", "hr", "img", "input", "meta", "source", "wbr")


class Html(str):
    """Markup. Every other string is escaped when it becomes part of an element."""


def el(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element with escaped content.

    A trailing underscore of an attribute is dropped (`class_`), other underscores become dashes. A
    child or an attribute that is None is left out. Text from files arrives here as a plain string:
    it never becomes markup.
    """
    named = {
        name.rstrip("_").replace("_", "-"): value
        for name, value in attributes.items()
        if value is not None
    }
    opening = "".join(f' {name}="{html.escape(str(value))}"' for name, value in named.items())
    if tag in _EMPTY_TAGS:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{join(*children)}</{tag}>")


def join(*parts: object) -> Html:
    """Concatenate parts, escape all that are not `Html`, and leave None out."""
    present = (part for part in parts if part is not None)
    return Html(
        "".join(part if isinstance(part, Html) else html.escape(str(part)) for part in present)
    )


def breakable(text: object) -> object:
    """Return text that may break after the dots, underscores and equals signs of names."""
    if isinstance(text, Html) or not isinstance(text, str):
        return text
    first, *rest = re.split(r"(?<=[._=])(?<!\d\.)(?=\w)", text)
    return join(first, *(part for piece in rest for part in (el("wbr"), piece)))


# ---- blocks
def table(
    header: Sequence[object],
    rows: Sequence[Sequence[object]],
    marks: Sequence[str] = (),
    words: int = 1,
    id_: str | None = None,
    stacks: bool = False,
) -> Html:
    """Return a table.

    words: how many columns hold text; the others are aligned as numbers. marks: the CSS class of
    each row, '' for none. stacks: on narrow screens each row becomes a block with one line per
    cell, so that no column is cut off. A header of empty strings is left out.
    """

    def cells(tag: str, row: Sequence[object]) -> Html:
        # On narrow screens the style sheet shows `data-label` before each cell.
        labels = header if stacks and tag == "td" else [None] * len(row)
        scope = "col" if tag == "th" else None
        parts = []
        for i, (cell, label) in enumerate(zip(row, labels, strict=True)):
            kind = None if i < words else "n"
            content = breakable(cell) if i < words else cell
            parts.append(el(tag, content, class_=kind, data_label=label, scope=scope))
        return join(*parts)

    lines = []
    for i, row in enumerate(rows):
        lines.append(el("tr", cells("td", row), class_=(marks[i] or None) if marks else None))
    head = el("thead", el("tr", cells("th", header))) if any(header) else None
    body = el("table", head, el("tbody", *lines), id=id_, class_="stacks" if stacks else None)
    return el("div", body, class_="scroll", tabindex="0")


def lead(*words: object) -> Html:
    """Return the first paragraph of a section."""
    return el("p", *words, class_="lead")


def note(*words: object) -> Html:
    """Return a paragraph in small type."""
    return el("p", *words, class_="note")


def picture(kind: str, content: bytes, alt: str, narrow: bytes = b"") -> Html:
    """Return an image that is embedded in the page; `narrow`: the version for narrow screens.

    `img` never runs scripts that an SVG contains.
    """
    wide, small = (
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}" for data in (content, narrow)
    )
    image = el("img", src=wide, alt=alt)
    return el("picture", el("source", media=NARROW, srcset=small), image) if narrow else image


def folded(summary: object, *inside: object) -> Html:
    """Return content that a click unfolds."""
    return el("details", el("summary", summary), *inside)


def page(title: str, head: Html, sections: Sequence[tuple[str, str, Html]], foot: Html) -> str:
    """Return the whole HTML file; `sections`: (id, heading, content), the result first.

    The table of contents follows the result: on a narrow screen it stands below, else beside.
    Its content security policy forbids every connection, and every script except `SCRIPT`, which it
    allows by its hash.
    """
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none';"
        f" form-action 'none'; script-src 'sha256-{allowed}'"
    )
    top = join(
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
        el("style", Html(f":root {{ --winner: {WINNER}; --baseline: {BASELINE}; }}\n{STYLE}")),
    )
    links = (el("li", el("a", heading, href=f"#{name}")) for name, heading, _ in sections)
    contents = el("nav", el("p", "Contents"), el("ol", *links), aria_label="Contents")
    parts = (el("section", el("h2", title), body, id=name) for name, title, body in sections)
    main = el("main", el("header", head), next(parts), contents, *parts, el("footer", foot))
    body = el("body", main, el("script", Html(SCRIPT)))
    return f'<!doctype html>\n<html lang="en">\n<head>{top}</head>\n{body}\n</html>\n'
