"""Searches from Python, without a cluster: results, errors, and what a call leaves of the process."""

import contextlib
import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from matplotlib.figure import Figure

import tunediff
from tests import searches
from tunediff import cli, search
from tunediff import config as cfg
from tunediff.api import calls, run, search_setup
from tunediff.api.options import SearchOptions
from tunediff.config import ConfigError
from tunediff.core import lock
from tunediff.core.progress import EventLines
from tunediff.ray_backend import connection
from tunediff.tuning.templates import Templates


@pytest.fixture
def night(tmp_path):
    """A finished search: the baseline, one that is better, one that is worse."""
    space = searches.make(tmp_path / "night", searches.FILE | {"budget": {"per_trial": "20s", "trials": 3}})
    for number, (point, end) in enumerate(
        (({}, 2.0), ({"precision.amp": "bf16"}, 0.8), ({"loader.batch_size": 256}, 3.0))
    ):
        curve = (5.0, 1000, 4 * end), (10.0, 2000, 2 * end), (20.0, 4000, end)
        searches.write(tmp_path / "night", space, number, point, curve)
    return tunediff.open_search("night", tmp_path)


def test_every_public_name_is_found_and_in_the_documentation():
    text = (calls.Path(__file__).parents[2] / "docs" / "how-to" / "python.md").read_text()
    for name in tunediff.__all__:
        assert getattr(tunediff, name) is not None
    for name in [name for names in tunediff._LAZY.values() for name in names if name != "Trial"]:
        assert name in text, name


