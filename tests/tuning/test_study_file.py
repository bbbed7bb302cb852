"""The file of a study: what is damage, what is only a lock."""

import contextlib
import errno
import sqlite3

import optuna
import pytest

from tunediff.core.files import study_url
from tunediff.tuning import sessions, study_file


@pytest.fixture
def path(tmp_path):
    """A study of one trial, in a folder whose name means something in a URL."""
    folder = tmp_path / "a %41?b#c"
    folder.mkdir()
    study = optuna.create_study(study_name=study_file.STUDY, storage=study_file.open_file(folder / "study.db"))
    study.add_trial(optuna.trial.create_trial(value=1.0))
    return folder / "study.db"


def values(path):
    study = optuna.load_study(study_name=study_file.STUDY, storage=study_file.open_file(path))
    return [trial.value for trial in study.trials]


def test_locked_study_stops_the_search_and_is_not_renamed(path, monkeypatch):
    monkeypatch.setattr(study_file, "LOCKED_S", 0.01)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sessions.StoppedError, match=r"study\.db cannot be read: database is locked"):
            study_file.open_file(path)
    assert [one.name for one in path.parent.iterdir()] == ["study.db"]
    assert values(path) == [1.0]


def test_disk_that_does_not_answer_is_no_damage(path, monkeypatch):
    def fail(*_, **__):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", fail)
        with pytest.raises(sessions.StoppedError, match="disk I/O error"):
            study_file.open_file(path)
    assert values(path) == [1.0]


@pytest.mark.parametrize("content", [b"garbage" * 1000, None], ids=["garbage", "cut in half"])
def test_damaged_study_is_put_aside(path, content):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    assert optuna.get_all_study_names(study_file.open_file(path)) == []
    assert path.with_name("study.db.damaged").exists()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_study_works_on_a_file_system_without_locks(path, no_locks, code):
    """SQLite is told to do without: it would say that the database is locked."""
    no_locks(code)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")  # whoever asks for a lock would wait
        assert values(path) == [1.0]
    assert "nolock=1" in study_url(path)
