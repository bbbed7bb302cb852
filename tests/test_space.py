"""Search files: shipped ones load, every mistake is refused, what is drawn is what the file says."""

import contextlib
import math
import pickle
import re

import optuna
import pytest
import yaml

from tunediff import config as cfg
from tunediff import space, study
from tunediff.config import ConfigError
from tunediff.tuning import resources
from tunediff.tuning.trial import plan

optuna.logging.set_verbosity(optuna.logging.ERROR)
SHIPPED = sorted(space.SHIPPED.rglob("*.yaml"))

FILE = """
workload: digits
budget: {per_trial: 20s, trials: 8}
search:
  loader.batch_size: [64, 128]
  optimizer.lr: {low: 5.0e-4, high: 8.0e-3, log: true}
  timesteps.name: [uniform, loss_second_moment]
  timesteps.history: {choice: [5, 10], when: {timesteps.name: loss_second_moment}}
  timesteps.uniform_share: {low: 0.001, high: 0.3, log: true, when: {timesteps.name: loss_second_moment}}
first:
  - {}
  - {loader.batch_size: 64, timesteps.name: loss_second_moment}
"""


def parse(text=FILE, **changes):
    content = yaml.safe_load(text)
    for key, value in changes.items():
        if value is None:
            content.pop(key)
        else:
            content[key] = value
    return space.parse(content, "x.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_files_load_and_their_baseline_lies_inside(path):
    loaded = space.load(path)
    assert loaded.points[0] == loaded.expand({}, "here")
    assert loaded.config(loaded.points[0]) == loaded.baseline


STUDIES = ["amp_by_gpus", "batch_by_gpus", "checkpointing", "compile_by_gpus", "ladder", "loader_workers",
           "mixed_precision", "top_operations"]  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_shipped_studies_are_probes_with_a_table_and_a_figure(name):
    path = space.find(f"studies/{name}")
    loaded = space.parse(space.read(path, world_sizes=(1, 2, 4)), str(path), path.parent)
    assert (loaded.metric, loaded.study.has_figure, loaded.skipped) == ("images_per_s", True, ())
    assert loaded.baseline.evaluation.points == 1
    assert loaded.config(loaded.points[0]) == loaded.baseline
    if name.endswith("_by_gpus"):
        assert {loaded.config(point).parallel.workers for point in loaded.points} == {1, 2, 4}


def test_all_shipped_studies_are_tested():
    assert sorted(path.stem for path in (space.SHIPPED / "studies").glob("*.yaml")) == STUDIES


def test_the_full_network_is_a_matter_of_overrides():
    path, full = space.find("studies/ladder"), cfg.Model()
    network = {name: value for name, value in cfg.flat(cfg.Config()).items() if name.startswith("model.")}
    loaded = space.load(path, overrides=network)
    assert loaded.baseline.model == full


def test_flagship_mixes_systems_sampler_and_weighting():
    names = {dimension.name.split(".")[0] for dimension in space.load(space.find("cifar10")).dimensions}
    assert {"loader", "precision", "compile", "timesteps", "weighting", "optimizer"} <= names


@pytest.mark.parametrize("name", ["digits_samplers", "cifar10_samplers", "digits_methods", "cifar10_cpu_methods"])
def test_files_that_compare_samplers_leave_none_out(name):
    choices = {dimension.name: set(dimension.choices or ()) for dimension in space.load(space.find(name)).dimensions}
    assert choices["timesteps.name"] == set(cfg.members()["timesteps.name"])
    if name.endswith("samplers"):
        assert choices["weighting.name"] == set(cfg.members()["weighting.name"])


def test_most_draws_of_the_samplers_can_run():
    loaded, possible = space.load(space.find("digits_samplers")), 0
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.Draw(loaded.dimensions)(study.ask()) for _ in range(80)]
    for values in drawn:
        with contextlib.suppress(ConfigError):
            possible += loaded.config(values) is not None
    assert possible > 0.9 * len(drawn)
    assert {name for values in drawn for name in values} == {dimension.name for dimension in loaded.dimensions}


