"""How many steps end at the budget."""

import dataclasses
import sys

import pytest

from tunediff.command import calibration
from tunediff.command.definition import CommandDefinition
from tunediff.command.run import CommandRun
from tunediff.config import ConfigError


@pytest.mark.parametrize(("start_s", "step_s"), [(0.0, 0.01), (5.0, 0.01), (1.0, 3.0), (40.0, 0.5)])
def test_steps_end_at_the_budget_whatever_the_start_costs(tmp_path, monkeypatch, start_s, step_s):
    monkeypatch.setattr(calibration, "seconds_of", lambda run, count: start_s + count * step_s)
    run = CommandRun(CommandDefinition("a {seed} {steps}", "loss"), {}, 0, tmp_path, 60.0)
    steps = calibration.steps(run, tmp_path / "steps.json")
    assert start_s + steps * step_s == pytest.approx(calibration.AIM * 60.0, abs=step_s)
    monkeypatch.setattr(calibration, "seconds_of", None)
    assert calibration.steps(run, tmp_path / "steps.json") == steps, "it is measured once"


def test_a_command_that_fails_with_few_steps_is_refused(tmp_path):
    command = CommandDefinition((sys.executable, "-c", "exit('at least 100 steps')", "{seed}", "{steps}"), "loss")
    run = CommandRun(command, {}, 0, tmp_path, 60.0)
    with pytest.raises(ConfigError, match="at least 100 steps"):
        calibration.steps(run, tmp_path / "steps.json")
    with pytest.raises(ConfigError, match="budget"):
        calibration.steps(dataclasses.replace(run, budget_s=None), tmp_path / "steps.json")
