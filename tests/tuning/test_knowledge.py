"""Which configurations an out-of-memory rules out."""

import pytest

from tests.helpers import point
from tunediff import config as cfg
from tunediff import search_space
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning import evaluated
from tunediff.tuning.evaluated import EvaluatedConfigurations, needs_at_least

BASE = {"loader.batch_size": 256, "loader.resident": True, "parallel.workers": 1}


def knobs(**changes):
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return cfg.flat(cfg.override(cfg.baseline("cifar10"), BASE | changed))


def trial(config, status="ok", mib=None, name="t0001"):
    points = [point(peak_memory_mib=mib)] if mib is not None else []
    return TrialRecord(name, 1, config, {}, "x", points=points, end=End(status))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"loader__batch_size": 512}, True),
        ({"loader__batch_size": 128}, False),
        ({"loader__batch_size": 512, "loader__accumulation": 2}, True),
        ({"loader__batch_size": 512, "loader__accumulation": 4}, False),
        ({"precision__amp": "bf16"}, False),
        ({"model__checkpoint_levels": [0]}, False),
        ({"loader__resident": False}, False),
        ({"optimizer__lr": 1e-5, "timesteps__name": "speed", "weighting__name": "min_snr"}, True),
        ({"seed": 7, "loader__workers": 8, "ema__half_life": 0.3}, True),
        ({"optimizer__implementation": "foreach"}, False),  # other temporary copies
        ({"compile__mode": "default"}, False),  # fuses, and keeps less
        ({"memory__channels_last": True}, False),
        ({"model__channels": 256}, False),  # surely more, but of another network: not compared
        ({"parallel__workers": 2, "loader__batch_size": 512}, True),
        ({"parallel__workers": 2}, False),  # half as many images on each
    ],
)
def test_what_needs_at_least_as_much(changes, expected):
    assert needs_at_least(knobs(**changes), knobs()) == expected


def test_half_precision_that_ran_out_rules_out_full_precision_not_the_reverse():
    half, full = knobs(precision__amp="bf16"), knobs()
    assert needs_at_least(full, half)
    assert not needs_at_least(half, full)
    assert needs_at_least(knobs(precision__amp="fp16"), half)


def test_a_checkpointed_network_that_ran_out_rules_out_one_that_keeps_all():
    assert needs_at_least(knobs(), knobs(model__checkpoint_levels=[0]))
    assert needs_at_least(knobs(model__checkpoint_levels=[0]), knobs(model__checkpoint_levels=[0, 1]))
    assert not needs_at_least(knobs(model__checkpoint_levels=[1]), knobs(model__checkpoint_levels=[0]))


def test_fewer_workers_are_not_ruled_out_by_more():
    two = knobs(parallel__workers=2, loader__batch_size=512)
    assert not needs_at_least(knobs(), two)


def test_more_workers_that_divide_the_model_need_less():
    """With as many images on each of them."""
    for strategy in ("fsdp", "pipeline"):
        two, four = (
            knobs(parallel__strategy=strategy, parallel__workers=workers, loader__batch_size=256 * workers)
            for workers in (2, 4)
        )
        assert needs_at_least(two, two)
        assert not needs_at_least(four, two)


def test_names_that_a_workload_says_memory_does_not_depend_on_are_knobs_of_it():
    schema = cfg.baseline("cifar10").schema
    own = cfg.find(schema.workload).declared
    named = [*own.MEMORY_FREE, *own.MEMORY_SAVING, *evaluated._MEMORY_FREE]
    sections = {name.partition(".")[0] + "." for name in schema.knobs}
    assert [name for name in named if name not in schema.knobs and name not in sections] == []


def test_another_workload_teaches_nothing():
    assert not needs_at_least(knobs() | {"workload": "another"}, knobs())


def test_a_trial_of_a_workload_that_is_gone_was_tried_all_the_same(tmp_path):
    space = search_space.parse(
        {"workload": "digits", "budget": {"per_trial": "3s", "trials": 2}, "search": {"loader.batch_size": [64, 128]}},
        "x.yaml",
    )
    gone = TrialRecord("t0003", 3, {"workload": "gone.py"}, {}, "of that")
    assert EvaluatedConfigurations(space, "cpu", [gone]).exact(space.baseline) is None
