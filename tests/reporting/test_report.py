"""The report of a search: its numbers are those of the journals, and nothing in a folder can break or abuse it."""

import base64
import csv
import hashlib
import html.parser
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy import stats
from tunediff.reporting.report_figures import Chart
from tunediff.reporting.report_html import SCRIPT
from tunediff.reporting.report_numbers import ABOVE, TOO_FEW, WITHIN, Why
from tunediff.reporting.report_result import explain

from tunediff import config as cfg
from tunediff import report as command
from tunediff import space
from tunediff.config import ConfigError
from tunediff.reporting import report, report_numbers, report_read, report_subject
from tunediff.tuning import confirming, experiment

ROOT = Path(__file__).parent.parent.parent
FILE = {
    "workload": "digits",
    "budget": {"per_trial": "20s", "trials": 8},
    "search": {
        "loader.batch_size": [32, 64, 128, 256],
        "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "precision.amp": ["none", "bf16"],
    },
}
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PARTS = ("data_wait", "host_to_device", "sampler", "forward", "backward", "optimizer", "ema", "other")


# -------------------------------------------------------------------------------------------------- hand-made searches
def make(folder, content=FILE):
    """The folder of a search that has no trial yet."""
    wanted = space.parse(content, "night.yaml")
    experiment.create(folder, wanted, content)
    return wanted


def write(folder, wanted, number, point=None, curve=((5.0, 1000, 4.0), (20.0, 4000, 2.0)), *, status="ok", **more):
    """One journal, as text: `curve` holds (train_s, images, frechet); status None leaves it under way."""
    drawn = wanted.expand(point or {}, "test")
    drawn = more.pop("drawn", drawn)
    config, name = wanted.config(drawn), f"t{number:04d}"
    seconds = {"setup": 1.0, "compile": more.get("compile_s", 0.0), "data_wait": 0.5, "train": 19.5, "evaluation": 2.0}
    lines = [
        {
            "event": "start", "time": 1000.0 + number, "name": name, "number": number, "drawn": drawn, "budget_s": 20.0,
            "config": cfg.flat(config) | more.get("config", {}), "fingerprint": cfg.fingerprint(config),
            "environment": {"cpu": "slow one", "cpu_cores": 2, "versions": {"torch": "2.15"}},
        },
        {"event": "worker", "time": 1001.0 + number, "device": "cpu", "threads": 2, "images": 1797},
    ]  # fmt: skip
    for index, (train_s, images, frechet) in enumerate(curve, 1):
        rate, size = more.get("rate", images / train_s), config.loader.batch_size
        step = {f"step_{part}_s": size / rate / len(PARTS) for part in PARTS}
        lines.append(
            {
                "event": "point", "time": 1002.0 + number + index, "index": index, "train_s": train_s, "images": images,
                "images_per_s": rate, "steps": images // size, "step_s": size / rate, **step,
                "peak_memory_mib": 500.0 + number, "label": more.get("label", "FD (classifier)"),
                "effective_weight": [1.0, 2.0], "seconds": seconds,
            } | ({"frechet": frechet} if frechet is not None else {})
        )  # fmt: skip
    if status is not None:
        lines.append({"event": "end", "time": 1030.0 + number, "status": status, "reason": more.get("reason", ""),
                      "seconds": seconds})  # fmt: skip
    place = folder / "trials" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def random_points(wanted, count, seed=0):
    """As a search without knowledge draws them."""
    rng, points = np.random.default_rng(seed), []
    for _ in range(count):
        point = {}
        for dimension in wanted.dimensions:
            if not dimension.active(point):
                continue
            if dimension.choices is not None:
                point[dimension.name] = dimension.choices[rng.integers(len(dimension.choices))]
            else:
                low, high = (math.log(end) if dimension.log else end for end in (dimension.low, dimension.high))
                value = rng.uniform(low, high)
                point[dimension.name] = math.exp(value) if dimension.log else value
        points.append(point)
    return points


