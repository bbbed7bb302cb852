"""The report of a search: its numbers are those of the journals, and nothing in a folder can break or abuse it."""

import base64
import contextlib
import hashlib
import html
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import yaml

from tests.report.pages import Elements, rows, words, written
from tests.searches import FILE, again, make, noisy, random_points, write
from tunediff import search_space
from tunediff.analysis import journals
from tunediff.core import colors
from tunediff.report import __main__ as command
from tunediff.report import context, outputs
from tunediff.report.files import Files
from tunediff.report.html import SCRIPT
from tunediff.report.sections.curves import of_trials
from tunediff.tuning import sessions


# ------------------------------------------------------------------------------------------------------------ the page
def test_the_page_says_what_won_by_how_much_and_why(night):
    page = written(again(night))
    text = words(page)
    # 2 → 0.8; it is at 2 where 4 → 1.6 between 5 and 10 s comes by: after 5 + 5·(4 − 2)/(4 − 1.6) s
    crossing = 5 + 5 * 2.0 / 2.4
    assert (
        "t0001 is best: after 20 training seconds its FD (classifier) is 0.8, 60 % below the 2 of the baseline" in text
    )
    assert f"as good as the baseline at its end after {crossing:.3g} s: {20 / crossing:.3g} times faster" in text
    assert "1.4 % of one run (sd, from 2 runs of the baseline" in text
    # At 4,000 images it has 1.6 against 2: log(1.6/2)/log(0.8/2) = 24 % is learning, the rest is twice the images.
    assert "24 % is learning more from each image (1.6 instead of 2 at 4,000 images)" in text
    assert "76 % is speed (2 times as many images in the same seconds); one run each." in text
    assert "precision.amp none bf16" in text
    assert "python -m tunediff.search digits --name night" in text
    assert "python -m tunediff.export night --trial t0001" in text
    assert "Measured on slow one." in text
    assert "No trial failed." in text
    assert "finished" not in text, "4 of 8 trials"
    assert "interrupted · 4 of 8 trials ended" in text


@pytest.mark.parametrize(("error", "state"), [(None, "ended"), (KeyboardInterrupt, "interrupted")])
def test_the_state_says_whether_a_limit_or_an_interruption_ended_the_search(night, plain, error, state):
    """With `total:`, for example, a search ends in order before all its trials have begun."""
    with pytest.raises(error) if error else contextlib.nullcontext(), sessions.noted(night, "search"):
        if error:
            raise error
    why = "nothing new was left to draw"
    left_out = "" if error else f" · not begun: 5 of 8 trials: {why}"
    assert f"{state} · 3 of 8 trials ended{left_out} · written" in words(written(night))


def test_the_state_names_the_limit_that_left_trials_out(night, plain):
    space = night / "search.yaml"
    content = yaml.safe_load(space.read_text())
    content["budget"]["total"] = "4m"
    space.write_text(yaml.safe_dump(content))
    with sessions.noted(night, "search"):
        pass
    assert "nothing new was left to draw and to end within 4m00s · " in words(written(night))
    with sessions.noted(night, "search"):
        sessions.note_time_is_up(night)
    assert " · not begun: 5 of 8 trials: another would not end within 4m00s · " in words(written(night))


