"""A training or a profile in a process of its own, as the command or the call sees it that asks for it."""

import contextlib
import os
import time
import uuid

import pytest
import torch

from tests.tuning import foreground_runs
from tunediff import cli
from tunediff.core.errors import TunediffError
from tunediff.core.progress import EventLines
from tunediff.tuning import foreground


def call(function, content=None):
    return foreground.call(getattr(foreground_runs, function), content, "diffusion", EventLines())


def test_lines_warnings_and_the_result_come_back_and_nothing_else(capfd, caplog):
    (content, pid), (_, again) = call("work", {"a": 1}), call("work")
    assert content == {"a": 1}
    assert len({pid, again, os.getpid()}) == 3
    out, err = capfd.readouterr()
    assert ("half-way" in out, "aside" in err) == (True, True)
    assert ("tunediff.training.x", "a warning") in [(record.name, record.getMessage()) for record in caplog.records]
    assert (torch.get_default_dtype(), os.environ.get("SPOILED")) == (torch.float32, None)


@pytest.mark.parametrize("name", foreground_runs.ERRORS)
def test_an_error_is_raised_as_it_is_with_its_lines(name):
    expected = foreground_runs.ERRORS[name]
    kind = TunediffError if name == "unreadable" else type(expected)
    with pytest.raises(kind, match=str(expected)) as raised:
        call("fail", name)
    assert "in fail\n" in str(raised.value.__cause__)


def test_a_command_prints_the_traceback_of_its_run_once(capfd):
    assert cli.guarded(lambda argv: call("fail", "of python"))([]) == cli.FAILED
    err = capfd.readouterr().err
    assert [err.count(words) for words in ("Traceback", "in fail\n", "ZeroDivisionError: ours")] == [1, 1, 1]
    assert err.rstrip().endswith("ZeroDivisionError: ours")


def test_a_process_that_is_killed_is_an_error_and_harms_no_later_one():
    with pytest.raises(TunediffError, match="its process has ended: .* was killed by SIGKILL"):
        call("die")
    assert call("work", 2)[0] == 2


@pytest.mark.parametrize("dies", [False, True], ids=["returns", "is killed"])
def test_named_semaphores_of_a_run_go_with_it_and_nothing_is_said_of_them(capfd, dies):
    prefix, until = f"tunediff-{uuid.uuid4().hex}", time.monotonic() + 60
    with pytest.raises(TunediffError, match="SIGKILL") if dies else contextlib.nullcontext():
        assert call("load", (prefix, dies)) > 0
    while foreground_runs.semaphores(prefix) and time.monotonic() < until:
        time.sleep(0.05)
    assert foreground_runs.semaphores(prefix) == []
    assert "resource_tracker" not in capfd.readouterr().err