@pytest.fixture
def plain(monkeypatch):
    """Figures cost seconds: where only words matter they are a dot."""

    def draw(build):
        return None if build() is None else Chart(b"<svg></svg>", DOT)

    monkeypatch.setattr(report_subject, "draw", draw)


@pytest.fixture
def night(tmp_path):
    """The baseline and a winner that is twice as fast, both with images."""
    folder = tmp_path / "night"
    wanted = make(folder)
    for number, point, curve in (
        (0, {}, ((5.0, 1000, 8.0), (10.0, 2000, 4.0), (20.0, 4000, 2.0))),
        (1, {"precision.amp": "bf16"}, ((5.0, 2000, 4.0), (10.0, 4000, 1.6), (20.0, 8000, 0.8))),
        (2, {"loader.batch_size": 256}, ((5.0, 1200, 6.0), (10.0, 2400, 5.0), (20.0, 4800, 3.0))),
    ):
        place = write(folder, wanted, number, point, curve)
        Image.new("L", (40, 40), 90 * number).save(place / "samples.png")
    (folder / "sessions.jsonl").write_text(
        json.dumps({"event": "begin", "time": 990.0, "command": "/x/tunediff/search.py digits --name night"}) + "\n"
        + json.dumps({"event": "end", "time": 1090.0}) + "\n"
    )  # fmt: skip
    return folder


def written(folder, **more):
    subject = report.read(folder, **more)
    report.write_all(subject, folder)
    return (folder / "report.html").read_text()


def words(page):
    """What a reader sees, without markup, in one line."""
    page = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S)
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"</(td|th|p|li|dd|dt|h\d)>", " ", page))))
    return text.replace("\N{NO-BREAK SPACE}", " ")


