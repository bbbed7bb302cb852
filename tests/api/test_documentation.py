"""The code of docs/how-to/python.md, with trials and runs that are made up."""

import re
import sys
import types
from pathlib import Path

import pytest

from tests import comparisons, searches
from tests.helpers import measure_here
from tunediff import analysis
from tunediff.api import compare_run, search_run
from tunediff.training import check

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "python.md"


@pytest.mark.timeout(600)
def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    def run_trials(folder, space, *_):
        for number in range(len(analysis.read(folder).trials), space.budget.trials):
            place = searches.write(folder, space, number, curve=((5.0, 1000, 4.0), (20.0, 4000, 2.0 / (number + 1))))
            assert place.is_relative_to(tmp_path)

    def run_pairs(told, *_):
        for side in "AB":
            (told.folder / side / "config.yaml").unlink()
        comparisons.made(comparisons.BETTER, folder=told.folder)

    measure_here(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_run, "_run", run_trials)
    monkeypatch.setattr(compare_run, "_run", run_pairs)
    monkeypatch.setattr(check, "before_search", lambda *_: {"warnings": [], "unread": []})
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    scope = {"__name__": "__main__", "In": []}
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    for number, block in enumerate(blocks):
        scope["In"].append(block)  # as IPython does
        exec(compile(block, f"{PAGE}, block {number + 1}", "exec", dont_inherit=True), scope)
    assert scope["comparison"].verdict.verdict == "better"
    assert "class Knobs" in (tmp_path / "ray_results" / "from a notebook" / "workload" / "notebook.py").read_text()
    assert scope["training"].value > 0
