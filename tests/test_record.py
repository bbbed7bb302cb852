"""Journals survive torn lines and restarts; derived values are what they say."""

import json

import pytest

from tunediff import record
from tunediff.config import ConfigError
from tunediff.record import Journal, read_trial, seconds_to, speedup

START = {"name": "t0003", "number": 3, "config": {"seed": 0}, "drawn": {}, "fingerprint": "abc", "budget_s": 20.0}


def point(index, train_s, frechet):
    return {"index": index, "train_s": train_s, "frechet": frechet}


def test_round_trip(tmp_path):
    journal = Journal(tmp_path / "t0003")
    journal.write("start", **START)
    journal.write("point", **point(1, 5.0, 9.0))
    unfinished = read_trial(tmp_path / "t0003")
    assert (unfinished.finished, unfinished.value("frechet")) == (False, None)
    journal.write("point", **point(2, 10.0, 4.0))
    journal.write("end", status="ok", reason="", steps=7)
    found = read_trial(tmp_path / "t0003")
    assert (found.name, found.status, found.value("frechet"), found.end["steps"]) == ("t0003", "ok", 4.0, 7)
    assert [p["train_s"] for p in found.points] == [5.0, 10.0]


def test_no_journal_is_no_trial(tmp_path):
    assert read_trial(tmp_path) is None


def test_a_torn_last_line_loses_only_itself(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", **START)
    journal.write("point", **point(1, 5.0, 9.0))
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"event": "point", "index": 2, "fre')  # killed while writing
    assert len(read_trial(tmp_path).points) == 1
    Journal(tmp_path).write("point", **point(2, 10.0, 4.0))
    assert [p["frechet"] for p in read_trial(tmp_path).points] == [9.0, 4.0]


def test_a_point_measured_again_replaces_it_and_what_came_after(tmp_path):
    journal = Journal(tmp_path)
    for event, content in [
        ("start", START), ("point", point(1, 5.0, 9.0)), ("point", point(2, 10.0, 6.0)),
        ("start", START), ("point", point(1, 5.0, 8.0)),
    ]:  # fmt: skip
        journal.write(event, **content)
    found = read_trial(tmp_path)
    assert found.attempts == 2
    assert [p["frechet"] for p in found.points] == [8.0]


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Journal(tmp_path).write("point", **point(1, 5.0, float("nan")))


def test_failed_trials_have_no_value(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", **START)
    journal.write("point", **point(1, 5.0, 9.0))
    journal.write("end", status="oom", reason="CUDA out of memory")
    found = read_trial(tmp_path)
    assert (found.status, found.reason, found.value("frechet")) == ("oom", "CUDA out of memory", None)


def test_trials_come_in_order(tmp_path):
    for number in (10, 2):
        Journal(tmp_path / "trials" / f"t{number:04d}").write("start", **(START | {"number": number}))
    assert [found.number for found in record.read_trials(tmp_path)] == [2, 10]


def test_seconds_to_interpolates_between_evaluations():
    curve = [point(1, 5.0, 10.0), point(2, 10.0, 6.0), point(3, 15.0, 2.0)]
    assert seconds_to(curve, "frechet", 8.0) == 7.5
    assert seconds_to(curve, "frechet", 6.0) == 10.0
    assert seconds_to(curve, "frechet", 12.0) == 5.0  # below at the first evaluation: no earlier claim
    assert seconds_to(curve, "frechet", 1.0) is None


def test_seconds_to_takes_the_first_crossing():
    curve = [point(1, 5.0, 10.0), point(2, 10.0, 4.0), point(3, 15.0, 8.0), point(4, 20.0, 3.0)]
    assert seconds_to(curve, "frechet", 4.0) == 10.0


def test_speedup():
    baseline = [point(1, 10.0, 9.0), point(2, 20.0, 6.0)]
    fast = [point(1, 10.0, 6.0), point(2, 20.0, 3.0)]
    assert speedup(fast, baseline) == 2.0
    assert speedup(baseline, baseline) == 1.0
    assert speedup([point(1, 20.0, 7.0)], baseline) is None
    assert speedup([], baseline) is None


def test_environment_is_plain_json():
    found = environment.describe()
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"][0].isdigit()
    assert found["cpu_cores"] >= 1


def test_a_final_evaluation_belongs_to_the_point_it_was_made_after(tmp_path):
    journal = record.Journal(tmp_path)
    journal.write("start", name="t0000", number=0, config={}, drawn={}, fingerprint="x", budget_s=1.0)
    journal.write("point", index=1, train_s=1.0, frechet=5.0)
    journal.write("final", train_s=1.0, frechet=4.0, label="FID")
    found = record.read_trial(tmp_path).points[-1]
    assert (found["frechet"], found["final_frechet"], found["final_label"]) == (5.0, 4.0, "FID")
    journal.write("point", index=1, train_s=1.1, frechet=6.0)  # began anew: the old final is of other weights
    assert "final_frechet" not in record.read_trial(tmp_path).points[-1]


def test_a_folder_that_cannot_be_written_says_why(tmp_path, monkeypatch):
    assert record.unwritable(tmp_path) is None
    assert "No such file" in record.unwritable(tmp_path / "gone")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", full)
    assert record.unwritable(tmp_path) == "No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_journal_of_another_kind_is_named(tmp_path):
    (tmp_path / record.JOURNAL).write_text('{"event": "start", "time": 1}\n')
    with pytest.raises(ConfigError, match=r"journal\.jsonl: is damaged: KeyError"):
        read_trial(tmp_path)