def test_draws_follow_when_and_stay_inside():
    loaded = parse()
    draw = pickle.loads(pickle.dumps(space.Draw(loaded.dimensions)))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [draw(study.ask()) for _ in range(60)]
    for values in drawn:
        adaptive = values["timesteps.name"] == "loss_second_moment"
        assert ("timesteps.history" in values) == ("timesteps.uniform_share" in values) == adaptive
        assert 5e-4 <= values["optimizer.lr"] <= 8e-3
        loaded.config(values)
    assert {values["loader.batch_size"] for values in drawn} == {64, 128}
    # log: half of the draws below the geometric mean, 2e-3
    below = sum(values["optimizer.lr"] < 2e-3 for values in drawn)
    assert 18 <= below <= 42


def test_first_points_are_completed_from_the_baseline():
    baseline, second = parse().points
    assert baseline == {"loader.batch_size": 128, "optimizer.lr": 1e-3, "timesteps.name": "uniform"}
    assert second == {
        "loader.batch_size": 64, "optimizer.lr": 1e-3, "timesteps.name": "loss_second_moment",
        "timesteps.history": 10, "timesteps.uniform_share": 0.001,
    }  # fmt: skip


def test_enqueued_points_come_out_as_written():
    loaded = parse()
    study = optuna.create_study()
    for point in loaded.points:
        study.enqueue_trial(space.to_params(point))
    draw = space.Draw(loaded.dimensions)
    assert [draw(study.ask()) for _ in loaded.points] == list(loaded.points)


def test_baseline_is_first_even_if_not_listed():
    loaded = parse(first=[{"loader.batch_size": 64}])
    assert [point["loader.batch_size"] for point in loaded.points] == [128, 64]


def test_the_baseline_of_a_searched_knob_can_be_given():
    loaded = parse(baseline={"loader.batch_size": 64, "optimizer.lr": 2e-3}, first=[])
    assert (loaded.baseline.loader.batch_size, loaded.points[0]["optimizer.lr"]) == (64, 2e-3)


def test_grid_is_every_combination_that_is_possible():
    grid = {
        "loader.batch_size": [128, 96],
        "parallel.workers": [1, 5],
        "timesteps.name": ["uniform", "loss_second_moment"],
        "timesteps.history": {"choice": [5, 10], "when": {"timesteps.name": "loss_second_moment"}},
    }
    loaded = parse(search=None, first=None, grid=grid, budget={"per_trial": "20s"})
    # 5 workers divide neither batch: 2 batches × 1 world size × (uniform + 2 histories)
    assert len(loaded.points) == 6 == loaded.budget.trials
    assert loaded.points[0] == {"loader.batch_size": 128, "parallel.workers": 1, "timesteps.name": "uniform"}
    assert len(loaded.skipped) == 6
    assert (
        "x.yaml: grid: loader.batch_size: 128 is not allowed: must be a multiple of parallel.workers"
        in loaded.skipped[0]
    )


def test_trials_run_in_order_with_the_baseline_first():
    trials = [{"precision.amp": "bf16"}, {"timesteps.name": "loss_second_moment", "timesteps.history": 5}, {}]
    loaded = parse(search=None, first=None, trials=trials, budget={"per_trial": "20s"})
    configs = [loaded.config(point) for point in loaded.points]
    assert configs[0] == loaded.baseline
    assert [c.precision.amp for c in configs] == ["none", "bf16", "none"]
    assert configs[2].timesteps == cfg.LossSecondMoment(history=5)
    assert len(configs) == 3


def test_points_that_share_a_knob_keep_the_defaults_of_their_own_members():
    """`uniform_share` belongs to several samplers, each with a default of its own."""
    trials = [
        {"timesteps.name": "logit_normal", "timesteps.uniform_share": 0.05},
        {"timesteps.name": "loss_second_moment"},
        {"timesteps.name": "speed"},
    ]
    loaded = parse(search=None, first=None, trials=trials, budget={"per_trial": "20s"})
    wanted = [cfg.LogitNormal(uniform_share=0.05), cfg.LossSecondMoment(), cfg.Speed()]
    assert [loaded.config(point).timesteps for point in loaded.points[1:]] == wanted


# --------------------------------------------------------------------------------------------------------- ladders
def laddered(rungs, **changes):
    return parse(search=None, first=None, ladder=rungs, budget={"per_trial": "20s"}, **changes)


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
    assert list(loaded.points) == [base, *together, base | rungs["larger batch"], base | rungs["resident"]]
    assert [(rung.name, rung.knobs) for rung in loaded.rungs] == list(rungs.items())
    assert [rung.together for rung in loaded.rungs] == together
    assert [rung.alone for rung in loaded.rungs] == [base | knobs for knobs in rungs.values()]
    assert (loaded.kind, space.size(loaded), loaded.budget.trials, loaded.skipped) == ("ladder", 6, 6, ())


