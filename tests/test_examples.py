"""The files under `examples/`: each trains, is judged, goes on and is searched, as a user's file is."""

import re
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers import Dies, KilledError, Told, assert_equal, check_here, train, weights
from tests.training.conftest import one_thread  # noqa: F401
from tunediff import config as cfg
from tunediff import search

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = ["classifier", "control", "finetune", "flow", "ranker"]
SLOW = pytest.mark.nightly  # imports trl


def example(name, **values):
    own = {knob.replace("__", "."): value for knob, value in values.items()}
    return cfg.override(cfg.baseline(str(FOLDER / f"{name}.py")), {"evaluation.points": 2} | own)


@pytest.mark.parametrize(
    ("name", "knobs", "batches", "low", "high"),
    [
        ("classifier", {}, 22, 0.2, 1.0),  # chance is 0.1
        ("ranker", {"width": 64, "candidates": 4}, 20, 0.3, 1.0),  # chance is 0.125
        ("flow", {"loader__batch_size": 8, "evaluation__points": 1}, 1, 0.0, 1000.0),
    ],
)
def test_an_example_trains_and_is_judged(name, knobs, batches, low, high):
    config, told = example(name, **knobs), Told()
    outcome = train(config, samples=batches * config.loader.batch_size, evaluates=True, observer=told)
    assert (outcome.finished, outcome.unread, len(told.points)) == (True, (), config.evaluation.points)
    assert all(low < point[cfg.of(config).objective.name] < high for point in told.points)
    if name == "flow":
        assert told.points[-1]["label"] == "FD (classifier)"
        assert told.shown["samples"].shape == (64, 1, 8, 8)


def test_the_file_of_the_page_on_own_trainings_learns(tmp_path):
    """As it stands in docs/own-training.md; chance is 0.1."""
    page = (FOLDER.parent / "docs" / "own-training.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(# mine.py\n.*?)```", page, re.S)[1])
    config, told = cfg.override(cfg.baseline(str(tmp_path / "mine.py")), {"evaluation.points": 1}), Told()
    outcome = train(config, samples=40 * config.loader.batch_size, evaluates=True, observer=told)
    assert (outcome.finished, outcome.unread) == (True, ())
    assert 0.5 < told.points[-1]["accuracy"] <= 1.0


def test_a_loop_that_collects_its_own_data_goes_on_exactly_and_trains_no_step_twice(tmp_path):
    config, samples, steps = example("control"), 16 * 32 * 4, []
    counting = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    told = Told()
    whole = train(config, samples=samples, folder=tmp_path / "whole", evaluates=True, observer=told)
    counting.remove()
    assert len(steps) == 4 * config.passes, "four updates, and none before them that is undone"
    assert all(5 < point["return"] <= 200 for point in told.points)
    with pytest.raises(KilledError):
        train(config, samples=samples, folder=tmp_path / "killed", evaluates=True, observer=Dies())
    again = train(config, samples=samples, folder=tmp_path / "killed", evaluates=True)
    assert_equal(weights(again), weights(whole))


def test_the_check_says_that_environments_begin_anew_where_they_are_not_kept(tmp_path):
    text = (FOLDER / "control.py").read_text()
    for name, kept in (("keeps.py", text), ("forgets.py", text.replace(", carts=carts)", ")"))):
        (tmp_path / name).write_text(kept)
        warnings = check_here(cfg.baseline(str(tmp_path / name)))["warnings"]
        said = any("a resumed training does not go on as if it had not been interrupted" in line for line in warnings)
        assert said == (name == "forgets.py")


@SLOW
@pytest.mark.parametrize("knobs", [{}, {"packing": True, "targets": "linear"}])
def test_fine_tuning_lowers_the_loss_of_verbs_it_has_not_seen_and_goes_on_exactly(knobs, tmp_path):
    pytest.importorskip("trl")
    config = example("finetune", lr=0.01, **knobs)
    samples = 16 * 30
    whole = train(config, samples=samples, folder=tmp_path / "whole", evaluates=True)
    assert whole.points[-1]["eval_loss"] < 5.4, "6.2 untrained; log(256 tokens) is 5.5"
    with pytest.raises(KilledError):
        train(config, samples=samples, folder=tmp_path / "killed", evaluates=True, observer=Dies())
    again = train(config, samples=samples, folder=tmp_path / "killed", evaluates=True)
    assert_equal(weights(again), weights(whole))
    assert (tmp_path / "whole" / "checkpoint.pt").stat().st_size < 1.5 * 2**20, "the base alone has 2.7 MiB"
    assert any("lora_A" in name for name in whole.weights)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) if name == "finetune" else name for name in NAMES])
def test_a_search_of_an_example_needs_no_other_file(name, tmp_path, capsys, at_tmp_path):
    if name == "finetune":
        pytest.importorskip("trl")
    assert search.main([str(FOLDER / f"{name}.py"), "--dry-run", "--no-check"]) == 0
    assert "first 0: baseline" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_readme_has_them_all():
    text = (FOLDER / "README.md").read_text()
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NAMES) == set(re.findall(r"examples/(\w+)\.py", text))
