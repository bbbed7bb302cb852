"""Effects of knobs are means with their noise; fronts are what none beats."""

import math

import numpy as np
import pytest
from scipy import stats

from tests.searches import FILE, make, write
from tunediff.analysis import effects, importance, journals, speed
from tunediff.analysis.effects import ABOVE, TOO_FEW, WITHIN
from tunediff.analysis.pareto import front


def test_effects_are_means_with_their_noise(tmp_path):
    wanted = make(tmp_path / "night")
    values = {"none": (2.0, 2.2, 1.9, 2.1), "bf16": (1.0, 1.2, 0.9, 1.1)}
    trials = [(amp, value) for amp in values for value in values[amp]]
    for number, (amp, value) in enumerate(trials):
        point = {"precision.amp": amp, "optimizer.lr": 1e-3 + 1e-4 * (number % 4)}
        write(tmp_path / "night", wanted, number, point, curve=((20.0, 4000, value),))
    write(tmp_path / "night", wanted, 8, {"precision.amp": "bf16", "optimizer.lr": 2e-3}, curve=(), status="nan")
    found = {effect.knob: effect for effect in effects.effects(journals.read(tmp_path / "night")[0])}
    amp = found["precision.amp"]
    assert [(level.label, level.objective.runs, level.failed) for level in amp.levels] == [
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
    results = journals.read(tmp_path / "night")[0]
    row = effects.effects_table(results, [amp]).to_dict("records")[1]
    means = {name.rpartition("_")[0] for name in row if name.endswith("_mean")}
    assert (row["value"], row["trials"], row["failed"], row["verdict"]) == ("bf16", 5, 1, ABOVE)
    assert (row["frechet_mean"], row["frechet_trials"]) == (amp.levels[1].objective.mean, 4)
    assert means == {"frechet", "samples_per_s"}


def test_a_range_is_cut_into_parts_of_equal_numbers(tmp_path):
    wanted = make(tmp_path / "night")
    for number, lr in enumerate(np.geomspace(1e-4, 1e-2, 20)):
        write(tmp_path / "night", wanted, number, {"optimizer.lr": float(lr)}, curve=((20.0, 4000, float(lr)),))
    (effect,) = effects.effects(journals.read(tmp_path / "night")[0])
    assert [len(level.members) for level in effect.levels] == [4] * 5
    assert effect.levels[0].label.startswith("1.00e-04 … ")
    assert effect.levels[-1].label.endswith(" … 1.00e-02"), "all ends are written in one way"
    assert effect.verdict == ABOVE


def test_knob_values_that_differ_in_a_late_digit_are_levels_of_their_own(tmp_path):
    space = {"ema.max_decay": [0.999, 0.9995, 0.9999], "optimizer.beta2": [0.9995, 0.9999, 0.999]}
    wanted = make(tmp_path / "night", FILE | {"search": space})
    decays, ends = space["ema.max_decay"], (1.0, 1.5, 1.1)
    for number in range(12):
        curve = ((20.0, 4000, ends[number % 3] + 0.001 * number),)
        point = {"ema.max_decay": decays[number % 3], "optimizer.beta2": space["optimizer.beta2"][number % 2]}
        write(tmp_path / "night", wanted, number, point, curve)
    results = journals.read(tmp_path / "night")[0]
    decay, beta = effects.effects(results)
    assert [(level.label, len(level.members)) for level in decay.levels] == [("0.999", 4), ("0.9995", 4), ("0.9999", 4)]
    assert [level.label for level in beta.levels] == ["0.9995", "0.9999"]
    assert (decay.verdict, beta.verdict) == (ABOVE, WITHIN)
    shares = importance.importance(results, lambda trial: trial.value(results.metric))
    assert (shares.unvaried, max(shares.shares, key=shares.shares.get)) == ([], "ema.max_decay")
    assert shares.fit > 0.9


def test_few_trials_are_not_judged(night):
    found = effects.effects(journals.read(night)[0])
    assert {effect.verdict for effect in found} == {TOO_FEW}
    assert importance.importance(journals.read(night)[0], speed.rate) is None


@pytest.mark.parametrize(("fit", "doubtful"), [(None, True), (-0.5, True), (0.29, True), (0.3, False), (0.9, False)])
def test_shares_of_a_forest_that_predicts_little_are_doubtful(fit, doubtful):
    assert importance.Importance({"optimizer.lr": 0.7}, fit, 20, []).doubtful is doubtful


def test_the_front_is_what_none_beats():
    rng = np.random.default_rng(1)
    points = [tuple(map(float, point)) for point in rng.integers(0, 12, (80, 2))]
    brute = [not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points) for p in points]
    assert front(points) == brute
    assert front([]) == []
