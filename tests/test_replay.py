"""Search strategies replayed against tables whose best point is known; no cluster."""

import csv
import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.replay.__main__ import _main, main
from benchmarks.replay.report import markdown, ratio, regret, summary
from benchmarks.replay.strategies import CANDIDATES, STRATEGIES, replay_all
from benchmarks.replay.table import load
from benchmarks.replay.table import write as write_table
from tests.helpers import point as made
from tunediff import search_space
from tunediff.config import ConfigError, workload
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal

ROOT = Path(__file__).parent.parent


ALL = STRATEGIES | CANDIDATES
HEAD = ["loader.batch_size", "optimizer.lr", "precision.amp", "train_s", "frechet", "status"]


def rows():
    """18 points, best: 64, 0.002, bf16; one ran out of memory. No two rows have the same seconds."""
    found = []
    for n, (size, lr, amp) in enumerate(itertools.product((32, 64, 128), (1e-3, 2e-3, 4e-3), ("none", "bf16"))):
        final = 1.0 + abs(size - 64) / 32 + abs(lr - 2e-3) * 500 + (amp == "none")
        if (size, lr, amp) == (128, 4e-3, "none"):
            found.append([size, lr, amp, 0.25, "", "oom"])
            continue
        for i in range(1, 5):
            found.append([size, lr, amp, 2 * i + 0.001 * n + 0.0001, final * 4 / i, "ok"])
    return found


def write(path, lines, head=HEAD):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head, *lines])
    return path


@pytest.fixture
def table(tmp_path):
    return load(write(tmp_path / "table.csv", rows()))


def run(table, name, seed):
    return replay_all(table, [name], [seed])[0]


def costs(found):
    return [round(b - a, 4) for a, b in itertools.pairwise((0.0, *found.spent_s))]


# --------------------------------------------------------------------------------------------------------------- table
def test_a_table_is_read(table):
    assert (len(table.curves), table.best, table.worst) == (18, 1.0, 4.5)
    assert table.budget_s == pytest.approx(8.0, abs=0.001)
    assert table.space.budget.per_trial_s == table.budget_s
    assert table.curves[0].knobs == {"loader.batch_size": 32, "optimizer.lr": 0.001, "precision.amp": "none"}
    assert table.space.candidates == (table.curves[0].knobs,)  # the baseline
    failed = [curve for curve in table.curves if curve.value is None]
    assert [(curve.status, curve.spent_s, curve.points) for curve in failed] == [("oom", 0.25, ())]
    assert table.total_s == pytest.approx(sum(curve.spent_s for curve in table.curves))


def test_knobs_that_apply_only_sometimes(tmp_path):
    head = ["timesteps.name", "timesteps.history", "train_s", "frechet", "status"]
    lines = [
        ["uniform", "", 8.0, 3.0, "ok"],
        ["loss_second_moment", 5, 8.1, 2.0, "ok"],
        ["loss_second_moment", 20, 8.2, 1.0, "ok"],
    ]
    table = load(write(tmp_path / "table.csv", lines, head))
    assert [curve.value for curve in table.curves] == [3.0, 2.0, 1.0]
    for name in ("random", "ours"):
        found = run(table, name, 0)
        assert found.best[-1] == 1.0
        assert len(found.best) <= 3


GRID = {
    "workload": "digits",
    "budget": {"per_trial": "8s"},
    "grid": {"loader.batch_size": [64, 128], "weighting.name": ["constant", "min_snr"], "optimizer.lr": [1.0e-5, 1e-3]},
}


@pytest.fixture
def searched(tmp_path):
    """The folder of a grid that was searched; its third point was not finite, its last ran out of memory at once."""
    folder = tmp_path / "searched"
    folder.mkdir()
    (folder / "search.yaml").write_text(yaml.safe_dump(GRID))
    wanted = search_space.load(folder / "search.yaml")
    for n, point in enumerate(wanted.candidates):
        config = wanted.config(point)
        journal = Journal(folder / "trials" / f"t{n:04d}")
        journal.start(config, point, 8.0, n)
        status = {2: "nan", 7: "oom"}.get(n, "ok")
        for i in range(1, {"nan": 3, "oom": 1, "ok": 5}[status]):
            journal.point(made(i, 2.0 * i + 0.00012345 * n, frechet=10.0 / i + n))
        journal.end(record.End(status, "why"))
    return folder


def test_a_searched_grid_becomes_a_table_and_the_table_is_enough(searched, tmp_path):
    recorded = load(searched, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "kept")
    kept = load(tmp_path / "kept")
    assert kept.curves == recorded.curves
    assert (kept.budget_s, kept.total_s, kept.best) == (recorded.budget_s, recorded.total_s, recorded.best)
    trials = record.read_trials(searched)
    assert [curve.knobs for curve in kept.curves] == [trial.drawn for trial in trials]
    assert [curve.status for curve in kept.curves] == [trial.status for trial in trials]
    for curve, trial in zip(kept.curves, trials, strict=True):
        expected = [(point.train_s, point["frechet"]) for point in trial.points]
        np.testing.assert_allclose(curve.points, expected or np.zeros((0,)), rtol=1e-4)
    assert kept.curves[2].spent_s == pytest.approx(4.0, abs=1.0)  # not a number after its second evaluation
    assert kept.curves[7].spent_s < 1.0
    assert replay_all(kept, ["ours"], range(3)) == replay_all(recorded, ["ours"], range(3))
    write_table(tmp_path / "again.csv", searched, "frechet", trials)
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "out" / "table.csv").read_text()


