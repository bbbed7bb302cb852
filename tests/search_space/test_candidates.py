"""Grids, lists, ladders, seeds: what is tried, in which order."""

import pytest

from tests.search_space.files import changed, listed, parse
from tunediff import search_space
from tunediff.workloads.diffusion.methods import LogitNormal, LossSecondMoment, Speed


def test_baseline_is_first_even_if_not_listed():
    loaded = parse(first=[{"loader.batch_size": 64}], noise=1)
    assert [point["loader.batch_size"] for point in loaded.candidates] == [128, 64]


def test_the_baseline_of_a_searched_knob_can_be_given():
    loaded = parse(baseline={"loader.batch_size": 64, "optimizer.lr": 2e-3}, first=[])
    assert (loaded.baseline.loader.batch_size, loaded.candidates[0]["optimizer.lr"]) == (64, 2e-3)


@pytest.mark.parametrize(("trials", "run"), [(6, 4), (3, 2), (1, 0)])
def test_first_points_beyond_the_trials_are_said_to_be_left_out(trials, run):
    """The second run of the baseline, by default from six trials on, takes the place of a point."""
    points = [{"loader.batch_size": size} for size in (8, 16, 32, 64, 256)]
    sizes = {"loader.batch_size": [128, *(point["loader.batch_size"] for point in points)]}
    left, none = (
        parse(search=sizes, first=points, budget={"per_trial": "20s", "trials": count}, noise=noise).skipped
        for count, noise in ((trials, None), (6, 1))
    )
    assert f"first: only {run} of 5" in left[0]
    assert none == ()


def test_grid_is_every_combination_that_is_possible():
    grid = {
        "loader.batch_size": [128, 96],
        "parallel.workers": [1, 5],
        "timesteps.name": ["uniform", "loss_second_moment"],
        "timesteps.history": {"choice": [5, 10], "when": {"timesteps.name": "loss_second_moment"}},
    }
    loaded = listed(grid=grid)
    # 5 workers divide neither batch: 2 batches × 1 world size × (uniform + 2 histories)
    assert len(loaded.candidates) == 6 == loaded.budget.trials
    assert loaded.candidates[0] == {"loader.batch_size": 128, "parallel.workers": 1, "timesteps.name": "uniform"}
    assert len(loaded.skipped) == 6
    assert (
        "x.yaml: grid: loader.batch_size: 128 is not allowed: must be a multiple of parallel.workers"
        in loaded.skipped[0]
    )


def test_trials_run_in_order_with_the_baseline_first():
    trials = [{"precision.amp": "bf16"}, {"timesteps.name": "loss_second_moment", "timesteps.history": 5}, {}]
    loaded = listed(trials=trials)
    configs = [loaded.config(point) for point in loaded.candidates]
    assert configs[0] == loaded.baseline
    assert [c.precision.amp for c in configs] == ["none", "bf16", "none"]
    assert configs[2].timesteps == LossSecondMoment(history=5)
    assert len(configs) == 3


def test_points_that_share_a_knob_keep_the_defaults_of_their_own_members():
    """`uniform_share` belongs to several samplers, each with a default of its own."""
    trials = [
        {"timesteps.name": "logit_normal", "timesteps.uniform_share": 0.05},
        {"timesteps.name": "loss_second_moment"},
        {"timesteps.name": "speed"},
    ]
    loaded = listed(trials=trials)
    wanted = [LogitNormal(uniform_share=0.05), LossSecondMoment(), Speed()]
    assert [loaded.config(point).timesteps for point in loaded.candidates[1:]] == wanted


def test_probes_run_in_the_order_that_needs_the_fewest_worker_groups():
    grid = {"compile.mode": ["none", "default"], "parallel.workers": [1, 2, 4], "loader.batch_size": [64, 128]}
    changes = {"search": None, "first": None, "grid": grid, "budget": {"per_trial": "20s"}, "fixed": {}}
    loaded = parse(objective="samples_per_s", baseline={"parallel.workers": 2}, **changes)
    order = [
        tuple(point[name] for name in ("parallel.workers", "compile.mode", "loader.batch_size"))
        for point in loaded.candidates
    ]
    assert order == [
        (2, "none", 128), (2, "none", 64), (2, "default", 64), (2, "default", 128),
        (1, "none", 64), (1, "none", 128), (1, "default", 64), (1, "default", 128),
        (4, "none", 64), (4, "none", 128), (4, "default", 64), (4, "default", 128),
    ]  # fmt: skip
    as_written = parse(baseline={"parallel.workers": 2}, **changes).candidates
    assert as_written[1] == {"compile.mode": "none", "parallel.workers": 1, "loader.batch_size": 64}


# --------------------------------------------------------------------------------------------------------- ladders
def laddered(rungs, **changes):
    return listed(ladder=rungs, **changes)