def test_the_same_data_lie_beside_it(night, rendered):
    page = written(again(night))
    files = {path.name for path in (night / "report").iterdir()}
    assert files >= {
        "curves.csv", "curves.png", "effects.csv", "effects.png", "step.csv", "step.png", "trials.csv",
        "trade_offs.csv", "trade_offs.png", "why.csv", "why_curves.png", "won.csv", "baseline_samples.png",
        "winner_samples.png", "seconds.csv",
    }  # fmt: skip
    for name in files:
        content = (night / "report" / name).read_bytes()
        assert content.startswith(b"\x89PNG") if name.endswith(".png") else b"," in content
        assert f'href="report/{name}"' in page
    assert [row["frechet"] for row in rows(night / "report" / "won.csv")] == ["2.0", "0.8"]
    assert len(rows(night / "report" / "curves.csv")) == 12
    assert "effective_weight" not in (night / "report" / "curves.csv").read_text(), "lists have no place in a table"
    why = {row["quantity"]: row for row in rows(night / "report" / "why.csv")}
    assert (why["images/s"]["baseline"], why["images/s"]["winner"]) == ("200.0", "400.0")
    step = rows(night / "report" / "step.csv")
    assert sum(float(row["baseline_s_per_1000_samples"]) for row in step) == pytest.approx(1000 / 200)
    assert sum(float(row["winner_s_per_1000_samples"]) for row in step) == pytest.approx(1000 / 400)


def test_headings_begin_with_a_capital_and_the_table_of_trials_has_the_full_width(night, plain):
    for path in night.glob("trials/*/journal.jsonl"):
        path.write_text(path.read_text().replace("FD (classifier)", "distance"))
    page = written(night)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert "Distance against training seconds" in headings
    assert not [heading for heading in headings if heading[0].islower()]
    assert ">Distance against training seconds</a>" in page
    assert "main > #trials { max-width: none; }" in page


