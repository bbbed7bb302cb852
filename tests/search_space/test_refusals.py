"""Every mistake in a search file is refused in words that name file, key, value and what is allowed."""

import pytest

from tests.search_space.files import changed, gridded, rungs, searched
from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.search_space.sections import _times

TWICE = "is given twice, 1 and 2; allowed: once, nested or dotted"
REFUSED = [
    (changed() | {3: 4}, "x.yaml: 3: no such key; allowed: workload, base, objective, budget"),
    (changed(serch={}), "x.yaml: serch: no such key; allowed: workload, base, objective, budget"),
    (changed(search=None), "x.yaml: exactly one of search:, grid:, trials: and ladder:"),
    (changed(grid={}), "x.yaml: exactly one of search:, grid:, trials: and ladder:"),
    (changed(workload="mnist"), "x.yaml: workload: unknown name 'mnist'; allowed: cifar10"),
    (changed(workload=None), "x.yaml: exactly one of workload:"),
    (changed(search={}), "x.yaml: search: names no knob"),
    (changed(search=[1]), "x.yaml: search: needs `key: value` lines, found [1]"),
    (changed(seed=-1), "x.yaml: seed: -1 is not allowed"),
    (changed(early_stopping="asah"), "x.yaml: early_stopping: 'asah' is not allowed; allowed: one of none, asha; did you mean asha?"),
    (changed(objective="fid"), "x.yaml: objective: metric: 'fid' is not allowed; allowed: frechet, samples_per_s"),
    (changed(objective={"metric": "frechet", "mode": "max"}), "x.yaml: objective: mode: 'max' is not allowed"),
    (changed(objective=["frechet", "samples_per_s"]), "x.yaml: objective: ['frechet', 'samples_per_s'] is not allowed; allowed: "
     "one of frechet, samples_per_s, or a list of one of these and one of peak_memory_mib, device_s, energy_wh, price"),
    (changed(objective=["frechet"]), "x.yaml: objective: ['frechet'] is not allowed"),
    (changed(objective=["frechet", "device_s"], early_stopping="asha"), "early_stopping: 'asha' is not allowed with two"),
    (changed(budget={}), "x.yaml: budget: per_trial: is missing"),
    (changed(budget={"per_trial": "20s"}), "x.yaml: budget: trials: is missing"),
    (changed(budget={"per_trial": 20, "trials": 8}), "x.yaml: budget: per_trial: 20 is not a duration; allowed: a number"),
    (changed(budget={"per_trial": "0s", "trials": 8}), "x.yaml: budget: per_trial: '0s' is empty"),
    (changed(budget={"per_trial": "", "trials": 8}), "x.yaml: budget: per_trial: '' is not a duration"),
    (changed(budget={"per_trial": "20s", "trials": 0}), "x.yaml: budget: trials: 0 is not allowed"),
    (changed(budget={"per_trial": "20s", "trials": 8, "compile": True}), "x.yaml: budget: compile: True"),
    (changed(budget={"per_trial": "20s", "trials": 8, "steps": 5}), "x.yaml: budget: steps: no such key"),
    (changed(budget={"per_trial": "20s", "trials": 8, "deadline": "10s"}), "x.yaml: budget: deadline: '10s'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "deadline": "20s"}), "budget: deadline: '20s' is not above per_trial = '20s'"),
    (changed(budget={"per_trial": "20s", "trials": 8, "total": "10s"}), "x.yaml: budget: total: '10s' is less than"),
    (
        changed(objective="samples_per_s", budget={"per_trial": "20s", "trials": 8, "compile": "charged"}),
        "x.yaml: budget: compile: 'charged' is not allowed for samples_per_s",
    ),
    (changed(budget={"per_trial": "20s", "trials": 8, "unit": "gpu"}), "x.yaml: budget: unit: 'gpu' is not allowed; allowed: one of wall, device"),
    (changed(budget={"per_trial": "20s", "trials": 8, "price_per_device_hour": 0}), "x.yaml: budget: price_per_device_hour: 0 is not allowed"),
    (changed(objective=["frechet", "price"]), "x.yaml: objective: cost: 'price' needs the price of a device: budget: price_per_"),
    (
        changed(objective=["frechet", "device_s"], budget={"per_trial": "20s", "trials": 8, "unit": "device"}),
        "x.yaml: objective: cost: 'device_s' is not allowed: with budget: unit: device every trial has the same device_s",
    ),
    (
        changed(objective="samples_per_s", budget={"per_trial": "20s", "trials": 8, "unit": "device"}),
        "x.yaml: budget: unit: 'device' is not allowed for samples_per_s, a rate",
    ),
    (
        changed(fixed={"parallel.workers": 4}, budget={"per_trial": "40s", "trials": 8, "unit": "device", "total": "9s"}),
        "x.yaml: budget: total: '9s' is less than per_trial = '40s', 10 s for a trial",
    ),
    (changed(fixed={"loader.wrkers": 1}), "x.yaml: fixed: loader.wrkers: no such knob; did you mean loader.workers"),
    (changed(fixed={"loader": {"workers": 1}, "loader.workers": 2}), f"x.yaml: fixed: loader.workers: {TWICE}"),
    (changed(baseline={"optimizer": {"lr": 1}, "optimizer.lr": 2}), f"x.yaml: baseline: optimizer.lr: {TWICE}"),
    (changed(first=[{"loader.workers": 1, "loader": {"workers": 2}}]), f"x.yaml: first[0]: loader.workers: {TWICE}"),
    (searched(loader={"workers": [1]}, loader__workers=[2]), "x.yaml: search: loader.workers: is given twice, [1] and [2]"),
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
    (searched(optimizer__lr={"low": "1e-4", "high": 1e-3}), "(YAML 1.1 reads '1e-4' as text; write 1.0e-3 for 1e-3)"),
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
        searched(timesteps__history=[5, 10], timesteps__name=["uniform", "loss_second_moment"]),
        "timesteps.history: belongs to timesteps.name = loss_second_moment; timesteps.name must stand above it in the file",
    ),
    (
        searched(timesteps__name=["uniform", "stratified"], timesteps__history=[5, 10]),
        "timesteps.history: belongs to timesteps.name = loss_second_moment, which is never drawn; allowed: [uniform, stratified]",
    ),
    (
        searched(timesteps__name=["uniform", "speed"], timesteps__tau={"choice": [0.5, 0.7], "when": {"timesteps.name": []}}),
        "timesteps.tau: when: timesteps.name: [] is not allowed; allowed: [uniform, speed]",
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
    (
        searched(loader__resident=[False, True], loader__workers={"choice": [0], "when": {"loader.resident": 0}}),
        "loader.workers: when: loader.resident: 0 is never drawn; allowed: [False, True]",
    ),
    (changed(fixed={"data.name": "cifar10", "data.split": "all", "loader.workers": 1.0}), "loader.workers: 1.0 is not allowed"),
    (changed(budget={"per_trial": "20s", "trials": 8, "total": None}), "x.yaml: budget: total: None is not allowed"),
    (changed(fixed={1: 2}), "x.yaml: fixed: 1 is not allowed as a key; allowed: a word"),
    (
        changed(fixed={"seed": 2**31 - 500}, confirm={"of": 1}),
        "x.yaml: confirm: seed: 2147484159 is not allowed; allowed: a whole number of at least 0",
    ),
    (changed(warm_start=7), "x.yaml: warm_start: 7 is not allowed; allowed: a string"),
    (gridded(warm_start="night"), "x.yaml: warm_start: 'night' is not allowed; it belongs to search:; grid: draws nothing"),
    (changed(final={"evaluation.points": 2}), "x.yaml: final: evaluation.points: is not allowed; allowed: evaluation.images, "),
    (changed(final={"evaluation.images": 2}), "x.yaml: final: evaluation.images: 2 is not allowed"),
    (changed(final={"evaluation.images": 64}, objective="samples_per_s"), "x.yaml: final: samples_per_s is no judgement of a model"),
    (changed(objective=[["frechet"], "device_s"]), "x.yaml: objective: [['frechet'], 'device_s'] is not allowed"),
    (changed(objective={"metric": "frechet", "cost": "watts"}), "x.yaml: objective: cost: 'watts' is not allowed; allowed: one of peak"),
    (changed(seeds=3), "x.yaml: seeds: belongs to grid:, trials: and ladder:, which repeat each of their points"),
    (gridded(seeds=1), "x.yaml: seeds: 1 is not allowed; allowed: a whole number of at least 2 and at most 100"),
    (gridded(seeds=101), "x.yaml: seeds: 101 is not allowed"),
    (gridded(seeds=True), "x.yaml: seeds: True is not allowed"),
    (gridded(seeds=[0, 1]), "x.yaml: seeds: [0, 1] is not allowed"),
    (gridded(seeds=3, early_stopping="asha"), "x.yaml: seeds: early_stopping: 'asha' is not allowed"),
    (gridded(seeds=3, fixed={"seed": 2**31 - 2}), "x.yaml: seeds: seed: 2147483648 is not allowed"),
    (gridded(noise=2), "x.yaml: noise: belongs to search:; grid: repeats every point with seeds:"),
    (rungs(("a", {"precision.amp": "bf16"}), noise=1), "x.yaml: noise: belongs to search:; ladder: repeats every point"),
    (changed(noise=8), "x.yaml: noise: 8 runs of the baseline leave none of 8 trials to search; allowed: at most 7, or more"),
    (changed(noise=0), "x.yaml: noise: 0 is not allowed; allowed: a whole number of at least 1 and at most 100"),
    (changed(fixed={"seed": 2**31 - 1}), "x.yaml: noise: seed: 2147483648 is not allowed"),
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
    (changed(fresh="yes"), "x.yaml: fresh: 'yes' is not allowed; allowed: true or false"),
    (changed(operations=True), "x.yaml: operations: True is not allowed; allowed: a whole number of at least 0 and at most 1000"),
    (changed(operations=-1), "x.yaml: operations: -1 is not allowed"),
    (changed(operations=1001), "x.yaml: operations: 1001 is not allowed"),
    (changed(search=None, first=None, grid={"parallel.workers": "every"}, budget={"per_trial": "9s"}),
     "x.yaml: grid: parallel.workers: 'every' is not a space; allowed: a list of choices"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[message[-45:] for _, message in REFUSED])
def test_mistakes_are_refused(content, message):
    with pytest.raises(ConfigError) as error:
        search_space.parse(content, "x.yaml")
    assert message in str(error.value)


def test_sixteen_times_the_budget_is_the_most():
    assert _times("16x") == "16x"
    with pytest.raises(ValueError, match="16x, rising"):
        _times("17x")


@pytest.mark.parametrize(("value", "where"), [(False, "x.yaml: objective: "), (0, "x.yaml: objective: "), ("", "x.yaml: objective: metric: '' is not ")])  # fmt: skip
def test_an_empty_objective_is_refused(value, where):
    with pytest.raises(ConfigError, match=f"^{where}"):
        search_space.parse(changed(objective=value), "x.yaml")
