"""What comes after a search: its finalists on new seeds, and two configurations compared."""

import json
from pathlib import Path

import pytest

from tests.tuning.test_search import HELPER, WAITS
from tunediff import compare


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
