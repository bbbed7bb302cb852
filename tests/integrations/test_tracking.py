"""Searches tracked with a service: what is sent, once, whatever the service does."""

import dataclasses
import json
import logging
import math
import re
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import searches
from tests.helpers import point
from tunediff import cli, compare, search, train
from tunediff import config as cfg
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.listeners import Activity
from tunediff.core.trial_record import read_trial
from tunediff.integrations import companion, services, tracking
from tunediff.integrations.companion import Facts
from tunediff.integrations.tracking import Tracker
from tunediff.tuning import experiment

CURVE = (5.0, 1000, 4.0), (20.0, 4000, 2.0)
FILE = searches.FILE | {"budget": {"per_trial": "20s", "trials": 2}}


class Remembers:
    """A service that remembers what it is sent, and fails when it is told to."""

    def __init__(self):
        self.sent, self.fault, self.closed = [], None, False
        self.faulty = None
        """Name of the only run that fails; None: all fail."""

    def send(self, run, points, pictures, end):
        if self.fault is not None and self.faulty in (None, run.name):
            raise self.fault
        self.sent.append((run.name, [point.index for point in points], end and end.status))
        self.run, self.pictures, self.end = run, pictures, end

    def close(self):
        self.closed = True


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "night"


@pytest.fixture
def space(folder):
    """A search whose baseline has ended and whose second trial runs."""
    space = searches.make(folder, FILE)
    searches.write(folder, space, 0, {}, CURVE)
    searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE[:1], status=None)
    return space


@pytest.fixture
def service():
    return Remembers()


def facts(folder, service="mlflow"):
    return Facts(folder, f"--track {service}", service=service, objective="frechet", settings={"workload": "digits"})


def make(folder, service, said=None):
    return Tracker(facts(folder), service, (said if said is not None else []).append)


def test_tracker_sends_search_trials_points_and_ends(folder, space, service):
    assert make(folder, service).sync()
    assert service.sent == [("night", [], None), ("t0000", [1, 2], "ok"), ("t0001", [1], None)]
    assert service.run.config["optimizer.lr"] == 1e-2
    assert (service.run.search, service.run.kind) == ("night", "trial")
    assert service.run.id == f"{service.run.search_id}-t0001"


def test_tracker_of_a_resumed_search_continues_its_runs_and_sends_nothing_twice(folder, space, service):
    make(folder, service).sync()
    first, service.sent = service.run.id, []
    searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE, status="oom", reason="no room")
    resumed = make(folder, service)
    assert resumed.sync()
    assert resumed.sync()
    assert service.sent == [("t0001", [2], "oom")]
    assert service.run.id == first
    assert (service.end.failed, service.end.reason) == (True, "no room")
    assert resumed.sync('{"best_trial": "t0000"}', last=True)
    assert service.sent[1:] == [("night", [], "ok")]
    assert service.end.summary == {"best_trial": "t0000"}
    assert service.closed


def test_tracker_begins_another_run_where_a_trial_starts_from_the_beginning(folder, space, service):
    make(folder, service).sync()
    service.sent.clear()
    Journal(folder / "trials" / "t0001").restarted("no checkpoint")
    make(folder, service).sync()
    assert service.sent == [("t0001", [], "restarted"), ("t0001.2", [], None)]


def test_tracker_names_confirming_runs_after_their_folder(folder, space, service):
    again = searches.make(folder / "confirm", FILE)
    searches.write(folder / "confirm", again, 0, {}, CURVE)
    make(folder, service).sync()
    assert service.sent[-1] == ("confirm/t0000", [1, 2], "ok")
    assert service.run.kind == "confirming"
    assert service.run.id.endswith("-confirm-t0000")


def test_a_service_that_fails_is_named_once_and_gets_everything_later(folder, space, service):
    said = []
    service.fault = ConnectionError("refused")
    sending = make(folder, service, said)
    assert not sending.sync()
    assert not sending.sync()  # left alone for a while
    assert not sending.sync(last=True)
    assert said == ["--track mlflow: ConnectionError: refused; the search goes on, and its results are sent later"]
    service.fault = None
    assert sending.sync(last=True)
    assert len(service.sent) == 3


