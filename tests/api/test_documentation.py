"""The Python code of the README, of docs/how-to/python.md and of the notebook, with trials and runs that are made up."""

import contextlib
import json
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from tests import comparisons, searches
from tests.helpers import measure_here
from tunediff import analysis
from tunediff.api import run as running
from tunediff.ray_backend import connection
from tunediff.training.weights import save

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, check_says, at_tmp_path):
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
    for owner, name, replaced in (
        (connection, "started", contextlib.nullcontext),
        (running, "_search", run_trials),
        (running, "_compare", run_pairs),
    ):
        monkeypatch.setattr(owner, name, replaced)
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


# --------------- a search that the kernel of a notebook has started goes on in a shell, and is opened in another kernel
NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "search.ipynb"
SEARCH = (
    'search = tunediff.run_search(workload, trials=4, budget="2s", confirm=0, seed=1, name="night", progress=False)'
)
OPEN = "import json, tunediff\nsearch = tunediff.open_search('night')"


@contextlib.contextmanager
def kernel(folder):
    """A kernel in a folder, and a client of it."""
    manager = pytest.importorskip("jupyter_client").KernelManager()
    manager.start_kernel(cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=1200)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client, cell):
    """Run a cell and return what it prints."""
    printed = []

    def listen(message):
        printed.append(message["content"].get("text", "") if message["msg_type"] == "stream" else "")

    reply = client.execute_interactive(cell, timeout=1200, output_hook=listen)["content"]
    assert reply["status"] == "ok", reply
    return "".join(printed)


def define_workload(client):
    """Run the cells of the tutorial that define its workload."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells[:2]:
        run_cell(client, "".join(cell["source"]))


def events(folder, trial, kind):
    """Return the events of one kind in the journal of a trial."""
    path = folder / "ray_results" / "night" / "trials" / trial / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if f'"event": "{kind}"' in line]


@pytest.mark.nightly
@pytest.mark.parametrize("ends", ["interrupted", "killed"])
def test_search_from_a_notebook_goes_on_in_a_shell_and_is_opened_again(tmp_path, ends):
    with kernel(tmp_path) as (manager, client):
        define_workload(client)
        client.execute(SEARCH)
        while not events(tmp_path, "t0001", "point"):
            assert manager.is_alive()
            time.sleep(0.1)
        if ends == "interrupted":
            manager.interrupt_kernel()
            reply = client.get_shell_msg(timeout=1200)["content"]
            assert reply["ename"] == "KeyboardInterrupt"
            assert "--resume night" in reply["evalue"]
            assert run_cell(
                client, "import ray; print(ray.is_initialized(), tunediff.open_search('night').running)"
            ) == ("False False\n")
    with kernel(tmp_path) as (_, client):
        run_cell(client, OPEN)
        command = [sys.executable, "-m", "tunediff", "search", "--resume", "night", "--json", "--quiet"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = json.loads(done.stdout)
        assert printed["statuses"]["ok"] == 4
        assert json.loads(run_cell(client, "print(json.dumps(search.json()))")) == printed
        assert len(events(tmp_path, "t0000", "start")) == 1, "a finished trial is not trained again"
        last = [json.loads(events(tmp_path, f"t{number:04d}", "point")[-1]) for number in range(4)]
        assert json.loads(run_cell(client, "print(json.dumps(search.trials()['accuracy'].tolist()))")) == [
            point["accuracy"] for point in last
        ]
