"""Every search file that is shipped loads, and is what it says."""

import contextlib
import json

import optuna
import pytest

from tests.search_space.files import changed, gridded, rungs, searched, studied
from tunediff import config as cfg
from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.workloads.diffusion.knobs import Model

SHIPPED = sorted(search_space.SHIPPED.rglob("*.yaml"))
MEMBERS = cfg.find("diffusion").schema.members


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_files_load_and_their_baseline_lies_inside(path):
    loaded = search_space.load(path, ["data.path=photos"] if path.stem.startswith("images") else [])
    assert loaded.candidates[0] == loaded.expand({}, "here")
    assert loaded.config(loaded.candidates[0]) == loaded.baseline


STUDIES = ["amp_by_gpus", "batch_by_gpus", "checkpointing", "classifier_by_gpus", "classifier_checkpointing",
           "classifier_ladder", "classifier_loader_workers", "classifier_mixed_precision", "classifier_parallelism",
           "compile_by_gpus", "ladder", "loader_workers", "mixed_precision", "parallelism", "top_operations"]  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_shipped_studies_are_probes_with_a_table_and_a_figure(name):
    path = search_space.find(f"studies/{name}")
    loaded = search_space.parse(search_space.read(path, world_sizes=(1, 2, 4)), str(path), path.parent)
    assert (loaded.metric, loaded.study.has_figure, loaded.skipped) == ("samples_per_s", True, ())
    assert loaded.baseline.evaluation.points == 1
    assert loaded.config(loaded.candidates[0]) == loaded.baseline
    if name.endswith(("_by_gpus", "parallelism")):
        assert {loaded.config(point).parallel.workers for point in loaded.candidates} == {1, 2, 4}
    if name.endswith("parallelism"):
        content = search_space.read(path, world_sizes=(1, 2, 4), gpu=True)
        both = [
            search_space.parse(one, str(path), path.parent)
            for one in (search_space.read(path, world_sizes=(1, 2)), content)
        ]
        found = [{one.config(point).parallel.strategy for point in one.candidates} for one in both]
        assert found == [{"ddp", "fsdp", "pipeline"}, {"ddp", "dp", "fsdp", "pipeline"}]


def test_all_shipped_studies_are_tested():
    assert sorted(path.stem for path in (search_space.SHIPPED / "studies").glob("*.yaml")) == STUDIES


def test_the_full_network_is_a_matter_of_overrides():
    default = cfg.flat(cfg.find("diffusion").schema.default())
    network = [f"{name}={json.dumps(value)}" for name, value in default.items() if name.startswith("model.")]
    assert search_space.load(search_space.find("studies/ladder"), network).baseline.model == Model()


def test_flagship_mixes_systems_sampler_and_weighting():
    names = {dimension.name.split(".")[0] for dimension in search_space.load(search_space.find("cifar10")).dimensions}
    assert {"loader", "precision", "compile", "timesteps", "weighting", "optimizer"} <= names


def test_files_that_compare_samplers_list_all_once_and_first_with_what_applies_to_each():
    loaded = search_space.load(search_space.find("digits_samplers"))
    for union, members in MEMBERS.items():
        if union in {dimension.name for dimension in loaded.dimensions}:
            assert {point[union] for point in loaded.candidates} == set(members)
    shares = {point["timesteps.name"]: point.get("timesteps.uniform_share") for point in loaded.candidates}
    assert (shares["log_normal"], shares["wiener"], shares["speed"]) == (0.001, None, None)


def test_most_draws_of_the_samplers_can_run():
    loaded, possible = search_space.load(search_space.find("digits_samplers")), 0
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [search_space.Draw(loaded.dimensions)(study.ask()) for _ in range(80)]
    for values in drawn:
        with contextlib.suppress(ConfigError):
            possible += loaded.config(values) is not None
    assert possible > 0.9 * len(drawn)
    assert {name for values in drawn for name in values} == {dimension.name for dimension in loaded.dimensions}


