"""Numbers that are missing in a journal, or are none."""

import json

import pytest

from tunediff import analysis


def test_device_seconds_of_a_journal_without_the_number_of_workers_are_those_of_one(night):
    path = night / "trials" / "t0001" / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["config"]["parallel.workers"]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], lines[-1] | {"status": "oom"}]))
    assert analysis.device_s(analysis.read(night).trials[1]) == 20.0


@pytest.mark.parametrize("value", ["NaN", "1e999"])
def test_a_number_that_is_none_counts_as_not_measured(night, value):
    path = night / "trials" / "t0001" / "journal.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"samples_per_s": ', f'"samples_per_s": {value}, "was": '))
    assert analysis.read(night).trials[1].points[0].get("samples_per_s") is None
