"""Whatever is said of a search or a comparison is what a file holds: console, live table, result, page, figures, JSON.

`python -m tests.golden` writes the files again; what git shows of them then is what a change does to what users read.
"""

import difflib
import html
import json
import os
import re
import time
from pathlib import Path

import pytest

from tests import comparisons, golden
from tunediff.analysis.comparison import Comparison
from tunediff.config import workload
from tunediff.core.progress import EventLines
from tunediff.report import __main__ as command
from tunediff.report import console, context, files, live_table, page, reading, sentences, style, text

OURS = re.compile(r"[Ii]mage|FD|FID|Fr[ée]chet|DDIM|EMA|noise in all trials|[Ll]ower is better|below the baseline")
FILES = Path(golden.__file__).parent


@pytest.fixture(autouse=True)
def figures(monkeypatch, at_tmp_path):
    """What figures say, in place of pictures, in the order in which they are drawn."""
    monkeypatch.setitem(workload.SHIPPED, "ranker", "tests.ranker")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    drawn = []

    def draw(build, kind):
        with style.drawing():
            if (figure := build()) is None:
                return None
        drawn.append(figure_text(figure))
        return b"."

    monkeypatch.setattr(style, "draw", draw)
    return drawn


def figure_text(figure):
    """The texts of a figure and how much is drawn, one line per panel."""
    lines = [f"title: {figure.get_suptitle()}"] if figure.get_suptitle() else []
    for axes in figure.axes:
        texts = [axes.get_title(loc="left") or axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        ticks = [label.get_text() for label in axes.get_yticklabels()] if axes.yaxis.get_major_formatter().__class__.__name__ in (
            "FixedFormatter", "FuncFormatter") else []  # fmt: skip
        named = [f"x {axes.get_xscale()}, y {axes.get_yscale()}", *(text for text in texts if text)]
        ends = [line.get_xydata()[-1] for line in axes.lines if len(line.get_xydata())]
        shown = " ".join(
            [*(f"({x:.4g}, {y:.4g})" for x, y in ends), *(f"{bar.get_width():.4g}" for bar in axes.patches)]
        )
        lines.append(" · ".join([*named, *filter(None, ticks), *(text.get_text() for text in axes.texts)]))
        lines.append(
            f"  {len(axes.lines)} lines, {len(axes.collections)} collections, {len(axes.patches)} bars; ends {shown}"
        )
    lines += ["legend: " + ", ".join(text.get_text() for text in legend.get_texts()) for legend in figure.legends]
    return "\n".join(lines)


def page_text(content):
    """What a reader of a page sees, a line per paragraph or row; `[winner]` before what has that mark."""
    content = re.sub(r"<(style|script).*?</\1>|<title>.*?</title>", "", content, flags=re.S)
    content = re.sub(
        r"<nav.*?</nav>|<pre>(?:tunediff_format|workload|width).*?</pre>", "", content, flags=re.S
    )  # and YAML
    content = re.sub(r'<(?:tr|span) class="(baseline|winner)">', r"[\1] ", content)
    content = re.sub(r"(?<!\n)<h2>", "\n\n## ", content)
    content = re.sub(r"</(?:td|th)>", " | ", content)
    content = re.sub(r"</(?:tr|p|li|h\d|figcaption|summary|pre|dt|dd|figure)>|<br>", "\n", content)
    lines = html.unescape(re.sub(r"<[^>]+>", "", content)).splitlines()
    text = "\n".join(re.sub(r"[ \N{NO-BREAK SPACE}]+", " ", line).rstrip(" |") for line in lines)
    return re.sub(r"\n+(\n## )?", lambda found: f"\n{found[1]}" if found[1] else "\n", text).strip()


def compare_with_file(name, content, folder):
    """Compare with a golden file, or write it; paths, dates and times of now have the same form everywhere."""
    content = content.replace(str(folder), "FOLDER").replace("\N{NO-BREAK SPACE}", " ")
    content = re.sub(r"written \d{4}-\d\d-\d\d \d\d:\d\d", "written DATE TIME", content)
    content = re.sub(r"^\[(\w* *)[\dms]+\]", r"[\1TIME]", content, flags=re.M)
    content = "\n".join(line.rstrip() for line in content.splitlines()).rstrip() + "\n"
    path = FILES / name
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(content, encoding="utf-8")
    stored = path.read_text(encoding="utf-8")
    lines = (text.splitlines() for text in (stored, content))
    assert content == stored, "\n".join(difflib.unified_diff(*lines, name, "now", lineterm="", n=1))


def rounded(value):
    """A JSON value whose last digits do not depend on the versions of libraries, without keys that say nothing."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items() if one not in (None, [], "")}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def as_text(value):
    return json.dumps(rounded(value), indent=1, ensure_ascii=False)


def events(folder):
    """The events of all trials in the order of their numbers."""
    for path in sorted(folder.glob("trials/*/journal.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] in ("start", "point", "end"):
                yield line["event"], path.parent.name, line["drawn"] if line["event"] == "start" else line


def console_text(folder, space, capsys):
    capsys.readouterr()
    shown = console.Console(folder, space, EventLines(begun=time.monotonic()))
    for event in events(folder):
        shown.listen(*event)
    lines = capsys.readouterr().out
    with live_table.LiveTable(folder, space) as table:
        for event in events(folder):
            table.listen(*event)
    live = re.sub(r"(trials|runs) · [\dms]+( · |\n)", r"\1 · TIME\2", capsys.readouterr().out)
    return f"{lines}\n{live}"


def table_text(path):
    """A table of numbers, without digits that depend on the versions of libraries."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda value: f"{float(value[0]):.5g}", path.read_text())


def parts(**content):
    return "\n\n".join(f"======== {name}\n{text.strip()}" for name, text in content.items() if text.strip())


@pytest.mark.parametrize("name", golden.SEARCHES)
def test_what_is_said_of_a_search(name, tmp_path, figures, capsys):
    build, objective = golden.SEARCHES[name]
    build(folder := tmp_path / "night", objective)
    about = context.read(folder, now=2000.0)
    files.write_search(about.results)
    page.write_search(about, folder)
    written = {file.name: file.read_text() for file in sorted(folder.glob("*.md"))}
    written |= {file.name: table_text(file) for file in folder.glob("comparison.csv")}
    shown = page_text((folder / "report.html").read_text())
    said = parts(
        console=console_text(folder, about.results.space, capsys),
        result="\n".join(text.lines(found := reading.of_folder(folder))),
        page=shown,
        figures="\n\n".join(figures),
        **written,
    )
    if name not in golden.WHOLE:
        said = re.sub(r"(?ms)^## (Knob|Trade-offs|When|Failures|Every|Reproduce).*?(?=^## |^={8})", "", said)
    compare_with_file(f"{name}.txt", said, tmp_path)
    compare_with_file(f"{name}.json", as_text(reading.as_json(found)), tmp_path)
    first = found.summary[0].replace("\N{NO-BREAK SPACE}", " ")
    assert shown.partition("## Result\n")[2].startswith(first), "page, text and JSON say the same"
    assert objective.mode == "min" or not OURS.search(said), "an objective of the user has none of our words"


@pytest.mark.parametrize("name", golden.COMPARISONS)
def test_what_is_said_of_a_comparison(name, tmp_path, figures):
    folder = comparisons.made(**golden.COMPARISONS[name])
    assert command.main([folder.name]) == 0
    found = reading.of_folder(folder)
    said = parts(
        progress=sentences.progress(found),
        result="\n".join(text.lines(found)),
        comment=text.comment(Comparison.read(folder)),
        page=page_text((folder / "report.html").read_text()),
        figures="\n\n".join(figures),
    )
    compare_with_file(f"{name}.txt", said, tmp_path)
    compare_with_file(f"{name}.json", as_text(reading.as_json(found)), tmp_path)
    assert json.loads((folder / "result.json").read_text()) == reading.as_json(found), "beside the page"
