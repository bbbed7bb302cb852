"""What comes after a search: its finalists on new seeds, and two configurations compared."""

import json
from pathlib import Path

import pytest

from tests.tuning.test_search import HELPER, WAITS
from tunediff import compare
from tunediff.core import trial_record as record


@pytest.mark.nightly
@pytest.mark.cluster
def test_finalists_run_again_in_the_cluster_of_their_search_or_in_none(search):
    """What comes after a search needs no new cluster; interrupted, it goes on where it was, without Ray."""
    budget = {"per_trial": "1s", "trials": 2}
    space_, first = {"optimizer.lr": [1e-5, 3e-3]}, [{"optimizer.lr": 3e-3}]
    one = search("again", budget=budget, search=space_, first=first, baseline={"optimizer.lr": 1e-5},
                 confirm={"of": 1, "seeds": 2})  # fmt: skip
    one.start(str(one.file), "--name", "again")
    runs = one.folder / "confirm"

    def trial(folder, name):
        return record.read_trial(folder / "trials" / name)

    one.wait_for(lambda: (run := trial(runs, "t0001")) is not None and run.points)
    one.interrupt()
    first_run = (runs / "trials" / "t0000" / "journal.jsonl").read_bytes()
    one.run("--resume", "again")
    assert (runs / "trials" / "t0000" / "journal.jsonl").read_bytes() == first_run
    short = record.read_trials(runs)
    assert [(run.status, run.config["seed"]) for run in short] == [("ok", 1000 + i // 2) for i in range(4)]
    started = sorted(short, key=lambda run: run.started)
    assert [run.name for run in started] == ["t0000", "t0001", "t0003", "t0002"]
    assert "verdict: " in one.log
    assert one.log.count("dashboard http") == 1, "Ray has started again"


@pytest.mark.training
def test_two_configurations_are_compared(tmp_path, monkeypatch, capsys):
    """Three pairs of runs of a user's file, in processes of their own, and again from what they left."""
    monkeypatch.chdir(tmp_path)
    Path("waits.py").write_text(WAITS)
    Path("helper.py").write_text(HELPER)
    words = ["waits.py", "lr=0.01", "--budget", "0.2s", "--pairs", "3", "--name", "two", "--no-check", "--json"]
    code, told = compare.main(words), json.loads(capsys.readouterr().out)
    assert code == {"better": 0, "no_difference": 10, "worse": 11}[told["verdict"]]
    assert (told["rule"]["rounds"], told["runs"]) == (3, 6)
    low, ratio, high = (told["candidates"][1]["effect"][key] for key in ("low", "value", "high"))
    assert low < ratio < high
    assert compare.main(["--resume", "two", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["candidates"][1]["effect"]["value"] == ratio
