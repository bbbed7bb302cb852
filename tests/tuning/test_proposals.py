"""What is proposed and told: two objectives, points of an earlier search, what a lack of memory rules out."""

import json
import shutil

import pytest

from tests.helpers import point
from tests.tuning.asked import BIG, EARLIER, FILE, AskedBackend, end, pool, study
from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis.pareto import pareto, pareto_table
from tunediff.api import search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End, TrialRecord
from tunediff.tuning import evaluated, experiment
from tunediff.tuning.evaluated import EvaluatedConfigurations, needs_at_least


def measured(searcher, suggestion, frechet, memory, trial_id="a"):
    """A trial that ended ok with both objectives."""
    folder = searcher.proposer.experiment / "trials" / suggestion["spec"].name
    end(searcher, suggestion, None, status=None)
    Journal(folder).point(point(1, 3.0, device_s=3.0, frechet=frechet, peak_memory_mib=memory))
    Journal(folder).end(End("ok"))
    searcher.on_trial_complete(trial_id, {})


def test_two_objectives_end_with_their_trade_offs(make):
    """Optuna is told both; a failure is bad in both; what another trial beats in both is not on the front."""
    from tunediff import analysis

    two = {"objective": ["frechet", "peak_memory_mib"], "first": None, "budget": {"per_trial": "3s", "trials": 9}}
    searcher = make(**(EARLIER | two))
    values = [(5.0, 300.0), (4.0, 400.0), (6.0, 310.0), (3.0, 900.0), (5.5, 250.0), (4.0, 390.0)]
    for frechet, memory in values:
        suggestion = searcher.suggest("a")
        searcher.on_trial_result("a", {"objective": frechet, "index": 1})  # Optuna keeps no curves of two objectives
        measured(searcher, suggestion, frechet, memory)
    failed = searcher.suggest("a")
    end(searcher, failed, "a", status="nan")
    told = {t.user_attrs["trial"]: t.values for t in study(searcher) if "trial" in t.user_attrs}
    assert [told[f"t{i:04d}"] for i in range(6)] == [list(pair) for pair in values]
    assert told[failed["spec"].name] == [12.0, 1800.0]

    found = analysis.Results(
        searcher.proposer.experiment, searcher.proposer.space, record.read_trials(searcher.proposer.experiment)
    )
    assert [row["trial"] for row in pareto(found)] == ["t0003", "t0005", "t0000", "t0004"]
    rows = pareto_table(found)
    assert list(rows["peak_memory_mib"]) == [900.0, 390.0, 300.0, 250.0]
    assert list(rows["frechet"]) == sorted(rows["frechet"])
    assert rows["configuration"][2] == "baseline"
    again = make(**(EARLIER | two))
    assert again.suggest("b")["spec"].name == "t0007"  # resumed: the study of two objectives opens again


@pytest.mark.parametrize(
    ("cost", "ended", "truth"),
    [
        ("peak_memory_mib", End("oom", "", {}, 0, {"peak_memory_mib": 140_000.0}), 140_000.0),
        ("peak_memory_mib", End("timeout", ""), 5000.0),  # killed: its last point is all that is known
        ("device_s", End("nan", "", {"train": 90.0, "data_wait": 10.0, "evaluation": 900.0}), 200.0),
    ],
)
def test_a_failure_is_never_told_as_cheaper_than_it_was(make, cost, ended, truth):
    """A trial that ran out of 140 GiB is not one of 600 MiB; nor is a draw that needs at least as much."""
    two = {
        **BIG, "search": {"loader.batch_size": [64, 1024], "optimizer.lr": [1e-4, 1e-3], "parallel.workers": [1, 2]},
        "first": [{"loader.batch_size": 1024, "parallel.workers": 2}], "budget": {"per_trial": "3s", "trials": 20},
    }  # fmt: skip
    searcher = make(**two, objective=["frechet", cost])
    measured(searcher, searcher.suggest("a"), 5.0, 300.0)
    failed = searcher.suggest("b")
    end(searcher, failed, None, status=None)
    folder = searcher.proposer.experiment / "trials" / failed["spec"].name
    Journal(folder).point(point(1, 1.0, device_s=2.0, frechet=9.0, peak_memory_mib=5000.0))
    Journal(folder).end(ended)
    searcher.on_trial_complete("b", {})
    told = study(searcher)[1].values
    assert told[0] == 10.0
    assert told[1] > truth
    ruled_out = []
    for i in range(7 if ended.status == "oom" else 5):
        if ruled_out or (suggestion := searcher.suggest(f"x{i}")) == "FINISHED":
            break
        measured(searcher, suggestion, 5.0, 300.0, f"x{i}")
        ruled_out = [t.values for t in study(searcher) if "ruled_out" in t.user_attrs]
    assert bool(ruled_out) == (ended.status == "oom")
    assert all(values == told for values in ruled_out)


# ----------------------------------------------------------------- the best points of an earlier search are tried first
@pytest.fixture
def earlier(tmp_path):
    """A finished search: baseline 5, batch 64 best with 3, batch 32 not finite, another learning rate 4."""
    from tunediff.ray_backend.searcher import Searcher
    from tunediff.tuning.optuna_proposer import OptunaProposer

    folder, content = tmp_path / "earlier", FILE | EARLIER | {"budget": {"per_trial": "3s", "trials": 4}}
    wanted = search_space.parse(content, "x.yaml")
    experiment.create(folder, wanted, content)
    searcher = Searcher(OptunaProposer(wanted, folder), AskedBackend(pool()))
    for value in (5.0, 3.0, None, 4.0):
        end(searcher, searcher.suggest("a"), "a", status="nan" if value is None else "ok", value=value)
    return folder


def warm_started(earlier, **changes):
    """The points that a search tries first, without what it has failed with and the baseline."""
    file = earlier.parent / "night.yaml"
    file.write_text(json.dumps(FILE | EARLIER | {"first": [], **changes}))
    options = SearchOptions(words=(str(file),), name="new", storage=earlier.parent, warm_start="earlier")
    request = search_setup.prepare(options)
    points = [(point["loader.batch_size"], point.get("optimizer.lr")) for point in request.space.candidates]
    assert len(request.content["first"]) == len(points) - 1
    return request, points


def test_best_points_of_an_earlier_search_are_tried_first(earlier):
    request, points = warm_started(earlier)
    assert points == [(128, 1e-3), (64, 1e-3), (128, 5e-3)]
    experiment.create(request.folder, request.space, request.content)
    shutil.rmtree(earlier)
    resumed = search_setup.prepare(SearchOptions(resume="new", storage=earlier.parent, trials=20))
    assert resumed.space.candidates[:3] == request.space.candidates


def test_what_lies_outside_the_space_is_left_out(earlier):
    _, points = warm_started(earlier, search={"loader.batch_size": [128, 256], "optimizer.lr": [1e-3, 5e-3]})
    assert points == [(128, 1e-3), (128, 5e-3)]


def test_an_earlier_search_that_is_not_there_is_refused(earlier):
    file = earlier.parent / "night.yaml"
    file.write_text(json.dumps(FILE | {"warm_start": "gone"}))
    with pytest.raises(ConfigError, match="--warm-start: 'gone' is not allowed; allowed: a search in "):
        search_setup.prepare(SearchOptions(words=(str(file),), storage=earlier.parent))


# ---------------------------------------------------------------------- which configurations an out-of-memory rules out
BASE = {"loader.batch_size": 256, "loader.resident": True, "parallel.workers": 1}


def knobs(**changes):
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    return cfg.flat(cfg.override(cfg.baseline("cifar10"), BASE | changed))


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