def test_json_of_a_search_is_what_the_command_prints(night, capsys):
    assert search.main(["--resume", "night", "--storage", str(night.folder.parent), "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out) == night.json()


def test_results_of_a_search_are_tables_figures_and_typed_values(night, tmp_path):
    assert night.trials()["optimizer.lr"].tolist() == [1e-3] * 3
    assert night.trials()["frechet"].tolist() == [2.0, 0.8, 3.0]
    assert len(night.curves()) == 9
    assert (night.best.trial, night.best.value) == ("t0001", 0.8)
    assert night.best.configuration == {"precision.amp": "bf16"}
    assert (night.verdict.leader.values, night.verdict.best) == ([0.8], night.json()["best"])
    assert isinstance(night.figure(), Figure)
    assert night.report().read_text().startswith("<!doctype html>")
    exported = night.best.export(tmp_path / "best.yaml")
    assert "amp: bf16" in exported.read_text()


def test_every_figure_of_the_report_is_a_matplotlib_figure(night):
    with pytest.raises(tunediff.TunediffError, match="figure: 'effects' is not allowed; allowed: ") as error:
        night.figure("effects")  # of too few trials, which would draw single runs as means
    names = str(error.value).rpartition("allowed: ")[2].split(", ")
    assert {"curves", "trade_offs"} <= set(names)
    assert all(isinstance(night.figure(name), Figure) for name in names)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tunediff.run_search("nowhere.yaml"), "nowhere.yaml: no such search file; shipped:"),
        (lambda: tunediff.run_search("digits", {"optimizer.lr": "fast"}), "^optimizer.lr: 'fast' is not allowed"),
        (lambda: tunediff.run_search("digits", trials=0), "^trials: 0 is not allowed"),
        (lambda: tunediff.run_search("digits", trials="x"), "trials: 'x' is not allowed; allowed: a whole number"),
        (lambda: tunediff.open_search("gone"), "gone: no such search in"),
        (lambda: tunediff.run_comparison("digits", "digits"), "digits: A and B are identical, on the same seeds"),
        (lambda: tunediff.run_training("digits"), "run_training: needs budget or samples"),
        (lambda: tunediff.run_profile("digits", steps=1), "^steps: 1 is not allowed"),
        (lambda: tunediff.load_model("gone"), "gone: no training, search or exported file"),
    ],
)
def test_mistakes_raise_the_message_of_the_command(tmp_path, capsys, call, message, at_tmp_path):
    with pytest.raises(tunediff.TunediffError, match=message):
        call()
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_says_how_to_go_on_and_leaves_the_process_as_it_was(tmp_path, instead_of_trials, capsys):
    def interrupted(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Ray Tune takes it
        raise KeyboardInterrupt

    instead_of_trials(interrupted)
    handler, environment = signal.getsignal(signal.SIGINT), dict(os.environ)
    with pytest.raises(KeyboardInterrupt, match=r"everything measured is in .*night\nresume: tunediff search"):
        tunediff.run_search("digits", name="night", storage=tmp_path, cpus=1, progress=False)
    assert signal.getsignal(signal.SIGINT) is handler
    assert dict(os.environ) == environment
    assert capsys.readouterr() == ("", "")


def test_sigterm_ends_a_call_before_ray_starts():
    """It would end the process and leave running what it has started to measure."""
    with pytest.raises(KeyboardInterrupt), calls.called(cluster=True):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    thread = threading.Thread(target=lambda: calls.called(cluster=True).__enter__())  # it alone may handle signals
    thread.start()
    thread.join()


def test_options_are_a_command_again():
    options = SearchOptions(words=["digits", "seed=3"], name="a b", trials=3, budget=90, check=False, confirm=0)
    command = options.command_line("search", SearchOptions)
    assert shlex.split(command)[2:4] == ["digits", "seed=3"]
    assert vars(search.arguments(shlex.split(command)[2:])).items() >= vars(options).items()


def test_values_from_python_are_words_as_on_a_command_line():
    values = {
        "loader.batch_size": np.int64(64),
        "ema.half_life": np.float32(0.5),
        "model.multipliers": np.array([1, 2]),
    }
    settings = calls.words(("optimizer.lr=1e-3", values, {"optimizer.decay": "cosine"}))
    assert settings == [
        "optimizer.lr=1e-3", "loader.batch_size=64", "ema.half_life=0.5", "model.multipliers=[1, 2]",
        "optimizer.decay=cosine",
    ]  # fmt: skip
    config = cfg.with_words(cfg.baseline("digits"), settings)
    assert (config.optimizer.lr, config.loader.batch_size, config.model.multipliers) == (1e-3, 64, (1, 2))
    assert cfg.with_words(cfg.baseline("digits"), calls.words(({"optimizer.lr": "1e-3"},))).optimizer.lr == 1e-3


def test_numbers_of_numpy_are_numbers():
    options = SearchOptions(trials=np.int64(4), seed=np.int64(3), budget=np.int64(5), total="2m")
    assert (options.trials, options.seed, options.budget, options.total) == (4, 3, 5.0, 120.0)
    assert type(options.trials) is int


def test_keywords_are_those_of_the_options():
    names = inspect.signature(tunediff.run_search).parameters
    assert {"trials", "budget", "check", "progress"} < set(names)
    assert not {"resume", "dry_run", "json"} & set(names)
    assert "trials: trials in all, the baseline included" in tunediff.run_search.__doc__
    with pytest.raises(tunediff.ConfigError, match="trails: no such option"):
        tunediff.run_search("digits", trails=3)


def test_a_search_that_a_process_runs_is_running_until_that_ends(night):
    assert not night.running
    with lock.exclusive_lock(night.folder):
        assert night.running
    assert not night.running
    (night.folder / lock.LOCK).write_text(f"{lock.socket.gethostname()} {os.getpid()} 5.0")  # it was killed
    assert not night.running


def test_a_search_on_a_cluster_is_the_command_in_a_process_of_its_own(tmp_path, monkeypatch):
    started = []

    def popen(command, **how):
        started.append(command)
        return real([sys.executable, "-c", "import sys; print('error: no', file=sys.stderr); sys.exit(2)"], **how)

    real = subprocess.Popen
    for name, value in (
        ("tunediff.api.search.subprocess.Popen", popen),
        ("tunediff.core.machine.check", lambda options: None),  # there is no such cluster
    ):
        monkeypatch.setattr(name, value)
    with pytest.raises(tunediff.TunediffError, match="night ended with exit code 2: error: no"):
        tunediff.run_search("digits", budget=3, name="night", storage=tmp_path, address="a:1")
    assert started[-1][1:4] == ["-m", "tunediff", "search"]
    assert search.arguments(started[-1][4:]) == search.SearchCommandOptions(
        words=["digits"], name="night", storage=tmp_path, budget=3, address="a:1"
    )


def test_a_finished_search_leaves_its_report_and_opens_it_on_request(night, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) > 1)
    words = ["--resume", "night", "--storage", str(night.folder.parent), "--open"]
    assert search.main(words) == cli.OK
    page = night.folder / "report.html"
    out, err = capsys.readouterr()
    assert page.is_file()
    assert f"\nreport: {page}\n" in out
    assert err.endswith(f"--open: there is no browser; the report is {page}\n")
    assert search.main(words) == cli.OK
    assert "--open" not in capsys.readouterr().err
    assert opened == [page.as_uri()] * 2