def test_a_rung_that_cannot_stand_alone_is_left_out_with_its_reason():
    rungs = {"compile": {"compile.mode": "default"}, "any size": {"compile.dynamic": True}}
    loaded = laddered(rungs)
    assert [point["compile.dynamic"] for point in loaded.points] == [False, False, True]
    assert [rung.alone is None for rung in loaded.rungs] == [False, True]
    assert loaded.skipped == (
        "x.yaml: ladder: any size alone: compile.dynamic: True is not allowed: it needs a compile.mode other than none",
    )


def test_a_rung_that_changes_nothing_runs_nothing_new():
    loaded = laddered({"nothing": {"precision.amp": "none"}, "bf16": {"precision.amp": "bf16"}})
    assert [point["precision.amp"] for point in loaded.points] == ["none", "bf16"]


def test_a_ladder_is_repeated_with_seeds():
    loaded = laddered({"bf16": {"precision.amp": "bf16"}}, seeds=2)
    assert [(point["seed"], point["precision.amp"]) for point in loaded.points] == [
        (0, "none"), (0, "bf16"), (1, "none"), (1, "bf16"),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------- throughput, studies
def test_all_world_sizes_are_those_of_the_machine(tmp_path):
    file = tmp_path / "s.yaml"
    grid = {"parallel.workers": "all", "loader.batch_size": [64, 128]}
    file.write_text(yaml.safe_dump({"workload": "digits", "budget": {"per_trial": "5s"}, "grid": grid}))
    content = space.read(file, world_sizes=(1, 2, 4))
    assert content["grid"]["parallel.workers"] == [1, 2, 4]
    assert len(space.parse(content, "x.yaml").points) == 6
    assert len(space.load(file).points) == 2, "one worker where nobody says what there is"
    with pytest.raises(ConfigError, match="parallel.workers: 'all' is not allowed with --address"):
        space.read(file, world_sizes=())
    machines = {(2, 0): (1, 2), (6, 0): (1, 2, 4), (64, 1): (1,), (64, 8): (1, 2, 4, 8), (1, 0): (1,)}
    for (cores, gpus), expected in machines.items():
        assert resources.world_sizes_of(resources.Machine(cores, gpus)) == expected


def test_probes_run_in_the_order_that_needs_the_fewest_worker_groups():
    grid = {
        "compile.mode": ["none", "default"],
        "parallel.workers": [1, 2, 4],
        "loader.batch_size": [64, 128],
    }
    changes = {"search": None, "first": None, "grid": grid, "budget": {"per_trial": "20s"}, "fixed": {}}
    loaded = parse(objective="images_per_s", baseline={"parallel.workers": 2}, **changes)
    order = [
        tuple(point[name] for name in ("parallel.workers", "compile.mode", "loader.batch_size"))
        for point in loaded.points
    ]
    assert order == [
        (2, "none", 128), (2, "none", 64), (2, "default", 64), (2, "default", 128),
        (1, "none", 64), (1, "none", 128), (1, "default", 64), (1, "default", 128),
        (4, "none", 64), (4, "none", 128), (4, "default", 64), (4, "default", 128),
    ]  # fmt: skip
    as_written = parse(baseline={"parallel.workers": 2}, **changes).points
    assert as_written[1] == {"compile.mode": "none", "parallel.workers": 1, "loader.batch_size": 64}


def test_what_measures_reaches_every_driver(tmp_path):
    loaded = parse(fresh=True, operations=7)
    job = plan(loaded, tmp_path, ["slot"])
    assert (loaded.fresh, loaded.operations, job["fresh"], job["profile_steps"]) == (True, 7, True, 7)
    job = plan(parse(), tmp_path, ["slot"])
    assert (job["fresh"], job["profile_steps"]) == (False, 0)


def test_a_study_names_knobs_and_quantities():
    loaded = parse(study={"columns": ["loader.batch_size", "epoch_s"], "x": "loader.batch_size", "y": "epoch_s"})
    assert loaded.study.columns == ("loader.batch_size", "epoch_s")
    assert (loaded.study.x, loaded.study.y, loaded.study.has_figure) == ("loader.batch_size", ("epoch_s",), True)
    assert not parse(study={"columns": ["status"]}).study.has_figure
    assert parse(study={"columns": ["operation"]}, operations=3).study.has_figure, "that of the operations"
    assert parse(study={"columns": ["status"], "y": ["step_s", "epoch_s"]}).study.y == ("step_s", "epoch_s")
    assert parse().study is None


def test_every_quantity_is_explained():
    for name, quantity in {**study.QUANTITIES, **study.OPERATIONS}.items():
        assert quantity.meaning, name
        assert quantity.label, name


# ---------------------------------------------------------------------------------------------------------- seeds
def test_points_are_repeated_seed_after_seed():
    grid = {"timesteps.name": ["uniform", "stratified"]}
    loaded = parse(search=None, first=None, grid=grid, budget={"per_trial": "20s"}, seeds=3, fixed={"seed": 5})
    assert [(point["seed"], point["timesteps.name"]) for point in loaded.points] == [
        (5, "uniform"), (5, "stratified"), (6, "uniform"), (6, "stratified"), (7, "uniform"), (7, "stratified"),
    ]  # fmt: skip
    assert (loaded.seeds, loaded.budget.trials, space.size(loaded)) == (3, 6, 6)
    assert loaded.config(loaded.points[0]) == loaded.baseline
    assert [loaded.config(point).seed for point in loaded.points] == [5, 5, 6, 6, 7, 7]
    assert loaded.dimensions[0].name == "seed"


def test_repeated_points_come_out_as_written():
    trials = [{"timesteps.name": "loss_second_moment", "timesteps.history": 2}, {"precision.amp": "bf16"}]
    loaded = parse(search=None, first=None, trials=trials, budget={"per_trial": "20s"}, seeds=2)
    assert [point["seed"] for point in loaded.points] == [0, 0, 0, 1, 1, 1], "the baseline takes part in every seed"
    study = optuna.create_study()
    for point in loaded.points:
        study.enqueue_trial(space.to_params(point))
    draw = space.Draw(loaded.dimensions)
    assert [draw(study.ask()) for _ in loaded.points] == list(loaded.points)


def test_limits_count_all_runs():
    grid = {"timesteps.name": ["uniform", "stratified"]}
    budget = {"per_trial": "20s", "trials": 3}
    loaded = parse(search=None, first=None, grid=grid, budget=budget, seeds=2)
    assert [point["seed"] for point in loaded.points] == [0, 0, 1]
    assert loaded.budget.trials == 3


def test_without_seeds_the_seed_is_no_dimension():
    loaded = parse(search=None, first=None, grid={"timesteps.name": ["uniform"]}, budget={"per_trial": "20s"})
    assert (loaded.seeds, [d.name for d in loaded.dimensions]) == (1, ["timesteps.name"])


def test_lists_as_choices_survive_optuna(tmp_path):
    search = {"model.multipliers": [[1, 2], [1, 2, 4]]}
    loaded = parse(search=search, first=[{"model.multipliers": [1, 2, 4]}])
    storage = f"sqlite:///{tmp_path}/s.db"
    study = optuna.create_study(storage=storage)
    study.enqueue_trial(space.to_params(loaded.points[1]))
    values = space.Draw(loaded.dimensions)(study.ask())
    assert loaded.config(values).model.multipliers == (1, 2, 4)


def test_base_is_a_configuration_file(tmp_path):
    changed = cfg.override(cfg.workload("digits"), {"optimizer.lr": 2e-3})
    (tmp_path / "best.yaml").write_text(cfg.dump(changed))
    content = yaml.safe_load(FILE)
    del content["workload"]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content | {"base": "best.yaml"}, sort_keys=False))
    assert space.load(tmp_path / "s.yaml").baseline == changed