class Elements(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def rows(path):
    return list(csv.DictReader(path.open()))


# ------------------------------------------------------------------------------------------------------------ the page
def test_the_page_says_what_won_by_how_much_and_why(night):
    page = written(night)
    text = words(page)
    # 2 → 0.8; it is at 2 where 4 → 1.6 between 5 and 10 s comes by: after 5 + 5·(4 − 2)/(4 − 1.6) s
    crossing = 5 + 5 * 2.0 / 2.4
    assert (
        "t0001 is best: after 20 training seconds its FD (classifier) is 0.8, 60 % below the 2 of the baseline" in text
    )
    assert f"as good as the baseline at its end after {crossing:.3g} s: {20 / crossing:.3g} times faster" in text
    assert "One run each" in text
    # At 4,000 images it has 1.6 against 2: log(1.6/2)/log(0.8/2) = 24 % is learning, the rest is twice the images.
    assert "24 % is learning more from each image (1.6 instead of 2 at 4,000 images)" in text
    assert "76 % is speed (2 times as many images in the same seconds); one run each." in text
    assert "precision.amp none bf16" in text
    assert "python -m tunediff.search digits --name night" in text
    assert "python -m tunediff.export night --trial t0001" in text
    assert "slow one" in text
    assert "No trial failed." in text
    assert "finished" not in text, "3 of 8 trials"
    assert "interrupted · 3 of 8 trials ended" in text


def test_the_same_data_lie_beside_it(night):
    page = written(night)
    files = {path.name for path in (night / "report").iterdir()}
    assert files >= {
        "curves.csv", "curves.png", "effects.csv", "effects.png", "parallel.png", "step.csv", "step.png", "trials.csv",
        "trade_offs.csv", "trade_offs.png", "why.csv", "why_curves.png", "won.csv", "baseline_samples.png",
        "winner_samples.png", "seconds.csv",
    }  # fmt: skip
    for name in files:
        content = (night / "report" / name).read_bytes()
        assert content.startswith(b"\x89PNG") if name.endswith(".png") else b"," in content
        assert f'href="report/{name}"' in page
    assert [row["frechet"] for row in rows(night / "report" / "won.csv")] == ["2.0", "0.8"]
    assert len(rows(night / "report" / "curves.csv")) == 9
    assert "effective_weight" not in (night / "report" / "curves.csv").read_text(), "lists have no place in a table"
    why = {row["quantity"]: row for row in rows(night / "report" / "why.csv")}
    assert (why["images/s"]["baseline"], why["images/s"]["winner"]) == ("200.0", "400.0")
    step = rows(night / "report" / "step.csv")
    assert sum(float(row["baseline_s_per_1000_images"]) for row in step) == pytest.approx(1000 / 200)
    assert sum(float(row["winner_s_per_1000_images"]) for row in step) == pytest.approx(1000 / 400)


def test_the_page_loads_nothing_and_runs_one_script(night):
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


def test_what_a_file_holds_is_text_and_nothing_else(night):
    wanted = report_read.read(night)[0].space
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
    assert "t0003 is best" in words(page)
    assert "<script>alert" not in page
    elements = Elements(page).found
    assert sum(tag == "script" for tag, _ in elements) == 1
    assert not [attrs for _, attrs in elements if any(name.startswith("on") for name in attrs)]
    assert all(attrs["src"].startswith("data:image/") for tag, attrs in elements if tag == "img")
    assert html.escape(EVIL) in page, "it is shown as it is"


def test_a_spreadsheet_sees_no_formula(night, plain):
    wanted = report_read.read(night)[0].space
    write(night, wanted, 3, {"loader.batch_size": 32}, curve=(), status="error", reason="=HYPERLINK(A1)")
    written(night)
    assert rows(night / "report" / "failures.csv")[0]["reason"] == "'=HYPERLINK(A1)"
    assert rows(night / "report" / "trials.csv")[3]["reason"] == "'=HYPERLINK(A1)"


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line | {"name": "../../elsewhere"},
        lambda line: {key: value for key, value in line.items() if key != "config"},
        lambda line: line | {"config": [1, 2]},
        lambda line: line | {"config": line["config"] | {"seed": "none"}},
        lambda line: line | {"drawn": {"loader.batch_size": {"deep": 1}}},
        lambda line: line | {"time": "yesterday"},
        lambda line: line | {"number": None},
    ],
)
def test_journals_that_are_not_understood_are_named_and_left_out(night, change):
    path = night / "trials" / "t0001" / "journal.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(change(json.loads(first))), *rest]) + "\n")
    found, unreadable = report_read.read(night)
    assert [trial.name for trial in found.trials] == ["t0000", "t0002"]
    assert list(unreadable) == ["t0001"]


def test_damaged_points_are_no_values(night, plain):
    wanted = report_read.read(night)[0].space
    place = write(night, wanted, 3, {"loader.batch_size": 32}, curve=((5.0, 10, 3.0), (20.0, 40, 1.0)))
    text = (place / "journal.jsonl").read_text()
    text = text.replace('"frechet": 1.0', '"frechet": "low"').replace('"images_per_s": 2.0', '"images_per_s": NaN')
    (place / "journal.jsonl").write_text(text + "\n[1, 2]\nnot json\n\xff\n" + '{"event": "point"')
    (night / "trials" / "t0004").mkdir()
    (night / "trials" / "t0005").mkdir()
    (night / "trials" / "t0005" / "journal.jsonl").write_bytes(b"\x00\xff\n{}\n{}")
    text = words(written(night))
    assert "t0001 is best" in text
    assert "1 journal was not understood and left out" in text
    assert "t0005" in text


# ---------------------------------------------------------------------------------------------------- unfinished states
def test_a_search_without_trials_and_one_that_has_just_begun(tmp_path, plain):
    wanted = make(tmp_path / "night")
    assert "No trial has begun yet." in words(written(tmp_path / "night"))
    write(tmp_path / "night", wanted, 0, curve=((5.0, 1000, 8.0),), status=None)
    place = write(tmp_path / "night", wanted, 1, {"precision.amp": "bf16"}, curve=(), status=None)
    (place / "journal.jsonl").write_text((place / "journal.jsonl").read_text()[:-30])  # half written
    (tmp_path / "night" / "sessions.jsonl").write_text('{"event": "begin", "time": 1000, "command": "x"}\n{"even')
    text = words(written(tmp_path / "night", now=1063.0))
    assert "No trial has a result yet: 2 trials are under way, t0000 farthest, at 5 of 20 s." in text
    assert "running, or killed · 0 of 8 trials ended, 2 under way" in text
    assert "last news 1 min before" in text, "its last line was written at 1003"


