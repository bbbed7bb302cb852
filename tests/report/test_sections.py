"""Numbers of the page and of its tables, computed by hand."""

import logging
import math

import numpy as np
import pytest

from tests.comparisons import PLAIN
from tests.report.pages import words, written
from tests.searches import FILE, again, make, random_points, write
from tunediff import analysis, export, search_space
from tunediff.analysis import confirming_runs, evidence, pareto
from tunediff.report import charts, context, reading, tables
from tunediff.tuning import confirming

GRID = {"workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"precision.amp": ["none", "bf16"]}}
COMPILE = FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}}


def test_the_gain_is_split_into_speed_and_learning(night, plain):
    """2 → 0.8; it is at 2 after 5 + 5·(4 − 2)/(4 − 1.6) s; at 4,000 images it has 1.6 for 2: log(1.6/2)/log(0.8/2)."""
    text = words(written(again(night)))
    crossing = 5 + 5 * 2.0 / 2.4
    assert f"as good as the baseline at its end after {crossing:.3g} s: {20 / crossing:.3g} times sooner" in text
    assert "24 % is learning more from each image (1.6 instead of 2 at 4,000 images)" in text
    assert "76 % is speed (2 times as many images in the same seconds); one run each." in text
    known = evidence.read(analysis.read(night))
    assert known.speedup(known.best).mean == pytest.approx(20 / crossing)
    assert known.seconds_to_baseline(known.best) == pytest.approx(crossing)


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
def test_a_second_objective_has_its_front(tmp_path):
    """More workers are better and cost more: both ends are on the front, what is worse and dearer is not."""
    space = make(tmp_path / "night", FILE | {"objective": ["frechet", "device_s"]})
    for number, (point, value, cost) in enumerate(
        (({}, 4.0, 20.0), ({"precision.amp": "bf16"}, 2.0, 40.0), ({"loader.batch_size": 256}, 3.0, 60.0))
    ):
        write(tmp_path / "night", space, number, point, ((20.0, 4000, value),), found={"device_s": cost})
    frame = pareto.trade_offs(analysis.read(tmp_path / "night"))
    assert list(frame["trial"][frame["on_front_device_s"]]) == ["t0001", "t0000"]


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
