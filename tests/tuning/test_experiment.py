"""What a search leaves on disk before its first trial, and when it stops one."""

import pytest
import yaml
from ray.tune.schedulers import TrialScheduler

from tunediff import space
from tunediff.config import ConfigError
from tunediff.tuning import experiment, tuner

CONTENT = {
    "workload": "digits",
    "budget": {"per_trial": "8s", "trials": 8},
    "search": {"loader.batch_size": [32, 64, 128]},
}


def loaded(**more):
    return space.parse(CONTENT | more, "x.yaml")


# ------------------------------------------------------------------------------------------------------------ the folder
def test_a_folder_that_could_not_be_completed_is_not_there(tmp_path, monkeypatch):
    """A full disk: the name stays free, and nothing is left that --resume would trip over."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(yaml, "safe_dump", full)
        with pytest.raises(ConfigError, match="night cannot be written: No space left on device"):
            experiment.create(tmp_path / "night", loaded(), CONTENT)
    assert list(tmp_path.iterdir()) == []
    experiment.create(tmp_path / "night", loaded(), CONTENT)
    assert experiment.reopen(tmp_path / "night").budget.trials == 8
    assert [path.name for path in tmp_path.iterdir()] == ["night"]


# --------------------------------------------------------------------------------------------------------- early stopping
class Controller:
    def get_live_trials(self):
        return []


class Trial:
    def __init__(self, trial_id, drawn):
        self.trial_id, self.config = trial_id, {**drawn, "trial": f"t{trial_id}", "slot": 0}


def stopped_at(scheduler, curves, points=()):
    """Feed trials one after the other to Tune's own scheduler; training seconds at which each was stopped, or None.

    `points`: the knobs of the first ones.
    """
    controller, found = Controller(), []
    for number, curve in enumerate(curves):
        trial = Trial(str(number), points[number] if number < len(points) else {"loader.batch_size": 64})
        scheduler.on_trial_add(controller, trial)
        last, stop = {}, None
        for train_s, value in curve:
            last = {"train_s": train_s, "objective": value, "time_total_s": train_s}
            if scheduler.on_trial_result(controller, trial, last) == TrialScheduler.STOP:
                stop = train_s if train_s < curve[-1][0] else None  # at the end of its budget a trial ends anyway
                break
        if stop is None:
            scheduler.on_trial_complete(controller, trial, last)
        found.append(stop)
    return found


def at(*values):
    """A curve with points after 2, 4, 6 and 8 s."""
    return list(zip((2.0, 4.0, 6.0, 8.0), values, strict=True))


@pytest.mark.parametrize("rule", ["asha", "median"])
def test_a_winner_whose_curve_crosses_late_is_not_stopped(rule):
    """Compilation, warm-up and the EMA cost at first: behind all others after a quarter, ahead from the half on."""
    scheduler = tuner.scheduler(loaded(early_stopping=rule))
    assert scheduler.set_search_properties("objective", "min")
    steady = [at(20.0, 10.0 + i / 10, 8.0, 7.0) for i in range(4)]
    crossing = at(300.0, 9.0, 5.0, 3.0)
    hopeless = at(25.0, 24.0, 23.0, 22.0)
    *_, late, bad = stopped_at(scheduler, [*steady, crossing, hopeless])
    assert late is None
    assert bad is not None, "the rule stops nothing at all"
    assert bad >= 4.0, "stopped before half of its budget"


@pytest.mark.parametrize("rule", ["asha", "median"])
@pytest.mark.parametrize("noise", [1, 3])
def test_no_run_of_the_baseline_is_stopped(rule, noise):
    """However bad it is beside the first ones: without its end there is neither a speed-up nor a noise."""
    wanted = loaded(early_stopping=rule, noise=noise)
    scheduler = tuner.scheduler(wanted)
    assert scheduler.set_search_properties("objective", "min")
    good, bad = at(20.0, 10.0, 8.0, 7.0), at(25.0, 24.0, 23.0, 22.0)
    others = [{"loader.batch_size": 64}] * 4
    stops = stopped_at(scheduler, [*[good] * 4, *[bad] * noise, bad], [*others, *wanted.candidates[:noise]])
    assert stops[:-1] == [None] * (4 + noise)
    assert stops[-1] is not None, "the rule stops nothing at all"


def test_nothing_is_stopped_unless_asked_for():
    assert tuner.scheduler(loaded()) is None
