"""Journals of any content are read, or named and left out."""

import json

import pytest

from tunediff.analysis import device_s, journals


def test_a_journal_that_is_not_understood_is_named_and_left_out(night):
    for name, old, new in (("t0000", '"name": "t0000"', '"name": "../../elsewhere"'), ("t0001", '"config"', '"knobs"')):
        path = night / "trials" / name / "journal.jsonl"
        path.write_text(path.read_text().replace(old, new))
    found, unreadable = journals.read(night)
    assert [trial.name for trial in found.trials] == ["t0000", "t0002"], "a name is a path of its folder alone"
    assert list(unreadable) == ["t0001"]


def test_device_seconds_of_a_journal_without_the_number_of_workers_are_those_of_one(night):
    path = night / "trials" / "t0001" / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["config"]["parallel.workers"]
    end = lines[-1] | {"status": "oom"}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], end]))
    found, unreadable = journals.read(night)
    assert unreadable == {}
    assert device_s(found.trials[1]) == 20.0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_counts_as_not_measured(night, value):
    path = night / "trials" / "t0001" / "journal.jsonl"
    lines = path.read_text().splitlines()
    at, line = next((i, json.loads(line)) for i, line in enumerate(lines) if json.loads(line)["event"] == "point")
    lines[at] = json.dumps(line | {"samples_per_s": 0.125}).replace("0.125", value)
    path.write_text("\n".join(lines) + "\n")
    found, unreadable = journals.read(night)
    assert unreadable == {}
    (trial,) = (trial for trial in found.trials if trial.name == "t0001")
    assert trial.points[0].get("samples_per_s") is None
