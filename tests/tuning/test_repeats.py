"""The last trials of a search run what leads again, on further seeds; without a cluster."""

import types

import pytest

from tests.tuning.asked import FILE, end, study
from tunediff import analysis, search_space
from tunediff.analysis import evidence, noise
from tunediff.config import ConfigError
from tunediff.core import trial_record as record
from tunediff.tuning.stopping import early_stopping

LISTED = [{"loader.batch_size": 64}, {"loader.batch_size": 32}, {"loader.resident": True}]
SEARCH = {"budget": {"per_trial": "3s", "trials": 8}, "reruns": 4, "first": LISTED}
"""The baseline and three points, and four trials that run what leads again."""


def ended(searcher, value, number, **how):
    """Suggest the next trial and end it with a value; its drawn knobs."""
    suggestion = searcher.suggest(f"tune{number}")
    if isinstance(suggestion, str):
        return suggestion
    end(searcher, suggestion, f"tune{number}", value=value, **how)
    return suggestion["spec"].drawn


def read(searcher):
    folder = searcher.proposer.experiment
    return analysis.Results(folder, searcher.proposer.space, record.read_trials(folder))


def test_what_leads_by_its_mean_runs_again_until_it_has_three_runs(make):
    searcher = make(**SEARCH)
    listed = [ended(searcher, value, number) for number, value in enumerate((5.0, 3.0, 4.0, 9.0))]
    assert not any("seed" in drawn for drawn in listed)
    lucky, solid = listed[1], listed[2]
    again = [ended(searcher, value, number) for number, value in enumerate((6.0, 4.2, 4.1, 4.0), 4)]
    assert again == [{**lucky, "seed": 1}, {**solid, "seed": 1}, {**solid, "seed": 2}, {**lucky, "seed": 2}]
    assert searcher.suggest("more") == "FINISHED"
    results = read(searcher)
    assert [outcome.trial.name for outcome in results.ranked] == ["t0002", "t0001", "t0000", "t0003"]
    assert results.ranked[0].value == pytest.approx(4.1)
    assert [trial.name for trial in noise.finalists(results, 1)] == ["t0002"]
    states = [(t.user_attrs["trial"], t.state.name, t.value) for t in study(searcher)]
    assert states[4:] == [(f"t000{i}", "COMPLETE", value) for i, value in enumerate((6.0, 4.2, 4.1, 4.0), 4)]


def test_the_baseline_is_not_run_again_for_leading(make):
    searcher = make(**SEARCH)
    base, *_ = [ended(searcher, value, number) for number, value in enumerate((1.0, 3.0, 4.0, 9.0))]
    again = [ended(searcher, 3.5, number) for number in range(4, 8)]
    assert not any({**base, "seed": drawn["seed"]} == drawn for drawn in again)


def test_what_fails_when_it_runs_again_leads_no_more(make):
    """Its value is luck until all others that lead have failed, too; a failure counts as a run."""
    searcher = make(**SEARCH)
    listed = [ended(searcher, value, number) for number, value in enumerate((5.0, 3.0, 4.0, 9.0))]
    again = [ended(searcher, 3.0, number, status="nan") for number in range(4, 8)]
    assert again == [{**listed[i], "seed": seed} for i, seed in ((1, 1), (2, 1), (3, 1), (1, 2))]


def test_resume_continues_a_rerun_and_does_not_begin_it_twice(make, tmp_path):
    first = make(in_file=True, **SEARCH)
    listed = [ended(first, value, number) for number, value in enumerate((5.0, 3.0, 4.0, 9.0))]
    running = first.suggest("killed")
    running["spec"].begin()
    (tmp_path / "study.db").unlink()  # and the study with it
    second = make(in_file=True, **SEARCH)
    again = second.suggest("x")
    assert (again["trial"], again["spec"].drawn) == (running["trial"], {**listed[1], "seed": 1})
    end(second, again, "x", begin=False, value=6.0)
    assert ended(second, 4.0, 9) == {**listed[2], "seed": 1}
    named = second.suggest("named")["spec"].drawn  # killed before its journal began: only the study knows it
    assert make(in_file=True, **SEARCH).suggest("y")["spec"].drawn == named == {**listed[2], "seed": 2}


def test_with_several_slots_each_rerun_is_another(make):
    """And a slot that finds nothing to run again yet is asked later."""
    searcher = make(slots=8, **SEARCH)
    first = [searcher.suggest(f"tune{i}") for i in range(4)]
    assert searcher.suggest("early") is None
    for number, (suggestion, value) in enumerate(zip(first[:3], (5.0, 3.0, 4.0), strict=True)):
        end(searcher, suggestion, f"tune{number}", value=value)
    again = [searcher.suggest(f"tune{i}")["spec"].drawn for i in range(4, 8)]
    drawn = [suggestion["spec"].drawn for suggestion in first]
    assert again == [{**drawn[i], "seed": seed} for i in (1, 2) for seed in (1, 2)]


