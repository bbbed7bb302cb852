"""A search with two objectives: a result and its cost."""

import pytest

from tests.helpers import point
from tests.tuning.asked import BIG, EARLIER, end, study
from tunediff.analysis.pareto import pareto, pareto_table
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End


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