def test_the_page_loads_nothing_and_runs_one_script(night, rendered):
    page = written(night)
    assert not re.search(r"https?:|//[a-z]", re.sub(r'src="data:[^"]*"', "", page))
    elements = Elements(page).found
    assert [attrs for tag, attrs in elements if tag == "script"] == [{}]
    assert not [tag for tag, _ in elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
    sources = [attrs["src"].partition(";")[0] for tag, attrs in elements if tag == "img"]
    assert set(sources) == {"data:image/svg+xml", "data:image/png"}
    policy = next(attrs["content"] for tag, attrs in elements if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode() in policy
    assert f"<script>{SCRIPT}</script>" in page
    headings = [attrs["id"] for tag, attrs in elements if tag == "section"]
    assert [attrs["href"] for tag, attrs in elements if tag == "a"][: len(headings)] == [
        f"#{name}" for name in headings
    ]


SORTED = """
const head = {appendChild() {}, removeAttribute() {}, getAttribute: () => null, setAttribute() {}};
const rows = CELLS.map(text => ({cells: [{textContent: text}], dataset: {}, textContent: text})), out = [];
const body = {rows: rows, appendChild: row => out.push(row.textContent)};
const table = {tBodies: [body], tHead: {rows: [{cells: [head]}]}};
let click;
globalThis.document = {
  getElementById: id => id === "trials-table" ? table : {addEventListener() {}},
  createElement: () => ({appendChild() {}, addEventListener: (_, call) => { click = call; }}),
  querySelector: () => ({}),
};
"""
"""What of a browser the script needs to sort a table of one column by a click on its heading."""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_click_sorts_differences_by_their_size():
    order = ["−1,200", "−0.3", "−0.012", "≥ 0.001", "+0.012", "+0.5", "+3", "10", ""]
    program = (
        SORTED.replace("CELLS", json.dumps(sorted(order))) + SCRIPT + "\nclick(); console.log(JSON.stringify(out));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == order


def test_a_report_that_has_less_removes_what_it_had_more(night, plain):
    written(night)
    assert (night / "report" / "step.csv").exists()
    for name in ("t0001", "t0002"):
        (night / "trials" / name / "journal.jsonl").unlink()
    (night / "report" / "own.txt").write_text("kept")
    written(night)
    assert not (night / "report" / "step.csv").exists()
    assert (night / "report" / "own.txt").exists()


# -------------------------------------------------------------------------------------------------- a stranger's folder
EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' $\\frac{1$"


def test_what_a_file_holds_is_text_and_nothing_else(night, rendered):
    wanted = journals.read(night)[0].space
    evil = {"drawn": {"loader.batch_size": 64, "optimizer.lr": 1e-3, "precision.amp": "none"}}
    place = write(night, wanted, 3, curve=((20.0, 4000, 0.5),), label=EVIL, config={"weighting.name": EVIL}, **evil)
    text = (place / "journal.jsonl").read_text()
    (place / "journal.jsonl").write_text(
        text.replace('"precision.amp": "none"}', f'"precision.amp": {json.dumps(EVIL)}}}')
    )
    write(night, wanted, 4, {"loader.batch_size": 32}, curve=(), status="error", reason=EVIL)
    with (night / "sessions.jsonl").open("a") as file:
        file.write(json.dumps({"event": "begin", "time": 5.0, "command": EVIL, "environment": {"cpu": EVIL}}) + "\n")
        file.write(json.dumps({"event": "end", "time": 6.0}) + "\n")
    (night / "search.yaml").write_text((night / "search.yaml").read_text() + f"# {EVIL}\n")
    (place / "samples.png").write_text(f"<svg onload='alert(4)'>{EVIL}</svg>")
    page = written(night)
    assert "t0003 is ahead" in words(page)
    assert "<script>alert" not in page
    elements = Elements(page).found
    assert sum(tag == "script" for tag, _ in elements) == 1
    assert not [attrs for _, attrs in elements if any(name.startswith("on") for name in attrs)]
    assert all(attrs["src"].startswith("data:image/") for tag, attrs in elements if tag == "img")
    assert html.escape(EVIL) in page, "it is shown as it is"


def test_a_spreadsheet_sees_no_formula(night, plain):
    wanted = journals.read(night)[0].space
    write(night, wanted, 3, {"loader.batch_size": 32}, curve=(), status="error", reason="=HYPERLINK(A1)")
    for number, first in enumerate("+-@", 4):
        write(night, wanted, number, {"loader.batch_size": 32}, curve=(), status="error", reason=f"{first}1")
    written(night)
    assert rows(night / "report" / "failures.csv")[0]["reason"] == "'=HYPERLINK(A1)"
    outputs.write_all(journals.read(night)[0])
    for table in (night / "report" / "trials.csv", night / "trials.csv"):
        assert [row["reason"] for row in rows(table)[3:]] == ["'=HYPERLINK(A1)", "'+1", "'-1", "'@1"]


def test_damaged_points_are_no_values(night, plain):
    wanted = journals.read(night)[0].space
    place = write(night, wanted, 3, {"loader.batch_size": 32}, curve=((5.0, 10, 3.0), (20.0, 40, 1.0)))
    text = (place / "journal.jsonl").read_text()
    text = text.replace('"frechet": 1.0', '"frechet": "low"').replace('"samples_per_s": 2.0', '"samples_per_s": NaN')
    (place / "journal.jsonl").write_text(text + "\n[1, 2]\nnot json\n\xff\n" + '{"event": "point"')
    (night / "trials" / "t0004").mkdir()
    (night / "trials" / "t0005").mkdir()
    (night / "trials" / "t0005" / "journal.jsonl").write_bytes(b"\x00\xff\n{}\n{}")
    text = words(written(night))
    assert "t0001 is ahead" in text
    assert "1 journal was not readable and left out" in text
    assert "t0005" in text


def test_report_removes_files_of_an_earlier_report_and_nothing_else(tmp_path):
    for name in ("won.csv", "longer_240s.csv", "longer_240s.png", "longer_480s.csv", "mine.csv"):
        (tmp_path / name).write_text("")
    files = Files(tmp_path)
    files.keep("longer_480s.csv", b"")
    files.tidy()
    assert {file.name for file in tmp_path.iterdir()} == {"longer_480s.csv", "mine.csv"}


# ---------------------------------------------------------------------------------------------------- unfinished states
def test_a_search_without_trials_and_one_that_has_just_begun(tmp_path, plain):
    wanted = make(tmp_path / "night")
    assert "No trial has begun yet." in words(written(tmp_path / "night"))
    write(tmp_path / "night", wanted, 0, curve=((5.0, 1000, 8.0),), status=None)
    place = write(tmp_path / "night", wanted, 1, {"precision.amp": "bf16"}, curve=(), status=None)
    (place / "journal.jsonl").write_text((place / "journal.jsonl").read_text()[:-30])  # half written
    (tmp_path / "night" / "sessions.jsonl").write_text('{"event": "begin", "time": 1000, "command": "x"}\n{"even')
    text = words(written(tmp_path / "night", now=1063.0))
    assert "No trial has a result yet: 2 trials are under way, t0000 farthest, at 5 s of 20 s." in text
    assert "running, or killed · 0 of 8 trials ended, 2 under way" in text
    assert "last update 1 min earlier" in text, "its last line was written at 1003"


def test_only_failures(tmp_path, plain):
    wanted = make(tmp_path / "night")
    for number, size in enumerate((128, 64, 256)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, curve=(), status="oom",
              reason=f"CUDA out of memory: {size} MiB")  # fmt: skip
    text = words(written(tmp_path / "night"))
    assert "No result: none of the 3 trials that ended has a result" in text
    assert "3 of 3 trials that ended failed" in text
    (row,) = rows(tmp_path / "night" / "report" / "failures.csv")
    assert (row["status"], row["trials"], row["names"]) == ("oom", "3", "t0000 t0001 t0002"), "numbers do not matter"


def test_a_finished_search(tmp_path, plain):
    """The best first, those without a result at the end."""
    wanted = make(tmp_path / "night", FILE | {"budget": {"per_trial": "20s", "trials": 3}})
    write(tmp_path / "night", wanted, 0, curve=(), status="oom", reason="too large")
    for number, size, value in ((1, 64, 3.0), (2, 256, 2.0)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, curve=((20.0, 4000, value),))
    page = written(tmp_path / "night")
    assert "finished · 3 of 3 trials ended" in words(page)
    table = page[page.index('id="trials-table"') :]
    assert re.findall(r"<td>(t\d{4})</td>", table)[:3] == ["t0002", "t0001", "t0000"]


def test_images_after_unequal_seconds_are_not_called_equal(night, plain):
    assert "From the last evaluation of each, after equal training seconds." in words(written(night))
    journal = night / "trials" / "t0001" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"train_s": 20.0', '"train_s": 12.0'))
    assert "From the last evaluation of each." in words(written(night))


def test_one_trial(tmp_path):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0)
    text = words(written(tmp_path / "night"))
    assert "The baseline (t0000) is the only trial with a result so far: FD (classifier) 2." in text
    assert "Samples" not in text, "nothing was shown"


def test_report_of_a_search_that_stopped_all_but_its_baseline(tmp_path):
    folder = tmp_path / "night"
    content = FILE | {"budget": {"per_trial": "20s", "trials": 4}, "confirm": {"of": 1, "seeds": 3}}
    wanted = make(folder, content)
    write(folder, wanted, 0, found={"disturbed": True})
    for number, size in enumerate((32, 64), 1):
        write(folder, wanted, number, {"loader.batch_size": size}, ((10.0, 1000, 2.1 * number),), status="pruned")
    write(folder, wanted, 3, {"loader.batch_size": 256}, (), status="oom", reason="too large")
    page = written(folder)
    text = words(page)
    assert "is the only trial with a result: FD (classifier) 2. 2 trials were stopped early, 1 failed." in text
    assert "Only the baseline has a result. 2 trials were stopped early, 1 failed." in text
    assert "Nothing to confirm: only the baseline finished." in text
    assert "A search file with confirm:" not in text
    assert "†: others used the machine meanwhile." in text
    assert "<td>ok †</td>" in page
    found = context.read(folder)
    (axes,) = of_trials(found.results, found.highlights).axes
    marked = [line for line in axes.lines if line.get_marker() == "o" and line.get_color() == colors.PRUNED]
    places = [place for line in marked for place in zip(*line.get_data(), strict=True)]
    assert places == [(10.0, 2.1), (10.0, 4.2)], "curves of one point are invisible"


def test_report_warns_of_an_objective_that_does_not_move(tmp_path, plain):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, curve=((5.0, 1000, 12.5), (20.0, 4000, 12.5)))
    assert "The objective did not move in any trial with a result" in words(written(tmp_path / "night"))
    write(tmp_path / "night", wanted, 1, {"loader.batch_size": 64})
    assert "The objective did not move" not in words(written(tmp_path / "night"))


def test_without_its_baseline_the_best_is_compared_with_nothing(tmp_path, plain):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, curve=(), status="nan", reason="the loss is not finite")
    write(tmp_path / "night", wanted, 1, {"precision.amp": "bf16"})
    text = words(written(tmp_path / "night"))
    assert "not determined: the baseline t0000 ended as nan." in text
    assert "1 of 2 trials that ended failed" in text