def test_only_failures(tmp_path, plain):
    wanted = make(tmp_path / "night")
    for number, size in enumerate((128, 64, 256)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, curve=(), status="oom",
              reason=f"CUDA out of memory: {size} MiB")  # fmt: skip
    text = words(written(tmp_path / "night"))
    assert "Nothing won: none of the 3 trials that ended has a result" in text
    assert "3 of 3 trials that ended failed" in text
    (row,) = rows(tmp_path / "night" / "report" / "failures.csv")
    assert (row["status"], row["trials"], row["names"]) == ("oom", "3", "t0000 t0001 t0002"), "numbers do not matter"


def test_one_trial(tmp_path):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0)
    text = words(written(tmp_path / "night"))
    assert "The baseline (t0000) is the only trial with a result so far: FD (classifier) 2." in text
    assert "No images are kept of baseline (t0000)." in text


def test_without_its_baseline_the_best_is_compared_with_nothing(tmp_path, plain):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, curve=(), status="nan", reason="the loss is not finite")
    write(tmp_path / "night", wanted, 1, {"precision.amp": "bf16"})
    text = words(written(tmp_path / "night"))
    assert "its FD (classifier) is 2; the baseline has no result to compare it with." in text
    assert "1 of 2 trials that ended failed" in text


def test_the_baseline_may_win(tmp_path, plain):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0)
    for number, size in ((1, 64), (2, 256)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, curve=((20.0, 4000, 3.0),))
    text = words(written(tmp_path / "night"))
    assert "The baseline (t0000) itself is best: none of 2 other trials beats its FD (classifier) of 2." in text
    assert "Why it" not in text


# --------------------------------------------------------------------------------------------------- with several runs
CONFIRM = FILE | {"confirm": {"of": 1, "seeds": 3}}


@pytest.mark.parametrize(
    ("worth", "ended", "said"),
    [
        (0.5, 6, "precision.amp=bf16 wins: better than the baseline by more than the noise on 3 new seeds."),
        (1.0, 6, "No finalist is better than the baseline by more than the noise on 3 new seeds"),
        (0.5, 5, "The confirming runs are not complete: 5 of 6 have ended."),
    ],
)
def test_confirming_runs_lead(tmp_path, plain, worth, ended, said):
    folder = tmp_path / "night"
    wanted = make(folder, CONFIRM)
    write(folder, wanted, 0)
    write(folder, wanted, 1, {"precision.amp": "bf16"}, curve=((20.0, 4000, 0.5),))
    place, again = confirming.prepare(report_read.read(folder)[0])
    for number, point in enumerate(again.points[:ended]):
        mine = point["precision.amp"] == "bf16"
        value = 2.0 * (worth if mine else 1.0) * (1 + 0.02 * ((number * 7) % 5 - 2))
        write(place, again, number, drawn=point, curve=((10.0, 2000, 2 * value), (20.0, 4000, value)))
    page = written(folder)
    text = words(page[page.index("<main>") :])
    assert text.index(said) < text.index("FD (classifier) against training seconds")
    assert "On new seeds" in text
    verdicts = {row["configuration"]: row["verdict"] for row in rows(folder / "report" / "won.csv")}
    if ended == 6:
        assert verdicts["precision.amp=bf16"] == ("better" if worth < 1 else "no difference larger than the noise")
        assert ("Why it wins" in text) == (worth < 1)
        assert verdicts["precision.amp=bf16"] in text
        assert "One run each" not in text


