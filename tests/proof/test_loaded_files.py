"""A revision runs its own files, also where an editable install or PYTHONPATH names the working copy's."""

import os
import sys
from pathlib import Path

import pytest

from tests.proof.test_verify import WORDS, commit
from tunediff import ConfigError, compare
from tunediff.api import sides

TRAIN = "import mypkg, random, sys\nprint('loss:', mypkg.FACTOR * (1 + 0.01 * random.Random(sys.argv[1]).random()))\n"
MINE = """
from dataclasses import dataclass
import mypkg
from tunediff import Metric
@dataclass(frozen=True)
class Knobs:
    width: int = 8
OBJECTIVE = Metric("mse", "min")
def train(trial): pass
"""


@pytest.fixture
def layout(tmp_path, monkeypatch, at_tmp_path):
    """A repository whose package in `src/` is twice as good since its last commit, and on PYTHONPATH."""
    package = tmp_path / "src/mypkg/__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("FACTOR = 2.0\n")
    Path("train.py").write_text(TRAIN)
    Path("mine.py").write_text(MINE)
    Path(".gitignore").write_text("ray_results\nsite\n__pycache__\n")
    commit(tmp_path)
    package.write_text("FACTOR = 1.0\n")
    commit(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{package.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def compared(command):
    return compare.main(["--run", f"{command} {{seed}}", "--at", "HEAD~1", "--at", "HEAD", *WORDS, "--name", "x"])


def test_a_package_of_the_working_copy_ends_the_comparison_by_its_name(layout, capsys):
    assert compared(f"{sys.executable} train.py") == 2
    assert "A: src/mypkg/__init__.py was loaded, which is not of the revision" in capsys.readouterr().err
    assert not any(Path("ray_results/x/trials/t0000").glob("loaded*"))
    assert "end" not in Path("ray_results/x/trials/t0000/journal.jsonl").read_text(), "--resume judges no such run"


def test_a_relative_path_runs_the_revision_beside_the_users_own_start(layout, monkeypatch):
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("import sys\nsys.flag_of_mine = 1\n")
    start = "import sitecustomize, sys\nassert sys.flag_of_mine and 'tunediff' not in sitecustomize.__file__\n"
    Path("train.py").write_text(f"{start}assert not any('tunediff/command' in path for path in sys.path)\n{TRAIN}")
    commit(layout)
    Path("src/mypkg/__init__.py").write_text("FACTOR = 0.5\n")
    commit(layout)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", str(layout / "site"), os.environ["PYTHONPATH"]]))
    assert compared(f"{sys.executable} train.py") == 0


def test_a_file_of_a_revision_is_refused_with_a_module_of_the_working_copy(layout, monkeypatch, tmp_path_factory):
    monkeypatch.syspath_prepend(layout / "src")
    with pytest.raises(ConfigError, match="src/mypkg/__init__.py was loaded, which is not of that revision"):
        sides.side_of(["mine.py@HEAD~1"], tmp_path_factory.mktemp("revision"))
    assert sides.side_of(["mine.py"], tmp_path_factory.mktemp("unused")).schema.workload.endswith("mine.py")
