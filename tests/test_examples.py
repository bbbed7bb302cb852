"""The files under `examples/`: each trains, is judged, goes on and is searched, as a user's file is."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers import Dies, KilledError, Told, assert_equal, check_here, train, weights
from tunediff import config as cfg
from tunediff import sample, search
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.training.weights import save

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = ["classifier", "control", "finetune", "flow", "ranker"]
SLOW = pytest.mark.nightly  # imports trl
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.nightly  # `test_sample.py` and `test_evaluate.py` draw from others
def test_sample_draws_from_a_training_of_an_example(tmp_path, capsys, at_tmp_path):
    """The same images in any batch size; the file of the workload runs only if the user says so."""
    config, folder = example("flow", loader__batch_size=8), tmp_path / "ray_results" / "flow-run"
    config = cfg.take_along(config, folder)
    journal = Journal(folder)
    journal.start(*cfg.identity(config), {}, 3.0)
    journal.end(record.End("ok", seconds={"train": 3.0}, steps=1))
    save(weights(train(config, samples=8)), folder / "weights.safetensors", {})

    assert sample.main(["flow-run"]) == 2
    assert "flow.py is not allowed: sample is for diffusion; allowed: diffusion, or" in capsys.readouterr().err
    words = ["flow-run", "--images", "10"]
    for option, message in (
        ("--sampler=ddim", "--sampler: flow.py has no such option"),
        ("--batch-size=0", "--batch-size: 0 is not allowed; allowed: a whole number of at least 1"),
    ):
        assert sample.main([*words[:2], option]) == 2
        assert message in capsys.readouterr().err

    assert sample.main(words) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["images"], lines["sampler"], lines["seed"]) == ("10", "flow", "0")
    assert lines["path"] == "ray_results/flow-run/samples-flow-run-flow.png"
    assert np.asarray(Image.open(lines["path"])).shape == (2 * 34 + 2, 8 * 34 + 2)
    arrays = []
    for size in ("10", "4"):
        assert sample.main([*words, "--batch-size", size, "--out", size]) == 0
        arrays.append(np.stack([np.asarray(Image.open(file)) for file in sorted(Path(size).iterdir())]))
    assert arrays[0].shape == (10, 8, 8)
    assert arrays[0].std() > 10
    assert np.abs(arrays[0].astype(int) - arrays[1]).max() <= 1


def test_an_interrupted_example_ends_where_an_uninterrupted_one_does(tmp_path):
    config, samples = example("classifier", dropout=0.3), 64 * 8
    whole = train(config, samples=samples, folder=tmp_path / "whole", evaluates=True)
    with pytest.raises(KilledError):
        train(config, samples=samples, folder=tmp_path / "killed", evaluates=True, observer=Dies())
    again = train(config, samples=samples, folder=tmp_path / "killed", evaluates=True)
    assert again.points[-1]["accuracy"] == whole.points[-1]["accuracy"]
    assert_equal(weights(whole), weights(again))


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


def test_the_right_line_is_among_the_candidates_once_and_no_module_on_both_sides():
    ranker = cfg.of(example("ranker")).code
    modules = {(line, text): module for module, line, text in ranker.functions()}
    sides = [ranker.pairs(8, held_out=held_out) for held_out in (False, True)]
    learned, held_out = ({modules[lines[0], text] for text, lines in side} for side in sides)
    assert not learned & held_out
    sizes = Counter(modules.values())
    module_of = {line: module for module, line, _ in ranker.functions()}
    for text, lines in sides[0] + sides[1]:
        module = modules[lines[0], text]
        assert len(set(lines)) == 8
        near = sum(module_of[line] == module for line in lines)
        assert near == min(8, sizes[module]), "of the same module first"
    assert len(sides[1]) > 300


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
