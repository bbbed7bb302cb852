"""What a search will cost, computed by hand; a limit, a disk and other load."""

import re

import pytest

from tests import searches
from tunediff.experiment.model import seconds_of
from tunediff.report import console, plan


@pytest.fixture(autouse=True)
def machine(this_machine):
    this_machine(2)


def planned(folder, measured=None, **content):
    return plan.values(searches.make(folder, searches.FILE | content), folder.parent, measured or {})


def test_an_unknown_evaluation_is_null_and_named(tmp_path):
    """0.0 would say that it costs nothing."""
    values = planned(tmp_path / "night")
    assert (values["seconds"]["evaluation"], values["wall_clock_lacks"]) == (None, ["evaluation"])
    assert "evaluation: unknown" in (said := plan.lines(values))
    assert any(line.startswith("wall-clock: about ") and line.endswith(" and evaluation") for line in said)
    timed = planned(tmp_path / "other", {"evaluation_s": 22.56})
    assert (timed["seconds"]["evaluation"] > 0, timed["wall_clock_lacks"]) == (True, [])


@pytest.mark.parametrize(("trials", "total", "confirming_s"), [(2, "2m30s", 91), (100, "10m", 9 * 22)])
def test_no_forecast_exceeds_the_limit_of_the_search(tmp_path, trials, total, confirming_s):
    """Of 2 trials, which leave 91 s of 132 to confirm, and of 100, which leave confirming what it is kept."""
    budget = {"per_trial": "20s", "trials": trials, "total": total}
    space = searches.make(tmp_path / "night", searches.FILE | {"confirm": {"of": 2, "seeds": 3}, "budget": budget})
    values = plan.values(space, tmp_path, {"evaluation_s": 0.0})
    seconds = values["seconds"]
    assert sum(spent for part, spent in seconds.items() if part != "wall_clock") == seconds["wall_clock"]
    assert seconds["wall_clock"] == pytest.approx(values["total_limit_s"])
    assert seconds["confirmation"] == confirming_s <= values["confirming_s"]
    left = console.Console(tmp_path / "night", space, planned=values).remaining_words()
    forecasts = re.findall(r"about ((?:\d+[hms])+)", left)
    assert sum(seconds_of(one) for one in forecasts) <= values["total_limit_s"]


def test_a_limit_below_one_trial_costs_one_trial_per_slot(tmp_path):
    """What starts at once runs to its end."""
    budget = {"per_trial": "300s", "total": "320s", "trials": 8, "price_per_device_hour": 3.0}
    values = planned(tmp_path / "night", {"evaluation_s": 200.0, "parameters": 1000}, budget=budget)
    assert (values["device_hours"], values["price"]) == (pytest.approx(300 / 3600), pytest.approx(0.25))
    assert values["disk_mib"] == pytest.approx(4 * 1000 * (1 + 8) / 2**20)


@pytest.mark.parametrize(("unit", "hours"), [("wall", 8), ("device", 4)])
def test_devices_share_a_budget_in_device_seconds_and_no_other(tmp_path, unit, hours):
    """Four trials of an hour on one or two devices."""
    budget = {"per_trial": "1h", "trials": 4, "unit": unit, "price_per_device_hour": 2.5}
    values = planned(tmp_path / "night", search={"parallel.workers": [1, 2]}, budget=budget)
    assert (values["device_hours"], values["price"]) == (hours, 2.5 * hours)


def test_the_disk_holds_all_weights_and_the_checkpoints_under_way(tmp_path):
    """Of float32: 4 bytes a parameter for each run; 16 for a checkpoint (weights, averages, two moments), of which
    there are two while one is written."""
    values = planned(tmp_path / "night", {"evaluation_s": 22.56, "parameters": 2**20}, confirm={"of": 1, "seeds": 4})
    assert (values["at_once"], values["trials"]) == (1, 8)
    assert values["disk_mib"] == 4 * (8 + 2 * 4) + 2 * 16
    adapter = {"parameters": 2**30, "saved_parameters": 2**20}
    assert planned(tmp_path / "other", adapter, budget={"per_trial": "20s", "trials": 8})["disk_mib"] == 4 * (8 + 8)


def test_a_search_of_more_than_a_month_is_refused(tmp_path):
    """By its training or by its evaluations."""
    for name, measured, budget in (("slow", {"evaluation_s": 1e5}, "20s"), ("long", {}, "900h")):
        found = planned(tmp_path / name, measured, budget={"per_trial": budget, "trials": 8})
        assert "days of wall-clock" in found["refused"]
