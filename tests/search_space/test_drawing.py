"""What is drawn is what the file says."""

import pickle

import optuna
import pytest

from tests.search_space.files import changed, listed, parse
from tunediff import config as cfg
from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.search_space import reading

optuna.logging.set_verbosity(optuna.logging.ERROR)
MANY = [*range(1, 65)]


def test_draws_follow_when_and_stay_inside():
    loaded = parse()
    draw = pickle.loads(pickle.dumps(search_space.Draw(loaded.dimensions)))
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
    baseline, second = parse(noise=1).candidates
    assert baseline == {"loader.batch_size": 128, "optimizer.lr": 1e-3, "timesteps.name": "uniform"}
    assert second == {
        "loader.batch_size": 64, "optimizer.lr": 1e-3, "timesteps.name": "loss_second_moment",
        "timesteps.history": 10, "timesteps.uniform_share": 0.001,
    }  # fmt: skip


def test_lists_as_choices_survive_optuna(tmp_path):
    search = {"model.multipliers": [[1, 2], [1, 2, 4]]}
    loaded = parse(search=search, first=[{"model.multipliers": [1, 2, 4]}], noise=1)
    storage = f"sqlite:///{tmp_path}/s.db"
    study = optuna.create_study(storage=storage)
    study.enqueue_trial(search_space.to_params(loaded.candidates[1]))
    values = search_space.Draw(loaded.dimensions)(study.ask())
    assert loaded.config(values).model.multipliers == (1, 2, 4)


def test_a_condition_names_values_that_are_drawn():
    with pytest.raises(ConfigError, match="when: loader.workers: 1.5 is never drawn; allowed: 0 … 3"):
        parse(search={"loader.workers": {"low": 0, "high": 3},
                      "optimizer.lr": {"choice": [1e-3], "when": {"loader.workers": [1.5]}}}, first=[])  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "seeds", "count"),
    [
        ({"loader.prefetch_factor": MANY, "loader.accumulation": MANY, "loader.workers": [*range(64)]}, None, "10,001"),
        # 64 × (62 + 2 × 64): of 64 numbers of workers 2 have a prefetch factor
        ({"loader.accumulation": MANY, "loader.workers": [*range(64)], "loader.prefetch_factor": {
            "choice": MANY, "when": {"loader.workers": [1, 2]}}}, None, "10,001"),
        ({"loader.accumulation": MANY, "loader.workers": [*range(64)]}, 3, "4,096 combinations or more × 3"),
    ],
    ids=["product", "condition", "seeds"],
)  # fmt: skip
def test_a_grid_of_too_many_points_is_refused_before_all_are_made(grid, seeds, count):
    with pytest.raises(ConfigError, match=f"grid: has {count}"):
        listed(grid=grid, seeds=seeds)


@pytest.mark.parametrize("key", ["trials", "first"])
def test_lists_without_end_are_refused_before_they_are_read(monkeypatch, key):
    entries = [{"optimizer.lr": 1e-6 * number} for number in range(1, 700_001)]
    monkeypatch.setattr(reading, "_points", None)  # nobody looks at one of them
    with pytest.raises(ConfigError, match=f"x.yaml: {key}: has 700,000 entries; allowed: at most 10,000 points"):
        (listed if key == "trials" else parse)(**{key: entries})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="model.channels: has 700,000 choices; allowed: at most 1,000, or a range"):
        parse(search={"model.channels": [*range(1, 700_001)]}, first=[])


# ------------------------------------------------------------------------------------ when a union member's knob applies
def searched(**spec):
    search = {"timesteps.name": ["uniform", "info_noise", "speed"], "loader.resident": [False, True], **spec}
    return {dimension.name: dimension for dimension in parse(search=search, first=[]).dimensions}


