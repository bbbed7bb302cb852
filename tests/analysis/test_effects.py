"""Shares of knobs in the differences between trials; fronts are what none beats."""

import numpy as np

from tests.searches import FILE, make, write
from tunediff import analysis
from tunediff.analysis import importance, speed
from tunediff.analysis.pareto import front


def test_knob_that_makes_the_difference_has_the_largest_share(tmp_path):
    space = {"ema.max_decay": [0.999, 0.9995, 0.9999], "optimizer.beta2": [0.9995, 0.9999, 0.999]}
    wanted = make(tmp_path / "night", FILE | {"search": space})
    decays, ends = space["ema.max_decay"], (1.0, 1.5, 1.1)
    for number in range(12):
        curve = ((20.0, 4000, ends[number % 3] + 0.001 * number),)
        point = {"ema.max_decay": decays[number % 3], "optimizer.beta2": space["optimizer.beta2"][number % 2]}
        write(tmp_path / "night", wanted, number, point, curve)
    results = analysis.read(tmp_path / "night")
    shares = importance.importance(results, lambda trial: trial.value(results.metric))
    assert (shares.unvaried, max(shares.shares, key=shares.shares.get)) == ([], "ema.max_decay")


def test_few_trials_are_not_judged(night):
    assert importance.importance(analysis.read(night), speed.rate) is None


def test_the_front_is_what_none_beats():
    rng = np.random.default_rng(1)
    points = [tuple(map(float, point)) for point in rng.integers(0, 12, (80, 2))]
    brute = [not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points) for p in points]
    assert front(points) == brute
    assert front([]) == []