def test_several_seeds_are_compared(tmp_path):
    content = {
        "workload": "digits",
        "budget": {"per_trial": "20s"},
        "seeds": 3,
        "grid": {"precision.amp": ["none", "bf16"]},
    }
    wanted = make(tmp_path / "night", content)
    for number, point in enumerate(wanted.points):
        value = (1.0 if point["precision.amp"] == "bf16" else 2.0) * (1 + 0.02 * number)
        write(tmp_path / "night", wanted, number, drawn=point, curve=((5.0, 1000, 3 * value), (20.0, 4000, value)))
    text = words(written(tmp_path / "night"))
    assert "precision.amp=bf16 has the best mean over 3 seeds: FD (classifier) 1.06 ± 0.04" in text
    assert "That is larger than the noise, all comparisons counted." in text
    assert "Some differences from the baseline are larger than the noise (3 seeds, 1 comparison" in text
    assert (tmp_path / "night" / "report" / "comparison.png").exists()


@pytest.mark.parametrize("form", ["grid", "ladder"])
def test_studies_of_throughput_have_no_frechet_distance(tmp_path, form):
    points = {"grid": {"precision.amp": ["none", "bf16"], "loader.batch_size": [64, 128]},
              "ladder": {"bf16": {"precision.amp": "bf16"}, "small": {"loader.batch_size": 64}}}  # fmt: skip
    content = {
        "workload": "digits", "objective": "images_per_s", "budget": {"per_trial": "5s"}, form: points[form],
        "study": {"title": "What is $fast$", "columns": ["configuration", "images_per_s"],
                  "figure": {"kind": "bars", "y": "images_per_s"}},
    }  # fmt: skip
    wanted = make(tmp_path / "fast", content)
    for number, point in enumerate(wanted.points):
        rate = 100.0 * (2 if point["precision.amp"] == "bf16" else 1) + number
        write(tmp_path / "fast", wanted, number, drawn=point, curve=((5.0, 500, None),), rate=rate)
    page = written(tmp_path / "fast")
    text = words(page)
    assert "FD" not in text
    assert "FID" not in text
    assert "Fréchet" not in text
    assert re.search(r"t000\d is best: 20\d images/s, 2.0\d times the 100 of the baseline", text)
    assert "What is $fast$" in text
    assert "Images" not in re.findall(r"<h2>(.*?)</h2>", page)
    assert ("What each knob does" in text) == (form == "grid"), "a ladder changes several knobs at once"
    assert (tmp_path / "fast" / "report" / "study.png").exists()


@pytest.mark.parametrize("label", ["FID", "FD (classifier)"])
def test_the_distance_is_called_what_its_journals_call_it(night, plain, label):
    for path in night.glob("trials/*/journal.jsonl"):
        path.write_text(path.read_text().replace("FD (classifier)", label))
    text = words(written(night))
    assert f"its {label} is 0.8" in text
    assert ("FID" in text) == (label == "FID")


# ----------------------------------------------------------------------------------------------------------------- why
def curve_of(points):
    return [{"train_s": s, "images": n, "frechet": f, "index": i} for i, (s, n, f) in enumerate(points, 1)]


def why_of(baseline, winner):
    from tunediff.record import TrialRecord

    trials = [TrialRecord(f"t000{i}", i, {}, {}, "", points=curve_of(c)) for i, c in enumerate((baseline, winner))]
    return report_numbers.why(*trials)


def test_speed_and_learning_add_up():
    told = why_of([(5, 100, 8.0), (10, 200, 4.0)], [(5, 150, 4.0), (10, 300, 1.0)])
    assert (told.seconds, told.equal_images, told.images) == (10, 200, (200, 300))
    # Straight in images, logarithmic in the distance: a third of the way from 4 to 1.
    assert told.at_images == pytest.approx((4.0, 4.0 * (1 / 4) ** (1 / 3)))
    assert told.learning + told.throughput == pytest.approx(told.total) == pytest.approx(math.log(1 / 4))
    assert told.learning / told.total == pytest.approx(1 / 3)


def test_a_slower_winner_is_read_off_the_baselines_curve():
    told = why_of([(5, 100, 8.0), (10, 200, 2.0)], [(5, 75, 4.0), (10, 150, 1.0)])
    assert told.at_images == pytest.approx((4.0, 1.0))
    assert told.throughput > 0 > told.learning