def test_what_is_no_table_is_refused(tmp_path, searched, capsys):
    def refused(path, words):
        assert main([str(path)]) == 2
        assert words in capsys.readouterr().err

    path = tmp_path / "table.csv"
    refused(tmp_path / "nowhere", "no table there; record one with")
    refused(write(path, []), "no table; it needs columns of knobs")
    refused(write(path, rows(), ["a", *HEAD[1:]]), "a")
    refused(write(path, rows(), [*HEAD[:3], "seconds", *HEAD[4:]]), "no table; it needs columns")
    refused(write(path, rows()[4:]), "1 of 18 points of the grid have no curve, e.g. loader.batch_size=32")
    refused(write(path, rows()[:-2]), "incomplete: 17 finished curves, of [2, 4] evaluations")
    refused(write(path, [[*line[:5], "pruned"] for line in rows()]), "incomplete: status pruned")
    refused(write(path, [*rows()[:3], [*rows()[3][:4], "", "ok"], *rows()[4:]]), "have a frechet")
    refused(write(path, [[*line[:4], "x", "ok"] for line in rows()]), "must be numbers")
    refused(write(path, [*rows(), rows()[0]]), "must rise in train_s")
    journal = searched / "trials" / "t0005" / record.JOURNAL
    journal.write_text("\n".join(journal.read_text().splitlines()[:-1]) + "\n")  # killed before its end
    refused(searched, "1 of 8 points are not recorded; python -m tunediff.search --resume searched --trials 8")
    (searched / "search.yaml").write_text(yaml.safe_dump(GRID | {"early_stopping": "asha"}))
    refused(searched, "nothing stopped")
    with pytest.raises(ConfigError, match="allowed: random, TPE"):
        _main([str(tmp_path), "--only", "best"])


def test_a_grid_that_was_cut_is_no_table(searched):
    for trial in ("t0006", "t0007"):
        shutil.rmtree(searched / "trials" / trial)
    (searched / "search.yaml").write_text(yaml.safe_dump(GRID | {"budget": {"per_trial": "8s", "trials": 6}}))
    with pytest.raises(ConfigError, match="2 of 8 points are not recorded"):
        load(searched)


# -------------------------------------------------------------------------------------------- objectives of any kind
RANKED = [[8, 5.0, 0.0, "ok"], [8, 10.0, 0.5, "ok"], [16, 5.1, 0.2, "ok"], [16, 10.1, 0.9, "ok"], [32, 4.0, "", "nan"]]


@pytest.mark.parametrize("name", ["random", "TPE", "ours", "ours + ASHA"])
def test_a_table_of_accuracies_is_searched_for_the_highest(tmp_path, monkeypatch, name):
    monkeypatch.setitem(workload.SHIPPED, "ranker", "tests.ranker")
    (tmp_path / "baseline.yaml").write_text("workload: ranker\n")
    table = load(write(tmp_path / "table.csv", RANKED, ["width", "train_s", "accuracy", "status"]))
    assert (table.space.metric, table.best, table.worst, table.ratios) == ("accuracy", -0.9, -0.5, False)
    found = run(table, name, 0)
    assert found.best[-1] == -0.9
    assert regret(table, [found], 1e9)[0] == 0.0
    assert regret(table, [found], 0.0)[0] == 1.0, "nothing found is as bad as the worst"
    text = markdown(table, summary(table, [found]), "ranker", 1)
    assert "accuracy 0.9 to 0.5, 1 within 2% of the table's range from the best, 1 failed" in text
    assert "how far accuracy of the best finished trial is from the table's best" in text
    assert "FD" not in text


# -------------------------------------------------------------------------------------------------------------- replay
@pytest.mark.parametrize("name", ALL)
def test_a_seed_gives_one_replay_and_regret_never_rises(table, name):
    found, again, other = run(table, name, 1), run(table, name, 1), run(table, name, 2)
    assert found == again
    assert found.spent_s != other.spent_s
    assert all(a >= b for a, b in itertools.pairwise(found.best))
    assert all(a < b for a, b in itertools.pairwise(found.spent_s))
    assert found.spent_s[-1] <= table.total_s + 1e-9
    seconds = np.linspace(0, table.total_s, 50)
    curve = [regret(table, [found], s)[0] for s in seconds]
    assert curve[0] == pytest.approx(3.5)  # nothing found is as bad as the worst
    assert all(a >= b for a, b in itertools.pairwise(curve))
    if ALL[name].stopping.rule == "none":
        assert found.best[-1] == table.best
        assert curve[-1] == 0.0


