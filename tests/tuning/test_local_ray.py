"""Ray on this machine: its token, and what it leaves behind."""

import logging
import os
import stat
import sys
import types
from pathlib import Path

import pytest

from tunediff.ray_backend import connection
from tunediff.tuning.sessions import NotStartedError

NAMES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path, tmp_path_factory):
    """Nothing of Ray's is set, and the home folder is empty."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("tmp")))


def test_every_cluster_has_a_random_token_that_only_its_user_can_read(monkeypatch, tmp_path):
    tokens = []
    for _ in range(2):
        with connection.random_token():
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            file = Path(connection.dashboard("127.0.0.1:8265").partition("token: cat ")[2].rstrip(")"))
            assert file.read_text() == tokens[-1]
            assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
        assert "RAY_AUTH_TOKEN" not in os.environ
        assert not file.exists()
    assert len(set(tokens)) == 2
    assert all(len(token) == 64 for token in tokens)
    assert not (tmp_path / ".ray").exists(), "others may read what Ray keeps there"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RAY_AUTH_TOKEN", "mine", "token: RAY_AUTH_TOKEN)"),
        ("RAY_AUTH_TOKEN_PATH", "elsewhere", "token: RAY_AUTH_TOKEN_PATH)"),
        ("RAY_AUTH_MODE", "disabled", "token: none)"),
    ],
)
def test_token_of_the_user_is_left_alone(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with connection.random_token():
        assert {name: os.environ[name] for name in NAMES if name in os.environ} == {name: value}
        assert connection.dashboard("127.0.0.1:8265").endswith(said)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """The folder of the session that `ray.init` is said to have started, beside another one."""
    for name in ("session_1", "session_2"):
        (tmp_path / name / "logs").mkdir(parents=True)
    context = types.SimpleNamespace(
        address_info={"session_dir": str(tmp_path / "session_1")}, dashboard_url="10.0.0.5:8265"
    )
    for name, replaced in (
        ("ray.init", lambda **_: logging.getLogger("ray").setLevel(logging.ERROR) or context),
        ("ray.shutdown", lambda: None), ("tunediff.ray_backend.cluster.runtime_env", dict),
    ):  # fmt: skip
        monkeypatch.setattr(name, replaced)
    return tmp_path


def test_session_folder_of_a_search_is_removed_at_its_end(session):
    with connection.cluster("auto"):
        pass
    with connection.cluster(None):
        assert sorted(path.name for path in session.iterdir()) == ["session_1", "session_2"]
    assert [path.name for path in session.iterdir()] == ["session_2"]


def test_sigterm_while_ray_starts_is_an_interruption(monkeypatch):
    """`ray.init` sets a handler of SIGTERM that ends the process without a word."""
    monkeypatch.setattr("ray.init", lambda **_: sys.exit(15))
    with pytest.raises(KeyboardInterrupt), connection.cluster(None):
        pass


def test_ray_gets_more_time_than_its_own_30_s_to_start(monkeypatch):
    from ray._private import services

    late = [RuntimeError("no node yet"), "node"]

    def get_node(*_):
        if isinstance(answer := late.pop(0), Exception):
            raise answer
        return answer

    init = lambda **_: services.get_node("gcs", "id")  # noqa: E731
    for name, replaced in (("ray._private.services.get_node", get_node), ("ray.init", init)):
        monkeypatch.setattr(name, replaced)
    with connection.cluster(None) as context:
        assert context == "node"
    assert services.get_node is get_node
    monkeypatch.setattr(connection, "START_S", 0.0)
    late += [RuntimeError("never")]
    with pytest.raises(NotStartedError, match="never"), connection.cluster(None):
        pass