def test_runs_of_different_length_are_compared_where_both_are_known():
    told = why_of([(5, 100, 8.0), (10, 200, 4.0)], [(5, 100, 4.0)])
    assert (told.seconds, told.at_seconds, told.images) == (5, pytest.approx((8.0, 4.0)), (100, 100))
    assert why_of([(5, 100, 8.0)], []) is None
    assert why_of([(5, 100, 0.0)], [(5, 100, 1.0)]) is None, "an exact zero has no logarithm"
    assert why_of([(10, 200, 4.0)], [(5, 100, 4.0)]) is None, "the baseline was not evaluated so early"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Why(20, (2.0, 1.0), (100, 200), 100, (2.0, 1.5)), "Of the gain, FD 1 instead of 2 at 20 training seconds, 42 % is"),
        (Why(20, (2.0, 1.0), (200, 100), 100, (2.5, 1.0)), "All of the gain, FD 1 instead of 2 at 20 training seconds, is learning"),
        (Why(20, (2.0, 1.0), (100, 400), 100, (2.0, 2.2)), "is speed (4 times as many images in the same seconds); from each"),
        (Why(20, (2.0, 1.0), (100, 100), 100, (2.0, 1.0)), "Practically all of the gain"),
        (Why(20, (2.0, 1.0), (100, 300), 100, (2.0, 2.0)), "from each image both learn as much"),
        (Why(20, (1.0, 2.0), (100, 100), 100, (1.0, 2.0)), "No gain: FD 2 instead of 1"),
        (Why(20, (2.0, 1.0), (100, 900), 100, None), "how much of that is speed cannot be told, for at 100 images"),
    ],
)  # fmt: skip
def test_the_sentence_says_which_of_the_two_it_is(told, said):
    sentence = explain(told, "FD", "one run each").replace("\N{NO-BREAK SPACE}", " ")
    assert said in sentence
    assert sentence.endswith("; one run each.")
    assert sentence.count(".") == 1 + len(re.findall(r"\d\.\d", sentence)), "one sentence"


# --------------------------------------------------------------------------------------------------------------- knobs
def test_effects_are_means_with_their_noise(tmp_path):
    wanted = make(tmp_path / "night")
    values = {"none": (2.0, 2.2, 1.9, 2.1), "bf16": (1.0, 1.2, 0.9, 1.1)}
    trials = [(amp, value) for amp in values for value in values[amp]]
    for number, (amp, value) in enumerate(trials):
        point = {"precision.amp": amp, "optimizer.lr": 1e-3 + 1e-4 * (number % 4)}
        write(tmp_path / "night", wanted, number, point, curve=((20.0, 4000, value),))
    write(tmp_path / "night", wanted, 8, {"precision.amp": "bf16", "optimizer.lr": 2e-3}, curve=(), status="nan")
    found = {effect.knob: effect for effect in report_numbers.effects(report_read.read(tmp_path / "night")[0])}
    amp = found["precision.amp"]
    assert [(level.label, level.objective.trials, level.failed) for level in amp.levels] == [
        ("none", 4, 0),
        ("bf16", 4, 1),
    ]
    for level in amp.levels:
        logs = np.log(values[level.label])
        mean, error = logs.mean(), logs.std(ddof=1) / 2
        assert (level.objective.mean, level.objective.low) == pytest.approx((math.exp(mean), math.exp(mean - error)))
    assert amp.p == pytest.approx(stats.f_oneway(*(np.log(v) for v in values.values())).pvalue)
    assert (amp.verdict, found["optimizer.lr"].verdict) == (ABOVE, WITHIN)
    assert amp.p_holm == pytest.approx(2 * amp.p), "two knobs were tested"
    assert amp.spread == pytest.approx(math.exp(np.log(values["none"]).mean() - np.log(values["bf16"]).mean()))
    assert "loader.batch_size" not in found, "it had one value"