def test_a_members_knob_applies_when_its_member_is_drawn():
    when = searched(**{"timesteps.bins": [10, 20, 40]})["timesteps.bins"].when
    assert when == (("timesteps.name", ("info_noise",)),)
    shared = searched(**{"timesteps.importance_correction": {"low": 0.0, "high": 1.0}})
    assert shared["timesteps.importance_correction"].when == (("timesteps.name", ("speed", "info_noise")),)
    assert not shared["timesteps.importance_correction"].active({"timesteps.name": "uniform"})


def test_other_conditions_come_on_top():
    spec = {"choice": [10, 40], "when": {"loader.resident": True}}
    dimension = searched(**{"timesteps.bins": spec})["timesteps.bins"]
    assert dict(dimension.when) == {"timesteps.name": ("info_noise",), "loader.resident": (True,)}
    narrower = {"low": 0.0, "high": 1.0, "when": {"timesteps.name": "speed"}}
    dimension = searched(**{"timesteps.importance_correction": narrower})["timesteps.importance_correction"]
    assert dimension.when == (("timesteps.name", ("speed",)),)


def test_a_member_that_is_fixed_needs_no_condition():
    loaded = parse(fixed={"timesteps.name": "info_noise"}, search={"timesteps.bins": [10, 40]}, first=[], noise=1)
    assert [(dimension.name, dimension.when) for dimension in loaded.dimensions] == [("timesteps.bins", ())]
    assert loaded.candidates == ({"timesteps.bins": 40},)


def test_a_condition_on_a_fixed_member_leaves_out_what_is_of_others():
    """One file for many methods: `fixed:` or the command line names one, and only its knobs are searched."""
    search = {
        "loader.resident": [False, True],
        "timesteps.bins": {"choice": [10, 20, 40], "when": {"timesteps.name": ["info_noise"]}},
        "timesteps.tau": {"low": 0.4, "high": 0.9, "when": {"timesteps.name": "speed", "loader.resident": True}},
    }

    def of(method):
        loaded = parse(search=search, first=[], fixed={"timesteps.name": method})
        return {dimension.name: dimension.when for dimension in loaded.dimensions}

    assert of("uniform") == {"loader.resident": ()}
    assert of("info_noise") == {"loader.resident": (), "timesteps.bins": ()}
    assert of("speed") == {"loader.resident": (), "timesteps.tau": (("loader.resident", (True,)),)}
    search["timesteps.bins"]["when"] = {"timesteps.name": "info_nois"}
    with pytest.raises(ConfigError, match="timesteps.bins: when: .*info_nois.*info_noise"):
        of("uniform")


# ----------------------------------------------------------------------------------------------- what a space says of itself
def test_the_objective_is_the_workloads_unless_told_otherwise():
    loaded = parse()
    assert (loaded.metric, loaded.mode, loaded.label, loaded.evaluates) == ("frechet", "min", "FD", True)
    assert loaded.workload is cfg.find("diffusion")
    assert loaded.schema is loaded.baseline.schema is loaded.workload.schema
    rate = parse(objective=["samples_per_s", "device_s"])
    assert (rate.metric, rate.mode, rate.evaluates, rate.cost) == ("samples_per_s", "max", False, "device_s")
    assert parse(objective={"mode": "min"}).metric == "frechet"


def test_what_differs_from_the_baseline():
    loaded = parse()
    assert loaded.changed(loaded.candidates[0]) == {}
    changed = {"loader.batch_size": 64, "timesteps.name": "loss_second_moment"}
    assert loaded.changed(changed) == changed
    trained = loaded.config(changed)
    assert loaded.changed(trained) == changed, "not what another sampler has by default, and the baseline's has not"
    assert loaded.changed(cfg.flat(trained)) == changed, "as a record keeps it"
    assert loaded.config(loaded.changed(trained)) == trained
    share = loaded.config({**changed, "timesteps.uniform_share": 0.3})
    assert loaded.changed(share) == {**changed, "timesteps.uniform_share": 0.3}


def test_another_ruler_may_change_what_no_search_varies():
    loaded = parse(final={"evaluation.images": 64}, confirm={"of": 1, "final": {"evaluation.sampler": "ddpm"}})
    assert (loaded.final, loaded.confirm.final) == ({"evaluation.images": 64}, {"evaluation.sampler": "ddpm"})
    assert (loaded.confirm.of, loaded.confirm.seeds) == (1, 12)


