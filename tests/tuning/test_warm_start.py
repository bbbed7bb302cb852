"""The best points of an earlier search are tried first; what ran on another machine is named."""

import json
import shutil
import types

import pytest

from tests.tuning.asked import EARLIER, FILE, AskedBackend, end, pool
from tunediff import search, search_space
from tunediff.api import search_setup
from tunediff.api.search_setup import SearchOptions
from tunediff.config import ConfigError
from tunediff.core import machine_options
from tunediff.core.journal import Journal
from tunediff.tuning import experiment


@pytest.fixture
def earlier(tmp_path):
    """A finished search: baseline 5, batch 64 best with 3, batch 32 not finite, another learning rate 4."""
    from tunediff.ray_backend.searcher import Searcher
    from tunediff.tuning.optuna_proposer import OptunaProposer

    folder, content = tmp_path / "earlier", FILE | EARLIER | {"budget": {"per_trial": "3s", "trials": 4}}
    wanted = search_space.parse(content, "x.yaml")
    experiment.create(folder, wanted, content)
    searcher = Searcher(OptunaProposer(wanted, folder), AskedBackend(pool()))
    for value in (5.0, 3.0, None, 4.0):
        end(searcher, searcher.suggest("a"), "a", status="nan" if value is None else "ok", value=value)
    return folder


def warm_started(earlier, **changes):
    """The points that a search tries first, without what it has failed with and the baseline."""
    file = earlier.parent / "night.yaml"
    file.write_text(json.dumps(FILE | EARLIER | {"first": [], **changes}))
    options = SearchOptions(words=(str(file),), name="new", storage=earlier.parent, warm_start="earlier")
    request = search_setup.prepare(options)
    points = [(point["loader.batch_size"], point.get("optimizer.lr")) for point in request.space.candidates]
    assert len(request.content["first"]) == len(points) - 1
    return request, points


def test_best_points_of_an_earlier_search_are_tried_first(earlier):
    request, points = warm_started(earlier)
    assert points == [(128, 1e-3), (64, 1e-3), (128, 5e-3)]
    experiment.create(request.folder, request.space, request.content)
    shutil.rmtree(earlier)
    resumed = search_setup.prepare(SearchOptions(resume="new", storage=earlier.parent, trials=20))
    assert resumed.space.candidates[:3] == request.space.candidates


def test_what_lies_outside_the_space_is_left_out(earlier):
    _, points = warm_started(earlier, search={"loader.batch_size": [128, 256], "optimizer.lr": [1e-3, 5e-3]})
    assert points == [(128, 1e-3), (128, 5e-3)]


def test_an_earlier_search_that_is_not_there_is_refused(earlier):
    file = earlier.parent / "night.yaml"
    file.write_text(json.dumps(FILE | {"warm_start": "gone"}))
    with pytest.raises(ConfigError, match="--warm-start: 'gone' is not allowed; allowed: a search in "):
        search_setup.prepare(SearchOptions(words=(str(file),), storage=earlier.parent))


def test_a_search_resumed_elsewhere_is_warned_of(earlier, environment_is, this_machine, capsys):
    this_machine(2)
    assert experiment.foreign(earlier) == ""
    environment_is(versions={"torch": "1.0"})
    assert search.main(["--resume", earlier.name, "--storage", str(earlier.parent), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("WARNING: earlier: 3 of its 3 trials were measured elsewhere (torch ")
    assert "1.0 here): what is measured from now on cannot be compared with them" in said


NODE = {"cpu": "AMD EPYC 9654", "cpu_features": ["avx512f"], "usable_cores": 64, "code": "0123456789ab"}
NODE |= {"gpus": ["NVIDIA H100 80GB HBM3, 700.00 W, 81559 MiB"], "versions": {"torch": "2.15.0"}}


def moved(folder, **environment):
    """The trials of this search were trained on another machine."""
    for path in folder.glob("trials/*"):
        Journal(path).write("worker", device="NVIDIA H100 80GB HBM3", threads=8, environment=environment)


def test_a_cluster_is_compared_by_its_nodes_not_by_its_head(earlier):
    """The head has no GPU: `--resume` on the same nodes warns of nothing."""
    moved(earlier, **NODE)
    slots = [types.SimpleNamespace(device="cuda", environment=NODE | changes) for changes in ({}, {"usable_cores": 32})]
    assert experiment.foreign(earlier, slots[0]) == ""
    assert "3 of its 3 trials were measured elsewhere (CPU cores 64 there, 32 here)" in experiment.foreign(
        earlier, slots[1]
    )
    assert experiment.foreign(earlier, types.SimpleNamespace(device="cuda", environment={})) == "", "no node yet"


def test_a_search_resumed_on_a_cluster_is_not_compared_with_its_head(earlier, monkeypatch, caplog):
    moved(earlier, **NODE)
    monkeypatch.setattr(machine_options, "_speaks_http2", lambda *_: True)
    search_setup.prepare(SearchOptions(resume="earlier", storage=earlier.parent, address="head:6379", dry_run=True))
    assert "measured elsewhere" not in caplog.text
    search_setup.prepare(SearchOptions(resume="earlier", storage=earlier.parent, dry_run=True))
    assert "measured elsewhere" in caplog.text
