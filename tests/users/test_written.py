"""What a user's file writes: into the folder of the run; the check names the rest, and nothing that was there is lost."""

from pathlib import Path

import pytest

from tests.helpers import CPU
from tunediff import config as cfg
from tunediff.config.code import WorkloadError
from tunediff.core.clock import Budget
from tunediff.training.check import check
from tunediff.training.engine import Engine
from tunediff.training.judging import judged
from tunediff.training.observer import Observer
from tunediff.training.trial import run

PLAIN = (Path(__file__).parent / "plain.py").read_text()
IMPORTS = "import os, shutil\nfrom pathlib import Path\nfrom safetensors.torch import save_file\n"
AFTER = "        trial.step(loss, optimizer)\n"
WAYS = {
    "torch.save": "torch.save(net.state_dict(), 'out/model')",
    "safetensors": "save_file(net.state_dict(), 'out/model')",
    "open": "open('out/model', 'w').write('new')",
    "rename": "Path('out/new').write_text('new'); os.replace('out/new', 'out/model')",
}


@pytest.fixture
def baseline(tmp_path, monkeypatch):
    """The baseline of a file whose training ends with these lines; it runs where the file lies."""
    monkeypatch.chdir(tmp_path)

    def write(*last, first=""):
        text = PLAIN.replace(AFTER, AFTER + "".join(f"    {line}\n" for line in last))
        Path("mine.py").write_text(
            IMPORTS + text.replace("    net = nn", f"    {first}\n    net = nn" if first else "    net = nn", 1)
        )
        return cfg.baseline("mine.py")

    return write


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_check_names_what_is_written_outside_the_run_and_leaves_nothing_of_it(baseline, way):
    config = baseline("os.makedirs('out', exist_ok=True)", way)
    (warning,) = check(config, CPU)["warnings"]
    assert "writes out/" in warning
    assert "trial.folder" in warning
    assert not Path("out").exists()


def test_check_names_neither_what_lies_in_the_run_nor_a_cache_that_is_filled_once(baseline):
    config = baseline(
        *(way.replace("'out/", "trial.folder / 'out/") for way in WAYS.values() if "new" not in way),
        "if not os.path.exists('cache.pt'): torch.save(1, 'cache.pt')",
        first="(trial.folder / 'out').mkdir(exist_ok=True)",
    )
    assert check(config, CPU)["warnings"] == []
    assert Path("cache.pt").exists(), "as after a download"


@pytest.mark.parametrize("way", [*WAYS.values(), "shutil.rmtree('out')"], ids=[*WAYS, "rmtree"])
def test_check_writes_over_nothing_that_was_there(baseline, way):
    Path("out").mkdir()
    Path("out/model").write_text("trained for a day")
    with pytest.raises(WorkloadError, match=r"out.*: train\(trial\) would write over it .* trial.folder"):
        check(baseline(way), CPU)
    assert Path("out/model").read_text() == "trained for a day"


def test_evaluate_saves_nothing_after_the_loop_and_writes_over_nothing_before_it(baseline):
    config = baseline("Path('model').write_text('trained')")
    weights = run(Engine(config, Budget(samples=16), CPU, Observer(), evaluates=True)).weights
    assert Path("model").read_text() == "trained"
    Path("model").write_text("trained for a day")
    assert 0 <= judged(config, weights, CPU)["accuracy"] <= 1
    with pytest.raises(WorkloadError, match="model: train"):
        judged(baseline(first="Path('model').write_text('a log')"), weights, CPU)
    assert Path("model").read_text() == "trained for a day"


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
