"""What a user's file writes goes into the folder of the run."""

from pathlib import Path

import pytest

from tests.helpers import CPU
from tunediff import config as cfg
from tunediff.core.clock import Budget
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

PLAIN = (Path(__file__).parent / "plain.py").read_text()
AFTER = "        trial.step(loss, optimizer)\n"


@pytest.fixture
def baseline(tmp_path, monkeypatch):
    """The baseline of a file whose training ends with these lines; it runs where the file lies."""
    monkeypatch.chdir(tmp_path)

    def write(*last):
        Path("mine.py").write_text(PLAIN.replace(AFTER, AFTER + "".join(f"    {line}\n" for line in last)))
        return cfg.baseline("mine.py")

    return write


def test_each_run_has_a_folder_for_what_it_writes(baseline, tmp_path):
    config = baseline("(trial.folder / 'notes').write_text(str(trial.step_count))", "print(trial.folder)")
    for name, samples in {"a": 16, "b": 32}.items():
        run(Engine(config, Budget(samples=samples), CPU, Observer(), folder=tmp_path / name))
    notes = {path.read_text() for path in tmp_path.rglob("notes")}
    assert notes == {"1", "2"}


def test_the_folder_of_a_run_that_keeps_nothing_goes_with_it(baseline, capsys):
    run(Engine(baseline("print(trial.folder)"), Budget(samples=16), CPU, Observer()))
    folder = Path(capsys.readouterr().out.strip())
    assert folder.is_absolute()
    assert not folder.exists()