def test_a_ladder_climbs_and_then_tries_each_rung_alone():
    rungs = {
        "bf16": {"precision.amp": "bf16"},
        "larger batch": {"loader.batch_size": 256, "optimizer.lr": 2e-3},
        "resident": {"loader.resident": True},
    }
    loaded = laddered(rungs)
    base = {"precision.amp": "none", "loader.batch_size": 128, "optimizer.lr": 1e-3, "loader.resident": False}
    together = [
        base | rungs["bf16"],
        base | rungs["bf16"] | rungs["larger batch"],
        base | rungs["bf16"] | rungs["larger batch"] | rungs["resident"],
    ]
    # the first rung is both, and runs once
    assert list(loaded.candidates) == [base, *together, base | rungs["larger batch"], base | rungs["resident"]]
    assert [(rung.name, rung.knobs) for rung in loaded.rungs] == list(rungs.items())
    assert [rung.together for rung in loaded.rungs] == together
    assert [rung.alone for rung in loaded.rungs] == [base | knobs for knobs in rungs.values()]
    assert (loaded.kind, loaded.budget.trials, loaded.skipped) == ("ladder", 6, ())


def test_a_rung_that_cannot_stand_alone_is_left_out_with_its_reason():
    rungs = {"compile": {"compile.mode": "default"}, "any size": {"compile.dynamic": True}}
    loaded = laddered(rungs)
    assert [point["compile.dynamic"] for point in loaded.candidates] == [False, False, True]
    assert [rung.alone is None for rung in loaded.rungs] == [False, True]
    assert loaded.skipped == (
        "skipped a combination that contradicts itself: x.yaml: ladder: any size alone: compile.dynamic: True is not "
        "allowed: it needs a compile.mode other than none",
    )


def test_a_rung_that_needs_the_one_before_it_cannot_stand_alone():
    loaded = laddered({"adaptive": {"timesteps.name": "info_noise"}, "bins": {"timesteps.bins": 10}})
    assert [point.get("timesteps.bins") for point in loaded.candidates] == [None, 40, 10]
    assert loaded.rungs[1].alone is None
    assert "x.yaml: ladder: bins alone: timesteps.bins: belongs to timesteps.name" in loaded.skipped[0]


# ---------------------------------------------------------------------------------------------------------- seeds
def test_points_are_repeated_seed_after_seed():
    grid = {"timesteps.name": ["uniform", "stratified"]}
    loaded = listed(grid=grid, seeds=3, fixed={"seed": 5})
    assert [(point["seed"], point["timesteps.name"]) for point in loaded.candidates] == [
        (5, "uniform"), (5, "stratified"), (6, "uniform"), (6, "stratified"), (7, "uniform"), (7, "stratified"),
    ]  # fmt: skip
    assert (loaded.seeds, loaded.budget.trials) == (3, 6)
    assert loaded.config(loaded.candidates[0]) == loaded.baseline
    assert [loaded.config(point).seed for point in loaded.candidates] == [5, 5, 6, 6, 7, 7]
    assert loaded.dimensions[0].name == "seed"


def test_limits_count_all_runs():
    grid = {"timesteps.name": ["uniform", "stratified"]}
    budget = {"per_trial": "20s", "trials": 3}
    loaded = parse(search=None, first=None, grid=grid, budget=budget, seeds=2)
    assert [point["seed"] for point in loaded.candidates] == [0, 0, 1]
    assert loaded.budget.trials == 3


# ---------------------------------------------------------------------------------------------------------- noise
@pytest.mark.parametrize(
    ("changes", "seeds"),
    [
        ({}, [None, 6, None]),
        ({"noise": 1}, [None, None]),
        ({"noise": 3}, [None, 6, 7, None]),
        ({"budget": {"per_trial": "20s", "trials": 6}}, [None, 6, None]),
        ({"budget": {"per_trial": "20s", "trials": 5}}, [None, None]),
        ({"budget": {"per_trial": "20s", "trials": 3}, "noise": 2}, [None, 6, None]),
        ({"objective": "samples_per_s", "first": None}, [None, 6]),
        ({"objective": ["frechet", "device_s"], "first": []}, [None, 6]),
    ],
)
def test_a_search_runs_its_baseline_again_on_the_next_seeds(changes, seeds):
    loaded = parse(fixed={"seed": 5}, **changes)
    assert [point.get("seed") for point in loaded.candidates] == seeds
    assert loaded.noise == len([seed for seed in seeds if seed]) + 1
    baseline, *others = loaded.candidates
    for again in others[: loaded.noise - 1]:
        assert again == {**baseline, "seed": again["seed"]}
        assert loaded.changed(again) == {"seed": again["seed"]}
    assert "seed" not in [dimension.name for dimension in loaded.dimensions]


@pytest.mark.parametrize(("trials", "noise"), [(1, 1), (5, 1), (6, 2), (40, 2)])
def test_the_number_of_trials_on_the_command_line_decides(trials, noise):
    loaded = search_space.parse(changed(), "x.yaml", budget={"trials": trials})
    assert (loaded.noise, len(loaded.candidates)) == (noise, min(trials, noise + 1))


def test_what_repeats_its_points_anyway_has_no_further_runs_of_the_baseline():
    forms = {"grid": {"precision.amp": ["none", "bf16"]}, "trials": [{"precision.amp": "bf16"}]}
    for form in [{name: of} for name, of in forms.items()] + [{"ladder": {"a": {"precision.amp": "bf16"}}}]:
        assert listed(budget={"per_trial": "20s", "trials": 40}, **form).noise == 1