def test_what_the_noise_leaves_open_is_said_where_the_answer_is(tmp_path, plain):
    text = words(written(noisy(tmp_path / "night")))
    assert "Within the noise of the best, and so possibly as good: t0002, t0004." in text
    assert (
        "Noise: 8.01 % of one run (sd, from 2 runs of the baseline: a rough estimate); the best of 6 is biased by"
        in text
    )
    assert "no significant difference" not in text
    text = words(written(noisy(tmp_path / "close", repeats=(3.0,))))
    assert (
        "is 1 beside the 2 of the baseline (t0000): no significant difference from the baseline by one run each."
        in text
    )
    assert "Nothing to explain: no significant difference from the baseline by one run each." in text
    assert "times faster" not in text


def test_trials_within_the_noise_are_marked(tmp_path, plain):
    folder = noisy(tmp_path / "night")
    page = written(folder)
    table = page[page.index('id="trials-table"') :]
    names = re.findall(r"<td>(t\d{4})</td>", table)
    assert names == ["t0003", "t0002", "t0004", "t0005", "t0000", "t0001", "t0006"]
    marked = re.findall(r"<td>(t\d{4})</td>(?:(?!</tr>).)*≈", table, flags=re.S)
    assert marked == ["t0002", "t0004"]
    again = table[table.index("<td>t0001</td>") :]
    assert ">1</td>" in again[: again.index("</tr>")], "its seed"
    assert "≈: within the noise of the best, 8.01 % of one run" in words(page)
    kept = {row["trial"]: row["within_noise_of_best"] for row in rows(folder / "report" / "trials.csv")}
    assert [name for name, near in kept.items() if near == "True"] == ["t0002", "t0003", "t0004"]


