"""The Python code of the README, of docs/how-to/python.md and of the notebook, with trials and runs that are made up."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

from tests import comparisons, searches
from tests.helpers import measure_here
from tunediff import analysis
from tunediff.api import run as running
from tunediff.training.weights import save

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch, check_says):
    """Runs the code of a page from top to bottom, and returns its variables."""

    def run_trials(folder, space, *_):
        has_rates = "optimizer.lr" in {dimension.name for dimension in space.dimensions}
        for number in range(len(analysis.read(folder).trials), space.budget.trials):
            point = {"optimizer.lr": 0.001 + 0.0001 * number} if has_rates and number else None
            curve = ((5.0, 1000, 4.0), (20.0, 4000, 2.0 / (number + 1)))
            place = searches.write(folder, space, number, point, curve)
            if network := space.workload.get_hook("network"):
                save(network(space.baseline.knobs).state_dict(), place / "weights.safetensors", {})

    def run_pairs(told, *_):
        for side in "AB":
            (told.folder / side / "config.yaml").unlink()
        comparisons.made(comparisons.BETTER, folder=told.folder)

    measure_here(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "_search", run_trials)
    monkeypatch.setattr(running, "_compare", run_pairs)
    check_says({"warnings": [], "unread": [], "value": 0.5})
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))

    def run(page):
        scope, text = {"__name__": "__main__", "In": []}, page.read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        if page.suffix == ".ipynb":
            blocks = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        for block in blocks:
            scope["In"].append(block)  # as IPython does
            exec(compile(block, f"{page}, block {len(scope['In'])}", "exec", dont_inherit=True), scope)
        return scope

    return run


@pytest.mark.nightly
def test_the_page_runs_from_top_to_bottom(run):
    scope = run(ROOT / "docs" / "how-to" / "python.md")
    assert scope["comparison"].verdict.verdict == "better"
    assert "class Knobs" in Path("ray_results/from a notebook/workload/notebook.py").read_text()
    assert scope["training"].value > 0
    assert (scope["trial"], len(scope["study"].search.trials())) == (None, 6)


def test_the_readme_runs(run, capsys):
    assert run(ROOT / "README.md")["search"].best.trial == "t0003"
    assert "optimizer.lr" in capsys.readouterr().out


def test_the_notebook_runs(run):
    search = run(ROOT / "docs" / "tutorials" / "search.ipynb")["search"]
    assert (search.name, len(search.trials())) == ("notebook", 6)
    assert "class Knobs" in Path("ray_results/notebook/workload/notebook.py").read_text()
