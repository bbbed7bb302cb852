"""The best points of an earlier search are tried first."""

import json
import shutil

import pytest

from tests.tuning.asked import EARLIER, FILE, AskedBackend, end, pool
from tunediff import search_space
from tunediff.api import search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
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