def test_a_search_that_repeated_nothing_reads_as_ever(night, plain):
    page = written(night)
    assert "≈" not in page
    assert "One run each: how much of that is chance is unknown, and the best of 3 is biased" in words(page)
    assert {row["within_noise_of_best"] for row in rows(night / "report" / "trials.csv")} == {""}


@pytest.mark.parametrize("objective", ["frechet", "samples_per_s"])
@pytest.mark.parametrize("status", ["oom", "pruned", None])
def test_nothing_is_faster_than_a_baseline_without_an_end(tmp_path, plain, status, objective):
    content = FILE | {"objective": objective}
    of_baseline = {"status": status, "curve": ((5.0, 1000, 8.0),), "content": content}
    folder = noisy(tmp_path / "night", (), **of_baseline)
    write(folder, search_space.load(folder / "search.yaml"), 9, {"optimizer.lr": 2e-3}, rate=900.0)
    text = words(written(folder))
    why = f"ended as {status}" if status else "is not finished"
    assert f"than the baseline is not determined: the baseline t0000 {why}." in text
    assert "times as fast" not in text.replace("How many times as fast it is is not determined", "")
    assert "times faster" not in text
    assert all(row["speedup"] == "" for row in rows(folder / "report" / "trials.csv"))


def test_the_baseline_may_win(tmp_path, plain):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0)
    for number, size in ((1, 64), (2, 256)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, curve=((20.0, 4000, 3.0),))
    text = words(written(tmp_path / "night"))
    assert "The baseline (t0000) itself is best: none of 2 other trials beats its FD (classifier) of 2." in text
    assert "Why it" not in text


