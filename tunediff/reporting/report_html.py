"""The report's HTML: elements that escape what they hold, the shell of the page, its style and its one script."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

WINNER, BASELINE = "#c2410c", "#1d5fa8"
"""The two colours that mean something, the same in every table and figure; apart for colour-blind eyes as well."""

_EMPTY_TAGS = ("br", "hr", "img", "input", "meta")


class Html(str):
    """Text that is markup already. Every other string is escaped when it becomes part of an element."""


def el(tag: str, *children: object, **attributes: object) -> Html:
    """An element. `class_` loses its underscore, others become dashes; None leaves a child or an attribute out.

    Whatever a file holds passes through here as a plain string: it ends up as text, never as markup.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    opening = "".join(f' {name}="{html.escape(str(value))}"' for name, value in named.items())
    if tag in _EMPTY_TAGS:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{join(children)}</{tag}>")


def join(parts: Iterable[object]) -> Html:
    """Parts side by side."""
    return Html(
        "".join(part if isinstance(part, Html) else html.escape(str(part)) for part in parts if part is not None)
    )


# ------------------------------------------------------------------------------------------------------------- blocks
def table(
    header: Sequence[object],
    rows: Sequence[Sequence[object]],
    marks: Sequence[str] = (),
    words: int = 1,
    id_: str | None = None,
) -> Html:
    """A table. The first `words` columns are words, the others numbers; `marks`: the class of each row, '' for none.

    A header without a word is left out.
    """

    def cells(tag: str, row: Sequence[object]) -> Html:
        scope = {"scope": "col"} if tag == "th" else {}
        return join(el(tag, cell, class_=None if place < words else "n", **scope) for place, cell in enumerate(row))

    lines = [
        el("tr", cells("td", row), class_=(marks[place] or None) if place < len(marks) else None)
        for place, row in enumerate(rows)
    ]
    head = el("thead", el("tr", cells("th", header))) if any(header) else None
    whole = el("table", head, el("tbody", *lines), id=id_)
    return el("div", whole, class_="scroll", tabindex="0")


def picture(kind: str, content: bytes, alt: str, class_: str | None = None) -> Html:
    """An image inside the file. Scripts do not run in an SVG that is shown by `img`, whatever it holds."""
    data = base64.b64encode(content).decode()
    return el("img", src=f"data:image/{kind};base64,{data}", alt=alt, class_=class_)


def folded(summary: object, *inside: object) -> Html:
    """Something that is opened by a click."""
    return el("details", el("summary", summary), *inside)


def page(title: str, head: Html, sections: Sequence[tuple[str, str, Html]], foot: Html) -> str:
    """The whole file, from its head and its (id, heading, content) sections.

    The policy in it forbids every connection and every script but the one below, known by its hash.
    """
    contents = el("ol", *(el("li", el("a", heading, href=f"#{name}")) for name, heading, _ in sections))
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
    )
    top = join(
        [
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="referrer", content="no-referrer"),
            el("title", title),
            el("style", Html(STYLE)),
        ]
    )
    main = el(
        "main",
        el("header", head),
        *(el("section", el("h2", heading), content, id=name) for name, heading, content in sections),
        el("footer", foot),
    )
    body = el("body", el("nav", el("p", "Contents"), contents, aria_label="Contents"), main, el("script", Html(SCRIPT)))
    return f'<!doctype html>\n<html lang="en">\n<head>{top}</head>\n{body}\n</html>\n'


