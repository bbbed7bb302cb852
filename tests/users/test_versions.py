"""The version and the copy of a workload are those of what it has loaded, however that was imported."""

import importlib
import json
import subprocess
import sys

import pytest

from tests.tuning.test_worker import job_of
from tunediff import config as cfg
from tunediff import evaluate
from tunediff import train as train_command
from tunediff.api import compare_setup, notebook
from tunediff.api.options import CompareOptions
from tunediff.core import trial_record as record
from tunediff.core.point import Point
from tunediff.tuning.templates import Templates

FILE = """
import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
import torch
import yaml
from tunediff import Metric

@dataclass(frozen=True)
class Knobs:
    model: str = "resnet"
    lr: float = 0.1

OBJECTIVE = Metric("score", "min")
BASELINE = {"evaluation.points": 1, "loader.batch_size": 8, "loader.workers": 0}

def located(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)

def train(trial):
    import plugins
    by_name = importlib.import_module(f"models.{trial.knobs.model}")
    settings = yaml.safe_load(Path(__file__).with_name("model.yaml").read_text())
    by_path = located(settings["net"]["_target_"])
    head = settings["head"]
    by_class_path = located(head["class_path"])(**head["init_args"])
    listed = [importlib.import_module(f"plugins.{one.name}") for one in pkgutil.iter_modules(plugins.__path__)]
    flat = importlib.import_module("flat_module")
    net = trial.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    values = [by_name.VALUE, by_path.VALUE, by_class_path.value, flat.VALUE, *(one.VALUE for one in listed)]
    trial.evaluate_with(lambda: {"score": sum(values), "many": len(values)})
    for (batch,) in trial.batches((torch.ones(64, 4),)):
        trial.step(net(batch).square().mean(), optimizer)
"""
MODULES = {
    "models/resnet.py": "VALUE = 1", "models/vgg.py": "VALUE = 2", "layers/__init__.py": "",
    "layers/linear.py": "class Linear:\n    VALUE = 10", "plugins/__init__.py": "", "plugins/one.py": "VALUE = 100",
    "plugins/two.py": "VALUE = 1000", "flat_module.py": "VALUE = 10000",
    "heads/plain.py": "class Head:\n    def __init__(self, value):\n        self.value = 10 * value",
}  # fmt: skip
SETTINGS = """
net: {_target_: layers.linear.Linear}                              # as Hydra names a class
head: {class_path: heads.plain.Head, init_args: {value: 10000}}    # as Lightning's and jsonargparse's files do
"""
SCORE = 111111


@pytest.fixture
def mine(tmp_path, monkeypatch, at_tmp_path):
    """A file that imports modules beside it by name only, and that of its folder."""
    folder = tmp_path / "original"
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("flat_module", "heads", "layers", "models", "plugins")
    ]:
        monkeypatch.delitem(sys.modules, name)  # of other tests
    for name, text in {"mine.py": FILE, "model.yaml": SETTINGS, **MODULES}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "mine.py"


@pytest.fixture
def train(tmp_path):
    """Trains a configuration in a process of its own; returns its last point, or the reason of its failure."""
    numbers = iter(range(99))

    def trained(config):
        job = job_of(
            tmp_path / "search/trials" / f"t{next(numbers)}", config, samples=16, metric="score", evaluates=True
        )

        def answer(run, event):
            if isinstance(event, Point) and event.index < job.points:
                run.send("go")

        with Templates() as templates:
            templates.train(job, {}, answer)
        trial = record.read_trial(job.folder)
        return trial.points[-1] if trial.points else trial.reason

    return trained


def test_what_lies_below_the_file_is_the_version_and_the_copy(mine, train, tmp_path):
    (mine.parent / ".#mine.py").symlink_to("me@here.1234")  # as Emacs locks a file
    config = cfg.baseline(str(mine))
    assert {str(path) for path in cfg.of(config).file.contents} == {"mine.py", *MODULES}
    copy = cfg.take_along(config, tmp_path / "search")
    assert copy.schema.version == config.schema.version
    for name in MODULES:
        (mine.parent / name).write_text("VALUE = -1")  # edits reach no run of the copy
    assert cfg.baseline(str(mine)).schema.version != config.schema.version
    assert train(copy)["score"] == SCORE
    assert train(cfg.override(copy, {"model": "vgg"}))["score"] == SCORE + 1
    (tmp_path / "search").rename(tmp_path / "moved")
    assert cfg.baseline(str(tmp_path / "moved/workload/mine.py")).schema.version == copy.schema.version


@pytest.mark.parametrize("edited", ["models/resnet.py", pytest.param("heads/plain.py", marks=pytest.mark.nightly)])
def test_a_training_has_the_version_of_what_it_has_imported_by_name(mine, tmp_path, capsys, edited, in_this_process):
    words = ["--config", str(mine), "--samples", "64", "--out", "out"]
    assert train_command.main(words) == 0
    assert train_command.main(words) == 0, "what it has imported is known, and unchanged"
    versions = [record.read_trial(tmp_path / "out").fingerprint]
    (mine.parent / edited).write_text(MODULES[edited].replace("1", "2"))
    assert train_command.main([*words[:-1], "other"]) == 0
    versions.append(record.read_trial(tmp_path / "other").fingerprint)
    assert versions[0] != versions[1], "one of what was loaded"
    capsys.readouterr()
    assert evaluate.main(["out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["score"]["value"] == SCORE
    assert train_command.main(words) == 2
    assert "mine.py has changed" in capsys.readouterr().err


def git(*words):
    subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me@here", *words], check=True, capture_output=True)


@pytest.fixture
def committed(mine, monkeypatch):
    """The folder of the file is a repository, in which a module was edited since that is imported by name."""
    monkeypatch.chdir(mine.parent)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    for name in EDITED:
        (mine.parent / name).write_text(MODULES[name].replace("1", "2"))


EDITED = ("models/resnet.py", "layers/linear.py", "heads/plain.py")


@pytest.mark.usefixtures("committed")
def test_a_revision_runs_its_modules_that_are_imported_by_name(tmp_path):
    options = CompareOptions(words=("mine.py@HEAD", "mine.py"), storage=tmp_path / "results", name="c")
    with compare_setup.prepare(options, lambda line: None) as request:
        compare_setup.create(request, options)
    for name in EDITED:
        texts = [(tmp_path / f"results/c/{side}/workload" / name).read_text() for side in "AB"]
        assert texts == [MODULES[name], MODULES[name].replace("1", "2")]
    versions = [cfg.load(tmp_path / f"results/c/{side}/config.yaml").schema.version for side in "AB"]
    assert versions[0] != versions[1]


def test_a_module_that_the_program_has_imported_is_trained_as_edited(mine, monkeypatch):
    """Also what it imports."""
    mine = mine.rename(mine.with_name("edited.py"))
    mine.write_text(f"import flat_module\n{FILE}\nWHICH = flat_module.VALUE\n")
    monkeypatch.syspath_prepend(str(mine.parent))
    old = importlib.import_module("edited")
    other = importlib.import_module("models.vgg")
    (mine.parent / "flat_module.py").write_text("VALUE = 70000")
    mine.write_text(mine.read_text().replace("lr: float = 0.1", "lr: float = 0.7"))
    config = cfg.named(cfg.find(notebook.named(old, mine.parent)).file.file, [])
    assert (config.lr, cfg.of(config).code.WHICH, old.WHICH) == (0.7, 70000, 10000)
    assert sys.modules["models.vgg"] is other, "what only the program uses stays"
