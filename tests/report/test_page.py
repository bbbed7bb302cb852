"""The report of a search: nothing in a folder can break or abuse it; its files, states and command."""

import contextlib
import csv
import html.parser
import json
import logging
import math
import re
from pathlib import Path

import markupsafe
import numpy as np
import pytest
import scipy.stats
import yaml

from tests.comparisons import BETTER, CLOSE, PLAIN, made, told
from tests.searches import FILE, again, make, random_points, write
from tunediff import analysis, compare, export, search_space
from tunediff.analysis import confirming_runs, evidence, sides
from tunediff.analysis.comparison import Comparison
from tunediff.api.compare import PairedComparison
from tunediff.report import __main__ as command
from tunediff.report import charts, context, page, reading, tables
from tunediff.report import text as results
from tunediff.tuning import confirming, sessions


def written(folder, **more):
    page.write_search(context.read(folder, **more), folder)
    return (folder / "report.html").read_text()


def words(text):
    """What a reader sees, without markup, in one line."""
    text = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.S)
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"</(td|th|p|li|dd|dt|h\d)>", " ", text))))
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


# ------------------------------------------------------------------------------------------- a folder of somebody else
EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' $\\frac{1$"


def test_the_page_loads_nothing_runs_no_script_and_shows_content_of_files_as_text(night, rendered):
    space = analysis.read(again(night)).space
    evil = {"drawn": {"loader.batch_size": 64, "optimizer.lr": 1e-3, "precision.amp": "none"}}
    place = write(night, space, 3, curve=((20.0, 4000, 0.5),), label=EVIL, config={"weighting.name": EVIL}, **evil)
    text = (place / "journal.jsonl").read_text()
    (place / "journal.jsonl").write_text(
        text.replace('"precision.amp": "none"}', f'"precision.amp": {json.dumps(EVIL)}}}')
    )
    write(night, space, 4, {"loader.batch_size": 32}, curve=(), status="error", reason=EVIL)
    with (night / "sessions.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"event": "begin", "time": 5.0, "monotonic_s": 5.0, "command": EVIL, "environment": {"cpu": EVIL}}
            )
            + "\n"
        )
        file.write(json.dumps({"event": "end", "time": 6.0, "monotonic_s": 6.0}) + "\n")
    (night / "experiment.yaml").write_text((night / "experiment.yaml").read_text() + f"# {EVIL}\n")
    (place / "samples.png").write_text(f"<svg onload='alert(4)'>{EVIL}</svg>")
    page = written(night)
    assert re.search(r"t0003 \(.*\) is (best|ahead)", words(page))
    assert markupsafe.escape(EVIL) in page, "it is shown as it is"
    assert "<script>alert" not in page
    assert not re.search(r"https?:|//[a-z]", re.sub(r'src="data:[^"]*"', "", page))
    elements = Elements(page).found
    assert not [attrs for tag, attrs in elements if tag == "script"]
    assert not [attrs for _, attrs in elements if any(name.startswith("on") for name in attrs)]
    assert not [tag for tag, _ in elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
    kinds = {attrs["src"].partition(";")[0] for tag, attrs in elements if tag == "img"}
    assert kinds == {"data:image/svg+xml", "data:image/png"}
    policy = next(attrs["content"] for tag, attrs in elements if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert all(attrs["href"].startswith("#") for tag, attrs in elements if tag == "a")


# --------------------------------------------------------------------------------------------------------------- states
def test_a_search_that_has_just_begun(tmp_path, plain):
    space = make(tmp_path / "night")
    write(tmp_path / "night", space, 0, curve=((5.0, 1000, 8.0),), status=None)
    place = write(tmp_path / "night", space, 1, {"precision.amp": "bf16"}, curve=(), status=None)
    (place / "journal.jsonl").write_text((place / "journal.jsonl").read_text()[:-30])  # half written
    (tmp_path / "night" / "sessions.jsonl").write_text('{"event": "begin", "time": 1000, "command": "x"}\n{"even')
    text = words(written(tmp_path / "night", now=1063.0))
    assert "running, or killed · 0 of 8 trials ended · 2 under way" in text
    assert "last update 1m00s earlier" in text, "its last line was written at 1003"


@pytest.mark.parametrize(("error", "not_begun"), [(KeyboardInterrupt, 0), (None, 5)])
def test_a_search_that_ended_has_left_out_trials_and_an_interrupted_one_has_not(night, error, not_begun):
    with pytest.raises(error) if error else contextlib.nullcontext(), sessions.recorded_session(night, "search"):
        if error:
            raise error
    assert reading.of_folder(night).search.not_begun == not_begun


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_writes_into_the_given_folder(night, plain, tmp_path, capsys):
    assert command.main(["night", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"report: {night / 'report.html'}"
    assert command.main(["night", "--storage", str(tmp_path), "--out", str(tmp_path / "other")]) == 0
    text = words((tmp_path / "other" / "report.html").read_text())
    assert f"tunediff report night --storage {tmp_path}" in text
    assert f"tunediff search {tmp_path}/night/experiment.yaml --name night-again" in text


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "experiment.yaml").unlink(), "night: no such search in "),
        (lambda folder: (folder / "experiment.yaml").write_text("search: ["), "is not valid YAML"),
        (lambda folder: (folder / "experiment.yaml").write_text("a: 1\n"), "a: no such key"),
        (lambda folder: (folder / "experiment.yaml").write_bytes(b"\xff\xfe"), "is not a text file in UTF-8"),
        (lambda folder: (folder / "experiment.yaml").write_text(yaml.safe_dump(FILE | {"objective": {"metric": [1]}})), "damaged"),
        (lambda folder: (folder / "baseline.yaml").unlink(), "baseline.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_damaged_folders_are_refused_in_a_line(night, tmp_path, capsys, break_it, message):
    break_it(night)
    assert command.main(["night", "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert not (night / "report.html").exists()


def test_unequal_workers_are_named_in_the_last_lines_and_at_each_trial(night):
    write(night, analysis.read(night).space, 3, {"loader.batch_size": 64}, threads=1)
    page = words(written(night))
    shown = "Workers were unequal (slow one, 2 threads; slow one, 1 thread)", "MiB threads", "threads of a worker 2; 1"
    assert [part for part in shown if part not in page] == []


# -------------------------------------------------------------- numbers of the page and of its tables, computed by hand
GRID = {"workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"precision.amp": ["none", "bf16"]}}
COMPILE = FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}}


def test_importance_separates_quality_from_throughput(tmp_path, caplog):
    conditional = {"low": 1.0, "high": 20.0, "log": True, "when": {"weighting.name": "min_snr"}}
    more = {"weighting.name": ["constant", "min_snr"], "weighting.gamma": conditional, "memory.channels_last": [False]}
    space, rng = make(tmp_path / "night", FILE | {"search": FILE["search"] | more}), np.random.default_rng(0)
    for number, point in enumerate([{}, *random_points(space, 59)]):
        rate = (400.0 if point.get("precision.amp") == "bf16" else 200.0) * math.exp(rng.normal(0, 0.02))
        gamma = point.get("weighting.gamma", 1.0)
        value = math.exp(math.log(point.get("optimizer.lr", 1e-3)) ** 2 / 10 + 0.5 * math.log(gamma))
        write(tmp_path / "night", space, number, point, curve=((20.0, 4000, value),), rate=rate)
    import optuna  # noqa: F401 - its first import sets the level

    caplog.set_level(logging.DEBUG, "optuna")
    about = context.read(tmp_path / "night")
    assert logging.getLogger("optuna").level == logging.DEBUG
    assert next(iter(about.quality.shares)) == "optimizer.lr"
    assert about.quality.shares["weighting.gamma"] > 0.02, "judged among the trials that have it"
    assert next(iter(about.throughput.shares)) == "precision.amp"
    assert about.throughput.shares["precision.amp"] > 0.9
    assert about.quality.unvaried == ["memory.channels_last"]


# ----------------------------------------------------------------------------------------------------- speed and cost
@pytest.mark.parametrize(
    ("charging", "status", "budget"),
    [("free", "ok", "--samples 4000"), ("charged", "ok", "--budget 20s"), ("free", "pruned", "--budget 20s")],
)
def test_a_compiled_trial_is_repeated_with_as_much_training(tmp_path, charging, status, budget):
    """`train` counts compiling as training; a search may not. A trial stopped early did not train for its budget."""
    space = make(tmp_path / "night", COMPILE | {"budget": FILE["budget"] | {"compile": charging}})
    drawn = space.candidates[0] | {"compile.mode": "default"}
    write(tmp_path / "night", space, 0, drawn=drawn, compile_s=18.0, status=status)
    results = analysis.read(tmp_path / "night")
    lines = export.provenance(results, results.trials[0], tmp_path / "best.yaml")
    assert any(f"best.yaml {budget} --storage" in line for line in lines)
    page = str(tables.reproduce(context.read(tmp_path / "night")))
    assert f"t0000.yaml {budget}" in page or status == "pruned"


SESSION = '{"event": "begin", "time": 0, "monotonic_s": 0}\n{"event": "end", "time": %d, "monotonic_s": %d}\n'


def test_totals_of_the_page_are_those_of_the_json(tmp_path, plain):
    """The search took 100 s and its confirming runs 75; each training takes 20 s of one device."""
    space = make(folder := tmp_path / "night", FILE | {"confirm": {"of": 1, "seeds": 3}})
    write(folder, space, 0)
    write(folder, space, 1, {"precision.amp": "bf16"}, curve=((20.0, 4000, 0.5),))
    place, runs = confirming.prepare(analysis.read(folder))
    for number, point in enumerate(runs.candidates):
        write(place, runs, number, drawn=point)
    for of, wall_s in ((folder, 100), (place, 75)):
        (of / "sessions.jsonl").write_text(SESSION % (wall_s, wall_s))
    found, trainings = reading.of_folder(folder), 2 + len(runs.candidates)
    assert (found.seconds["wall"], found.device_s) == (175, 20 * trainings)
    page = words(written(folder))
    assert "wall-clock of the search 2m55s of that, the confirming runs 1m15s 43 %" in page
    assert found.seconds["train"] + found.seconds["data_wait"] == 20 * trainings
    assert f"evaluation {found.seconds['evaluation']:.0f}s" in page


def test_a_file_of_the_user_is_confirmed_as_well(tmp_path):
    """Every folder has a copy of it: another path makes no other configuration."""
    (tmp_path / "mine.py").write_text(PLAIN)
    content = {"workload": str(tmp_path / "mine.py"), "budget": {"per_trial": "20s", "trials": 3},
               "search": {"width": [4, 8, 16]}, "confirm": {"of": 1, "seeds": 3}}  # fmt: skip
    make(folder := tmp_path / "night", content)
    space = search_space.load(search_space.of_search(folder))
    for number, (point, end) in enumerate((({}, 0.7), ({"width": 4}, 0.9), ({"width": 16}, 0.6))):
        write(folder, space, number, point, ((5.0, 1000, 0.5), (20.0, 4000, end)))
    place, runs = confirming.prepare(found := analysis.read(folder))
    for number, point in enumerate(runs.candidates):
        end = (0.6 if point["width"] == 4 else 0.7) + number / 1000
        write(place, runs, number, drawn=point, curve=((5.0, 1000, 0.5), (20.0, 4000, end)))
    known = evidence.read(analysis.read(folder))
    assert known.confirmation.is_conclusive
    assert (known.best.name, known.better(found.trials[1])) == ("t0000", False)
    assert confirming_runs.bias(known.confirmation, known.confirmation.leader)[0] == 0.9


# --------------------------------------------------------------------------------------------------------------- seeds
def test_curves_over_seeds_have_a_band_of_one_standard_deviation(tmp_path):
    """Three seeds of the baseline end at 2.0, 2.2 and 2.4: mean 2.2, standard deviation 0.2."""
    space = make(tmp_path / "night", GRID)
    for number, point in enumerate(space.candidates):
        value = 2.0 + 0.2 * (point["seed"] - space.baseline.seed)
        write(tmp_path / "night", space, number, drawn=point, curve=((5.0, 1000, 3 * value), (20.0, 4000, value)))
    figure = charts.of_candidates(evidence.read(analysis.read(tmp_path / "night")).compared, None, "s", "FD")
    bands = [area.get_paths()[0].vertices for axes in figure.axes for area in axes.collections]
    assert len(bands) == 2
    for band in bands:
        at_end = band[band[:, 0] == 20.0][:, 1]
        assert (at_end.min(), at_end.max()) == pytest.approx((2.0, 2.4))


# --------- comparisons of two configurations, beyond the golden files: exit codes, numbers computed apart, users' files
@pytest.fixture
def here(tmp_path, monkeypatch, at_tmp_path):
    """Where results and users' files lie."""
    monkeypatch.syspath_prepend(str(tmp_path))


UP = {"a": "digits_classifier", "b": ("digits_classifier", "loader.batch_size=64")}
CASES = {
    "falls, better": (BETTER, {}, "better", 0, "decided"),
    "falls, worse": ({"A": BETTER["B"], "B": BETTER["A"]}, {}, "worse", 11, "decided"),
    "falls, not": (CLOSE, {}, "no_difference", 10, "hopeless"),
    "falls below 0": ({"A": [0.1, -0.1, 0.0], "B": [-9.0, -9.1, -9.05]}, {}, "better", 0, "decided"),
    "rises, better": ({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, UP, "better", 0, "decided"),
    "rises, worse": ({"A": [0.9, 0.915, 0.888], "B": [0.8, 0.81, 0.79]}, UP, "worse", 11, "decided"),
    "equal": ({"A": [2.0, 2.2, 1.9], "B": [2.001, 2.202, 1.9015]}, {"within": 0.02}, "equivalent", 10, "equal"),
    "spent": ({"A": [2.0] * 4, "B": [1.7, 2.0, 1.6, 1.9]}, {"pairs": 4}, "no_difference", 10, "spent"),
    "failed": ({"A": [2.0], "B": [1.0]}, {"statuses": {("B", 1): "oom"}}, "failed", 12, "open"),
}  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("values", "options", "verdict", "code", "state"), CASES.values(), ids=CASES)
def test_the_verdict_and_its_exit_code(capsys, values, options, verdict, code, state):
    made(values, **options)
    printed, block = told(capsys, "--json")
    assert (printed, json.loads(block)["verdict"]) == (code, verdict)
    found = Comparison.read(Path("ray_results/x").absolute())
    assert (found.verdict, found.analysis.state, found.ended) == (verdict, state, True)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("options", "others"), [({}, ["B", "A"]), (UP, ["A", "B"])], ids=["falls", "rises"])
def test_nobody_is_ahead_in_a_pair_of_equal_values(options, others):
    folder = made({"A": [0.9, 0.9, 0.8], "B": [0.9, 0.8, 0.9]}, **options)
    assert [row[3] for row in results.pair_rows(Comparison.read(folder))] == ["ahead", "–", *others]


@pytest.mark.usefixtures("here")
def test_ratio_and_means_are_those_of_the_values(capsys):
    made(BETTER)
    said = json.loads(told(capsys, "--json")[1])
    (of_a, of_b), ratio = said["candidates"], scipy.stats.gmean(np.array(BETTER["B"]) / np.array(BETTER["A"]))
    assert (of_b["effect"]["kind"], of_b["effect"]["value"]) == ("ratio", pytest.approx(ratio))
    assert of_b["effect"]["low"] < ratio < of_b["effect"]["high"]
    a = np.array(BETTER["A"])
    assert (of_a["value"], of_a["sd"]) == (pytest.approx(a.mean()), pytest.approx(a.std(ddof=1)))
    assert said["seconds"]["train"] == 120
    table = rows(Path("ray_results/x/pairs.csv"))
    assert [(row["pair"], row["a_seed"], row["b_seed"], float(row["b_frechet"])) for row in table] == [
        ("1", "500", "500", 1.0), ("2", "501", "501", 1.08), ("3", "502", "502", 0.96),
    ]  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("most", [12, 100])
@pytest.mark.parametrize("rounds", [1, 2, 8, 9, 12])
def test_one_run_each_never_detects_more_than_several_pairs(most, rounds):
    """Student's t with the deviation of a single pair, as soon as that is known."""
    a, b = 2 + np.random.default_rng(1).normal(size=(2, rounds)) / 50
    found = Comparison.read(made({"A": list(a), "B": list(b)}, pairs=most))
    assert found.noise_is_rough == (rounds < 9)
    single = sides.one_run_detects(found)
    assert (single is None) == found.noise_is_rough or most == 100
    if single is not None:
        assert found.analysis.differences[0].resolution < single
        sd = np.log(b / a).std(ddof=1)
        assert single == pytest.approx(math.expm1(scipy.stats.t.ppf(0.975, rounds - 1) * sd))
        assert reading.of_sides(found).sides.one_run_each_tells == single


@pytest.mark.usefixtures("here")
def test_an_interval_inside_what_does_not_matter_is_equivalence(capsys):
    a = 2 + np.random.default_rng(0).normal(size=12) / 1000
    made({"A": list(a), "B": list(a[::-1])}, within=0.02, level=0.01, one_sided=True)
    assert (told(capsys)[0], told(capsys, "--fail-on", "worse")[0]) == (10, 0)
    said = json.loads(told(capsys, "--json")[1])
    rule, effect = said["rule"], said["candidates"][1]["effect"]
    assert (said["verdict"], said["state"], rule["level"], rule["within"]) == ("equivalent", "equal", 0.01, 0.02)
    assert rule["one_sided"]
    assert -0.02 < effect["low"] - 1 < 0 < effect["high"] - 1 < 0.02


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_open_comparison_has_no_verdict(count):
    """Neither in Python nor in the JSON that `result` of the MCP server returns, nor on the page."""
    folder = made({"A": [2.0, 2.4, 1.9][:count], "B": [1.7, 1.8, 1.85][:count]})
    comparison = PairedComparison(folder)
    assert (comparison.verdict.verdict, comparison.json()["verdict"], comparison.json()["state"]) == (
        "open",
        "open",
        "open",
    )
    assert "significant" not in words(comparison.report().read_text())


@pytest.mark.usefixtures("here")
def test_a_comment_is_written_or_refused_first(capsys):
    made(BETTER)
    assert told(capsys, "--comment", "comment.md")[0] == 0
    assert Path("comment.md").read_text().startswith("**tunediff: better.** B (digits loader.batch_size=64) is better")
    Path("taken").write_text("")
    assert compare.main(["--resume", "x", "--comment", "taken/comment.md"]) == 2
    assert capsys.readouterr().err.startswith("error: --comment: taken/comment.md cannot be written")
