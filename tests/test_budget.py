"""The benchmark of kept budgets: what it makes of its measurements, and that a training of it runs."""

import itertools

import pytest

from benchmarks import budget
from tests.helpers import point
from tunediff.config import workload


def run(train_s, seconds, slowest_s):
    points = [point(index, value) for index, value in enumerate(train_s, 1)]
    return budget.Run(points, seconds, slowest_s)


def test_lateness_is_that_of_the_worst_point_in_units_of_the_slowest_step():
    one, other = run([2.5, 5.5, 7.5, 10.1], 10.0, 0.5), run([2.5, 5.0, 7.5, 10.4], 10.0, 0.2)
    assert (one.ratio, one.late_s) == pytest.approx((1.01, 0.5))
    cells = budget.row("name", [one, other]).split("|")
    assert [cell.strip() for cell in cells[1:-1]] == [
        "name", "2", "1.025", "1.040", "0.250 0.525 0.750 1.025", "500", "500", "2.00",
    ]  # fmt: skip


def test_slowest_step_leaves_out_what_lies_between_two_segments(monkeypatch):
    ticks = iter([10.0, 11.0, 14.0, 100.0, 101.0])
    monkeypatch.setattr(budget.time, "monotonic", lambda: next(ticks))
    steps = budget.Steps()
    for part in ("setup", "train", "data_wait", "train"):
        steps.part(part)
    steps.after_step()
    steps.part("data_wait")
    steps.part("train")
    steps.after_step()
    for part in ("evaluation", "checkpoint", "train"):
        steps.part(part)
    steps.after_step()
    assert steps.slowest_s == 3.0


def test_each_training_of_its_own_runs_and_has_a_row(monkeypatch):
    monkeypatch.setattr(workload, "SHIPPED", dict(workload.SHIPPED))
    monkeypatch.setattr(budget, "JUDGED_S", 0.0)
    names = [name for name in budget.TRAININGS if name not in ("loader, 2 workers", "digits")]
    lines = list(budget.table(0.05, 1, names))
    assert [line.split("|")[1].strip() for line in lines[2:]] == names
    assert {line.count("|") for line in lines} == {9}
    items = budget.Items(0.0, cached=True)
    assert [float(items[index][0]) for index in itertools.islice(itertools.cycle((3, 4)), 4)] == [3, 4, 3, 4]