# -------------------------------------------------------------------------------------------------------------- style
STYLE = """
:root { color-scheme: light; --ink: #1f1e1b; --soft: #69675f; --rule: #e2dfd6; --paper: #fdfcf9; --tint: #f5f3ec;
  --winner: WINNER; --baseline: BASELINE; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3.5rem 2rem 6rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.58 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Arial, sans-serif;
  display: grid; grid-template-columns: 12.5rem minmax(0, 1fr); column-gap: 3.5rem; }
nav { position: sticky; top: 2rem; align-self: start; max-height: 92vh; overflow: auto; font-size: .84rem;
  line-height: 1.35; }
nav p { margin: .4rem 0 .6rem; color: var(--soft); font-size: .74rem; letter-spacing: .08em;
  text-transform: uppercase; }
nav ol { margin: 0; padding: 0; list-style: none; }
nav li { margin: 0 0 .5rem; }
nav a { color: var(--soft); text-decoration: none; }
nav a:hover, nav a:focus { color: var(--ink); text-decoration: underline; }
main { min-width: 0; max-width: 60rem; }
a { color: inherit; text-underline-offset: .18em; text-decoration-color: #b5b1a4; }
h1, h2, h3 { line-height: 1.22; font-weight: 650; letter-spacing: -.012em; text-wrap: balance; }
h1 { margin: 0 0 .3rem; font-size: 2.1rem; overflow-wrap: anywhere; }
h2 { margin: 4.2rem 0 .7rem; font-size: 1.42rem; }
h3 { margin: 2.2rem 0 .5rem; font-size: 1.05rem; }
p, ul, dl { margin: 0 0 1rem; }
p, li { max-width: 44rem; overflow-wrap: break-word; }
ul { padding-left: 1.2rem; }
.soft, figcaption, .note { color: var(--soft); }
.note, figcaption { font-size: .88rem; line-height: 1.5; }
.lead { font-size: 1.16rem; line-height: 1.5; }
.state { display: inline-block; margin: .9rem 0 0; padding: .1rem .65rem; border: 1px solid var(--rule);
  border-radius: 1rem; font-size: .84rem; color: var(--soft); background: var(--tint); }
.winner { color: var(--winner); font-weight: 600; }
.baseline { color: var(--baseline); font-weight: 600; }
.keys { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.4rem, 1fr)); gap: 1.4rem 1.6rem;
  margin: 1.8rem 0; padding: 1.3rem 0; border: solid var(--rule); border-width: 1px 0; }
.keys dt { font-size: .84rem; color: var(--soft); }
.keys dd { margin: .1rem 0 0; font-size: 1.4rem; line-height: 1.3; white-space: nowrap; letter-spacing: -.015em;
  font-variant-numeric: tabular-nums; }
.keys dd + dd { margin-top: .25rem; font-size: .88rem; line-height: 1.4; white-space: normal; letter-spacing: 0;
  color: var(--soft); }
figure { margin: 1.4rem 0 1.6rem; }
figure img { display: block; max-width: 100%; height: auto; mix-blend-mode: multiply; }
figcaption { margin-top: .5rem; max-width: 44rem; }
.scroll { overflow-x: auto; margin: 1rem 0 1.4rem; }
table { border-collapse: separate; border-spacing: 0; font-size: .88rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
th, td { padding: .34rem 1.1rem .34rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule);
  max-width: 30rem; overflow-wrap: break-word; }
td:first-child { min-width: 7.5rem; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; border-bottom-color: #bdb9ac; }
.n { text-align: right; white-space: nowrap; padding-left: .6rem; }
th.n { white-space: normal; min-width: 4.5rem; }
tr.winner td { color: var(--winner); }
tr.baseline td { color: var(--baseline); }
tr.rest td { color: var(--soft); font-weight: 400; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 1.6rem; }
.pair figure { margin: .6rem 0; }
.pair img { mix-blend-mode: normal; width: 100%; max-width: 27rem; image-rendering: pixelated;
  border: 1px solid var(--rule); }
details { margin: .9rem 0; }
summary { cursor: pointer; color: var(--soft); }
summary:hover { color: var(--ink); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .8rem 1rem; background: var(--tint);
  border-radius: .35rem; }
pre, code { font: .84rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
code { overflow-wrap: anywhere; }
td code, td .baseline { overflow-wrap: normal; white-space: nowrap; }
#trials-table { white-space: nowrap; }
#trials-table td:first-child { min-width: 0; }
#trials-table th { white-space: nowrap; }
#trials .scroll { max-height: 38rem; overflow: auto; border: solid var(--rule); border-width: 1px 0; }
#trials th { position: sticky; top: 0; background: var(--paper); z-index: 1; box-shadow: 0 1px #bdb9ac;
  padding-top: .5rem; }
#trials td:first-child { position: sticky; left: 0; background: var(--paper); }
#trials td:last-child { max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
.sorter { all: unset; cursor: pointer; }
.sorter:hover, .sorter:focus-visible { color: var(--ink); text-decoration: underline; }
[aria-sort=ascending] .sorter::after { content: " ↑"; }
[aria-sort=descending] .sorter::after { content: " ↓"; }
.filter { display: flex; flex-wrap: wrap; align-items: baseline; gap: .4rem 1.2rem; margin: 1rem 0 .6rem;
  font-size: .9rem; }
.filter[hidden] { display: none; }
.filter label { display: flex; align-items: baseline; gap: .8rem; white-space: nowrap; }
.filter input { font: inherit; padding: .3rem .6rem; width: 19rem; max-width: 60vw; border: 1px solid #c9c5b8;
  border-radius: .3rem; background: #fff; }
footer { margin-top: 5rem; padding-top: 1rem; border-top: 1px solid var(--rule); color: var(--soft);
  font-size: .84rem; }
@media (max-width: 68rem) {
  body { display: block; padding: 2rem 1.1rem 4rem; }
  nav { position: static; margin-bottom: 2.5rem; padding-bottom: 1.2rem; border-bottom: 1px solid var(--rule); }
  nav ol { columns: 2 11rem; }
}
@media screen and (max-width: 44rem) {
  figure { overflow-x: auto; }
  figure img { width: 42rem; max-width: none; }
  .pair img { width: 100%; max-width: 27rem; }
}
@media print {
  @page { margin: 16mm 15mm; }
  body { display: block; max-width: none; padding: 0; background: #fff; font-size: 9.5pt; }
  nav, .filter { display: none; }
  main { max-width: none; }
  h2 { margin-top: 1.8rem; }
  h2, h3, .lead { break-after: avoid; }
  figure, tr, p, .keys, .pair { break-inside: avoid; }
  .scroll, #trials .scroll { overflow: visible; max-height: none; }
  table { font-size: 7.5pt; }
  #trials-table { font-size: 5.2pt; white-space: normal; }
  #trials-table th, #trials-table td { padding: .2rem .4rem .2rem 0; min-width: 0; }
  #trials tbody tr:nth-child(n + 41) { display: none; }
  #trials th, #trials td:first-child { position: static; }
}
""".replace("WINNER", WINNER).replace("BASELINE", BASELINE)