def test_overrides_from_the_command_line():
    loaded = space.parse(yaml.safe_load(FILE), "x.yaml", overrides={"ema.half_life": 0.1}, budget={"trials": 3})
    assert loaded.baseline.ema.half_life == 0.1
    assert loaded.budget.trials == 3
    with pytest.raises(ConfigError, match=r"command line: optimizer.lr: is searched in this file as well"):
        space.parse(yaml.safe_load(FILE), "x.yaml", overrides={"optimizer.lr": 0.1})


def test_throughput_searches_do_not_charge_compilation():
    loaded = parse(objective="images_per_s")
    assert (loaded.metric, loaded.mode, loaded.budget.compile_charged) == ("images_per_s", "max", False)


def test_size():
    assert space.size(parse()) == math.inf
    search = {
        "loader.batch_size": [64, 128],
        "loader.workers": {"low": 0, "high": 8, "step": 2},
        "timesteps.name": ["uniform", "loss_second_moment"],
        "timesteps.history": {"choice": [5, 10], "when": {"timesteps.name": "loss_second_moment"}},
    }
    assert space.size(parse(search=search, first=[])) == 2 * 5 * (1 + 2)


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("2h0m5s", 7205)]
)
def test_durations(text, expected):
    assert space.duration_s(text, "x") == expected


