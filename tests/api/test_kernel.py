"""A search that the kernel of a notebook has started goes on in a shell, and is opened in another kernel."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

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
