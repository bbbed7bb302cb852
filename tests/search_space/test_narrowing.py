"""Searched knobs that the command line fixes."""

import pytest

from tests.search_space.files import changed
from tunediff import search_space
from tunediff.config import ConfigError


def narrow(*words, **changes):
    """(space, notices) of the digits file with these words."""
    narrowed = search_space.narrow(changed(**changes), "x.yaml", words=words)
    return search_space.parse(narrowed.content, "x.yaml", words=narrowed.words), narrowed.notices


def names(wanted):
    return [dimension.name for dimension in wanted.dimensions]


def test_command_line_fixes_a_searched_knob_and_says_so():
    wanted, notices = narrow("loader.batch_size=16")
    assert wanted.baseline.loader.batch_size == 16
    assert "loader.batch_size" not in names(wanted)
    assert notices == ["loader.batch_size is fixed at 16 by the command line; what x.yaml says of it is not searched"]
    assert all("loader.batch_size" not in point for point in wanted.candidates)
    assert any(point["timesteps.name"] == "loss_second_moment" for point in wanted.candidates)


def test_narrowed_content_reads_the_same_without_the_words():
    """The folder of a search keeps the content and the baseline, not the words."""
    narrowed = search_space.narrow(changed(), "x.yaml", words=["optimizer.lr=1e-2"])
    assert "optimizer.lr" not in narrowed.content["search"]
    assert narrowed.words == ["optimizer.lr=1e-2"]


def test_a_fixed_knob_replaces_the_files_baseline_value():
    wanted, _ = narrow("loader.batch_size=16", baseline={"loader.batch_size": 128})
    assert wanted.baseline.loader.batch_size == 16


def test_knobs_of_other_union_members_are_not_searched():
    wanted, notices = narrow("timesteps.name=wiener")
    assert wanted.baseline.timesteps.name == "wiener"
    assert names(wanted) == ["loader.batch_size", "optimizer.lr"]
    assert "timesteps.history is not searched: it applies only to another timesteps.name" in notices


def test_knobs_of_the_fixed_union_member_are_searched():
    wanted, _ = narrow("timesteps.name=loss_second_moment")
    assert names(wanted) == ["loader.batch_size", "optimizer.lr", "timesteps.history", "timesteps.uniform_share"]
    assert all(not dimension.when for dimension in wanted.dimensions)


def test_a_knob_of_a_searched_union_has_one_choice():
    wanted, notices = narrow("timesteps.history=5")
    (history,) = [dimension for dimension in wanted.dimensions if dimension.name == "timesteps.history"]
    assert history.choices == (5,)
    assert history.when == (("timesteps.name", ("loss_second_moment",)),)
    assert notices[0].startswith("timesteps.history is fixed at 5 by the command line")
    assert [point["timesteps.history"] for point in wanted.candidates if "timesteps.history" in point] == [5]


def test_conditions_on_a_fixed_knob_hold_or_drop_the_knob():
    search = {"loader.resident": [False, True], "loader.workers": {"choice": [0, 2], "when": {"loader.resident": False}},
              "optimizer.lr": {"low": 1e-4, "high": 1e-2}}  # fmt: skip
    wanted, _ = narrow("loader.resident=true", search=search, first=[], fixed={"loader.workers": 0})
    assert names(wanted) == ["optimizer.lr"]
    wanted, _ = narrow("loader.resident=false", search=search, first=[])
    assert names(wanted) == ["loader.workers", "optimizer.lr"]
    chained = search | {"loader.prefetch_factor": {"choice": [2, 4], "when": {"loader.workers": 2}}}
    wanted, notices = narrow("loader.resident=true", search=chained, first=[], fixed={"loader.workers": 0})
    assert (names(wanted), len(notices)) == (["optimizer.lr"], 3), "nor what depends on a knob that is not searched"
    kept = search_space.narrow(changed(search=search, first=[]), "x.yaml", words=["optimizer.lr=1e-3"]).content
    assert kept["search"] == {name: search[name] for name in ("loader.resident", "loader.workers")}


def test_first_points_that_contradict_a_fixed_knob_are_left_out():
    search = {"compile.mode": ["none", "default"], "compile.dynamic": [False, True]}
    first = [{}, {"compile.mode": "default", "compile.dynamic": True}]
    wanted, notices = narrow("compile.mode=none", search=search, first=first, noise=1)
    assert wanted.candidates == ({"compile.dynamic": False},)
    assert notices[1].startswith("a point is left out: first[1]: compile.dynamic: True is not allowed: it needs")


def test_missing_data_are_what_is_refused_not_a_point():
    """That the baseline cannot run is the only thing to say."""
    narrowed = search_space.narrow(changed(workload="images"), "x.yaml", words=["loader.batch_size=16"])
    with pytest.raises(ConfigError, match=r"data.path: None is not allowed"):
        search_space.parse(narrowed.content, "x.yaml", words=narrowed.words)


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