SCRIPT = """
(function () {
  "use strict";
  var table = document.getElementById("trials-table");
  if (!table) return;
  var body = table.tBodies[0], rows = Array.from(body.rows), heads = Array.from(table.tHead.rows[0].cells);
  function key(row, column) {
    var text = row.cells[column].textContent.trim(), number = parseFloat(text.replace(/,/g, ""));
    return { text: text, number: /^[-\\d.]/.test(text) ? number : NaN };
  }
  function order(a, b) {
    if (!a.text || !b.text) return (a.text ? 0 : 1) - (b.text ? 0 : 1);
    if (!isNaN(a.number) && !isNaN(b.number)) return a.number - b.number;
    return a.text < b.text ? -1 : a.text > b.text ? 1 : 0;
  }
  heads.forEach(function (head, column) {
    var button = document.createElement("button");
    button.type = "button";
    button.className = "sorter";
    while (head.firstChild) button.appendChild(head.firstChild);
    head.appendChild(button);
    button.addEventListener("click", function () {
      var up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.map(function (row) { return { row: row, key: key(row, column) }; })
        .sort(function (a, b) {
          var empty = (a.key.text ? 0 : 1) - (b.key.text ? 0 : 1);
          return empty || (up ? order(a.key, b.key) : order(b.key, a.key));
        })
        .forEach(function (item) { body.appendChild(item.row); });
    });
  });
  var box = document.getElementById("trials-filter"), count = document.getElementById("trials-count");
  document.querySelector("#trials .filter").hidden = false;
  box.addEventListener("input", function () {
    var words = box.value.toLowerCase().split(/\\s+/).filter(Boolean), shown = 0;
    rows.forEach(function (row) {
      var text = (row.dataset.text = row.dataset.text || row.textContent.toLowerCase());
      row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = shown + " of " + rows.length;
  });
})();
"""