# --------------------------------------------------------------------------------------------------------- many trials
@pytest.mark.nightly
def test_a_thousand_trials(tmp_path, rendered):
    folder = tmp_path / "night"
    wanted = make(folder, FILE | {"budget": {"per_trial": "20s", "trials": 1000}})
    rng = np.random.default_rng(0)
    for number, point in enumerate([{}, *random_points(wanted, 999)]):
        rate = 200.0 * (1.9 if point.get("precision.amp") == "bf16" else 1.0) * math.exp(rng.normal(0, 0.05))
        value = (1 + math.log(point.get("optimizer.lr", 3e-4) / 1e-3) ** 2 / 4) * math.exp(rng.normal(0, 0.1))
        curve = [(5.0 * i, int(5 * i * rate), value * 5 / i) for i in range(1, 5)]
        status = "nan" if rng.random() < 0.05 else "pruned" if rng.random() < 0.1 else "ok"
        write(folder, wanted, number, point, curve[: 4 if status == "ok" else 2], status=status, reason="x" * 40)
    page = written(folder)
    assert len(page) < 3e6
    assert page.count("<tr") > 1000
    assert "1,000 trials, the best first" in words(page)
    assert len(rows(folder / "report" / "trials.csv")) == 1000
    assert sum(path.stat().st_size for path in (folder / "report").iterdir()) < 5e6


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_writes_where_it_is_told(night, plain, tmp_path, capsys):
    assert command.main(["night", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"report: {night / 'report.html'}"
    assert command.main(["night", "--storage", str(tmp_path), "--out", str(tmp_path / "other")]) == 0
    text = words((tmp_path / "other" / "report.html").read_text())
    assert f"python -m tunediff.report night --storage {tmp_path}" in text
    assert f"python -m tunediff.search {tmp_path}/night/search.yaml --name night-again" in text


def test_the_same_search_can_be_run_from_what_the_page_names(night):
    again = search_space.load(night / "search.yaml")
    assert (again.baseline, again.dimensions, again.seed) == ((found := journals.read(night)[0].space).baseline,
                                                              found.dimensions, found.seed)  # fmt: skip


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "search.yaml").unlink(), "night: holds no search; a report needs the folder of a search, with"),
        (lambda folder: (folder / "search.yaml").write_text("search: ["), "is not valid YAML"),
        (lambda folder: (folder / "search.yaml").write_text("a: 1\n"), "a: no such key"),
        (lambda folder: (folder / "search.yaml").write_bytes(b"\xff\xfe"), "is not a text file in UTF-8"),
        (lambda folder: (folder / "search.yaml").write_text(yaml.safe_dump(FILE | {"objective": {"metric": [1]}})), "damaged"),
        (lambda folder: (folder / "baseline.yaml").unlink(), "baseline.yaml: cannot be read"),
        (lambda folder: (folder / "report").write_text("in the way"), "--out: "),
    ],
)  # fmt: skip
def test_damaged_folders_are_refused_in_a_line(night, tmp_path, capsys, break_it, message):
    break_it(night)
    assert command.main(["night", "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert not (night / "report.html").exists()


def test_unknown_names_are_refused_naming_those_there_are(night, tmp_path, capsys):
    assert command.main(["nihgt", "--storage", str(tmp_path)]) == 2
    assert "nihgt: no such search" in (error := capsys.readouterr().err)
    assert "there are: night" in error
    (tmp_path / "empty").mkdir()
    assert command.main(["empty", "--storage", str(tmp_path)]) == 2
    assert "empty: holds no search" in capsys.readouterr().err
