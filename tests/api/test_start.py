"""Ray starts while a new search measures what a trial costs."""

import contextlib
import threading

import pytest

from tunediff.api import run, search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
from tunediff.core.progress import EventLines
from tunediff.ray_backend import connection
from tunediff.tuning.templates import Templates


def test_ray_starts_while_a_trial_is_measured_and_ends_with_a_refusal(tmp_path, monkeypatch):
    events, ray_runs = list[str](), threading.Event()

    @contextlib.contextmanager
    def started(address):
        events.append("Ray starts")
        ray_runs.set()
        try:
            yield None
        finally:
            events.append("Ray ends")

    def measure(*_):
        assert ray_runs.wait(60)  # it does not wait for this
        raise ConfigError("data.path: no images")

    monkeypatch.setattr(connection, "started", started)
    monkeypatch.setattr(search_setup, "measure", measure)
    monkeypatch.setattr(Templates, "prepare", lambda *_: None)
    options = SearchOptions(words=["digits"], storage=tmp_path, name="x")
    with pytest.raises(ConfigError, match="no images"):
        run.search(search_setup.prepare(options), options, EventLines())
    assert events == ["Ray starts", "Ray ends"]
    assert not (tmp_path / "x").exists()