def test_a_range_is_cut_into_parts_of_equal_numbers(tmp_path):
    wanted = make(tmp_path / "night")
    for number, lr in enumerate(np.geomspace(1e-4, 1e-2, 20)):
        write(tmp_path / "night", wanted, number, {"optimizer.lr": float(lr)}, curve=((20.0, 4000, float(lr)),))
    (effect,) = report_numbers.effects(report_read.read(tmp_path / "night")[0])
    assert [len(level.members) for level in effect.levels] == [4] * 5
    assert effect.levels[0].label.startswith("1.00e-04 … ")
    assert effect.levels[-1].label.endswith("0.01")
    assert effect.verdict == ABOVE


def test_few_trials_are_not_judged(night):
    found = report_numbers.effects(report_read.read(night)[0])
    assert {effect.verdict for effect in found} == {TOO_FEW}
    assert report_numbers.importance(report_read.read(night)[0], report_numbers.rate) is None


def test_importance_tells_quality_from_throughput(tmp_path, plain):
    content = FILE | {
        "search": FILE["search"] | {
            "weighting.name": ["constant", "min_snr"],
            "weighting.gamma": {"low": 1.0, "high": 20.0, "log": True, "when": {"weighting.name": "min_snr"}},
            "model.channels_last": [False],
        }
    }  # fmt: skip
    wanted = make(tmp_path / "night", content)
    rng = np.random.default_rng(0)
    for number, point in enumerate([{}, *random_points(wanted, 59)]):
        rate = (400.0 if point.get("precision.amp") == "bf16" else 200.0) * math.exp(rng.normal(0, 0.02))
        gamma = point.get("weighting.gamma", 1.0)
        value = math.exp(math.log(point.get("optimizer.lr", 1e-3)) ** 2 / 10 + 0.5 * math.log(gamma))
        write(tmp_path / "night", wanted, number, point, curve=((20.0, 4000, value),), rate=rate)
    subject = report.read(tmp_path / "night")
    assert next(iter(subject.quality.shares)) == "optimizer.lr"
    assert subject.quality.shares["weighting.gamma"] > 0.02, "judged among the trials that have it"
    assert next(iter(subject.throughput.shares)) == "precision.amp"
    assert subject.throughput.shares["precision.amp"] > 0.9
    assert subject.throughput.fit > 0.9
    assert subject.quality.unvaried == ["model.channels_last"]
    text = words(written(tmp_path / "night"))
    assert "Differences in images/s come most from precision.amp (" in text
    assert rows(tmp_path / "night" / "report" / "importance.csv")[0]["knob"] == "optimizer.lr"


def test_the_front_is_what_none_beats():
    rng = np.random.default_rng(1)
    points = [tuple(map(float, point)) for point in rng.integers(0, 12, (80, 2))]
    brute = [not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points) for p in points]
    assert report_numbers.front(points) == brute
    assert report_numbers.front([]) == []


def test_a_quantity_that_no_trial_has_leaves_its_front_empty(tmp_path, plain):
    wanted = make(tmp_path / "night")
    for number, value in enumerate((4.0, 2.0)):
        journal = write(tmp_path / "night", wanted, number, curve=((20.0, 4000, value),)) / "journal.jsonl"
        journal.write_text(re.sub(r'"peak_memory_mib": [0-9.]+, ', "", journal.read_text()))
    assert not report_numbers.trade_offs(report_read.read(tmp_path / "night")[0])["on_front_peak_memory_mib"].any()
    assert "What won" in written(tmp_path / "night")


