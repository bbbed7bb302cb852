"""A real MLflow server: `uv run --with mlflow pytest -m nightly tests/integrations/test_mlflow_server.py`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests import searches
from tunediff.integrations.companion import Facts
from tunediff.integrations.mlflow_runs import MlflowRuns
from tunediff.integrations.tracking import Tracker

pytestmark = pytest.mark.nightly
CURVE = (5.0, 1000, 4.0), (20.0, 4000, 2.0)


@contextlib.contextmanager
def server(folder, port):
    words = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--port", str(port), "--workers", "1"]
    with open(folder / "server.log", "ab") as log:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *words]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert process.poll() is None, (folder / "server.log").read_text()
            time.sleep(1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_is_killed_gets_everything_once_it_is_back(tmp_path, monkeypatch):
    pytest.importorskip("flask_cors")  # of the server, which the client alone lacks
    mlflow = pytest.importorskip("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    folder, said = tmp_path / "night", []
    space = searches.make(folder, searches.FILE)
    searches.write(folder, space, 0, {}, CURVE[:1], status=None)
    tracker = Tracker(
        Facts(folder, "--track mlflow", service="mlflow", objective="frechet"), MlflowRuns(folder), said.append
    )
    with server(tmp_path, port):
        assert tracker.sync()
    searches.write(folder, space, 0, {}, CURVE)
    assert not tracker.sync(last=True)
    assert len(said) == 1
    with server(tmp_path, port):
        assert tracker.sync('{"best_trial": "t0000"}', last=True)
        client = mlflow.MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name("tunediff").experiment_id])
        assert {(run.info.run_name, run.info.status) for run in runs} == {("night", "FINISHED"), ("t0000", "FINISHED")}
        trial = next(run for run in runs if run.info.run_name == "t0000")
        assert [point.value for point in client.get_metric_history(trial.info.run_id, "frechet")] == [4.0, 2.0]
