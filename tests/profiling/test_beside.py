"""Trainings that share a device."""

import dataclasses

import pytest

from tunediff import config as cfg
from tunediff.api import search_setup
from tunediff.api.search_setup import SearchOptions
from tunediff.config import ConfigError
from tunediff.profiling import beside
from tunediff.profiling.beside import Beside


@pytest.mark.parametrize(
    ("rates", "noise", "steady"),
    [
        ((99.0, 98.5), 0.001, True),
        ((99.0, 90.0), 0.001, False),
        ((99.0, 90.0), 0.06, True),
        ((101.0, 97.0), 0.0, False),
    ],
)
def test_the_slowest_may_lose_two_percent_or_twice_the_noise(rates, noise, steady):
    assert Beside(100.0, rates, noise).steady is steady


@pytest.mark.training
def test_every_training_beside_others_is_measured():
    config = cfg.override(cfg.baseline("digits"), {"loader.batch_size": 8, "model.channels": 8})
    measured = beside.measure(config, 2, seconds=0.2)
    assert len(measured.beside) == 2
    assert min(measured.alone, *measured.beside) > 0


@pytest.mark.training
def test_a_training_that_fails_beside_others_says_why():
    config = dataclasses.replace(cfg.baseline("cifar10"), data=dataclasses.replace(
        cfg.baseline("cifar10").data, path="missing.zip"))  # fmt: skip
    with pytest.raises(ConfigError, match=r"trials_per_gpu: one of 1 trainings at once failed: .*missing.zip"):
        beside.measure(config, 2, seconds=0.2)


def shared(tmp_path):
    """A search of two trials on one GPU."""
    (tmp_path / "x.yaml").write_text(
        "workload: digits\nbudget: {per_trial: 2s}\ngrid: {loader.batch_size: [64, 128]}\ntrials_per_gpu: 2\n"
    )
    options = SearchOptions([str(tmp_path / "x.yaml")], storage=tmp_path)
    return search_setup.requested(options).space, options


def test_a_search_whose_trials_slow_each_other_down_is_refused(tmp_path, monkeypatch):
    space, options = shared(tmp_path)
    said = []
    monkeypatch.setattr(beside, "measure", lambda config, number: Beside(100.0, (60.0,) * number, 0.01))
    with pytest.raises(ConfigError, match=r"x.yaml: trials_per_gpu: 2: beside each other the slowest keeps 60%"):
        search_setup.check_shared(space, options, said.append)
    search_setup.check_shared(space, dataclasses.replace(options, force=True), said.append)
    assert "WARNING" in said[-1]
    monkeypatch.setattr(beside, "measure", lambda config, number: Beside(100.0, (99.5,) * number, 0.01))
    search_setup.check_shared(space, options, said.append)
    assert "99.5, 99.5 beside" in said[-1]
    with pytest.raises(ConfigError, match="or with --force"):
        search_setup.check_shared(space, dataclasses.replace(options, address="auto"), said.append)