def test_device_seconds_are_shared_by_the_devices_of_a_trial():
    """40 of them: ten for each of four workers, and at most twenty where two are the fewest."""
    budget = {"per_trial": "40s", "trials": 8, "unit": "device", "total": "25s", "price_per_device_hour": 1.5}
    workers = {"parallel.workers": [2, 4], "loader.batch_size": [64, 128]}
    shared = parse(budget=budget, search=workers, first=None, baseline={"parallel.workers": 4})
    assert [shared.budget.of(devices).seconds for devices in (1, 2, 4)] == [40.0, 20.0, 10.0]
    assert shared.longest_s == 20.0, "a limit of 25 s is enough"
    assert shared.budget.of(2).price_per_device_hour == 1.5
    assert parse(budget=shared.budget.lines, search=workers, first=None, baseline={"parallel.workers": 4}) == shared
    wall = parse(search=workers, first=None, baseline={"parallel.workers": 4})
    assert [wall.budget.of(devices).seconds for devices in (1, 4)] == [20.0, 20.0]
    assert (wall.longest_s, wall.budget.clock.along, shared.budget.clock.along) == (20.0, "train_s", "device_s")


# --------------------------------------------------------------------------- searched knobs that the command line fixes
def narrow(*words, **changes):
    """(space, notices) of the digits file with these words."""
    content, words, notices = search_space.narrow(changed(**changes), "x.yaml", words=words)
    return search_space.parse(content, "x.yaml", words=words), notices


def names(wanted):
    return [dimension.name for dimension in wanted.dimensions]


