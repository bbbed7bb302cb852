"""Two questions at once: is it good enough, and does it take less time? Values by scipy and by simulation."""

import numpy as np
import pytest
from scipy import stats

from tests.comparisons import made
from tunediff.analysis import sides, targets
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.sequential import Rules
from tunediff.config import ConfigError
from tunediff.core.target import Approach, Target

LOSSES = np.array([3.2771347, 3.2790118, 3.2785261, 3.2768093, 3.2797382, 3.2779615])


def test_gate_is_a_one_sample_t_test_against_the_target():
    """As speedruns have it: (3.28 − mean) √n / sd."""
    fixed = Rules(6, 0.01, one_sided=True, fixed=True)
    gate = targets.target_gate(LOSSES, Target("loss", "<=", 3.28), fixed)
    expected = stats.ttest_1samp(LOSSES, 3.28, alternative="less").pvalue
    assert gate.p == pytest.approx(expected)
    assert gate.shown == (expected < 0.01) == True  # noqa: E712
    assert not targets.target_gate(LOSSES, Target("loss", "<=", 3.2785), fixed).shown
    assert targets.target_gate(-LOSSES, Target("loss", ">=", -3.28), fixed).p == pytest.approx(expected)


def test_a_gate_of_a_margin_is_a_paired_t_test():
    a, b = LOSSES, LOSSES + np.array([0.0004142, -0.0002236, 0.0006164, 0.0001414, 0.0002828, 0.0003162])
    rules = Rules(6, 0.05, one_sided=True, fixed=True)
    margin = targets.margin_gate(a, b, 0.001, True, rules)
    assert margin.p == pytest.approx(stats.ttest_rel(b, a + 0.001, alternative="less").pvalue)
    assert margin.shown


def passed(target, mean, sd, decimals=9, times=400):
    """How many of so many series of 12 values pass a gate that their mean misses, looked at after every pair."""
    rng, found = np.random.default_rng(1), 0
    for _ in range(times):
        b = np.round(mean + sd * rng.standard_normal(12), decimals)
        found += any(targets.target_gate(b[:n], Target("loss", *target), Rules(12)).shown for n in range(3, 13))
    return found / times


def test_a_gate_is_passed_wrongly_no_more_often_than_its_level():
    """B just misses the target: it passes in at most 2.5 % of comparisons."""
    assert 0.015 < passed(("<=", 3.28), 3.28, 0.0013, times=2000) < 0.035


@pytest.mark.parametrize("sd", [0.0005, 0.002, 0.004])
def test_a_gate_of_few_digits_is_passed_wrongly_no_more_often_than_its_level(sd):
    """An accuracy that is printed with two digits, whose mean misses a target by a tenth of a digit."""
    both = [passed((">=", target), mean, sd, 2) for target, mean in ((0.94, 0.937), (0.936, 0.9355))]
    assert np.mean(both) < 0.03


def test_values_that_repeat_show_a_margin_that_is_larger_than_their_step():
    a = np.full(6, 0.94)
    assert not targets.margin_gate(a, a - 0.01, 0.012, False, Rules(6)).shown, "by less than what printing rounds"
    assert targets.margin_gate(a, a - 0.01, 0.04, False, Rules(6)).shown


def test_a_target_is_met_by_the_mean_of_evaluations_that_lie_apart():
    approach = Approach(Target("loss", "<=", 3.0))
    curve = [(10, 5.0), (20, 2.5), (30, 3.5), (31, 0.0), (40, 2.0)]
    early = Approach(Target("loss", "<=", 9.0))
    met = [early.add(seconds, 5.0 - seconds) for seconds in (1.0, 2.0, 3.0)]
    assert met == [None, None, 2.0], "one value may be luck"
    met = [approach.add(seconds, value) for seconds, value in curve]
    assert met == [None, None, None, None, pytest.approx(20 + 10 * (11 / 3 - 3) / (11 / 3 - 8 / 3))]


def test_the_last_evaluation_of_a_run_counts_however_soon_it_came():
    """A program whose values are read at once has met what its last one meets."""
    approach = Approach(Target("loss", "<=", 3.0))
    assert [approach.add(10.0, value) for value in (5.0, 2.0, 2.9)] == [None] * 3
    assert approach.end() == 10.0
    assert Approach(Target("loss", "<=", 3.0)).end() is None