@pytest.mark.parametrize("name", ["random", "TPE", "GP", "ours"])
def test_whole_trials_cost_their_seconds_and_no_point_is_run_twice(table, name):
    for seed in range(3):
        found = run(table, name, seed)
        assert found.stopped == 0
        assert len(set(costs(found))) == len(costs(found)) <= 18
        assert set(costs(found)) <= {round(curve.spent_s, 4) for curve in table.curves}


def test_ours_begins_with_the_baseline_and_differs_from_optuna_alone(table):
    assert {costs(run(table, "ours", seed))[0] for seed in range(5)} == {8.0001}
    assert len({costs(run(table, "random", seed))[0] for seed in range(5)}) > 1


@pytest.mark.parametrize("name", ["TPE + ASHA", "ours + ASHA", "ASHA by thirds from 25 %", "median"])
def test_stopped_trials_cost_what_they_trained(table, name):
    runs = [run(table, name, seed) for seed in range(5)]
    assert sum(found.stopped for found in runs) > 0
    whole = {round(curve.spent_s, 4) for curve in table.curves}
    grace_s = ALL[name].stopping.grace * table.budget_s
    partly = {round(s, 4) for curve in table.curves for s, _ in curve.points[:-1] if s >= grace_s}
    for found in runs:
        assert set(costs(found)) <= whole | partly
        assert sum(cost in partly for cost in costs(found)) == found.stopped


LATE = [[1e-3, 5.0, 10.0, "ok"], [1e-3, 10.0, 5.0, "ok"], [2e-3, 5.1, 20.0, "ok"], [2e-3, 10.1, 1.0, "ok"]]


@pytest.mark.parametrize(("name", "spent", "best"), [
    ("ours", (10.0, 20.1), (5.0, 1.0)),
    ("ours + ASHA", (10.0, 15.1), (5.0, 5.0)),  # worse than the first at half of its budget, where ASHA decides
    ("median", (10.0, 20.1), (5.0, 1.0)),  # needs three others
])  # fmt: skip
def test_a_late_winner_is_lost_to_early_stopping(tmp_path, name, spent, best):
    head = ["optimizer.lr", "train_s", "frechet", "status"]
    table = load(write(tmp_path / "table.csv", LATE, head))
    found = run(table, name, 0)
    assert found.spent_s == pytest.approx(spent)
    assert found.best == best
    assert found.seconds_to(1.0) == (spent[-1] if best[-1] == 1.0 else math.inf)
    assert [found.best_after(s) for s in (9.9, 10.0, 99.0)] == [math.inf, 5.0, best[-1]]


def test_a_failed_point_costs_seconds_and_is_bad(tmp_path):
    head = ["optimizer.lr", "train_s", "frechet", "status"]
    lines = [
        [1e-3, 3.0, 0.5, "nan"],
        [1e-3, 4.0, "", "nan"],
        *LATE[2:],
        [4e-3, 5.0, 3.0, "ok"],
        [4e-3, 10.2, 2.0, "ok"],
    ]
    table = load(write(tmp_path / "table.csv", lines, head))
    assert (table.best, table.worst) == (1.0, 2.0)  # what it had before it failed does not count
    for name in ("ours", "ours + ASHA"):
        found = run(table, name, 0)
        assert (found.spent_s[0], found.best[0]) == (4.0, math.inf)
        assert regret(table, [found], 4.0) == pytest.approx([1.0])
    assert {run(table, "TPE", seed).best[-1] for seed in range(5)} == {1.0}


# -------------------------------------------------------------------------------------------------------------- report
def test_the_command_writes_table_figure_and_text(searched, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--seeds", "4", "--out", str(out), "--processes", "1", "--only", "random", "--only", "ours + ASHA"]
    assert main([str(searched), *words]) == 0
    text = (out / "replay.md").read_text()
    assert capsys.readouterr().out == text
    assert text.startswith("# searched: search strategies replayed\n\n8 points of up to 8.0 training seconds")
    assert [line.split(" | ")[0] for line in text.splitlines()[6:8]] == ["| random", "| ours + ASHA"]
    assert {path.name for path in out.iterdir()} == {"table.csv", "baseline.yaml", "replay.md", "replay.png"}
    assert (out / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert not (searched / "table.csv").exists()
    assert main([str(out / "table.csv"), *words]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == text.splitlines()[2:]


def test_the_summary_counts_and_compares(table):
    runs = replay_all(table, ["random", "ours"], range(6))
    first, second = summary(table, runs)
    needed = sorted(found.seconds_to(1.02) for found in runs[:6])
    assert first["median_s"] == needed[2]
    assert first["quartiles_s"] == (needed[1], needed[4])
    assert (first["ratio"], first["reached"], first["stopped"]) == (None, 6, 0.0)
    assert second["ratio"][0] == second["median_s"] / first["median_s"]
    assert second["ratio"][1] <= second["ratio"][0] <= second["ratio"][2]
    assert first["regret"] == sorted(first["regret"], reverse=True)


def test_ratios_of_searches_that_never_arrive():
    ours, theirs = np.array([1.0, 2.0, math.inf]), np.array([4.0, 4.0, 4.0])
    middle, low, high = ratio(ours, theirs)
    assert (middle, low, high) == (0.5, 0.25, math.inf)
    assert ratio(theirs, theirs) == (1.0, 1.0, 1.0)
