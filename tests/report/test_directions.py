"""A workload of any objective, direction and unit is spoken of correctly: here a ranker of texts by its accuracy."""

import math
import re

import numpy as np
import pytest
from PIL import Image

from tests.report.pages import rows, words, written
from tests.report.test_console import shown
from tests.searches import FILE, again, make, write
from tunediff import analysis
from tunediff.analysis import confirmation, evidence
from tunediff.analysis.comparison import compare
from tunediff.analysis.statistics import BETTER, WORSE
from tunediff.config import workload
from tunediff.core.journal import Journal
from tunediff.report import console, live_table, outputs, study_table, summary, verdicts
from tunediff.tuning import confirming

RANKER = {
    "workload": "ranker",
    "budget": {"per_trial": "20s", "trials": 8},
    "search": {"loader.batch_size": [32, 64, 128, 256], "precision.amp": ["none", "bf16"]},
}
SEEDS = {"workload": "ranker", "budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"precision.amp": ["none", "bf16"]}}
OURS = re.compile(r"image|FD|FID|Fr[ée]chet|DDIM|EMA|noise in all trials|lower is better|below the baseline", re.I)


@pytest.fixture(autouse=True)
def shipped(monkeypatch):
    monkeypatch.setitem(workload.SHIPPED, "ranker", "tests.ranker")


def ranked(folder, shift=0.0):
    """The baseline; one that is twice as fast and as good per token; one that has learned nothing; one that failed."""
    wanted = make(folder, RANKER)
    for number, (point, curve) in enumerate((
        ({}, ((5.0, 1000, 0.2), (10.0, 2000, 0.5), (20.0, 4000, 0.8))),
        ({"precision.amp": "bf16"}, ((5.0, 2000, 0.5), (10.0, 4000, 0.8), (20.0, 8000, 0.9))),
        ({"loader.batch_size": 256}, ((5.0, 1200, 0.0), (10.0, 2400, 0.0), (20.0, 4800, 0.0))),
    )):  # fmt: skip
        write(folder, wanted, number, point, [(s, n, value + shift) for s, n, value in curve])
    write(folder, wanted, 3, {"loader.batch_size": 32}, (), status="oom", reason="no memory left")
    return wanted


# ------------------------------------------------------------------------------------------------------------- console
def test_lines_and_table_of_the_console(tmp_path, capsys):
    wanted = ranked(tmp_path / "night")
    said = console.Console(tmp_path / "night", wanted)
    for name in ("t0000", "t0001", "t0002"):
        said.listen("point", name, {"index": 2, "train_s": 10.0, "accuracy": 0.8, "samples_per_s": 400.0})
        said.listen("end", name, {})
    text = capsys.readouterr().out
    assert "t0001   10.0 s  accuracy 0.8  +0.3 vs. baseline  400 tokens/s" in text
    assert (
        "t0001 ok  20.0 s  accuracy 0.9  +0.1 vs. baseline  400 tokens/s on average  precision.amp=bf16  best t0001 0.9"
        in text
    )
    assert "t0002 ok  20.0 s  accuracy 0  −0.8 vs. baseline" in text, "an accuracy of 0 is a result"
    lines = [line for line in shown(tmp_path / "night", wanted) if line]
    assert lines[0].endswith("best t0001 0.9")
    again(tmp_path / "night")
    assert "best t0001 0.9 · 2× as fast as the baseline" in shown(tmp_path / "night", wanted)[1]
    assert re.search(r"accuracy ↑ +vs\. baseline +tokens/s", lines[1])
    assert lines[2].split()[2:] == ["precision.amp=bf16", "▁▆█", "0.9", "+0.1", "400", "501", "ok"]
    assert lines[3].split()[2:] == ["baseline", "▁▄█", "0.8", "+0", "200", "500", "ok"]
    assert lines[4].split()[2:] == ["loader.batch_size=256", "▁▁▁", "0", "−0.8", "240", "502", "ok"]
    assert not OURS.search("\n".join([text, *lines]))


# -------------------------------------------------------------------------------------------------------------- report
def test_the_page_speaks_of_its_objective_and_of_nothing_of_ours(tmp_path):
    ranked(tmp_path / "night")
    page = written(again(tmp_path / "night"))
    text = words(page)
    assert "ranker, 20 s of training per trial, judged by accuracy: share of 500 queries" in text
    won = "t0001 is best: after 20 training seconds its accuracy is 0.9, 0.1 above the 0.8 of the baseline (t0000)."
    assert f"{won} It is as good as the baseline at its end after 10 s: 2 times faster." in text
    assert "1 of 2 other trials with a result ends above the baseline (mean of its 2 runs)." in text
    assert (
        "The gain is accuracy 0.9 instead of 0.8 at 20 training seconds, with 2 times as many tokens in the same "
        "seconds; the difference at equal tokens is within the noise of one run (0.8 instead of 0.8 at 4,000 tokens)"
    ) in text
    assert "Shares are of" not in text
    assert "Values at equal tokens are" in text
    assert "1,000 tokens take 2.5 s of training instead of 5 s" in text
    assert "vs. baseline ≈ best speed-up tokens/s train s MiB" in text
    assert "+0.1 2.00 400" in text
    assert "accuracy: share of 500 queries whose answer comes first, by a net of width 8; higher is better." in text
    assert "waiting for tokens" in text
    assert "Samples" not in text
    markup = re.sub(r'src(?:set)?="data:[^"]*"|<img|<(style|script).*?</\1>', "", page, flags=re.S)
    assert not OURS.search(markup), OURS.search(markup)
    for table in (tmp_path / "night" / "report").glob("*.csv"):
        assert not OURS.search(table.read_text()), table
    assert rows(tmp_path / "night" / "report" / "trials.csv")[2]["versus_baseline"] == "-0.8"


def test_a_picture_is_shown_where_there_is_one(tmp_path, plain):
    ranked(tmp_path / "night")
    Image.new("L", (4, 4)).save(tmp_path / "night" / "trials" / "t0001" / "samples.png")
    text = words(written(tmp_path / "night"))
    assert "From the last evaluation of each." in text
    assert "No picture is kept of baseline (t0000)." in text


def test_a_search_that_showed_nothing_names_no_picture(tmp_path):
    ranked(tmp_path / "night")
    found = analysis.read(again(tmp_path / "night"))
    told = summary.values(evidence.read(found), 100.0)
    assert told["samples"] is None
    assert (told["best_value"], told["baseline_value"], told["speedup"]) == (0.9, 0.808, 2.0)
    assert not OURS.search(str(told))
    outputs.write_all(found)
    assert (tmp_path / "night" / "curves.png").exists()


@pytest.mark.parametrize(("mode", "said"), [("max", "0.1 above the −1.2 of the"), ("min", "0.8 below the −1.2 of the")])
def test_values_below_zero_are_compared_by_differences(tmp_path, plain, monkeypatch, mode, said):
    monkeypatch.setattr("tests.ranker.knobs.OBJECTIVE", workload.Metric("score", mode))
    wanted = ranked(tmp_path / "night", shift=-2.0)
    assert wanted.mode == mode
    text = words(written(again(tmp_path / "night")))
    assert said.replace("−", "-") in text
    lines = shown(tmp_path / "night", wanted)
    assert any(("+0.1" in line) if mode == "max" else ("−0.8" in line) for line in lines)


# ------------------------------------------------------------------------------------------------------- several runs
def test_accuracies_are_compared_by_their_differences(tmp_path):
    wanted = make(tmp_path / "night", SEEDS)
    for number, point in enumerate(wanted.candidates):
        value = (0.9 if point["precision.amp"] == "bf16" else 0.8) + 0.001 * number + 0.0002 * (number == 3)
        write(tmp_path / "night", wanted, number, drawn=point, curve=((5.0, 1000, value / 2), (20.0, 4000, value)))
    found = analysis.read(tmp_path / "night")
    compared = compare(found)
    (other,) = compared.others
    assert not compared.ratios
    assert other.difference.estimate == pytest.approx(0.101, abs=0.001)
    assert other.difference.verdict == BETTER
    header, _, row = verdicts.comparison_table(compared)
    assert header[3:5] == ["accuracy, mean ± sd", "difference (95 % interval)"]
    assert row[4].startswith("+0.10")
    assert "tokens/s" in header
    assert verdicts.conclusions(compared)[-1].endswith(" accuracy to be significant.")
    text = words(written(tmp_path / "night"))
    assert re.search(
        r"accuracy 0\.90\d+ ± 0\.00\d+ over 3 seeds, \+0\.10\d \(\+0\.\d+ … \+0\.\d+\) beside the baseline's", text
    )
    outputs.write_all(found)
    assert not OURS.search((tmp_path / "night" / "comparison.md").read_text())
    assert not OURS.search((tmp_path / "night" / "comparison.csv").read_text())


@pytest.mark.parametrize(("worth", "verdict"), [(0.05, BETTER), (-0.05, WORSE)])
def test_confirming_runs_follow_the_direction(tmp_path, worth, verdict):
    folder = tmp_path / "night"
    wanted = make(folder, RANKER | {"confirm": {"of": 1, "seeds": 3}})
    write(folder, wanted, 0, curve=((20.0, 4000, 0.8),))
    write(folder, wanted, 1, {"precision.amp": "bf16"}, curve=((20.0, 4000, 0.9),))
    found = analysis.read(folder)
    place, again = confirming.prepare(found)
    for number, point in enumerate(again.candidates):
        value = 0.8 + worth * (point["precision.amp"] == "bf16") + 0.001 * number
        write(place, again, number, drawn=point, curve=((10.0, 2000, value / 2), (20.0, 4000, value)))
    told = confirmation.confirm(found, analysis.read(place))
    (other,) = told.compared.others
    assert other.difference.verdict == verdict
    assert (told.winner is other) == (verdict == BETTER)
    said = " ".join(verdicts.sentences(told))
    assert "The accuracy of precision.amp=bf16 was 0.9 when it was chosen, and is" in said
    assert re.search(r"and is 0\.\d+ ± 0\.\d+ on new seeds\.$", said)
    assert not OURS.search(said)


def test_what_only_a_final_evaluation_decides_has_a_name(tmp_path):
    wanted = make(tmp_path / "night", SEEDS)
    for number, point in enumerate(wanted.candidates):
        place = write(tmp_path / "night", wanted, number, drawn=point, curve=((20.0, 4000, 0.8),))
        Journal(place).write("final", steps=4000 // wanted.config(point).loader.batch_size, accuracy=0.85)
    found = analysis.read(tmp_path / "night")
    assert confirmation.confirm(found, found).label == "final accuracy"


# --------------------------------------------------------------------------------------------------------------- study
def test_a_study_has_its_objective_and_its_unit(tmp_path):
    study = {
        "columns": ["configuration", "accuracy", "samples_per_s", "samples_per_s_sd", "samples_to_break_even"],
        "y": "accuracy",
    }
    content = SEEDS | {"study": study}
    wanted = make(tmp_path / "night", content)
    for number, point in enumerate(wanted.candidates):
        write(tmp_path / "night", wanted, number, drawn=point, curve=((20.0, 4000, 0.1 * number - 0.3),))
    found = analysis.read(tmp_path / "night")
    told = study_table.table(found)
    assert told.cells(50)[0] == ["configuration", "accuracy", "tokens/s", "± tokens/s", "tokens to break even"]
    assert told.study.quantity("epoch_s").meaning.startswith("tokens of the set / tokens per second")
    assert told.study.quantity("flops_per_sample").label == "GFLOP/token"
    outputs.write_all(found)
    assert (tmp_path / "night" / "study.png").exists()


def test_ours_keeps_its_words(tmp_path):
    wanted = make(tmp_path / "night", FILE)
    assert wanted.workload.unit == "images"
    write(tmp_path / "night", wanted, 0)
    page = words(written(tmp_path / "night"))
    assert "judged by FD (classifier): 1,000 generated images, DDIM, 20 steps" in page
    assert "FD (classifier): Fréchet distance; 1,000 generated images" in page
    assert "compare within a search only" in page


@pytest.mark.parametrize(
    ("values", "bars"), [([0.0, 0.5, 1.0], "▁▅█"), ([-3.0, -1.0, -2.0], "▁█▅"), ([math.nan, 1.0], "?▁")]
)
def test_a_rising_curve_as_bars(values, bars):
    assert live_table.sparkline(values, logs=False).replace("▄", "▅") == bars


def test_importance_and_effects_of_values_around_zero(tmp_path, plain):
    wanted = make(tmp_path / "night", RANKER)
    rng, number = np.random.default_rng(0), 0
    for size in (32, 64, 128, 256):
        for amp in ("none", "bf16"):
            for _ in range(2):
                value = (0.2 if amp == "bf16" else -0.2) + 0.01 * rng.normal()
                write(tmp_path / "night", wanted, number, {"loader.batch_size": size, "precision.amp": amp},
                      ((20.0, 4000, value),))  # fmt: skip
                number += 1
    text = words(written(tmp_path / "night"))
    assert "Differences in accuracy come most from precision.amp" in text
    assert re.search(r"the largest is that of precision.amp, by 0\.\d+ from its best to its worst value", text)
    assert "fANOVA: the part of the variance that a random forest" in text