def changed(**changes):
    content = yaml.safe_load(FILE)
    for key, value in changes.items():
        if value is None:
            content.pop(key)
        else:
            content[key] = value
    return content


def searched(**dimensions):
    names = {name.replace("__", "."): spec for name, spec in dimensions.items()}
    return changed(search=names, first=[])


def gridded(**changes):
    grid = {"loader.batch_size": [64, 128]}
    return changed(search=None, first=None, grid=grid, budget={"per_trial": "20s"}, **changes)


def rungs(*entries, **changes):
    ladder = dict(entries) if all(isinstance(entry, tuple) for entry in entries) else list(entries)
    return changed(search=None, first=None, ladder=ladder, budget={"per_trial": "20s"}, **changes)


def studied(columns=("epoch_s",), axes=None, **changes):
    section = {"columns": list(columns)} if columns is not None else {}
    return changed(study=section | (axes or {}), **changes)


REFUSED = [
    (changed(serch={}), "x.yaml: serch: no such key; allowed: workload"),
    (changed(search=None), "x.yaml: exactly one of search:, grid:, trials: and ladder:"),
    (changed(grid={}), "x.yaml: exactly one of search:, grid:, trials: and ladder:"),
    (changed(workload="mnist"), "x.yaml: workload: unknown name 'mnist'; allowed: cifar10"),
    (changed(workload=None), "x.yaml: exactly one of workload:"),
    (changed(search={}), "x.yaml: search: names no knob"),
    (changed(search=[1]), "x.yaml: search: needs `key: value` lines, found [1]"),
    (changed(seed=-1), "x.yaml: seed: -1 is not allowed"),
    (changed(early_stopping="asah"), "x.yaml: early_stopping: 'asah' is not allowed; allowed: none, asha, median"),
    (changed(objective="fid"), "x.yaml: objective: metric: 'fid' is not allowed; allowed: frechet, images_per_s"),
    (changed(objective={"metric": "frechet", "mode": "max"}), "x.yaml: objective: mode: 'max' is not allowed"),
    (changed(objective=["frechet", "images_per_s"]), "x.yaml: objective: ['frechet', 'images_per_s'] is not allowed; allowed: "
     "one of frechet, images_per_s, or a list of one of these and one of peak_memory_mib, worker_s"),
    (changed(objective=["frechet"]), "x.yaml: objective: ['frechet'] is not allowed"),
    (changed(objective=["frechet", "worker_s"], early_stopping="asha"), "early_stopping: 'asha' is not allowed with two"),
    (changed(budget={}), "x.yaml: budget: per_trial: is missing"),
    (changed(budget={"per_trial": "20s"}), "x.yaml: budget: trials: is missing"),
    (changed(budget={"per_trial": 20, "trials": 8}), "x.yaml: budget: per_trial: 20 is not a duration; allowed: a number"),
    (changed(budget={"per_trial": "0s", "trials": 8}), "x.yaml: budget: per_trial: '0s' is empty"),
    (changed(budget={"per_trial": "", "trials": 8}), "x.yaml: budget: per_trial: '' is not a duration"),
    (changed(budget={"per_trial": "20s", "trials": 0}), "x.yaml: budget: trials: 0 is not allowed"),
    (changed(budget={"per_trial": "20s", "trials": 8, "compile": True}), "x.yaml: budget: compile: True"),
    (changed(budget={"per_trial": "20s", "trials": 8, "steps": 5}), "x.yaml: budget: steps: no such key"),
    (changed(budget={"per_trial": "20s", "trials": 8, "deadline": "10s"}), "x.yaml: budget: deadline: '10s'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "total": "10s"}), "x.yaml: budget: total: '10s' is less than"),
    (
        changed(objective="images_per_s", budget={"per_trial": "20s", "trials": 8, "compile": "charged"}),
        "x.yaml: budget: compile: 'charged' is not allowed for images_per_s",
    ),
    (changed(fixed={"loader.wrkers": 1}), "x.yaml: fixed: loader.wrkers: no such knob; did you mean loader.workers"),
    (changed(fixed={"optimizer.lr": 1e-3}), "x.yaml: fixed: optimizer.lr: is searched in this file as well"),
    (changed(fixed={"loader.workers": -1}), "x.yaml: fixed: loader.workers: -1 is not allowed"),
    (changed(baseline={"loader.workers": 1}), "x.yaml: baseline: loader.workers: is not searched; put it under fixed:"),
    (changed(baseline={"optimizer.lr": 0.5}), "x.yaml: search (baseline): optimizer.lr: 0.5, the baseline's value, lies outside"),
    (changed(first={}), "x.yaml: first: needs a list of points"),
    (changed(first=[{"loader.batch_size": 32}]), "x.yaml: first[0]: loader.batch_size: 32 lies outside the space; allowed: [64, 128]"),
    (changed(first=[{"loader.wrkers": 32}]), "x.yaml: first[0]: loader.wrkers: no such knob"),
    (changed(first=[{"loader.workers": 2}]), "x.yaml: first[0]: loader.workers: 2 is not searched; put it under fixed:"),
    (changed(first=[{"timesteps.history": 5}]), "x.yaml: first[0]: timesteps.history"),
    (searched(loader__batchsize=[1]), "x.yaml: search: loader.batchsize: no such knob; did you mean loader.batch_size"),
    (searched(evaluation__images=[100, 200]), "x.yaml: search: evaluation.images: cannot be searched"),
    (searched(seed=[1, 2]), "x.yaml: search: seed: cannot be searched"),
    (searched(loader__batch_size=128), "x.yaml: search: loader.batch_size: 128 is not a space; allowed: a list"),
    (searched(loader__batch_size=[]), "x.yaml: search: loader.batch_size: [] is not a list of choices"),
    (searched(loader__batch_size=[128, 128]), "names a choice twice"),
    (searched(loader__batch_size=[64, 128, 0]), "x.yaml: search: loader.batch_size: loader.batch_size: 0 is not allowed"),
    (searched(precision__amp=[False, "none"]), "(YAML 1.1 reads off, no, on and yes as true or false"),
    (searched(optimizer__lr={"low": "1e-4", "high": 1e-3}), "(YAML 1.1 reads '1e-4' as text; write 1.0e-4)"),
    (searched(optimizer__lr={"low": 1e-4}), "x.yaml: search: optimizer.lr: high: is missing"),
    (searched(optimizer__lr={"low": 1e-2, "high": 1e-4}), "x.yaml: search: optimizer.lr: low 0.01 is not below high"),
    (searched(optimizer__lr={"low": 1e-4, "high": 1e-2, "lgo": True}), "optimizer.lr: lgo: no such key; allowed: choice"),
    (searched(optimizer__lr={"low": 1e-4, "high": 1e-2, "log": 1}), "optimizer.lr: log: 1 is not allowed"),
    (searched(optimizer__lr={"choice": [1e-3], "low": 1e-4}), "optimizer.lr: low: belongs to a range, not to a choice"),
    (searched(loader__workers={"low": 0, "high": 8, "log": True}), "loader.workers: log: needs a low above 0"),
    (searched(loader__workers={"low": 0, "high": 8, "step": 3}), "loader.workers: step: 3 does not lead from 0 to 8"),
    (searched(loader__workers={"low": 0, "high": 8, "step": 0.5}), "loader.workers: step: 0.5 is not allowed"),
    (searched(precision__amp={"low": 0, "high": 1}), "precision.amp: a range needs a number"),
    (searched(loader__batch_size=[64, 256]), "x.yaml: search (baseline): loader.batch_size: 128, the baseline's value, lies outside"),
    (searched(timesteps__history=[5, 10]), "timesteps.history: belongs to timesteps.name = loss_second_moment, but timesteps.name is uniform"),
    (
        searched(timesteps__name=["uniform", "loss_second_moment"], timesteps__history=[5, 10]),
        "timesteps.history: belongs to timesteps.name = loss_second_moment; add when: {timesteps.name: [loss_second_moment]}",
    ),
    (
        searched(
            timesteps__name=["uniform", "loss_second_moment"],
            timesteps__history={"choice": [5, 10], "when": {"timesteps.name": "uniform"}},
        ),
        "timesteps.history: when: timesteps.name: 'uniform' has no such knob",
    ),
    (
        searched(loader__workers={"choice": [0, 1], "when": {"loader.resident": False}}, loader__resident=[True, False]),
        "loader.workers: when: loader.resident: must be a knob searched further up",
    ),
    (
        searched(loader__resident=[False, True], loader__workers={"choice": [0], "when": {"loader.resident": "no"}}),
        "loader.workers: when: loader.resident: 'no' is never drawn",
    ),
    (changed(fixed={"data.name": "cifar10", "data.split": "all", "loader.workers": 1.0}), "loader.workers: 1.0 is not allowed"),
    (changed(seeds=3), "x.yaml: seeds: belongs to grid:, trials: and ladder:, which repeat each of their points"),
    (gridded(seeds=1), "x.yaml: seeds: 1 is not allowed; allowed: a whole number of at least 2 and at most 100"),
    (gridded(seeds=101), "x.yaml: seeds: 101 is not allowed"),
    (gridded(seeds=True), "x.yaml: seeds: True is not allowed"),
    (gridded(seeds=[0, 1]), "x.yaml: seeds: [0, 1] is not allowed"),
    (gridded(seeds=3, early_stopping="asha"), "x.yaml: seeds: early_stopping: 'asha' is not allowed"),
    (gridded(seeds=3, fixed={"seed": 2**31 - 2}), "x.yaml: seeds: seed: 2147483648 is not allowed"),
    (searched(seed={"low": 0, "high": 9}), "to run every point with several seeds, write seeds: 3"),
    (changed(search=None, first=None, trials=[{"seed": 1}]), "x.yaml: trials[0]: seed: must be the same in every trial"),
    (rungs(), "x.yaml: ladder: has no rung; e.g."),
    (rungs({"a": {}}), "x.yaml: ladder: needs `key: value` lines, found [{'a': {}}]"),
    (rungs(("a", {})), "x.yaml: ladder: a: changes no knob"),
    (rungs(("a", "bf16")), "x.yaml: ladder: a: needs `key: value` lines, found 'bf16'"),
    (rungs(("a", {"precision.ampp": "bf16"})), "x.yaml: ladder: a: precision.ampp: no such knob; did you mean precision.amp"),
    (rungs(("a", {"precision.amp": "bf8"})), "x.yaml: ladder: a: precision.amp: 'bf8' is not allowed; allowed: one of none, bf16"),
    (rungs(("a", {"seed": 1})), "x.yaml: ladder: a: seed: must be the same in every trial"),
    (
        rungs(("a", {"loader.batch_size": 100}), ("b", {"parallel.workers": 3})),
        "x.yaml: ladder: b: loader.batch_size: 100 is not allowed: must be a multiple of parallel.workers",
    ),
    (rungs(("a", {"precision.amp": "bf16"}), baseline={"optimizer.lr": 1e-3}), "x.yaml: baseline: optimizer.lr: is not searched"),
    (rungs(("a", {"precision.amp": "bf16"}), grid={}), "x.yaml: exactly one of search:, grid:, trials: and ladder: is needed, found"),
    (changed(fresh="yes"), "x.yaml: fresh: 'yes' is not allowed; allowed: true, false"),
    (changed(operations=True), "x.yaml: operations: True is not allowed; allowed: a whole number of at most 1000 steps"),
    (changed(operations=-1), "x.yaml: operations: -1 is not allowed"),
    (changed(operations=1001), "x.yaml: operations: 1001 is not allowed"),
    (changed(search=None, first=None, grid={"parallel.workers": "every"}, budget={"per_trial": "9s"}),
     "x.yaml: grid: parallel.workers: 'every' is not a space; allowed: a list of choices"),
    (changed(study=["epoch_s"]), "x.yaml: study: needs `key: value` lines, found ['epoch_s']"),
    (changed(study={"column": ["epoch_s"]}), "x.yaml: study: column: no such key; allowed: title, columns, x, y"),
    (changed(study={"columns": ["epoch_s"], 3: 4}), "x.yaml: study: 3: no such key; allowed: title, columns, x, y"),
    (studied(axes={"figure": {"kind": "bars", "y": "epoch_s"}}), "x.yaml: study: figure: no such key; allowed: title, columns, x, y"),
    (changed(study={"title": 3, "columns": ["epoch_s"]}), "x.yaml: study: title: 3 is not allowed; allowed: words"),
    (studied(None), "x.yaml: study: columns: None is not allowed; allowed: a list of knobs and quantities"),
    (studied([]), "x.yaml: study: columns: [] is not allowed; allowed: a list of knobs and quantities"),
    (changed(study={"columns": "epoch_s"}), "x.yaml: study: columns: 'epoch_s' is not allowed; allowed: a list of knobs and quantities"),
    (studied([7]), "x.yaml: study: columns: [7] is not allowed; allowed: a list of knobs and quantities"),
    (studied(["epochs_s"]), "x.yaml: study: columns: 'epochs_s': no such knob or quantity; did you mean epoch_s"),
    (studied(["epoch_s", "zzz"]), "x.yaml: study: columns: 'zzz': no such knob or quantity; allowed: configuration, trial, status"),
    (studied(["epoch_s", "epoch_s"]), "x.yaml: study: columns: 'epoch_s' is given twice"),
    (studied(["operation"]), "x.yaml: study: columns: 'operation' needs operations: in the search file"),
    (studied(["operation", "epoch_s"], operations=3), "x.yaml: study: columns: 'epoch_s' is a quantity of a whole step"),
    (studied(["operation"], {"y": "epoch_s"}, operations=3), "x.yaml: study: y: 'epoch_s' is a quantity of a whole step"),
    (studied(axes={"y": {"epoch_s": 1}}), "x.yaml: study: y: {'epoch_s': 1} is not allowed; allowed: a name, or several"),
    (studied(axes={"y": 3}), "x.yaml: study: y: 3 is not allowed; allowed: a name, or several"),
    (studied(axes={"y": "epoc_s"}), "x.yaml: study: y: 'epoc_s': no such measured number; did you mean epoch_s"),
    (studied(axes={"y": ["epoch_s", "epoch_s"]}), "x.yaml: study: y: 'epoch_s' is given twice"),
    (studied(axes={"y": "optimizer.lr"}), "x.yaml: study: y: 'optimizer.lr': no such measured number; did you mean step_optimizer_s"),
    (studied(axes={"y": "status"}), "x.yaml: study: y: 'status': no such measured number"),
    (studied(axes={"x": ["a", "b"], "y": "epoch_s"}), "x.yaml: study: x: ['a', 'b'] is not allowed; allowed: one name"),
    (studied(axes={"x": "batch", "y": "epoch_s"}), "x.yaml: study: x: 'batch': no such knob or measured number"),
    (studied(axes={"x": "loader.batch_siz", "y": "epoch_s"}), "measured number; did you mean loader.batch_size"),
    (studied(axes={"x": "precision.amp", "y": "epoch_s"}), "x.yaml: study: x: 'precision.amp' holds no numbers; without x: there is a bar for each"),
    (studied(axes={"x": "loader.batch_size"}), "x.yaml: study: x: 'loader.batch_size' needs y: as well, e.g. y: images_per_s"),
    (rungs(("a", {"precision.amp": "bf16"}), study={"columns": ["status"], "y": ["epoch_s", "step_s"]}),
     "x.yaml: study: y: epoch_s, step_s: the figure of a ladder needs one name under y:, and no x:"),
    (rungs(("a", {"precision.amp": "bf16"}), study={"columns": ["status"], "y": "epoch_s", "x": "step_s"}),
     "x.yaml: study: x: step_s: the figure of a ladder needs one name under y:, and no x:"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[message[-45:] for _, message in REFUSED])
def test_mistakes_are_refused(content, message):
    with pytest.raises(ConfigError) as error:
        space.parse(content, "x.yaml")
    assert message in str(error.value)


def test_find_lists_what_is_shipped(tmp_path):
    assert space.find(None).name == "digits.yaml"
    assert space.find("cifar10_systems") == space.SHIPPED / "cifar10_systems.yaml"
    with pytest.raises(ConfigError, match=re.escape("nowhere.yaml: no such search file; shipped: cifar10.yaml")):
        space.find("nowhere.yaml")


def test_a_grid_takes_no_range_and_no_first():
    grid = {"loader.batch_size": {"low": 64, "high": 128}}
    with pytest.raises(ConfigError, match="a grid needs a list of choices, not a range"):
        parse(search=None, first=None, grid=grid)
    with pytest.raises(ConfigError, match="first: belongs to search:"):
        parse(search=None, grid={"loader.batch_size": [64, 128]})
