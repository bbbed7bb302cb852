"""Searched knobs that the command line fixes."""

import optuna
import pytest

from tests.search_space.files import changed
from tunediff import search_space
from tunediff.config import ConfigError


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
