"""What is typed: words that stand together, names of options and of folders, and JSON wherever it is asked for."""

import importlib
import json
from pathlib import Path

import pytest
import yaml

from tests import searches
from tests.json_schemas import validate
from tunediff import search, search_space
from tunediff.core import text

FILE = {
    "workload": "digits", "budget": {"per_trial": "3s", "trials": 3},
    "search": {"optimizer.lr": {"low": 1e-4, "high": 1e-2}},
}  # fmt: skip

TINY = ["model.channels=8", "model.multipliers=[1]", "model.attention=[]", "data.max_images=64", "evaluation.images=16",
        "evaluation.steps=2", "evaluation.points=1", "evaluation.extractor=random", "loader.workers=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    searches.make(tmp_path / "taken", FILE)
    Path("taken", "sessions.jsonl").write_text(
        '{"event": "begin", "time": 0, "monotonic_s": 1}\n{"event": "end", "time": 9, "monotonic_s": 61}'
    )
    Path("ok.yaml").write_text(yaml.safe_dump(FILE))
    Path("config.yaml").write_text("workload: diffusion\nloader: {batch_size: 64}\n")
    Path("empty.yaml").write_text("")


def test_a_name_may_be_a_path_as_a_shell_completes_it(capsys):
    folder = searches.night(Path("ray_results/night"))
    for name in ("night", "night/", "ray_results/night", str(folder.absolute())):
        assert search_space.folder_of(name, Path("ray_results")) == folder.absolute()
    kept = (folder / "experiment.yaml").read_bytes()
    assert search.main(["--resume", "ray_results/night/", "--trials", "5", "--dry-run"]) == 0
    assert "trials: 5 ×" in capsys.readouterr().out
    assert (folder / "experiment.yaml").read_bytes() == kept, "a dry run leaves everything as it is"


@pytest.mark.training
def test_a_result_is_json_wherever_it_is_asked_for(capsys):
    searches.night(Path("kept/night"))
    told = {}
    for command, words in (
        ("report.__main__", ["night"]),
        ("export", ["night"]),
        ("train", ["--config", "digits", *TINY, "--samples", "128"]),
        ("sample", ["train-digits", "--images", "2", "--sampler", "ddim", "--steps", "2"]),
        ("evaluate", ["train-digits", *"--images 8 --sampler ddim --steps 2 --metrics fd".split()]),
    ):
        assert importlib.import_module(f"tunediff.{command}").main([*words, "--storage", "kept", "--json"]) == 0
        told[command] = json.loads(capsys.readouterr().out)
        validate(told[command], f"{command.partition('.')[0]}-output")
    assert told["report.__main__"]["report"] == str(Path("kept/night/report.html").absolute())
    assert told["export"]["configuration"] == str(Path("kept/night/best.yaml").absolute())
    assert told["train"]["steps"] == 1
    assert told["sample"]["images"] == 2
    assert told["sample"]["sampler"]["name"] == "ddim"
    assert (told["evaluate"]["schema"], Path(told["evaluate"]["json"]).is_file()) == (text.SCHEMA, True)
    assert Path(told["sample"]["path"]).is_absolute()
    assert Path(told["evaluate"]["json"]).is_absolute()
    assert told["train"]["metric"].startswith("FD")
    assert isinstance(told["train"]["value"], float)
