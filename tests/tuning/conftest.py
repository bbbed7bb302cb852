"""Searches as a user starts them, in a process of their own, on a model that trains in seconds."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from unittest import mock

import optuna
import psutil
import pytest
import yaml

from tests.tuning.asked import FILE, AskedBackend, pool
from tunediff import search_space
from tunediff.core import trial_record as record

MARK = "SEARCH_OF_TEST"
"""Variable that all processes of one search inherit."""
WAIT_S = 1200
"""Seconds until something that is waited for is taken for a hang: under the limit of pytest, whose reason says less."""
FIXED = {
    "data.max_images": 256, "model.multipliers": [1], "model.attention": [], "model.channels": 8,
    "evaluation.images": 64, "evaluation.steps": 5, "evaluation.points": 2, "optimizer.warmup": 0.2,
}  # fmt: skip


def _interruptible():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Search:
    """One search of a test: its file, its folder, its process."""

    def __init__(self, folder: Path, name: str, **content):
        self.storage, self.name = folder / "results", name
        self.folder = self.storage / name
        self.file = folder / f"{name}.yaml"
        fixed = FIXED | content.pop("fixed", {})
        self.file.write_text(yaml.safe_dump({"workload": "digits", "fixed": fixed, **content}, sort_keys=False))
        self.process = None

    def start(self, *words):
        command = [sys.executable, "-m", "tunediff.search", *words, "--storage", str(self.storage)]
        log = open(self.storage.parent / f"{self.name}.log", "a")  # noqa: SIM115
        # A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C must work all the same.
        self.process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=self.storage.parent, preexec_fn=_interruptible,
            env=os.environ | {MARK: uuid.uuid4().hex},
        )  # fmt: skip
        return self.process

    def run(self, *words):
        process = self.start(*(words or (str(self.file), "--name", self.name)))
        code = process.wait()
        assert code in (0, 3), self.log
        return code

    def interrupt(self):
        """Interrupt it as Ctrl-C does: it ends with all its processes and says how it is resumed."""
        family = of_search(self.process)
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(WAIT_S) == 130
        assert f"resume: tunediff search --resume {self.name}" in self.log
        assert "Traceback" not in self.log
        assert all_gone(family) == []

    @property
    def log(self):
        return (self.storage.parent / f"{self.name}.log").read_text()

    def trial(self, name):
        return record.read_trial(self.folder / "trials" / name)

    def events(self, name, kind):
        return [event for event in record.events(self.folder / "trials" / name) if event["event"] == kind]

    def wait_for(self, ready):
        """The first true answer of `ready`; fails when the search ends or the time is over."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if answer := ready():
                return answer
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        raise AssertionError(f"not ready after {WAIT_S} s\n{self.log}")

    @property
    def study(self):
        return optuna.load_study(study_name="tunediff", storage=f"sqlite:///{self.folder / 'study.db'}").trials

    @property
    def journals(self):
        return {path.parent.name: path.read_text() for path in sorted(self.folder.glob("trials/*/journal.jsonl"))}


def of_search(process):
    """The search's own processes: Ray's, the workers', and templates, which are nobody's children, with their runs."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    marks = {mark for child in family if (mark := mark_of(child))}
    pids = {child.pid for child in family}
    return family + [other for other in psutil.process_iter() if other.pid not in pids and mark_of(other) in marks]


def mark_of(process):
    """What the processes of one search have in their environments; '' without it."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get(MARK, "")
    return ""


def ray_process(process, prefix):
    """The search's process whose title begins so; waits for it, since Ray writes titles anew at every call of an actor."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        seen = []
        for found in of_search(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.append(" ".join(found.cmdline()))
                if seen[-1].startswith(prefix) or prefix in found.name():
                    return found
        time.sleep(0.1)
    raise AssertionError(f"no process {prefix} among {seen}")


def all_gone(processes):
    """Command lines of those that still run."""
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    return [p.cmdline() for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def worker_pid(search, name):
    """The process of the trial's latest attempt."""
    return search.events(name, "worker")[-1]["pid"]


@pytest.fixture(scope="session", autouse=True)
def _migrations_are_read_once():
    """Optuna loads all migrations of its tables for each study that it opens: half of the seconds of opening one."""
    from optuna.storages._rdb.storage import _VersionManager

    read, heads = _VersionManager.get_head_version, []

    def head(self):
        heads[:] = heads or [read(self)]
        return heads[0]

    with mock.patch.object(_VersionManager, "get_head_version", head):
        yield


@pytest.fixture
def make(tmp_path):
    """Makes the searcher of a search in `tmp_path`; `changes` are of its file."""
    from tunediff.ray_backend.searcher import Searcher
    from tunediff.tuning.optuna_proposer import OptunaProposer

    (tmp_path / "trials").mkdir()

    def make(slots=1, spent_s=0.0, device="cpu", places=None, **changes):
        content = {key: value for key, value in (FILE | changes).items() if value is not None}
        space = search_space.parse(content, "x.yaml")
        proposer = OptunaProposer(space, tmp_path, spent_s, device=device)
        return Searcher(proposer, AskedBackend(places or pool(slots)))

    return make


@pytest.fixture
def search(tmp_path):
    made = []

    def make(name, **content):
        made.append(Search(tmp_path, name, **content))
        return made[-1]

    yield make
    for one in made:
        if one.process is not None and one.process.poll() is None:
            children = of_search(one.process)
            os.kill(one.process.pid, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def block(log):
    """The `key: value` lines at the end of a search's output."""
    lines = [line.split(": ", 1) for line in log.splitlines() if ": " in line and not line.startswith("[")]
    return {key: value for key, value in lines}  # noqa: C416
