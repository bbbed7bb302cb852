"""What is read of a search that runs, and how often what takes longer with every trial is done again."""

import json

from tests.searches import make, write
from tunediff.analysis.journals import MANY, SHARE, Following, Throttle
from tunediff.core import trial_record


def test_what_has_ended_is_read_once(tmp_path, monkeypatch):
    """A look reads what runs and what is new; a trial that began later may end first."""
    wanted, looked, read_trial = make(tmp_path / "night"), [], trial_record.read_trial
    monkeypatch.setattr(trial_record, "read_trial", lambda folder: looked.append(folder.name) or read_trial(folder))
    following = Following(tmp_path / "night")
    assert following.read() == following.trials == []
    write(tmp_path / "night", wanted, 1)
    write(tmp_path / "night", wanted, 0, status=None)
    (tmp_path / "night" / "trials" / "t0002").mkdir()  # its journal has not begun
    assert [trial.name for trial in following.read()] == ["t0001"]
    assert ([trial.name for trial in following.trials], following.ended) == (["t0000", "t0001"], 1)
    looked.clear()
    assert following.read() == []
    assert looked == ["t0000", "t0002"]
    with (tmp_path / "night" / "trials" / "t0000" / trial_record.JOURNAL).open("a") as file:
        file.write(json.dumps({"event": "end", "time": 2000.0, "status": "nan"}) + "\n")
    assert [(trial.name, trial.status) for trial in following.read()] == [("t0000", "nan")]
    assert (following.ended, following.records["t0000"].status) == (2, "nan")


def test_what_takes_longer_is_done_again_so_that_it_takes_a_twentieth_of_the_time():
    times = iter([100.0, 102.0, 102.0, 141.9, 142.0])
    seldom = Throttle(lambda: next(times))
    with seldom.timed():  # 2 s
        pass
    assert SHARE == 0.05
    assert seldom.due(MANY), "of few everything is made anew"
    assert not seldom.due(MANY + 1)
    assert seldom.due(MANY + 1), "40 s later"
