"""What earlier versions had is refused in one sentence; a search that was recorded with it can still be read."""

import json

import pytest
import yaml

from tests.search_space.files import changed
from tests.searches import make, write
from tunediff import compare, evaluate, profile, search, search_space
from tunediff.config import ConfigError, removed
from tunediff.report.__main__ import main as report

FILES = {
    "early_stopping: pause": {"early_stopping": "pause"},
    "early_stopping: median": {"early_stopping": "median"},
    "optimizer.name: schedule_free": {
        "search": {
            "optimizer.name": ["adamw", "schedule_free", "muon"],
            "loader.batch_size": [64, 128],
            "optimizer.beta1": {"choice": [0.9, 0.95], "when": {"optimizer.name": "schedule_free"}},
        },
        "first": [{}, {"optimizer.name": "schedule_free"}],
    },
    "optimizer.beta1": {"search": {"loader.batch_size": [64, 128], "optimizer.beta1": [0.9, 0.95]}},
    "paused_gib": {"paused_gib": 2.0},
}
"""Search files with each removed key or value."""
OPTIONS = {
    "early_stopping: pause": (search.main, ["--early-stopping", "pause"]),
    "evaluate --data": (evaluate.main, ["model", "--data", "digits"]),
    "ema: H,H": (evaluate.main, ["model", "--ema", "0.05,0.1"]),
    "pipeline of diffusers": (evaluate.main, ["pipeline"]),
    "compare --resolution": (compare.main, ["digits", "seed=99", "--resolution", "2%"]),
    "profile --sweep": (profile.main, ["--config", "digits", "--sweep"]),
    "profile --compile": (profile.main, ["--config", "digits", "--compile"]),
}


@pytest.mark.parametrize("name", removed.REMOVED)
def test_what_was_removed_is_refused_with_the_version_that_had_it_and_what_to_use(name, tmp_path, monkeypatch, capsys):
    sentence = f"version 0.2.0 had it last; {removed.REMOVED[name]}"
    assert name in FILES or name in OPTIONS
    if name in FILES:
        with pytest.raises(ConfigError) as refused:
            search_space.parse(changed(**FILES[name]), "x.yaml")
        assert str(refused.value).endswith(sentence)
        assert str(refused.value).startswith("x.yaml: ")
    if name in OPTIONS:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "pipeline").mkdir()
        (tmp_path / "pipeline" / "model_index.json").write_text("{}")
        command, words = OPTIONS[name]
        assert command(words) == 2
        refusal = capsys.readouterr().err
        assert refusal.startswith("error: ")
        assert sentence in refusal


@pytest.mark.parametrize("name", FILES)
def test_report_shows_a_search_recorded_with_what_was_removed(name, tmp_path):
    space = make(tmp_path / "old")
    recorded = tmp_path / "old" / "search.yaml"
    recorded.write_text(yaml.safe_dump(yaml.safe_load(recorded.read_text()) | FILES[name]))
    write(tmp_path / "old", space, 0)
    write(tmp_path / "old", space, 1, {"loader.batch_size": 64}, status=None)
    journal = tmp_path / "old" / "trials" / "t0001" / "journal.jsonl"
    journal.write_text(journal.read_text() + json.dumps({"event": "paused", "time": 1200.0, "index": 1}) + "\n")
    write(tmp_path / "old", space, 2, {"loader.batch_size": 64}, curve=((20.0, 4000, 1.0),))
    journal = tmp_path / "old" / "trials" / "t0002" / "journal.jsonl"
    start, *lines = map(json.loads, journal.read_text().splitlines())
    for values in (start["drawn"], start["config"]):
        values |= {"optimizer.name": "schedule_free", "optimizer.beta1": 0.95}
    journal.write_text("".join(json.dumps(line) + "\n" for line in (start, *lines)))
    assert report(["old", "--storage", str(tmp_path)]) == 0
    assert "schedule_free" in (tmp_path / "old" / "report" / "trials.csv").read_text()
    kind, _, value = name.partition(": ")
    if kind == "early_stopping":
        assert f"stopped early by {value}" in (tmp_path / "old" / "report.html").read_text()
    with pytest.raises(ConfigError, match="had it last"):
        search_space.load(recorded)
