"""Two questions at once: is it good enough, and does it take less time? Values by scipy and by simulation."""

import numpy as np
import pytest
from scipy import stats

from tests.comparisons import made
from tunediff.analysis import pairs, targets
from tunediff.analysis.sequential import Rules
from tunediff.config import ConfigError
from tunediff.core.target import Target

LOSSES = np.array([3.2771, 3.2790, 3.2785, 3.2768, 3.2797, 3.2779])


def test_gate_is_a_one_sample_t_test_against_the_target():
    """As speedruns have it: (3.28 − mean) √n / sd."""
    fixed = Rules(0.01, one_sided=True, fixed=True)
    gate = targets.target_gate(LOSSES, Target("loss", "<=", 3.28), 6, fixed)
    expected = stats.ttest_1samp(LOSSES, 3.28, alternative="less").pvalue
    assert gate.p == pytest.approx(expected)
    assert gate.shown == (expected < 0.01) == True  # noqa: E712
    assert not targets.target_gate(LOSSES, Target("loss", "<=", 3.2785), 6, fixed).shown
    assert targets.target_gate(-LOSSES, Target("loss", ">=", -3.28), 6, fixed).p == pytest.approx(expected)


def test_gates_of_margin_and_of_equality_are_paired_t_tests():
    a, b = LOSSES, LOSSES + np.array([0.0004, -0.0002, 0.0006, 0.0001, 0.0002, 0.0003])
    rules = Rules(0.05, one_sided=True, fixed=True)
    margin = targets.margin_gate(a, b, 0.001, True, 6, rules)
    assert margin.p == pytest.approx(stats.ttest_rel(b, a + 0.001, alternative="less").pvalue)
    equal = targets.equal_gate(a, b, 0.001, 6, rules)
    above = stats.ttest_rel(b, a - 0.001, alternative="greater").pvalue
    assert equal.p == pytest.approx(max(margin.p, above))
    assert margin.shown
    assert equal.shown
    assert not targets.equal_gate(a, b, 0.0002, 6, rules).shown


def test_a_gate_is_passed_wrongly_no_more_often_than_its_level():
    """B just misses the target: looked at after every pair, it passes in at most 2.5 % of comparisons."""
    rng, passed, times = np.random.default_rng(1), 0, 2000
    for _ in range(times):
        b = 3.28 + 0.0013 * rng.standard_normal(12)
        gates = (targets.target_gate(b[:n], Target("loss", "<=", 3.28), 12, Rules()) for n in range(3, 13))
        passed += any(gate.shown for gate in gates)
    assert 0.015 < passed / times < 0.035


def test_a_target_is_a_condition():
    assert Target.of("val/loss <= 3.28", "") == Target("val/loss", "<=", 3.28)
    assert [Target.of(text, "").met(3.0) for text in ("a<3", "a<=3", "a>3", "a>=3")] == [False, True, False, True]
    with pytest.raises(ConfigError, match="--target: 'loss' is not allowed"):
        Target.of("loss", "--target")


def by_time(values, **content):
    """A comparison by time to a target, whose curves fall from three values to `values` at 5, 10, 15 and 20 s."""
    rules = {"better": "time", "target": "frechet<=2.5", "counted": "first", "margin": None}
    return pairs.read(made(values, objective="frechet", mode="min", **{**rules, **content}))


def test_seconds_until_the_target_decide_if_all_reach_it(tmp_path, monkeypatch):
    """Value v falls as 2.5 v, 2 v, 1.5 v, v: B, twice as good, is there sooner."""
    monkeypatch.chdir(tmp_path)
    found = by_time({"A": [2.0, 2.1, 1.95, 2.02], "B": [1.2, 1.25, 1.18, 1.22]})
    a, b = found.values[:, 0]
    assert a == pytest.approx(15 + 5 * (3.0 - 2.5) / (3.0 - 2.0))  # from 1.5 v to v, in the last quarter
    assert b == pytest.approx(5 + 5 * (3.0 - 2.5) / (3.0 - 2.4))
    assert found.verdict == "better"
    assert found.outcome_label == "seconds until frechet<=2.5"
    assert found.look.differences[0].estimate == pytest.approx(b / a, rel=0.03)


def test_a_run_that_never_reaches_the_target_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = by_time({"A": [2.0, 2.1, 1.95], "B": [1.2, 2.6, 1.18]})
    assert found.verdict == "failed"
    assert found.failure.name == "t0003"


def test_fast_and_bad_is_not_better(tmp_path, monkeypatch):
    """Equal seconds to the end of equally many samples would count; here B is quicker, and its values are not shown."""
    monkeypatch.chdir(tmp_path)
    values = {"A": [2.0, 2.1, 1.95, 2.02], "B": [2.3, 2.55, 2.1, 2.45]}
    folder = made(values, objective="frechet", mode="min", better="time", target="frechet<=2.2", counted="end",
                  margin=None, pairs=4)  # fmt: skip
    for journal in folder.glob("trials/*[13579]/journal.jsonl"):  # those of B take less time, differing a little
        factor = 0.5 + 0.01 * (int(journal.parent.name[1:]) % 4)
        journal.write_text(journal.read_text().replace('"train_s": 20.0', f'"train_s": {20 * factor}'))
    found = pairs.read(folder)
    assert found.look.differences[0].estimate < 0.6
    assert found.verdict == "quality not shown"
    assert found.test.target_p > 0.5