def test_a_long_start_up_hides_no_value_of_a_curve():
    """Values come one second apart after 90 of start-up; one was printed at the beginning."""
    values = [1.0, 0.8, 0.7, 0.5, 0.4, 0.4, 0.4]
    late, early = (Approach(Target("loss", "<=", 0.6)) for _ in range(2))
    met = [late.add(90.0 + epoch, value) for epoch, value in enumerate(values)]
    assert met == [None] * 4 + [pytest.approx(92 + 4 / 8), *met[5:]]
    curve = [(1.0, 2.0), *zip(range(90, 97), values, strict=True)]
    assert [early.add(*evaluation) for evaluation in curve] == [None] * 8
    assert early.end() == 96.0, "the newest three met it"


def test_a_run_that_is_evaluated_ten_times_as_often_meets_a_target_no_sooner():
    """By the first value that meets it: 11 % sooner."""
    rng = np.random.default_rng(1)

    def seconds(every):
        approach, now, met_s = Approach(Target("loss", "<=", 3.3)), 0.0, None
        while met_s is None:
            now += every
            met_s = approach.add(now, 3.28 + 0.5 * np.exp(-now / 100) + 0.01 * rng.standard_normal())
        return met_s

    rare, often = (np.mean([seconds(every) for _ in range(300)]) for every in (10.0, 1.0))
    assert often / rare == pytest.approx(1, abs=0.03)


def test_a_target_is_a_condition():
    assert Target.of("val/loss <= 3.28", "") == Target("val/loss", "<=", 3.28)
    assert [Target.of(text, "").met(3.0) for text in ("a<3", "a<=3", "a>3", "a>=3")] == [False, True, False, True]
    with pytest.raises(ConfigError, match="--target: 'loss' is not allowed"):
        Target.of("loss", "--target")


def by_time(values, **content):
    """A comparison by time to a target, whose curves fall from three values to `values` at 5, 10, 15 and 20 s."""
    rules = {"better": "time", "target": "frechet<=3.2", "counted": "first", "margin": None}
    return Comparison.read(made(values, objective="frechet", mode="min", **{**rules, **content}))


def test_seconds_until_the_target_decide_if_all_reach_it(at_tmp_path):
    """Value v falls as 2.5 v, 2 v, 1.5 v, v, the mean of three as 2.5 v, 2.25 v, 2 v, 1.5 v at 5, 7.5, 10 and 15 s."""
    found = by_time({"A": [2.0, 2.1, 1.95, 2.02], "B": [1.5, 1.55, 1.45, 1.52]})
    a, b = found.values[:, 0]
    assert a == pytest.approx(10 + 5 * (4.0 - 3.2) / (4.0 - 3.0))
    assert b == pytest.approx(7.5 + 2.5 * (3.375 - 3.2) / (3.375 - 3.0))
    assert found.verdict == "better"
    assert sides.outcome_label(found) == "seconds until frechet<=3.2"
    assert found.analysis.differences[0].estimate == pytest.approx(b / a, rel=0.03)


def test_a_run_that_never_reaches_the_target_is_longer_than_any(at_tmp_path):
    a = [2.6, 2.0, 2.7, 2.1, 2.6, 2.0, 1.95, 2.8]
    found = by_time({"A": a, "B": [1.2, 1.21, 1.18, 1.3, 1.25, 1.22, 1.23, 1.24]}, pairs=8)
    assert (found.verdict, found.analysis.rounds, found.has_failed) == ("better", 8, False)
    assert [found.missed(one) for one in found.candidates] == [4, 0]
    assert found.candidates[1].difference.estimate is None
    assert found.speedup(found.candidates[1]) is None, "no ratio is made of an infinite value"
    found = by_time({"A": [2.0, 2.1, 1.95], "B": [1.2, 2.6, 1.18]}, pairs=3)
    assert (found.verdict, found.failure) == ("no_difference", None), "three pairs are too few for their signs"


def test_fast_and_bad_is_not_better(at_tmp_path):
    """Equal seconds to the end of equally many samples would count; here B is quicker, and its values are not shown."""
    values = {"A": [2.0, 2.1, 1.95, 2.02], "B": [2.3, 2.55, 2.1, 2.45]}
    folder = made(values, objective="frechet", mode="min", better="time", target="frechet<=2.2", counted="end",
                  margin=None, pairs=4)  # fmt: skip
    for journal in folder.glob("trials/*[13579]/journal.jsonl"):  # those of B take less time, differing a little
        factor = 0.5 + 0.01 * (int(journal.parent.name[1:]) % 4)
        journal.write_text(journal.read_text().replace('"train_s": 20.0', f'"train_s": {20 * factor}'))
    found = Comparison.read(folder)
    assert found.analysis.differences[0].estimate < 0.6
    assert found.verdict == "quality_not_shown"
    assert found.target_p > 0.5
