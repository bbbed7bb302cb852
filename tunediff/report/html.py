"""Build the report's HTML with jinja2, which escapes all text: elements, tables, and the page."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import jinja2
from markupsafe import Markup

from tunediff.core import colors

PAGE = "report.html"
Html = Markup
"""Markup. Every other string is escaped when it becomes part of an element."""

_EMPTY_TAGS = ("br", "hr", "img", "input", "meta", "source", "wbr")


def el(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element with escaped content.

    A trailing underscore of an attribute is dropped (`class_`), other underscores become dashes. A
    child or an attribute that is None is left out. Text from files arrives here as a plain string:
    it never becomes markup.
    """
    opening = join(
        *(
            Html(' {}="{}"').format(name.rstrip("_").replace("_", "-"), value)
            for name, value in attributes.items()
            if value is not None
        )
    )
    if tag in _EMPTY_TAGS:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{join(*children)}</{tag}>")


def join(*parts: object) -> Html:
    """Concatenate parts, escape all that are not `Html`, and leave None out."""
    return Html("").join(
        part if isinstance(part, str) else str(part) for part in parts if part is not None
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


def picture(kind: str, content: bytes, alt: str) -> Html:
    """Return an image that is embedded in the page. `img` runs no scripts that an SVG contains."""
    return el("img", src=f"data:image/{kind};base64,{base64.b64encode(content).decode()}", alt=alt)


def folded(summary: object, *inside: object) -> Html:
    """Return content that a click unfolds."""
    return el("details", el("summary", summary), *inside)


def page(title: str, head: Html, sections: Sequence[tuple[str, str, Html]], foot: Html) -> str:
    """Return the whole HTML file; `sections`: (id, heading, content), the result first.

    The table of contents follows the result: on a narrow screen it stands below, else beside. The
    content security policy of the page forbids every connection and every script.
    """
    loader = jinja2.PackageLoader("tunediff.report", "")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("page.html")
    return template.render(
        title=title, head=head, sections=sections, foot=foot,
        winner=colors.WINNER, baseline=colors.BASELINE,
    )  # fmt: skip
