"""Ray on this machine: its token where the home folder cannot keep one, and what it leaves behind."""

import contextlib
import logging
import os
import sys
import types

import pytest

from tunediff.tuning import experiment, local_ray
from tunediff.tuning.sessions import NotStartedError

NAMES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "TUNEDIFF_KEEP_RAY")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Nothing of Ray's is set, and the home folder is empty."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(local_ray, "_made", [])


def token():
    local_ray.ensure_token()
    return os.environ.get("RAY_AUTH_TOKEN")


def test_token_is_made_where_home_cannot_be_written(monkeypatch):
    monkeypatch.setenv("HOME", "/proc")
    made = token()
    assert len(made) == 64
    assert token() == made, "one for all that this process starts"
    assert "set RAY_AUTH_TOKEN before the search" in local_ray.dashboard("127.0.0.1:8265")


def test_token_of_the_user_is_left_alone(monkeypatch, tmp_path):
    assert token() is None, "Ray keeps its own in a home folder that can be written"
    assert local_ray.dashboard("h:1") == "dashboard http://h:1 (loopback only; token: `ray get-auth-token`)"
    monkeypatch.setattr(local_ray, "home", lambda: None)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("theirs")
    assert token() is None, "it can be read"
    (tmp_path / ".ray" / "auth_token").unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "elsewhere")
    assert token() is None
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    assert token() == "mine"
    assert local_ray.dashboard("h:1") == "dashboard http://h:1 (loopback only; token: RAY_AUTH_TOKEN)"


def test_greeting_speaks_of_no_token_where_ray_asks_for_none(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("HOME", "/proc")
    assert token() is None
    assert local_ray.dashboard("127.0.0.1:8265") == "dashboard http://127.0.0.1:8265 (loopback only)"


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("auto", "dashboard http://10.0.0.5:8265 (of the cluster at auto)"),
        (None, "dashboard http://10.0.0.5:8265 (loopback only; token: `ray get-auth-token`)"),
    ],
)
def test_greeting_promises_nothing_of_a_cluster_that_was_there_before(monkeypatch, tmp_path, address, line):
    """Its dashboard may be open to everybody."""
    context, lines = types.SimpleNamespace(dashboard_url="10.0.0.5:8265"), []
    monkeypatch.setattr(experiment, "cluster", lambda address: contextlib.nullcontext(context))

    def greet(line):
        lines.append(line)
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        experiment.workers(tmp_path, lambda *machines: None, address, None, greet),
    ):
        pass
    assert lines == [line]


@pytest.fixture
def session(tmp_path, monkeypatch):
    """The folder of the session that `ray.init` is said to have started, beside another one."""
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_1")
    (tmp_path / "discovery.json").symlink_to(tmp_path / "session_1" / "discovery.json")
    context = types.SimpleNamespace(address_info={"session_dir": str(tmp_path / "session_1")})
    monkeypatch.setattr("ray.init", lambda **_: context)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("tunediff.tuning.cluster.runtime_env", dict)
    return tmp_path


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_session_folder_of_a_search_is_removed_at_its_end(session):
    with experiment.cluster(None):
        assert left(session) == ["discovery.json", "session_1", "session_2", "session_latest"]
    assert left(session) == ["session_2"]


@pytest.mark.parametrize("address", [None, "auto"])
def test_session_folder_stays_after_a_fault_on_a_cluster_or_where_asked_for(session, monkeypatch, address):
    if address is None:
        with pytest.raises(ZeroDivisionError), experiment.cluster(None):
            raise ZeroDivisionError
        monkeypatch.setenv("TUNEDIFF_KEEP_RAY", "1")
    with experiment.cluster(address):
        pass
    assert left(session) == ["discovery.json", "session_1", "session_2", "session_latest"]


def test_log_level_of_ray_is_put_back_after_a_search(session, monkeypatch):
    log = logging.getLogger("ray")
    monkeypatch.setattr("ray.init", lambda **_: log.setLevel(logging.ERROR) or types.SimpleNamespace())
    monkeypatch.setattr(log, "level", logging.DEBUG)
    with experiment.cluster(None):
        assert log.level == logging.ERROR
    assert log.level == logging.DEBUG


def test_session_link_of_another_search_stays(session):
    (session / "session_latest").unlink()
    (session / "session_latest").symlink_to(session / "session_2")
    with experiment.cluster(None):
        pass
    assert left(session) == ["session_2", "session_latest"]


def test_sigterm_while_ray_starts_is_an_interruption(monkeypatch):
    """`ray.init` sets a handler of SIGTERM that ends the process without a word."""
    monkeypatch.setattr(experiment, "_init", lambda **_: sys.exit(15))
    with pytest.raises(KeyboardInterrupt), experiment.cluster(None):
        pass


def test_ray_gets_more_time_than_its_own_30_s_to_start(monkeypatch):
    from ray._private import services

    late = [RuntimeError("no node yet"), "node"]

    def get_node(*_):
        if isinstance(answer := late.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr("ray.init", lambda **_: services.get_node("gcs", "id"))
    with experiment.cluster(None) as context:
        assert context == "node"
    assert services.get_node is get_node
    monkeypatch.setattr(local_ray, "START_S", 0.0)
    late += [RuntimeError("never")]
    with pytest.raises(NotStartedError, match="never"), experiment.cluster(None):
        pass