# ------------------------------------------------------------ ray starts while a new search measures what a trial costs
def test_ray_starts_while_a_trial_is_measured_and_ends_with_a_refusal(tmp_path, monkeypatch):
    events, ray_runs = list[str](), threading.Event()

    @contextlib.contextmanager
    def started(address):
        events.append("Ray starts")
        ray_runs.set()
        try:
            yield None
        finally:
            events.append("Ray ends")

    def measure(*_):
        assert ray_runs.wait(60)  # it does not wait for this
        raise ConfigError("data.path: no images")

    monkeypatch.setattr(connection, "started", started)
    monkeypatch.setattr(search_setup, "measure", measure)
    monkeypatch.setattr(Templates, "prepare", lambda *_: None)
    options = SearchOptions(words=["digits"], storage=tmp_path, name="x")
    with pytest.raises(ConfigError, match="no images"):
        run.search(search_setup.prepare(options), options, EventLines())
    assert events == ["Ray starts", "Ray ends"]
    assert not (tmp_path / "x").exists()


# ----------------------------------------------------------------------------- a search by a call from Python, with Ray
SCRIPT = """
import signal, types
from dataclasses import dataclass
from typing import Annotated
import ray, torch, tunediff

@dataclass(frozen=True)
class Knobs:
    width: Annotated[int, tunediff.Choice(4, 8, 16)] = 8
    lr: Annotated[float, tunediff.Range(1e-3, 1e-1, log=True)] = 0.01

def train(trial):
    net = trial.prepare(torch.nn.Linear(4, trial.knobs.width))
    optimizer = torch.optim.SGD(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"score": trial.knobs.width + trial.knobs.lr})
    for (x,) in trial.batches((torch.ones(64, 4),)):
        trial.step(net(x).square().mean(), optimizer)

workload = types.SimpleNamespace(Knobs=Knobs, OBJECTIVE=tunediff.Metric("score", "min"), train=train)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
fixed = {"loader.batch_size": 8, "loader.workers": 0, "precision.amp": "none"}
search = tunediff.run_search(workload, fixed, name="called", trials=3, budget=1, confirm=0, seed=7, check=False)
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
assert not ray.is_initialized()
"""


@pytest.mark.cluster
@pytest.mark.nightly  # `tests/tuning/test_search.py` resumes by a call from Python
def test_a_call_leaves_the_process_as_it_was(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    search = tunediff.open_search("called", tmp_path / "ray_results")
    assert search.json()["search"]["statuses"]["ok"] == 3
    drawn = [tuple(row) for row in search.trials()[["trial", "width", "lr"]].to_numpy().tolist()]
    assert drawn[0] == ("t0000", 8, 0.01)
    assert len(set(drawn)) == 3
