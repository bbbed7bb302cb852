"""Shared by all tests."""

import base64
import compileall
import gc
import io
import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the commands do; before anything imports torch
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # printed commands start with `tunediff`
os.environ.pop("UV", None)  # also where uv runs the tests
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small networks, and a test process per core
else:  # images often forbid bytecode: each of the many processes would compile the package anew
    compileall.compile_dir(Path(__file__).parents[1] / "tunediff", quiet=2)
BYTECODE_FORBIDDEN = sys.dont_write_bytecode


def pytest_collection():
    """Tests with rewritten assertions are kept as bytecode, whether or not an image forbids it: they take 6 s."""
    sys.dont_write_bytecode = False


def pytest_collection_finish():
    sys.dont_write_bytecode = BYTECODE_FORBIDDEN
    _freeze()


def pytest_runtest_setup():
    if len(sys.modules) > _freeze.modules + 50:
        _freeze()


def _freeze():
    """Every training collects garbage first: without this it would look at all that was imported, for a third of a
    second."""
    gc.collect()
    gc.freeze()
    _freeze.modules = len(sys.modules)


def pytest_sessionfinish():
    if helpers := sys.modules.get("tests.helpers"):
        helpers.end_pair()


@pytest.fixture
def timed():
    """For tests of what a search measures before it starts: it is measured in a process of its own."""


@pytest.fixture(autouse=True)
def _timed_in_no_time(request, monkeypatch):
    """What a search measures before it starts is measured in this process, and shortly: few tests care."""
    if "timed" in request.fixturenames:
        return
    from tests.helpers import measure_here, measured_once
    from tunediff.training import hardware

    measure_here(monkeypatch)
    monkeypatch.setattr(hardware, *measured_once())


@pytest.fixture
def clock(monkeypatch):
    """The clock of this process, moved by hand."""
    from tests.helpers import Hands

    monkeypatch.setattr(time, "monotonic", hands := Hands())
    return hands


@pytest.fixture
def at_tmp_path(tmp_path, monkeypatch):
    """The working folder is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def imports_as_before():
    """Folders of users' files are on the path of imports only as long as the test that made them."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture
def this_machine(monkeypatch):
    """Gives this machine so many cores and GPUs."""
    from tunediff.tuning import resources

    def has(cores, gpus=0):
        monkeypatch.setattr(resources, "local", lambda: resources.Machine(cores, gpus))

    return has


def _saying(monkeypatch, module):
    def say(answer):
        def before_search(*_, **__):
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(module, "before_search", before_search)

    return say


@pytest.fixture
def check_says(monkeypatch):
    """Lets the check of a user's file say this, or raise it, without a run."""
    from tunediff.inspector import check

    return _saying(monkeypatch, check)


@pytest.fixture
def probe_says(monkeypatch):
    """Lets this be what was measured of a shipped workload before a search, without a run."""
    from tunediff.inspector import probe

    return _saying(monkeypatch, probe)


@pytest.fixture
def instead_of_trials(monkeypatch):
    """Puts a function in the place of what starts Ray and trains, in a search or a comparison."""
    from tunediff.api import run

    def put(function):
        for name in ("_search", "_compare"):
            monkeypatch.setattr(run, name, function)

    return put


@pytest.fixture
def in_this_process():
    """Lets commands train and profile in this process, where tests replace parts of it; few need a real one."""
    from tests.helpers import commands_in_this_process

    with commands_in_this_process():
        yield


@pytest.fixture
def disk_probe(monkeypatch):
    """Lets a look at the disk of a folder find this fault, or none."""
    from tunediff.core import disk

    return lambda fault: monkeypatch.setattr(disk, "unwritable", lambda folder: fault)


@pytest.fixture
def disk_fault(monkeypatch):
    """Lets every write to a disk that is waited for fail with this code."""

    def fail(code):
        def fsync(descriptor):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    return fail


@pytest.fixture
def called_as(monkeypatch):
    """Lets this be the command line of this process."""
    return lambda *words: monkeypatch.setattr(sys, "argv", [*words])


@pytest.fixture
def nothing_installed(monkeypatch):
    """No further package can be imported."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.fixture
def poor_judge(monkeypatch):
    """Classifiers that judge need not be good, and are trained in no time."""
    from tunediff.evaluation import features

    monkeypatch.setattr(features, "STEPS", 2)


@pytest.fixture
def internet(monkeypatch):
    """Lets every server answer with these bytes, or fail so."""

    def answer(content):
        def urlopen(*_, **__):
            if isinstance(content, Exception):
                raise content
            return io.BytesIO(content)

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)

    return answer


@pytest.fixture
def no_users_code(monkeypatch):
    """No file here is the user's, whose lines errors name, although an earlier test may have loaded a workload."""
    from tunediff.config import code

    monkeypatch.setattr(code, "_roots", [])


@pytest.fixture(autouse=True)
def _outputs_fit_their_schemas(monkeypatch):
    """Whatever a command prints as JSON, in any test, is validated against the schemas that are shipped."""
    from tests import json_schemas
    from tunediff.core import text

    versioned = text.versioned

    def checked(values):
        output = versioned(values)
        json_schemas.validate_any(output)
        return output

    monkeypatch.setattr(text, "versioned", checked)


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""The smallest picture."""


@pytest.fixture
def rendered():
    """For tests that look into figures: they are rendered."""


@pytest.fixture(autouse=True)
def _figures_are_not_rendered(request, monkeypatch):
    """Rendering a report takes seconds, and few tests look into its figures: the others build them only."""
    if "rendered" in request.fixturenames:
        return

    def savefig(figure, file, *, format=None, **_):
        content = b"<svg></svg>" if format == "svg" else PNG
        file.write(content) if hasattr(file, "write") else Path(file).write_bytes(content)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)


TRAINING = {
    "doctor", "evaluation", "integrations", "profiling", "training", "users", "workloads", "test_commands", "test_distributed",
    "test_documentation", "test_evaluate", "test_evaluating", "test_examples", "test_profile",
    "test_starting", "test_worker",
}  # fmt: skip
"""Folders and files of the tier of that name, beside what has its marker; what is left is `unit`."""
LONGEST = (
    "tuning/test_search.py", "training/test_ranks.py", "workloads/diffusion/test_train.py", "test_commands.py",
    "training/test_resume.py", "users/test_mistakes.py", "users/test_files.py", "tuning/test_templates.py",
    "tuning/test_local.py", "evaluation/test_features.py",
)  # fmt: skip
"""Files that start first: the one with a Ray cluster waits for processes beside two that compute."""


def pytest_ignore_collect(collection_path, config):
    """Do not read, for the unit tier alone, what cannot be of it."""
    if config.getoption("-m") == "unit":
        return bool({*collection_path.relative_to(config.rootpath).with_suffix("").parts} & TRAINING) or None
    return None


def pytest_collection_modifyitems(config, items):
    """Give every test its tier; nightly ones are skipped unless they are asked for. A worker runs a file as a whole."""

    def rank(item):
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        first = LONGEST.index(file) if file in LONGEST else len(LONGEST) + bool(item.get_closest_marker("unit"))
        # A worker takes its next file two tests early: skipped ones, if there are any.
        return first, bool(item.get_closest_marker("nightly"))

    for item in items:
        place = item.path.relative_to(Path(__file__).parent).parts
        if not any(item.get_closest_marker(tier) for tier in ("nightly", "cluster", "gpu", "training")):
            item.add_marker("training" if {place[0], item.path.stem} & TRAINING else "unit")
        if item.get_closest_marker("nightly") and "nightly" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="run with -m nightly"))
    items.sort(key=rank)
