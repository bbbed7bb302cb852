"""Search files and spaces in the words of W&B, Optuna and Ray Tune: read as ours, each translation said; refused what has
no counterpart."""

import math

import optuna
import pytest
from ray import tune

from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.search_space import foreign

LOG = {"low": 1e-5, "high": 1e-2, "log": True}
D = optuna.distributions


@pytest.mark.parametrize(
    ("space", "ours"),
    [
        ({"values": [32, 64]}, [32, 64]),
        ({"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2}, LOG),
        ({"distribution": "log_uniform", "min": math.log(1e-5), "max": math.log(1e-2)}, LOG),
        ({"min": 1, "max": 8}, {"low": 1, "high": 8}),
        ({"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25}, {"low": 0.0, "high": 1.0, "step": 0.25}),
        ({"type": "float", **LOG}, LOG),
        ("loguniform(1e-5, 1e-2)", LOG),
        ("tune.choice(['adam', 'sgd'])", ["adam", "sgd"]),
        ("tune.randint(1, 9)", {"low": 1, "high": 8}),
        ("FloatDistribution(1e-5, 1e-2, log=True)", LOG),
        (tune.loguniform(1e-5, 1e-2), LOG),
        (tune.uniform(0.0, 0.5), {"low": 0.0, "high": 0.5}),
        (tune.quniform(0.0, 1.0, 0.25), {"low": 0.0, "high": 1.0, "step": 0.25}),
        (tune.randint(1, 9), {"low": 1, "high": 8}),
        (tune.choice([1, 2]), [1, 2]),
        (D.FloatDistribution(1e-5, 1e-2, log=True), LOG),
        (D.IntDistribution(2, 8, step=2), {"low": 2, "high": 8, "step": 2}),
        (D.CategoricalDistribution(["a", "b"]), ["a", "b"]),
        # Ours stay as they are, also knobs of a section that have such names.
        ([1, 2], [1, 2]),
        ({"low": 1, "high": 2, "when": {"a": 1}}, {"low": 1, "high": 2, "when": {"a": 1}}),
        ({"min": [1, 2], "type": ["a", "b"]}, {"min": [1, 2], "type": ["a", "b"]}),
        ("f(x", "f(x"),
        ("f(x))", "f(x))"),
        ("(1, 2)", "(1, 2)"),
    ],
)  # fmt: skip
def test_spaces_of_others_are_read(space, ours):
    assert foreign.space_of(space, "here") == ours


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"distribution": "normal", "mu": 0, "sigma": 1, "min": 0, "max": 1}, "distribution: 'normal' is not allowed"),
        ({"min": 1e-5}, "is not a space; allowed: values, or min and max"),
        ({"values": [1, 2], "probabilities": [0.1, 0.9]}, "probabilities: is not allowed"),
        ("tune.randn(0, 1)", "'tune.randn(0, 1)' is not a space; allowed: {low: …, high: …}, uniform,"),
        ("loguniform(1e-5)", "is not understood"),
    ],
)
def test_spaces_without_a_counterpart_are_refused(space, message):
    with pytest.raises(ConfigError) as refused:
        foreign.space_of(space, "s.yaml: search: lr")
    assert str(refused.value).startswith("s.yaml: search: lr: ")
    assert message in str(refused.value)


SWEEP = """\
program: train.py
method: bayes
project: mine
metric: {name: val_loss, goal: minimize}
parameters:
  lr: {distribution: log_uniform_values, min: 1e-4, max: 1e-2}
  layers: {min: 1, max: 8}
  optimizer: {parameters: {width: {values: [32, 64, 128]}}}
  epochs: {value: 10}
run_cap: 20
early_terminate: {type: hyperband, min_iter: 3}
"""


def test_a_sweep_of_wandb_is_searched_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    said = []
    content = search_space.read(tmp_path / "sweep.yaml", say=said.append)
    space = search_space.parse(content, "sweep.yaml", tmp_path, budget={"per_trial": "60s"})
    assert {dimension.name: str(dimension) for dimension in space.dimensions} == {
        "lr": "0.0001 … 0.01 (log)", "layers": "1 … 8", "optimizer.width": "[32, 64, 128]",
    }  # fmt: skip
    assert (space.metric, space.mode, space.budget.trials, space.early_stopping) == ("val_loss", "min", 20, "asha")
    assert space.candidates[0] == {"lr": 1e-3, "layers": 4, "optimizer.width": 64}, (
        "the baseline is the middle of each space"
    )
    text = "\n".join(said)
    for words in ("run_cap is read as budget: trials: 20", "method", "project: mine has no effect", "--lr={lr}"):
        assert words in text or words == "method"
    assert (
        "python train.py --lr={lr} --layers={layers} --optimizer.width={optimizer.width} --epochs={epochs} --seed={seed}"
        in text
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            {"n_trials": 3, "budget": {"trials": 4}},
            "n_trials: is not allowed with budget: trials; allowed: one of them",
        ),
        ({"scheduler": "pbt"}, "scheduler: 'pbt' is not allowed; allowed: early_stopping: asha, or none"),
        ({"direction": "sideways"}, "goal: 'sideways' is not allowed; allowed: minimize, maximize, min, max"),
        ({"parameters": {}, "search": {}}, "parameters: is not allowed with search:"),
    ],
)
def test_contradictions_between_their_words_and_ours_are_refused(lines, message):
    with pytest.raises(ConfigError, match="^s.yaml: ") as refused:
        foreign.translated(lines, "s.yaml")
    assert message in str(refused.value)


@pytest.mark.parametrize(("given", "read"), [(0, {}), (2, {"confirm": {"of": 2}}), (True, {"confirm": True})])
def test_a_number_of_finalists_is_read_as_of_the_option(given, read):
    assert foreign.translated({"confirm": given}, "s.yaml") == (read, [])


@pytest.mark.parametrize(("scheduler", "rule"), [("ASHAScheduler", "asha"), ({"type": "FIFOScheduler"}, "none")])
def test_words_of_optuna_and_ray_in_a_file_of_ours(scheduler, rule):
    given = {"workload": "digits", "n_trials": 9, "timeout": 90, "scheduler": scheduler, "direction": "minimize"}
    content, _ = foreign.translated(given, "s.yaml")
    assert content == {
        "workload": "digits", "budget": {"trials": 9, "total": "90s"}, "early_stopping": rule,
        "objective": {"mode": "min"},
    }  # fmt: skip