# ---------------------------------------------------- every mistake in a search file is refused, by file, key and value
REFUSED = [
    (changed() | {3: 4}, "3:"),
    (changed(serch={}), "serch:"),
    (changed(search=None), "exactly one of"),
    (changed(grid={}), "exactly one of"),
    (changed(workload="mnist"), "workload:"),
    (changed(workload=None), "workload:"),
    (changed(search={}), "search:"),
    (changed(seed=-1), "seed: -1"),
    (changed(early_stopping="asah"), "early_stopping: 'asah'"),
    (changed(objective="fid"), "objective: metric: 'fid'"),
    (changed(objective={"metric": "frechet", "mode": "max"}), "objective: mode: 'max'"),
    (changed(objective=["frechet", "samples_per_s"]), "objective: cost: 'samples_per_s'"),
    (changed(objective=["frechet"]), "objective: ['frechet']"),
    (changed(objective=["frechet", "device_s"], early_stopping="asha"), "early_stopping: 'asha'"),
    (changed(objective={"target": "frechet"}), "objective: target: 'frechet' is not allowed; allowed: such as"),
    (changed(objective={"target": 3}), "objective: target: 3"),
    (changed(objective={"target": "fid<=3"}), "objective: target: 'fid<=3' is not allowed; allowed: one of frechet"),
    (changed(objective={"target": "frechet>=3"}), "objective: target: 'frechet>=3' is not allowed; allowed: frechet<="),
    (changed(objective={"metric": "fid", "target": "frechet<=3"}), "objective: metric: 'fid'"),
    (changed(objective={"metric": "samples_per_s", "target": "frechet<=3"}),
     "objective: target: 'frechet<=3' is not allowed for samples_per_s; allowed: frechet"),
    (changed(objective={"target": "frechet<=3"}, early_stopping="asha"),
     "early_stopping: 'asha' is not allowed with a target"),
    (changed(budget={}), "budget: per_trial:"),
    (changed(budget={"per_trial": "20s"}), "budget: trials:"),
    (changed(budget={"per_trial": 20, "trials": 8}), "budget: per_trial: 20"),
    (changed(budget={"per_trial": "0s", "trials": 8}), "budget: per_trial: '0s'"),
    (changed(budget={"per_trial": "20s", "trials": 0}), "budget: trials: 0"),
    (changed(budget={"per_trial": "20s", "trials": 8, "compile": True}), "budget: compile: True"),
    (changed(budget={"per_trial": "20s", "trials": 8, "steps": 5}), "budget: steps:"),
    (changed(budget={"per_trial": "20s", "trials": 8, "deadline": "10s"}), "budget: deadline: '10s'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "deadline": "20s"}), "budget: deadline: '20s'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "total": "10s"}), "budget: total: '10s'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "unit": "gpu"}), "budget: unit: 'gpu'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "price_per_device_hour": 0}), "budget: price_per_device_hour: 0"),
    (changed(objective=["frechet", "price"]), "objective: cost: 'price'"),
    (changed(fixed={"parallel.workers": 4}, budget={"per_trial": "40s", "trials": 8, "unit": "device", "total": "9s"}),
     "budget: total: '9s'"),
    (changed(fixed={"loader.wrkers": 1}), "fixed: loader.wrkers:"),
    (changed(fixed={"loader": {"workers": 1}, "loader.workers": 2}), "fixed: loader.workers:"),
    (searched(loader={"workers": [1]}, loader__workers=[2]), "search: loader.workers:"),
    (changed(fixed={"optimizer.lr": 1e-3}), "fixed: optimizer.lr:"),
    (changed(fixed={"loader.workers": -1}), "fixed: loader.workers: -1"),
    (changed(baseline={"optimizer.lr": 0.5}), "search (baseline): optimizer.lr: 0.5"),
    (changed(first={}), "first:"),
    (changed(first=[{"loader.batch_size": 32}]), "first[0]: loader.batch_size: 32"),
    (changed(first=[{"loader.workers": 2}]), "first[0]: loader.workers: 2"),
    (changed(first=[{"timesteps.history": 5}]), "first[0]: timesteps.history:"),
    (searched(loader__batchsize=[1]), "search: loader.batchsize:"),
    (searched(evaluation__images=[100, 200]), "search: evaluation.images:"),
    (searched(seed=[1, 2]), "search: seed:"),
    (searched(loader__batch_size=128), "search: loader.batch_size: 128"),
    (searched(loader__batch_size=[]), "search: loader.batch_size: []"),
    (searched(loader__batch_size=[64, 128, 0]), "search: loader.batch_size: loader.batch_size: 0"),
    (searched(precision__amp=[False, "none"]), "search: precision.amp: precision.amp: False"),
    (searched(optimizer__lr={"low": "1e-4", "high": 1e-3}), "search: optimizer.lr: low: optimizer.lr: '1e-4'"),
    (searched(optimizer__lr={"low": 1e-4}), "search: optimizer.lr: high:"),
    (searched(optimizer__lr={"low": 1e-2, "high": 1e-4}), "search: optimizer.lr:"),
    (searched(optimizer__lr={"low": 1e-4, "high": 1e-2, "lgo": True}), "search: optimizer.lr: lgo:"),
    (searched(optimizer__lr={"low": 1e-4, "high": 1e-2, "log": 1}), "search: optimizer.lr: log: 1"),
    (searched(optimizer__lr={"choice": [1e-3], "low": 1e-4}), "search: optimizer.lr: low:"),
    (searched(loader__workers={"low": 0, "high": 8, "log": True}), "search: loader.workers: log:"),
    (searched(loader__workers={"low": 0, "high": 8, "step": 3}), "search: loader.workers: step: 3"),
    (searched(precision__amp={"low": 0, "high": 1}), "search: precision.amp:"),
    (searched(loader__batch_size=[64, 256]), "search (baseline): loader.batch_size: 128"),
    (searched(timesteps__history=[5, 10]), "search: timesteps.history:"),
    (searched(timesteps__name=["uniform", "stratified"], timesteps__history=[5, 10]), "search: timesteps.history:"),
    (searched(timesteps__name=["uniform", "speed"],
              timesteps__tau={"choice": [0.5, 0.7], "when": {"timesteps.name": []}}),
     "search: timesteps.tau: when: timesteps.name: []"),
    (searched(timesteps__name=["uniform", "loss_second_moment"],
              timesteps__history={"choice": [5, 10], "when": {"timesteps.name": "uniform"}}),
     "search: timesteps.history: when: timesteps.name: 'uniform'"),
    (searched(loader__workers={"choice": [0, 1], "when": {"loader.resident": False}}, loader__resident=[True, False]),
     "search: loader.workers: when: loader.resident:"),
    (searched(loader__resident=[False, True], loader__workers={"choice": [0], "when": {"loader.resident": "no"}}),
     "search: loader.workers: when: loader.resident: 'no'"),
    (changed(fixed={1: 2}), "fixed[1]: [key]: 1"),
    (changed(warm_start=7), "warm_start: 7"),
    (gridded(warm_start="night"), "warm_start: 'night'"),
    (changed(final={"evaluation.points": 2}), "final: evaluation.points:"),
    (changed(final={"evaluation.images": 2}), "final: evaluation.images: 2"),
    (changed(final={"evaluation.images": 64}, objective="samples_per_s"), "final:"),
    (changed(objective=[["frechet"], "device_s"]), "objective: metric: ['frechet']"),
    (changed(objective={"metric": "frechet", "cost": "watts"}), "objective: cost: 'watts'"),
    (changed(seeds=3), "seeds:"),
    (gridded(seeds=1), "seeds: 1"),
    (gridded(seeds=101), "seeds: 101"),
    (gridded(seeds=True), "seeds: True"),
    (gridded(seeds=3, early_stopping="asha"), "seeds: early_stopping: 'asha'"),
    (gridded(noise=2), "noise:"),
    (rungs(("a", {"precision.amp": "bf16"}), noise=1), "noise:"),
    (changed(noise=8), "noise: 8"),
    (changed(noise=0), "noise: 0"),
    (searched(seed={"low": 0, "high": 9}), "search: seed:"),
    (changed(search=None, first=None, trials=[{"seed": 1}]), "trials[0]: seed:"),
    (rungs(), "ladder:"),
    (rungs({"a": {}}), "ladder:"),
    (rungs(("a", {})), "ladder: a:"),
    (rungs(("a", "bf16")), "ladder: a:"),
    (rungs(("a", {"seed": 1})), "ladder: a: seed:"),
    (rungs(("a", {"loader.batch_size": 100}), ("b", {"parallel.workers": 3})), "ladder: b: loader.batch_size: 100"),
    (changed(operations=True), "operations: True"),
    (changed(operations=1001), "operations: 1001"),
    (changed(search=None, first=None, grid={"parallel.workers": "every"}, budget={"per_trial": "9s"}),
     "grid: parallel.workers: 'every'"),
    (changed(objective=""), "objective: metric: ''"),
    (changed(study=["epoch_s"]), "study:"),
    (studied(axes={"colums": ["epoch_s"]}), "study: colums: no such key; did you mean columns?"),
    (changed(study={"columns": ["epoch_s"], 3: 4}), "study: 3: no such key; allowed: columns, title, x, y"),
    (studied(axes={"figure": {"kind": "bars", "y": "epoch_s"}}), "study: figure: no such key; allowed: columns, title, x, y"),
    (changed(study={"title": 3, "columns": ["epoch_s"]}), "study: title: 3"),
    (studied(None), "study: columns: is missing"),
    (studied([]), "study: columns: []"),
    (changed(study={"columns": "epoch_s"}), "study: columns: 'epoch_s'"),
    (studied([7]), "study: columns[0]: 7"),
    (studied(["epochs_s"]), "study: columns: 'epochs_s': no such knob or quantity; did you mean epoch_s"),
    (studied(["epoch_s", "zzz"]), "study: columns: 'zzz': no such knob or quantity; allowed: configuration, trial, status"),
    (studied(["operation"]), "study: columns: 'operation' needs operations: in the search file"),
    (studied(["operation", "epoch_s"], operations=3), "study: columns: 'epoch_s' is a quantity of a whole step"),
    (studied(["operation"], {"y": "epoch_s"}, operations=3), "study: y: 'epoch_s' is a quantity of a whole step"),
    (studied(axes={"y": {"epoch_s": 1}}), "study: y: {'epoch_s': 1}"),
    (studied(axes={"y": 3}), "study: y: 3"),
    (studied(axes={"y": "epoc_s"}), "study: y: 'epoc_s': no such measured number; did you mean epoch_s"),
    (studied(axes={"y": "optimizer.lr"}), "study: y: 'optimizer.lr': no such measured number; did you mean step_optimizer_s"),
    (studied(axes={"y": "status"}), "study: y: 'status': no such measured number"),
    (studied(axes={"x": ["a", "b"], "y": "epoch_s"}), "study: x: ['a', 'b']"),
    (studied(axes={"x": "batch", "y": "epoch_s"}), "study: x: 'batch': no such knob or measured number"),
    (studied(axes={"x": "loader.batch_siz", "y": "epoch_s"}), "study: x: 'loader.batch_siz': no such knob or measured number; did you mean loader.batch_size"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "start"), REFUSED, ids=[start for _, start in REFUSED])
def test_a_search_file_is_refused_by_key_and_value(content, start):
    with pytest.raises(ConfigError) as error:
        search_space.parse(content, "x.yaml")
    assert str(error.value).startswith(f"x.yaml: {start}")