def test_no_rule_stops_a_rerun(make):
    space = make(**SEARCH, early_stopping="asha").proposer.space
    rule, drawn = early_stopping(space), space.candidates[1]

    def stops(name, role, drawn, value):
        run = types.SimpleNamespace(name=name, role=role, drawn=drawn)
        return rule.stops(run, {"index": 2, "train_s": 2.0, "fraction": 0.5, "objective": value})

    assert not stops("t0000", "draw", drawn, 3.0)
    assert not stops("t0001", "repeat", {**drawn, "seed": 1}, 9.0)
    assert stops("t0002", "draw", drawn, 9.0)


def test_time_is_left_for_reruns_and_confirming_runs(make, clock):
    """Of 6500 s, with 1000 s a trial: five draws leave time for a rerun, since one of every four trials is one."""
    changes = {
        "budget": {"per_trial": "1000s", "trials": 40, "total": "6500s"},
        "reruns": 10,
        "first": None,
        "noise": 1,
    }
    searcher = make(**changes)
    drawn = []
    while (suggestion := searcher.suggest(f"tune{len(drawn)}")) != "FINISHED":
        end(searcher, suggestion, f"tune{len(drawn)}", value=5.0 - len(drawn))
        clock.s += 1000.0
        drawn.append(suggestion["spec"].drawn)
    assert ["seed" in point for point in drawn] == [False] * 5 + [True]


def test_a_raised_limit_draws_again_and_keeps_the_share(make):
    before = make(**SEARCH)
    for number, value in enumerate((5.0, 3.0, 4.0, 9.0, 3.0, 3.0, 4.0, 4.0)):
        ended(before, value, number)
    after = make(**SEARCH | {"budget": {"per_trial": "3s", "trials": 10}, "reruns": 5})
    more = [ended(after, 5.0, number) for number in (8, 9)]
    assert ["seed" in drawn for drawn in more] == [False, True]
    assert after.suggest("more") == "FINISHED"


def test_a_lowered_limit_counts_reruns_that_were_made(make):
    before = make(**SEARCH)
    for number, value in enumerate((5.0, 3.0, 4.0, 9.0, 3.0, 3.0)):
        ended(before, value, number)
    after = make(**SEARCH | {"budget": {"per_trial": "3s", "trials": 7}, "reruns": 0})
    assert ended(after, 5.0, 6) is not None
    assert after.suggest("more") == "FINISHED"


@pytest.mark.parametrize(("trials", "reruns"), [(31, 0), (32, 4), (40, 5)])
def test_every_eighth_trial_is_a_rerun_from_32_on(trials, reruns):
    content = FILE | {"budget": {"per_trial": "3s", "trials": trials}}
    assert search_space.parse(content, "x.yaml").reruns == reruns
    assert search_space.parse(content | {"reruns": 0}, "x.yaml").reruns == 0
    two = content | {"objective": ["frechet", "peak_memory_mib"]}
    assert search_space.parse(two, "x.yaml").reruns == 0, "there is no single best"


def test_listed_points_are_not_replaced_by_reruns():
    rates = [{"loader.batch_size": 64}, *({"optimizer.lr": 1e-4 * i} for i in range(1, 32) if i != 10)]
    space = {"loader.batch_size": [32, 64, 128], "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}
    content = FILE | {"search": space, "first": rates, "budget": {"per_trial": "3s", "trials": 33}}
    assert search_space.parse(content, "x.yaml").reruns == 1, "33 less the baseline and 31 points"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reruns": -1}, "x.yaml: reruns: -1 is not allowed; allowed: a whole number of at least 0"),
        ({"reruns": 5}, "x.yaml: reruns: 5 is not allowed with 6 trials; allowed: 0 to 4"),
        (
            {"reruns": 1, "objective": ["frechet", "peak_memory_mib"]},
            "x.yaml: reruns: 1 is not allowed: two objectives have no single best; allowed: 0",
        ),
        (
            {"reruns": 1, "search": None, "first": None, "noise": None, "grid": {"loader.batch_size": [32, 64, 128]}},
            "x.yaml: reruns: 1 is not allowed: it belongs to search:; allowed: no such line",
        ),
    ],
)
def test_reruns_are_refused_where_they_mean_nothing(changes, why):
    content = {key: value for key, value in (FILE | changes).items() if value is not None}
    with pytest.raises(ConfigError) as error:
        search_space.parse(content, "x.yaml")
    assert str(error.value) == why


def test_the_run_by_which_a_configuration_was_chosen_is_not_part_of_the_noise(make):
    """It is partly luck: its distance from the next one would be noise and regression to the mean."""
    searcher = make(**SEARCH | {"noise": 2, "reruns": 3})
    values = (5.0, 5.5, 1.0, 4.0, 9.0, 3.0, 3.3, 4.2)
    for number, value in enumerate(values):
        ended(searcher, value, number)
    told = noise.measured(read(searcher))
    assert (told.runs, told.configurations, told.freedom) == (4, 2, 2), "5.0 and 5.5, 3.0 and 3.3"


def test_the_headline_compares_with_the_mean_of_the_baselines_runs(make):
    from tunediff.report.headline import headline

    searcher = make(**SEARCH | {"noise": 2, "reruns": 3})
    for number, value in enumerate((5.0, 5.5, 1.0, 4.0, 9.0, 1.2, 1.4, 5.6)):
        ended(searcher, value, number)
    told = headline(evidence.Evidence(read(searcher)))
    assert "the 5.25 of the baseline (t0000), the mean of 2 runs" in told, told
