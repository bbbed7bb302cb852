"""What follows from the trials of a search, whichever way its objective runs."""

import dataclasses

import pytest

from tests.helpers import point
from tests.searches import make, write
from tunediff import results
from tunediff.record import End, TrialRecord
from tunediff.results import why


@pytest.fixture
def found(night):
    return results.read(night)


def upwards(found):
    """The same search with an objective that is better the larger it is."""
    return dataclasses.replace(found, space=dataclasses.replace(found.space, mode="max"))


def test_a_finished_baseline_is_what_a_speedup_is_measured_by(found):
    best = found.leader
    assert found.sooner(best) == pytest.approx(20 / (5 + 5 / 1.2))
    assert found.sooner(found.baseline) == 1.0
    found.baseline.end = End("nan")
    assert (found.sooner(best), found.versus_baseline(best)) == (None, None)


def test_best_and_front_follow_the_direction(found):
    assert [trial.name for trial in found.ranked] == ["t0001", "t0000", "t0002"]
    assert [trial.name for trial in upwards(found).ranked] == ["t0002", "t0000", "t0001"]
    assert (found.leader.name, upwards(found).leader.name) == ("t0001", "t0002")
    for trial, cost in zip(found.trials, (500.0, 600.0, 500.0), strict=True):
        trial.points[-1] = dataclasses.replace(trial.points[-1], peak_memory_mib=cost)
    of_two = dataclasses.replace(found, space=dataclasses.replace(found.space, cost="peak_memory_mib"))
    assert [trial.name for trial in of_two.pareto] == ["t0001", "t0000"]
    assert [trial.name for trial in upwards(of_two).pareto] == ["t0002"]


def test_what_differs_from_the_baseline(tmp_path):
    """Of what was drawn only that; of a whole configuration also the knobs that came with another member of a union."""
    wanted = make(tmp_path / "night")
    assert wanted.changed({"loader.batch_size": 128, "precision.amp": "bf16"}) == {"precision.amp": "bf16"}
    write(tmp_path / "night", wanted, 0, {"precision.amp": "bf16"}, config={"weighting.gamma": 5.0, "seed": 3})
    found = results.read(tmp_path / "night")
    assert found.changed(found.trials[0]) == {"precision.amp": "bf16", "weighting.gamma": 5.0, "seed": 3}
    assert results.without_seed(found.changed(found.trials[0])) == {"precision.amp": "bf16", "weighting.gamma": 5.0}


def test_a_gain_is_a_gain_in_either_direction():
    def trial(number, *curve):
        points = [point(i, s, samples=n, accuracy=a) for i, (s, n, a) in enumerate(curve, 1)]
        return TrialRecord(f"t{number:04d}", number, {}, {}, "", points=points)

    told = why.why(trial(0, (5, 100, 0.2), (10, 200, 0.4)), trial(1, (5, 200, 0.4), (10, 400, 0.8)), "accuracy", "max")
    assert told.at_samples == pytest.approx((0.4, 0.4))
    assert told.total < 0
    assert told.throughput == pytest.approx(told.total), "equal at equal images: all of it is speed"