def test_a_second_objective_has_its_front(tmp_path):
    """More workers are better and cost more: both ends are on the front, what is worse and dearer is not."""
    content = FILE | {"objective": ["frechet", "worker_s"]}
    wanted = make(tmp_path / "night", content)
    for number, (point, value, cost) in enumerate(
        (({}, 4.0, 20.0), ({"precision.amp": "bf16"}, 2.0, 40.0), ({"loader.batch_size": 256}, 3.0, 60.0))
    ):
        place = write(tmp_path / "night", wanted, number, point, ((20.0, 4000, value),))
        journal = place / "journal.jsonl"
        journal.write_text(journal.read_text().replace('"train_s": 20.0', f'"train_s": 20.0, "worker_s": {cost}'))
    frame = report_numbers.trade_offs(report_read.read(tmp_path / "night")[0])
    assert list(frame["trial"][frame["on_front_worker_s"]]) == ["t0001", "t0000"]
    assert "2 in FD (classifier) and training seconds × workers" in written(tmp_path / "night")


def test_compiling_pays_from_where_it_has_caught_up(tmp_path):
    content = FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}}
    wanted = make(tmp_path / "night", content)
    write(tmp_path / "night", wanted, 0, rate=200.0)
    write(tmp_path / "night", wanted, 1, {"compile.mode": "default"}, rate=300.0, compile_s=6.0)
    write(
        tmp_path / "night", wanted, 2, {"compile.mode": "default", "loader.batch_size": 64}, rate=350.0, compile_s=7.0
    )
    frame = report_numbers.compiled(report_read.read(tmp_path / "night")[0]).set_index("trial")
    # 200 t = 300 (t − 6) at t = 18, after 3,600 images
    assert frame.loc["t0001", "break_even_s"] == pytest.approx(18)
    assert frame.loc["t0001", "images_to_break_even"] == pytest.approx(3600)
    assert frame.loc["t0001", "uncompiled"] == "t0000"
    assert math.isnan(frame.loc["t0002", "break_even_s"])
    text = words(written(tmp_path / "night"))
    assert (
        "1 configuration ran with and without torch.compile: within the budget it pays in 1 of them; compiling took 6 to"
        in text
    )
    assert (tmp_path / "night" / "report" / "compile.png").exists()


def test_without_compiled_trials_there_is_no_word_about_it(night, plain):
    assert "torch.compile" not in words(written(night))


def test_values_that_fail_are_named(tmp_path, plain):
    wanted = make(tmp_path / "night")
    for number, (size, bad) in enumerate([(128, 0), (32, 0), (64, 0), (64, 0), (256, 1), (256, 1), (256, 0)]):
        point = {"loader.batch_size": size, "optimizer.lr": 1e-3 + 1e-5 * number}
        write(tmp_path / "night", wanted, number, point if number else {}, status="oom" if bad else "ok",
              curve=() if bad else ((20.0, 4000, 1.0 + number),), reason="out of memory" * bad)  # fmt: skip
    assert "2 of 3 with loader.batch_size = 256" in words(written(tmp_path / "night"))


# --------------------------------------------------------------------------------------------------------- many trials
def test_a_thousand_trials(tmp_path):
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
    again = space.load(night / "search.yaml")
    assert (again.baseline, again.dimensions, again.seed) == ((found := report_read.read(night)[0].space).baseline,
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


# -------------------------------------------------------------------------------------------------------- tables alone
def test_a_folder_that_kept_only_its_tables(tmp_path, plain):
    """The runs that the documentation speaks of."""
    folder = ROOT / "ray_results" / "reference" / "digits-cpu"
    best = min((row for row in rows(folder / "trials.csv") if row["status"] == "ok"), key=lambda r: float(r["frechet"]))
    subject = report.read(folder)
    assert (subject.stars.baseline.name, subject.stars.winner.name) == ("t0000", best["trial"])
    report.write_all(subject, tmp_path)
    text = words((tmp_path / "report.html").read_text())
    assert f"{best['trial']} is best: after 20 training seconds its FD (classifier) is" in text
    assert (tmp_path / "report" / "winner_samples.png").exists()


def test_damaged_tables_are_refused(tmp_path):
    make(tmp_path / "night")
    (tmp_path / "night" / "trials").rmdir()
    (tmp_path / "night" / "trials.csv").write_text("trial,status\nxyz,ok\n")
    with pytest.raises(ConfigError, match=r"trials\.csv: is damaged"):
        report.read(tmp_path / "night")