def test_a_run_that_is_refused_does_not_block_the_others(folder, space, service, monkeypatch):
    said, service.fault, service.faulty = [], ValueError("bad name"), "t0000"
    with monkeypatch.context() as slow:
        slow.setattr(tracking, "MAX_FAILING_S", -1.0)
        assert not make(folder, service).sync()
    assert [name for name, *_ in service.sent] == ["night"]
    assert not make(folder, service, said).sync('{"best_trial": "t0000"}', last=True)
    assert [name for name, *_ in service.sent] == ["night", "t0001", "night"]
    assert service.closed
    assert len(said) == 1


def test_runs_of_a_comparison_name_their_side(folder, space, service):
    lines = [json.loads(line) for line in (folder / "trials/t0001/journal.jsonl").read_text().splitlines()]
    lines[0] |= {"name": "t0002", "drawn": {"side": "b", "seed": 1}}
    (folder / "trials/t0002").mkdir()
    (folder / "trials/t0002/journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make(folder, service).sync()
    assert (service.run.name, service.run.config["side"]) == ("t0002", "b")


def test_a_torn_line_of_what_was_sent_is_passed_over(folder, space, service):
    make(folder, service).sync()
    with open(folder / tracking.SENT, "a") as file:
        file.write('{"service": "mlf')
    service.sent.clear()
    assert make(folder, service).sync()
    assert service.sent == []


def test_a_training_is_one_run_that_the_same_command_goes_on_with(tmp_path, service):
    """Its folder is that of one run: there is no run of a search above it."""
    folder = tmp_path / "train-digits"
    journal = Journal(folder)
    journal.start(cfg.baseline("digits"), {}, 20.0)
    Image.new("L", (8, 8)).save(folder / "samples.png")
    for index, (train_s, samples, value) in enumerate(CURVE, 1):
        journal.point(point(index, train_s, samples=samples, frechet=value))
        assert make(folder, service).sync()
    assert service.sent == [("train-digits", [1], None), ("train-digits", [2], None)]
    assert (service.run.kind, list(service.pictures)) == ("training", ["samples"])
    journal.end(record.End("ok"))
    assert make(folder, service).sync(last=True)
    assert service.sent[2:] == [("train-digits", [], "ok")]
    assert service.closed


def test_a_training_that_goes_on_after_it_ran_out_of_memory_is_sent_on(tmp_path, service):
    journal = Journal(folder := tmp_path / "train-digits")
    for (index, (train_s, samples, value)), end in zip(enumerate(CURVE, 1), ("oom", "ok"), strict=True):
        journal.start(cfg.baseline("digits"), {}, 20.0)
        assert make(folder, service).sync()
        journal.point(point(index, train_s, samples=samples, frechet=value))
        assert make(folder, service).sync()
        journal.end(record.End(end))
        assert make(folder, service).sync(last=True)
    first, second = [("train-digits", [1], None), ("train-digits", [], "oom")], [("train-digits", [2], None)]
    assert service.sent == [("train-digits", [], None), *first, *second, ("train-digits", [], "ok")]


@pytest.fixture
def wandb_is_missing(monkeypatch):
    monkeypatch.setattr(services.WandbRuns, "package", "no_such_package")


@pytest.mark.usefixtures("wandb_is_missing", "in_this_process")
def test_train_writes_to_the_service_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--config", "digits", "--samples", "64", "--out", "run", "evaluation.points=1", "evaluation.images=16"]
    assert train.main([*words, "--track", "tensorboard"]) == cli.OK
    assert list(Path("run", "tensorboard", "run").glob("events.*"))
    assert train.main([*words[:-3], "other", "--track", "wandb"]) == cli.BAD_INPUT
    assert "no_such_package is not installed" in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.usefixtures("wandb_is_missing")
def test_absent_package_is_refused_with_its_extra_before_anything_starts(tmp_path, capsys):
    assert search.main(["digits", "--track", "wandb", "--storage", str(tmp_path)]) == cli.BAD_INPUT
    assert re.search(r"no_such_package is not installed; run: pip install '.*\[wandb\]'", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
    assert compare.main(["digits", "digits", "seed=1", "--track", "wandb", "--storage", str(tmp_path)]) == cli.BAD_INPUT
    assert "no_such_package is not installed" in capsys.readouterr().err


def test_unknown_service_is_refused(tmp_path, capsys):
    assert search.main(["digits", "--track", "comet", "--storage", str(tmp_path)]) == cli.BAD_INPUT
    assert "--track: 'comet' is not allowed; allowed: 'wandb', 'mlflow'" in capsys.readouterr().err


def test_track_of_a_resume_is_kept_in_the_search_file(folder, space):
    assert experiment.reopen(folder, others={"track": "tensorboard"}).track == "tensorboard"
    assert experiment.reopen(folder).track == "tensorboard"


# ------------------------------------------------------------------------------------------------------ real services
def finished(folder, space):
    """The second trial ends as well, with a picture."""
    place = searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE, status="oom")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(place / "samples.png")
    (folder / "report.html").write_text("<p>report</p>")


def send_all(folder, name, verdict):
    sending = Tracker(facts(folder, name), services.SERVICES[name](folder), print)
    assert sending.sync()
    return sending.sync(json.dumps(verdict), last=True)


def test_tensorboard_files_have_curves_knobs_pictures_and_verdict(folder, space):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert send_all(folder, "tensorboard", {"best_trial": "t0000"})
    finished(folder, space)
    assert send_all(folder, "tensorboard", {"best_trial": "t0001"})
    read = reading.EventAccumulator(str(folder / "tensorboard" / "t0001")).Reload()
    curve = read.Scalars("evaluation/frechet")
    assert [(event.step, event.value) for event in curve] == [(1000, 4.0), (4000, 2.0)]
    assert curve[1].wall_time - curve[0].wall_time == pytest.approx(15.0)
    assert read.Images("samples")
    assert b"oom" in read.Tensors("result/text_summary")[0].tensor_proto.string_val[0]
    plugin = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.lr" in plugin
    verdict = reading.EventAccumulator(str(folder / "tensorboard" / "night")).Reload().Tensors("result/text_summary")
    assert b"t0001" in verdict[-1].tensor_proto.string_val[0]


def wandb_records(path):
    """The records of a file of W&B's offline mode, a log in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.nightly
def test_tracking_process_writes_offline_runs_of_wandb(folder, space, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = []
    finished(folder, space)
    (tracked,) = tracking.listeners(Activity("search", folder, "again", "frechet", {}, "wandb"))
    tracked.search_begin(said.append)
    tracked.search_end(lambda: {"best_trial": "t0000", "configurations": []})
    assert not [line for line in said if "Ctrl-C" not in line]
    runs = {}
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        records = list(wandb_records(path))
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        runs[run.display_name] = run, records
    assert set(runs) == {"night", "t0000", "t0001"}
    run, records = runs["t0001"]
    assert (run.run_group, run.job_type, run.project) == ("night", "trial", "tunediff")
    assert {item.key: item.value_json for item in run.config.update}["optimizer.lr"] == "0.01"
    rows = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(float(row["train_s"]), float(row["frechet"])) for row in rows] == [(5.0, 4.0), (20.0, 2.0)]
    assert "samples" in rows[-1] or "samples._type" in rows[-1]
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1]
    verdict = [record.summary for record in runs["night"][1] if record.WhichOneof("record_type") == "summary"]
    values = {".".join(item.nested_key) or item.key: item.value_json for part in verdict for item in part.update}
    assert values["best_trial"] == '"t0000"'
    assert values["report._type"] == '"html-file"'


@pytest.mark.nightly
def test_a_server_that_never_answers_is_named_once_and_left(folder, space, monkeypatch, caplog):
    pytest.importorskip("wandb")
    said = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setattr(companion, "SILENT_S", 0.0)
        search = dataclasses.replace(facts(folder, "wandb"), late_s=0.1, patience_s=2.0)
        tracked = companion.Companion(tracking.__name__, search, folder / "log", "not everything was sent")
        tracked.search_begin(said.append)
        silent.accept()  # it has tried
        with caplog.at_level(logging.WARNING, "tunediff"):
            tracked.search_end(None)
    assert [line for line in said if "Ctrl-C" not in line] == [
        "--track wandb: no answer for 0 s; the search goes on, and its results are sent later"
    ]
    assert "--track wandb: sending the rest; Ctrl-C leaves it for later" in said
    assert "not everything was sent" in caplog.text


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """The package, with an empty store in a database."""
    pytest.importorskip("alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    return pytest.importorskip("mlflow")


@pytest.mark.nightly
def test_mlflow_store_has_nested_runs_and_equal_points_once(folder, space, mlflow):
    assert send_all(folder, "mlflow", {"best_trial": "t0000"})
    finished(folder, space)
    assert send_all(folder, "mlflow", {"best_trial": "t0001", "speedup": 1.5})
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tunediff")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"night", "t0000", "t0001"}
    search_run, trial = runs["night"], runs["t0001"]
    assert trial.data.tags["mlflow.parentRunId"] == search_run.info.run_id
    assert (trial.info.status, trial.data.tags["status"]) == ("FAILED", "oom")
    assert trial.data.params["optimizer.lr"] == "0.01"
    curve = client.get_metric_history(trial.info.run_id, "frechet")
    assert [(point.step, point.value) for point in curve] == [(1000, 4.0), (4000, 2.0)]
    assert curve[1].timestamp - curve[0].timestamp == 15_000
    assert (search_run.data.tags["best_trial"], search_run.data.metrics["speedup"]) == ("t0001", 1.5)
    assert {item.path for item in client.list_artifacts(search_run.info.run_id)} == {"report.html"}
    assert client.list_artifacts(trial.info.run_id, "images")


@pytest.mark.nightly
def test_mlflow_has_the_knobs_of_a_run_that_was_interrupted_after_its_creation(folder, space, mlflow, monkeypatch):
    """Creating a run and sending its knobs are two requests, and the second one fails once for each run."""
    from tunediff.integrations import mlflow_runs

    failed, log_batch = set(), mlflow.MlflowClient.log_batch

    def failing(client, run_id, metrics=(), params=(), tags=(), **how):
        if params and run_id not in failed:
            failed.add(run_id)
            raise ConnectionError("refused")
        return log_batch(client, run_id, metrics=metrics, params=params, tags=tags, **how)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", failing)
    service, client = mlflow_runs.MlflowRuns(folder), mlflow.MlflowClient()
    for _ in range(3):
        make(folder, service).sync(last=True)
    runs = client.search_runs([client.get_experiment_by_name("tunediff").experiment_id])
    assert len(failed) == len(runs) == 3
    assert all("workload" in run.data.params for run in runs)
    changed = dataclasses.replace(facts(folder), settings={"workload": "elsewhere/mine.py", "added": 1})
    assert Tracker(changed, mlflow_runs.MlflowRuns(folder), print).sync('{"best_trial": "t0000"}', last=True)


@pytest.mark.nightly
def test_mlflow_takes_names_that_it_does_not_allow(folder, space, mlflow):
    metrics = {"recall@5": 0.5, "../loss": 1.0, "a//b": 2.0, "psnr/y": 3.0, "x" * 300: 4.0}
    place = searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE, found=metrics)
    Image.new("L", (8, 8)).save(place / "drawn: @5.png")
    assert send_all(folder, "mlflow", {"recall@5": 0.5, "best@5": "t0001"})
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tunediff")
    runs = {run.info.run_name: run.data for run in client.search_runs([experiment.experiment_id])}
    names = {"recall_5", "___loss", "a__b", "psnr/y", "x" * 250}
    assert names <= runs["t0001"].metrics.keys()
    assert runs["night"].metrics["recall_5"] == 0.5
    assert runs["night"].tags["best_5"] == "t0001"


@pytest.mark.nightly
def test_trackio_database_has_runs_with_knobs_and_points(folder, space, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert send_all(folder, "trackio", {"best_trial": "t0000"})
    finished(folder, space)
    assert send_all(folder, "trackio", {"best_trial": "t0001"})
    runs = {run.name: run for run in trackio.Api().runs("tunediff")}
    assert set(runs) == {"night", "night/t0000", "night/t0001"}
    assert runs["night/t0001"].config["optimizer.lr"] == 1e-2


def test_points_that_are_not_finite_are_not_sent(folder, space):
    searches.write(folder, space, 0, {}, CURVE, found={"kid": math.inf, "label": "FD"})
    point = read_trial(folder / "trials" / "t0000").points[0]
    assert services.numbers(point)["train_s"] == 5.0
    assert "system/step_s" in services.numbers(point)
    assert not {"kid", "label", "disturbed", "seconds"} & services.numbers(point).keys()
