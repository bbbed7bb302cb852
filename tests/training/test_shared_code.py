"""Compiled code is shared by the trials of a search, and each pays what it costs alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from tests.helpers import tiny
from tunediff.core.clock import Budget, Clock
from tunediff.training import compilation
from tunediff.training.compilation import CACHES, SharedCode


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What a trial sets ends with its process."""
    for name in CACHES:
        monkeypatch.setenv(name, "/nothing")


def compiled(root, own_s, key="k", resumed=False):
    """Return (seconds charged, facts) of a trial that compiles for so long."""
    code, clock = SharedCode(root), Clock(Budget(seconds=600.0))
    code.use(key)
    clock.add("compile", own_s)
    facts = code.charge(clock, resumed)
    return clock.train_s, facts


def test_each_trial_is_charged_what_the_first_one_took(tmp_path):
    assert compiled(tmp_path, 80.0) == (80.0, {})
    assert compiled(tmp_path, 5.0) == (80.0, {"compile_own_s": 5.0, "compile_spared_s": 75.0})
    assert compiled(tmp_path, 90.0)[0] == 90.0, "other code, which was not there"
    assert compiled(tmp_path, 30.0, key="another network") == (30.0, {})
    assert compiled(tmp_path, 5.0, resumed=True)[0] == 5.0, "its checkpoint has the seconds"
    assert compiled(None, 7.0) == (7.0, {})


def test_nobody_uses_what_a_trial_is_still_compiling_or_has_left_unfinished(tmp_path):
    first, second = SharedCode(tmp_path), SharedCode(tmp_path)
    first.use("k")
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path)
    folder.mkdir()
    (folder / "half").touch()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/own"
    second.use("k")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/own"
    first.close()  # as its end does
    assert compiled(tmp_path, 40.0) == (40.0, {})
    assert not (folder / "half").exists()
    assert compiled(tmp_path, 4.0)[0] == 40.0


def test_confirming_runs_find_the_code_of_their_search(tmp_path):
    night = tmp_path / "night"
    longer = night / "confirm-2" / "4x"
    longer.mkdir(parents=True)
    for folder in (night, longer.parent, longer):
        (folder / "experiment.yaml").write_text("kind: search")
    folders = {compilation.code_folder(folder / "trials" / "t0001") for folder in (night, longer.parent, longer)}
    assert folders == {night / ".compiled"}


def test_runs_of_a_pair_share_code_that_no_other_pair_has(tmp_path):
    """One measurement of a side's compilation would be in all of its pairs."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "experiment.yaml").write_text("kind: comparison")
    folders = [compilation.code_folder(tmp_path / "x" / "trials" / f"t{number:04d}") for number in range(4)]
    assert folders[0] == folders[1] != folders[2] == folders[3]


def test_a_folder_without_locks_costs_no_training(tmp_path):
    (tmp_path / "k" / "lock").mkdir(parents=True)  # cannot be opened for writing
    for _ in range(2):
        assert compiled(tmp_path, 7.0) == (7.0, {}), "compiled by itself"


def test_rates_share_code_and_shapes_do_not():
    net = nn.Linear(4, 4)
    key = compilation.code_key(net, tiny(compile__mode="default"))
    assert key == compilation.code_key(net, tiny(compile__mode="default", optimizer__lr=0.5, seed=3))
    others = {"loader__batch_size": 8, "precision__amp": "bf16", "timesteps__name": "wiener"}
    keys = [compilation.code_key(net, tiny(compile__mode="default", **{name: value})) for name, value in others.items()]
    keys.append(compilation.code_key(nn.Linear(4, 5), tiny(compile__mode="default")))
    assert len({key, *keys}) == 5


TRAIN = """
import json, sys
from tests.helpers import Told, tiny, train
told = Told()
outcome = train(tiny(compile__mode="default", optimizer__lr=float(sys.argv[2])), observer=told, compiled=Path(sys.argv[1]))
print(json.dumps([outcome.seconds["compile"], told.facts.get("compile_own_s")]))
"""


@pytest.mark.nightly
def test_a_second_trial_finds_the_code_of_the_first(tmp_path):
    """It takes a C++ compiler."""
    seconds = []
    for rate in ("0.001", "0.002"):
        words = [sys.executable, "-c", f"from pathlib import Path\n{TRAIN}", str(tmp_path), rate]
        done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        seconds.append(json.loads(done.stdout.splitlines()[-1]))
    (cold_s, none), (charged_s, own_s) = seconds
    assert none is None
    assert charged_s == pytest.approx(cold_s)
    assert own_s < cold_s
