"""Trials in processes that are forked from templates: equal to those of a fresh process, and without a trace."""

import pytest
import torch

from tests.tuning import spoiling
from tests.tuning.test_worker import CONFIG, Parent, job_of, worker
from tunediff import config as cfg
from tunediff.core import trial_record as record
from tunediff.core.point import Point
from tunediff.core.template import Template, TemplateError
from tunediff.distributed import alone
from tunediff.tuning.resources import Placement
from tunediff.tuning.templates import Templates
from tunediff.tuning.trial_spec import WorkerGroupSpec

THREADS = torch.get_num_threads()


def test_what_runs_do_to_their_process_ends_with_them():
    with Template(spoiling.prepare, None) as template:

        def answer(function, content=None):
            run = template.start(getattr(spoiling, function), content)
            found = run.receive()
            assert run.receive() is None
            return found

        before = answer("describe")
        for way in spoiling.WAYS:
            assert answer("spoil", way) or way == "process of its own", way
        assert answer("describe") == before


@pytest.fixture(scope="module")
def templates():
    with Templates() as made:
        yield made


def train(templates, job):
    """Train a job in a run; returns its trial."""

    def answer(run, event):
        if isinstance(event, Point) and event.index < job.points:
            run.send("go")

    templates.train(job, {}, answer)
    return record.read_trial(job.folder)


def curve(trial):
    kept = ("frechet", "loss", "validation_loss", "samples", "steps")
    return [{key: point[key] for key in kept if key in point} for point in trial.points]


@pytest.mark.nightly
def test_a_forked_run_has_the_curve_of_any_other_process(templates, tmp_path):
    """Another trial before it, of another precision, order of channels, seed and loaders, leaves no trace."""
    judged = {"evaluation.images": 64, "evaluation.steps": 3, "evaluation.validation_images": 16}
    mine = cfg.override(CONFIG, judged | {"evaluation.extractor": "random"})
    changes = {
        "precision.amp": "bf16", "precision.matmul": "medium", "memory.channels_last": True, "seed": 7,
        "loader.workers": 1, "loader.resident": False,
    }  # fmt: skip
    jobs = {
        name: job_of(tmp_path / f"t{number}", config, samples=128, evaluates=True)
        for number, (name, config) in enumerate(
            (("here", mine), ("other", cfg.override(mine, changes)), ("forked", mine)), 1
        )
    }
    worker.work(jobs["here"], Parent(jobs["here"].folder), alone())
    other = train(templates, jobs["other"])
    trials = [record.read_trial(jobs["here"].folder), train(templates, jobs["forked"]), other]
    assert [trial.status for trial in trials] == ["ok"] * 3
    here, forked, changed = map(curve, trials)
    assert "frechet" in here[0]
    assert here == forked != changed


FILE = """
import os
from dataclasses import dataclass
import torch
from tunediff import Metric
{top}

@dataclass(frozen=True)
class Knobs:
    lr: float = 0.01

OBJECTIVE = Metric("threads", "max")
BASELINE = {{"loader.batch_size": 16, "loader.workers": 0, "evaluation.points": 1}}
X = torch.ones(64, 4)

def train(trial):
    net = trial.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {{"threads": torch.get_num_threads(), "version": {version}}})
    for (batch,) in trial.batches((X,)):
        trial.step(net(batch).pow(2).mean(), optimizer)
"""


@pytest.fixture
def users_job(tmp_path):
    """Writes a user's file and returns a job that trains it."""
    numbers = iter(range(99))

    def make(top="", version=1):
        file, folder = tmp_path / "workload" / "mine.py", tmp_path / "trials" / f"t{next(numbers)}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(FILE.format(top=top, version=version))
        folder.mkdir(parents=True)
        # Its import here may set the threads of this process
        of_any_version = WorkerGroupSpec(1, Placement(threads=THREADS))
        config = cfg.baseline(str(file))
        return job_of(folder, config, samples=32, metric="threads", evaluates=True, group=of_any_version)

    return make


@pytest.mark.usefixtures("no_users_code")
def test_each_version_of_a_file_trains_in_a_template_of_its_own(templates, users_job):
    """A file that is edited between two runs is trained as edited, and what it sets ends with its version."""
    versions = {1: "", 2: "torch.set_num_threads(1)"}
    points = [train(templates, users_job(versions[n], version=n)).points[-1] for n in (1, 2, 1)]
    assert [(point["threads"], point["version"]) for point in points] == [(THREADS, 1), (1, 2), (THREADS, 1)]


@pytest.mark.nightly  # `test_template.py` has runs that start afresh
@pytest.mark.usefixtures("no_users_code")
def test_file_that_must_not_be_forked_trains_in_fresh_processes(templates, users_job):
    top = "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    first, second = users_job(top), users_job(top)
    assert [train(templates, job).status for job in (first, second)] == ["ok", "ok"]
    assert "threads" in templates.prepare(first.workload).unsafe


@pytest.mark.usefixtures("no_users_code")
def test_error_while_a_file_is_imported_is_the_end_of_its_trial(users_job, monkeypatch):
    job = users_job('if os.environ.get("TUNEDIFF_BROKEN"): raise OSError("no data here")')
    monkeypatch.setenv("TUNEDIFF_BROKEN", "1")
    with Templates() as fresh:
        trial = train(fresh, job)
    assert trial.status == "error"
    assert "no data here" in trial.reason


@pytest.mark.usefixtures("no_users_code")
def test_file_that_hangs_while_it_is_imported_is_given_up(users_job, monkeypatch):
    job = users_job('if os.environ.get("TUNEDIFF_HANGS"): __import__("time").sleep(600)')
    monkeypatch.setenv("TUNEDIFF_HANGS", "1")
    with (
        Templates(import_limit_s=1.0) as fresh,
        pytest.raises(TemplateError, match=r"mine.py: is not imported after 1 s"),
    ):
        train(fresh, job)
