"""Search strategies replayed against a table whose best configuration is known; no cluster."""

import csv
import itertools
import json
import math
import re

import numpy as np
import pytest
import yaml

from benchmarks.replay import enough, record
from benchmarks.replay.__main__ import main
from benchmarks.replay.report import ratios
from benchmarks.replay.strategies import END, STRATEGIES, Strategy, ToTheEnd, replay
from benchmarks.replay.table import load
from tunediff import search_space
from tunediff.tuning.allocation import Decision

SEARCH = {
    "workload": "digits", "budget": {"per_trial": "8s", "trials": 24},
    "fixed": {"evaluation.points": 4},
    "search": {"loader.batch_size": [32, 64, 128, 256], "optimizer.lr": {"low": 1e-3, "high": 8e-3, "log": True}},
}  # fmt: skip
BEST = 13


def rows():
    """24 configurations, 2 % apart between seeds; number 13 is the best, 7 fails."""
    found = []
    for number, (size, lr) in enumerate(itertools.product((128, 32, 64, 256), (1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3))):
        end = 1.0 if number == BEST else 2.0 + 0.1 * number
        for seed in (0, 1):
            values = [end * (1 + 0.02 * seed) * 4 / i for i in range(1, 5)]
            status, many = ("nan", 2) if number == 7 else ("ok", 4)
            seconds = ";".join(f"{2 * i + 0.01 * number:.3f}" for i in range(1, many + 1))
            knobs = {"loader.batch_size": size, "optimizer.lr": lr}
            found.append([number, seed, status, seconds, ";".join(map(str, values[:many])), json.dumps(knobs)])
    return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(SEARCH))
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([record.COLUMNS, *rows()])
    return tmp_path


def test_table_has_the_noise_of_its_better_half_and_a_target_within_it(folder):
    table = load(folder)
    assert (len(table.configurations), table.points, table.good) == (24, 4, 1)
    assert table.noise.sd == pytest.approx(math.log(1.02) / math.sqrt(2))
    assert table.target == pytest.approx(math.log(1.02) / 2 + table.noise.sd)
    assert math.isinf(table.configurations[7].mean)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_finds_the_best_and_repeats_itself(folder, name):
    table = load(folder)
    seconds = [replay(table, STRATEGIES[name], seed) for seed in (0, 1, 0)]
    whole = sum(curve.points[-1].train_s for one in table.configurations for curve in one.curves[:1])
    assert all(16.0 <= value <= whole for value in seconds)
    assert seconds[0] == seconds[2]


def test_seconds_are_those_of_the_points_that_were_looked_at(folder):
    class NoneButTheBest(ToTheEnd):
        def after_point(self, trial, trials):
            return Decision.GO_ON if trial.points[-1]["frechet"] < 4.2 else END

    table = load(folder)
    first = [one.curves[0].points[0].train_s for one in table.configurations]
    ends = [table.configurations[place].curves[0].points[-1].train_s for place in (0, BEST)]
    spent = {replay(table, Strategy(lambda space: NoneButTheBest()), seed) for seed in range(5)}
    assert min(spent) >= sum(ends) - 1e-6
    assert max(spent) <= sum(ends) + sum(first)


def test_rules_that_use_early_points_are_faster_where_these_tell_all(folder):
    table = load(folder)
    medians = {
        name: np.median([replay(table, STRATEGIES[name], seed) for seed in range(15)])
        for name in ("random", "one point each, then the best", "promotion, random")
    }
    random = medians.pop("random")
    assert all(median < 0.7 * random for median in medians.values())


def test_incomplete_tables_are_refused(folder, capsys):
    lines = (folder / "table.csv").read_text().splitlines()
    (folder / "table.csv").write_text("\n".join(lines[:2]))
    assert main([str(folder)]) == 2
    assert "two seeds" in capsys.readouterr().err
    (folder / "table.csv").unlink()
    assert main([str(folder)]) == 2
    assert "benchmarks.replay.record" in capsys.readouterr().err


def test_ratio_compares_medians_and_never_is_infinite():
    ratio, samples = ratios(np.array([1.0, 2.0, 3.0]), np.array([4.0, 4.0, 4.0]))
    assert ratio == 0.5
    assert {0.25, 0.75} <= set(samples)
    assert math.isinf(ratios(np.array([math.inf]), np.array([1.0]))[0])


@pytest.mark.training  # in processes of their own
def test_command_prints_a_table_of_ratios(folder, capsys):
    assert main([str(folder), "--seeds", "2", "--processes", "2", "--only", "promotion, random"]) == 0
    assert re.search(r"\| promotion, random +\| \d\.\d\d \(", capsys.readouterr().out)


def test_recorded_configurations_begin_with_the_baseline_and_differ(folder):
    space = search_space.load(folder / "search.yaml")
    drawn = record.configurations(space, 20)
    assert drawn[0] == space.candidates[0]
    assert len({json.dumps(values) for values in drawn}) == 20
    assert record.configurations(space, 5) == drawn[:5]


def test_recorder_goes_on_where_it_was(folder, monkeypatch):
    trained = []

    def train(space, values, seed, points):
        trained.append((values["loader.batch_size"], seed))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return "ok", [(1.0, 2.0), (2.0, 1.5)]

    monkeypatch.setattr(record, "train", train)
    words = [str(folder / "search.yaml"), "--configs", "2", "--out", str(folder / "new.csv")]
    args = record.arguments([*words, "evaluation.images=200"])
    assert args.words == ["evaluation.images=200"]
    with pytest.raises(KeyboardInterrupt):
        record.record(args)
    record.record(args)
    with open(folder / "new.csv", newline="") as file:
        kept = [(row["number"], row["seed"], row["values"]) for row in csv.DictReader(file)]
    assert kept == [(number, seed, "2;1.5") for number in "01" for seed in "01"]
    assert len(trained) == 5


# ------------------------------------------------------------------------------------------------------- when to end
def found(losses, regret=None):
    losses = np.array(losses, float)
    return enough.Found(np.zeros((60, 1)), losses, np.array(regret if regret is not None else losses - losses.min()))


def test_patience_counts_the_trials_since_the_best_and_records_their_chance():
    one = found([5.0, 9.0, 1.0, *range(2, 39)])
    assert enough.patience(one, 12) == -9
    assert enough.records(one, 12) > enough.records(one, 20) > enough.records(one, 39)
    close, far = found(np.linspace(1.0, 1.1, 40)), found(np.linspace(1.0, 40.0, 40))
    assert enough.records(close, 20) < 1e-6, "what differs by little hardly leads to something much better"
    assert enough.records(far, 20) > 0.3


def test_a_fixed_number_of_trials_is_as_good_as_itself():
    searches = [[found(np.ones(40), np.linspace(3, 0, 40) * (1 + seed)) for seed in range(5)] for _ in range(2)]
    for trials in (10, 25, 40):
        assert enough.difference(searches, np.full((2, 5), trials)) == pytest.approx((0, 0, 0), abs=1e-9)
    clever = np.array([[10, 20, 30, 35, 40]] * 2)  # longer where more is to be gained
    by, _, high = enough.difference(searches, clever)
    assert by < 0
    assert high < 0.2


def test_a_search_of_a_table_draws_the_baseline_first_and_nothing_twice(folder, monkeypatch):
    monkeypatch.setattr(enough, "MOST", 12)
    one = enough.searched(load(folder), 0)
    assert len({tuple(point) for point in one.points}) == 24
    assert len(one.losses) == len(one.regret) == 12
    assert (one.regret >= 0).all()
    assert one.points[0] == pytest.approx([0, 0, 1, 0, 0])