def drawn(wanted):
    """Names of the knobs of which there is something to draw, in any draw."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    draws = [search_space.Draw(wanted.dimensions)(study.ask()) for _ in range(40)]
    return [name for name in names(wanted) if len({str(draw.get(name)) for draw in draws} - {"None"}) > 1]


def test_command_line_fixes_a_searched_knob_and_says_so():
    wanted, notices = narrow("loader.batch_size=16", baseline={"loader.batch_size": 128})
    assert wanted.baseline.loader.batch_size == 16
    assert notices == ["loader.batch_size is fixed at 16 by the command line; what x.yaml says of it is not searched"]
    assert "loader.batch_size" not in names(wanted)
    assert any(point["timesteps.name"] == "loss_second_moment" for point in wanted.candidates)


def test_narrowed_content_reads_the_same_without_the_words():
    """The folder of a search keeps the content and the baseline, not the words."""
    content, words, _ = search_space.narrow(changed(), "x.yaml", words=["optimizer.lr=1e-2", "seed=3"])
    assert "optimizer.lr" not in content["search"]
    assert words == ["optimizer.lr=1e-2", "seed=3"]


def test_knobs_of_other_union_members_are_not_drawn():
    wanted, _ = narrow("timesteps.name=wiener")
    assert wanted.baseline.timesteps.name == "wiener"
    assert drawn(wanted) == ["loader.batch_size", "optimizer.lr"]


@pytest.mark.parametrize("fixed", ["uniform", "wiener"], ids=["has no such knob", "has it, and does not search it"])
def test_a_listed_point_is_taken_without_what_is_not_searched_any_more(fixed):
    point = {"optimizer.lr": 0.004, "timesteps.name": "loss_second_moment", "timesteps.uniform_share": 0.002}
    wanted, notices = narrow(f"timesteps.name={fixed}", first=[{}, point])
    assert [one["optimizer.lr"] for one in wanted.candidates][-1] == 0.004
    assert not any("left out" in notice for notice in notices)


def test_knobs_of_the_fixed_union_member_are_drawn():
    wanted, _ = narrow("timesteps.name=loss_second_moment")
    assert drawn(wanted) == ["loader.batch_size", "optimizer.lr", "timesteps.history", "timesteps.uniform_share"]


def test_a_knob_of_a_searched_union_has_one_choice():
    wanted, notices = narrow("timesteps.history=5")
    (history,) = [dimension for dimension in wanted.dimensions if dimension.name == "timesteps.history"]
    assert history.choices == (5,)
    assert history.when == (("timesteps.name", ("loss_second_moment",)),)
    assert notices[0].startswith("timesteps.history is fixed at 5 by the command line")


def test_conditions_on_a_fixed_knob_hold_or_drop_the_knob():
    search = {"loader.resident": [False, True], "loader.workers": {"choice": [0, 2], "when": {"loader.resident": False}},
              "optimizer.lr": {"low": 1e-4, "high": 1e-2}}  # fmt: skip
    wanted, _ = narrow("loader.resident=true", search=search, first=[])
    assert drawn(wanted) == ["optimizer.lr"]
    wanted, _ = narrow("loader.resident=false", search=search, first=[])
    assert drawn(wanted) == ["loader.workers", "optimizer.lr"]
    chained = search | {"loader.prefetch_factor": {"choice": [2, 4], "when": {"loader.workers": 2}}}
    wanted, _ = narrow("loader.resident=true", search=chained, first=[])
    assert drawn(wanted) == ["optimizer.lr"], "nor what depends on a knob that is not drawn"


def test_first_points_that_contradict_a_fixed_knob_are_left_out():
    search = {"compile.mode": ["none", "default"], "compile.dynamic": [False, True]}
    first = [{}, {"compile.mode": "default", "compile.dynamic": True}]
    wanted, notices = narrow("compile.mode=none", search=search, first=first, noise=1)
    assert wanted.candidates == ({"compile.dynamic": False},)
    assert notices[1].startswith("a point is left out: first[1]")


def test_missing_data_are_what_is_refused_not_a_point():
    """That the baseline cannot run is the only thing to say."""
    content, words, _ = search_space.narrow(changed(workload="images"), "x.yaml", words=["loader.batch_size=16"])
    with pytest.raises(ConfigError, match=r"data.path: None is not allowed"):
        search_space.parse(content, "x.yaml", words=words)


def test_grids_are_narrowed_as_well():
    grid = {"loader.batch_size": [64, 128], "precision.amp": ["none", "bf16"]}
    wanted, _ = narrow("precision.amp=bf16", search=None, first=None, grid=grid)
    assert names(wanted) == ["loader.batch_size"]
    assert wanted.baseline.precision.amp == "bf16"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("loader.batch_size=banana", "command line: loader.batch_size: 'banana' is not allowed; allowed: a whole number"),
        ("loader.batch_size=-5", "command line: loader.batch_size: -5 is not allowed; allowed: a whole number of at least"),
        ("timesteps.name=wienr", "command line: timesteps.name: 'wienr' is not allowed; allowed: "),
        ("timesteps.history=banana", "command line: timesteps.history: 'banana' is not allowed; allowed: a whole number"),
    ],
)  # fmt: skip
def test_bad_words_are_refused_with_what_is_allowed(word, message):
    with pytest.raises(ConfigError) as refusal:
        narrow(word)
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_fixing_all_searched_knobs_is_refused():
    with pytest.raises(ConfigError, match=r"command line: fixes every knob that x.yaml searches"):
        narrow("loader.batch_size=64", search={"loader.batch_size": [64, 128]}, first=[])


def test_a_knob_given_nested_and_dotted_is_refused():
    with pytest.raises(ConfigError, match=r"x.yaml: fixed: loader.workers: is given twice, 1 and 2; allowed: once"):
        narrow("optimizer.lr=1e-3", fixed={"loader": {"workers": 1}, "loader.workers": 2})


def test_a_knob_given_twice_is_refused():
    with pytest.raises(
        ConfigError, match=r"command line: optimizer.lr: is given twice: optimizer.lr=1e-3, optimizer.lr=2"
    ):
        narrow("optimizer.lr=1e-3", "optimizer.lr=2")
