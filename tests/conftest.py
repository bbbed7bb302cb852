"""Shared by all tests."""

import base64
import compileall
import gc
import json
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the commands do; before anything imports torch
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


@pytest.fixture(autouse=True)
def _timed_in_no_time(monkeypatch):
    """What a search measures before it starts is measured in this process, and shortly: few tests care."""
    from tests.helpers import measure_here, measured_once
    from tunediff.training import hardware

    measure_here(monkeypatch)
    monkeypatch.setattr(hardware, *measured_once())


@pytest.fixture
def no_users_code(monkeypatch):
    """No file here is the user's, whose lines errors name, although an earlier test may have loaded a workload."""
    from tunediff.config import code

    monkeypatch.setattr(code, "_roots", [])


@pytest.fixture(autouse=True)
def _outputs_fit_their_schemas(monkeypatch):
    """Whatever a command prints as JSON, in any test, is validated against the schemas that are shipped."""
    from tests import json_schemas
    from tunediff.core import progress, text

    versioned, line = text.versioned, progress.EventLines.line

    def checked(values):
        output = versioned(values)
        json_schemas.validate_any(output)
        return output

    def checked_line(self, *words, **fields):
        written = line(self, *words, **fields)
        if self.as_json:
            json_schemas.validate(json.loads(written), "progress-output")
        return written

    monkeypatch.setattr(text, "versioned", checked)
    monkeypatch.setattr(progress.EventLines, "line", checked_line)


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
    "test_sample", "test_starting", "test_style", "test_worker",
}  # fmt: skip
"""Folders and files of the tier of that name, beside what has its marker; what is left is `unit`."""
LONGEST = (
    "tuning/test_search.py", "tuning/test_finalists.py", "workloads/diffusion/test_train.py", "test_commands.py",
    "api/test_cluster.py", "users/test_mistakes.py", "tuning/test_users.py", "training/test_ranks.py", "doctor/test_doctor.py",
)  # fmt: skip
"""Files that start first: two with a Ray cluster wait beside two that compute."""


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
