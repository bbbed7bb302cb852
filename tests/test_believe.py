"""Planted differences are looked for in noise that was measured; what the rules say is known in advance."""

import csv

import numpy as np
import pytest
import scipy.stats

from benchmarks.believe import __main__ as believe
from benchmarks.believe.noise import measured


@pytest.fixture(scope="module")
def sources():
    return believe.sources()


def test_measured_noise_has_standard_deviation_1_and_keeps_its_seeds(sources):
    for name in ("digits", "cifar10", "confirmed"):
        drawn = sources[name].draw(np.random.default_rng(0), (20_000,), 2)
        assert drawn.shape == (20_000, 2)
        assert drawn.std() == pytest.approx(1.0, rel=0.1)
        together = float((drawn[:, 0] * drawn[:, 1]).mean())
        assert together == pytest.approx(sources[name].common, abs=0.1)
    assert sources["cifar10"].common > 0.4 > sources["digits"].common  # a CIFAR-10 seed is good or bad for all


def test_its_size_is_that_of_the_kept_runs(sources):
    """Against the pooled deviation by hand, of two configurations with three seeds."""
    found = measured([believe.REFERENCE / "cifar10-cpu" / "confirm-trials.csv"])
    with open(believe.REFERENCE / "cifar10-cpu" / "confirm-trials.csv") as file:
        values = [np.log(float(row["frechet"])) for row in csv.DictReader(file)]
    pooled = np.sqrt((np.var(values[::2], ddof=1) + np.var(values[1::2], ddof=1)) / 2)
    assert found.sds == {"cifar10-cpu": pytest.approx(pooled)}


@pytest.mark.parametrize(("t", "against"), [(2.24, 1.02), (2.03, 1.56)])
def test_the_bayes_factor_is_the_published_one(t, against):
    """Rouder et al. 2009, 80 differences, scale 1: in favour of no effect."""
    found = believe.bayes_factors(np.array([t]), np.array([80]), scale=1.0)
    assert 1 / found[0] == pytest.approx(against, abs=0.01)


def test_p_values_are_those_of_the_paired_t_test():
    gains = np.random.default_rng(1).normal(0.5, 1, (1, 7))
    expected = [1.0, *(scipy.stats.ttest_1samp(gains[0, :many], 0).pvalue for many in range(2, 8))]
    assert believe.p_values(gains)[0] == pytest.approx(expected)


@pytest.mark.parametrize("rule", believe.RULES)
def test_every_rule_tells_what_is_plain(rule):
    gains = np.array([[1.0], [-1.0], [0.5]]) + np.random.default_rng(2).normal(0, 0.01, (3, 12))
    verdicts, pairs = believe.RULES[rule](gains)
    assert list(verdicts) == [1, -1, 1]
    assert (pairs <= 12).all()


def test_a_search_names_what_was_planted_and_refuses_luck():
    rng = np.random.default_rng(3)
    rows = believe.searched(believe.Drawn(), 40, rng)
    told = {(row["gain"], row["of"]): row for row in rows if row["rule"] == "confirm"}
    assert told[0.0, 3]["refused"] >= 0.85
    assert told[2.0, 3]["named_among"] >= 0.8
    assert told[2.0, 3]["named"] == pytest.approx(told[2.0, 3]["named_among"] * told[2.0, 3]["among"])


def test_reruns_bring_the_better_one_to_the_front():
    """Of 40 trials of noise without anything in common the best single run is the better one in half of all searches."""
    runs = {
        reruns: believe.confirmed(believe.Drawn(), 40, 40, reruns, "one", np.random.default_rng(0)) for reruns in (0, 5)
    }
    without, with_ = (next(row for row in runs[reruns] if row["of"] == 1) for reruns in (0, 5))
    assert with_["among"] > without["among"] + 0.1


def test_the_command_writes_its_table(tmp_path, capsys):
    assert believe.main(["--comparisons", "3", "--searches", "1", "--races", "1", "--out", str(tmp_path)]) == 0
    assert "compare, measured noise; shares in %" in capsys.readouterr().out
    with open(tmp_path / "believe.csv") as file:
        found = list(csv.DictReader(file))
    assert {row["noise"] for row in found} == {"digits", "cifar10", "confirmed", "normal", "heavy"}
    assert believe.main(["--comparisons", "0"]) == 2
    assert "--comparisons: 0 is not allowed" in capsys.readouterr().err
