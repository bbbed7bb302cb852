"""Listeners of a search: each hears everything in order, and none harms the search or another."""

import threading

import pytest

from tunediff.core import listeners
from tunediff.core.listeners import Activity, Listener, Listeners


class Recorder(Listener):
    def __init__(self):
        self.heard = []

    def search_begin(self, say):
        self.heard.append("begin")

    def start(self, trial, content):
        self.heard.append(("start", trial, content))

    def point(self, trial, content):
        self.heard.append(("point", trial, content))

    def end(self, trial, content):
        self.heard.append(("end", trial, content))

    def search_end(self, result):
        self.heard.append(result and result())


class Broken(Recorder):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def point(self, trial, content):
        raise self.error


class Hanging(Recorder):
    def __init__(self):
        super().__init__()
        self.free, self.ended = threading.Event(), threading.Event()

    def point(self, trial, content):
        self.free.wait()
        super().point(trial, content)

    def search_end(self, result):
        super().search_end(result)
        self.ended.set()


@pytest.fixture
def search(tmp_path, monkeypatch):
    """Runs one trial under these listeners; returns the hub."""

    def run(*heard, fails=False, lacking=()):
        hub = Listeners(*lacking, lambda activity: iter(heard))
        activity = Activity("search", tmp_path, "again", "loss", {}, None, lambda: {"best": 1})
        with hub.opened(activity, print):
            hub.tell("start", "t0000", {"lr": 1})
            hub.tell("point", "t0000", {"loss": 2.0})
            if fails:
                raise KeyboardInterrupt
            hub.tell("end", "t0000", {"lr": 1})
        return hub

    return run


TRIAL = [("start", "t0000", {"lr": 1}), ("point", "t0000", {"loss": 2.0}), ("end", "t0000", {"lr": 1})]


def test_a_listener_hears_all_events_and_the_result(search):
    search(recorder := Recorder())
    assert recorder.heard == ["begin", *TRIAL, {"best": 1}]


def test_a_search_that_is_stopped_ends_without_a_result(search):
    with pytest.raises(KeyboardInterrupt):
        search(recorder := Recorder(), fails=True)
    assert recorder.heard == ["begin", *TRIAL[:2], None]


@pytest.mark.parametrize("error", [RuntimeError("no room"), SystemExit("no room")], ids=["error", "exit"])
def test_a_listener_that_fails_is_named_once_and_harms_nothing(search, caplog, error):
    hub = search(broken := Broken(error), recorder := Recorder())
    with hub.with_listeners(broken):
        hub.tell("start", "t0001", {})
    assert caplog.messages == [f"Broken failed: {type(error).__name__}: no room"]
    assert broken.heard[:2] == recorder.heard[:2] == ["begin", TRIAL[0]]
    assert recorder.heard == ["begin", *TRIAL, {"best": 1}]


def test_listeners_that_cannot_be_made_are_named_and_harm_nothing(search, caplog):
    def lacks(activity):
        raise ImportError("no such service")

    search(recorder := Recorder(), lacking=[lacks])
    assert recorder.heard == ["begin", *TRIAL, {"best": 1}]
    assert caplog.messages == ["tests.test_listeners failed: ImportError: no such service"]


def test_a_listener_that_hangs_is_named_once_and_hears_the_rest_later(search, monkeypatch, caplog):
    monkeypatch.setattr(listeners, "LATE_S", 0.05)
    search(hanging := Hanging(), recorder := Recorder())
    assert recorder.heard == ["begin", *TRIAL, {"best": 1}]
    assert [message.partition(" takes")[0] for message in caplog.messages] == ["Hanging"]
    hanging.free.set()
    assert hanging.ended.wait(600)
    assert hanging.heard == ["begin", *TRIAL, {"best": 1}]
