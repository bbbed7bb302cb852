"""Searches tracked with a service: what is sent, once, whatever the service does."""

import json
import math
import re
import struct
import threading
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
from tunediff.integrations import background, tracking
from tunediff.integrations.tracking import Tracker
from tunediff.tuning import experiment

CURVE = (5.0, 1000, 4.0), (20.0, 4000, 2.0)
FILE = searches.FILE | {"budget": {"per_trial": "20s", "trials": 2}}


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
def sent(monkeypatch):
    """What a service was sent: (run, samples of the points, pictures, status). `sent.faults[name]`: its error."""

    class Sent(list):
        runs, faults = {}, {}

    sent = Sent()

    class Remembers:
        package = "json"

        def __init__(self, run):
            if error := sent.faults.get(run.name, sent.faults.get("*")):
                raise error
            self.name, sent.runs[run.name], self.samples = run.name, run, []

        def log(self, values, samples):
            sent.append((self.name, samples))

        def image(self, path, samples):
            sent.append((self.name, path.stem))

        def end(self, values, files):
            sent.append((self.name, values | {"files": [path.name for path in files]}))

        def close(self):
            sent.append((self.name, "closed"))

    monkeypatch.setitem(tracking.SERVICES, "mlflow", Remembers)
    return sent


def track(folder, result=None, service="mlflow"):
    """One session of the tracker, and what it says."""
    said = []
    tracker = Tracker(Activity("search", folder, "again", "frechet", {"workload": "digits"}, service))
    tracker.search_begin(said.append)
    tracker.search_end(None if result is None else lambda: result)
    return [line for line in said if "sending the rest" not in line]


def test_tracker_sends_search_trials_points_and_ends(folder, space, sent):
    assert track(folder, {"best_trial": "t0000"}) == []
    end = {"status": "ok", "reason": "", "final_frechet": 2.0, "files": []}
    search = ("night", {"status": "ok", "best_trial": "t0000", "files": []})
    assert sent == [("t0000", 1000), ("t0000", 4000), ("t0000", end), ("t0001", 1000), search, ("t0001", "closed")]
    assert sent.runs["t0001"].config["optimizer.lr"] == 1e-2
    assert (sent.runs["t0001"].kind, sent.runs["night"].kind) == ("trial", "search")


def test_tracker_of_a_resumed_search_continues_its_runs_and_sends_nothing_twice(folder, space, sent):
    track(folder)
    first = sent.runs["t0001"].id
    sent.clear()
    searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE, status="oom", reason="no room")
    track(folder)
    track(folder)
    assert sent == [("t0001", 4000), ("t0001", {"status": "oom", "reason": "no room", "files": []})]
    assert sent.runs["t0001"].id == first


def test_tracker_begins_another_run_where_a_trial_starts_from_the_beginning(folder, space, sent):
    track(folder)
    sent.clear()
    Journal(folder / "trials" / "t0001").restarted("no checkpoint")
    track(folder)
    assert sent == [("t0001.2", "closed")]


def test_tracker_names_confirming_runs_after_their_folder(folder, space, sent):
    again = searches.make(folder / "confirm", FILE)
    searches.write(folder / "confirm", again, 0, {}, CURVE)
    track(folder)
    run = sent.runs["confirm/t0000"]
    assert (run.kind, run.id.endswith("-confirm-t0000")) == ("confirming", True)


def test_a_service_that_fails_is_named_once_and_gets_everything_later(folder, space, sent):
    sent.faults["*"] = ConnectionError("refused")
    first, last = track(folder, {"best_trial": "t0000"})
    assert "ConnectionError: refused" in first
    assert "again" in last
    sent.faults.clear()
    assert track(folder, {"best_trial": "t0000"}) == []
    assert {"t0000", "t0001", "night"} == {name for name, _ in sent}


def test_a_run_that_is_refused_does_not_block_the_others(folder, space, sent):
    sent.faults["t0000"] = ValueError("bad name")
    assert len(track(folder, {"best_trial": "t0000"})) == 2
    assert {name for name, _ in sent} == {"t0001", "night"}


def test_a_service_that_hangs_does_not_keep_the_search(folder, space, sent, monkeypatch):
    for module, limit in ((background, "SILENT_S"), (tracking, "PATIENCE_S")):
        monkeypatch.setattr(module, limit, 0.0)
    hanging = threading.Event()
    monkeypatch.setattr(tracking.SERVICES["mlflow"], "log", lambda *content: hanging.wait())
    assert len(track(folder)) == 1
    hanging.set()


def test_runs_of_a_comparison_name_their_side(folder, space, sent):
    lines = [json.loads(line) for line in (folder / "trials/t0001/journal.jsonl").read_text().splitlines()]
    lines[0] |= {"name": "t0002", "drawn": {"side": "b", "seed": 1}}
    (folder / "trials/t0002").mkdir()
    (folder / "trials/t0002/journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    track(folder)
    assert sent.runs["t0002"].config["side"] == "b"


def test_a_training_is_one_run_that_the_same_command_goes_on_with(tmp_path, sent):
    """Its folder is that of one run: there is no run of a search above it. It goes on after lack of memory as well."""
    folder = tmp_path / "train-digits"
    journal = Journal(folder)
    for (index, (train_s, samples, value)), end in zip(enumerate(CURVE, 1), ("oom", "ok"), strict=True):
        journal.start(*cfg.identity(cfg.baseline("digits")), {}, 20.0)
        Image.new("L", (8, 8)).save(folder / "samples.png")
        journal.point(point(index, train_s, samples=samples, frechet=value))
        track(folder, {})
        journal.end(record.End(end))
        track(folder, {})
    assert [what if isinstance(what, int | str) else what["status"] for _, what in sent] == [
        1000, "samples", "closed", "oom", 4000, "samples", "closed", "ok",
    ]  # fmt: skip
    assert {run.kind for run in sent.runs.values()} == {"training"}


@pytest.fixture
def wandb_is_missing(monkeypatch):
    monkeypatch.setattr(tracking.WandbRun, "package", "no_such_package")


@pytest.mark.usefixtures("wandb_is_missing", "in_this_process")
def test_train_writes_to_the_service_and_says_what_is_missing(capsys, at_tmp_path):
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


def test_track_of_a_resume_is_kept_in_the_search_file(folder, space):
    assert experiment.reopen(folder, others={"track": "tensorboard"}).track == "tensorboard"
    assert experiment.reopen(folder).track == "tensorboard"


# ------------------------------------------------------------------------------------------------------ real services
def finished(folder, space):
    """The second trial ends as well, with a picture."""
    place = searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE, status="oom")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(place / "samples.png")
    (folder / "report.html").write_text("<p>report</p>")


def test_tensorboard_files_have_curves_knobs_pictures_and_verdict(folder, space):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert track(folder, service="tensorboard") == []
    finished(folder, space)
    assert track(folder, {"best_trial": "t0001"}, "tensorboard") == []
    read = reading.EventAccumulator(str(folder / "tensorboard" / "t0001")).Reload()
    curve = read.Scalars("evaluation/frechet")
    assert [(event.step, event.value) for event in curve] == [(1000, 4.0), (4000, 2.0)]
    assert read.Images("samples")
    assert b"oom" in read.Tensors("result/text_summary")[0].tensor_proto.string_val[0]
    assert b"optimizer.lr" in read.Tensors("knobs/text_summary")[0].tensor_proto.string_val[0]
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
def test_tracker_writes_offline_runs_of_wandb(folder, space, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    finished(folder, space)
    assert track(folder, {"best_trial": "t0000", "configurations": []}, "wandb") == []
    wandb.teardown()  # its process writes the files
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


@pytest.fixture
def mlflow(tmp_path, monkeypatch, at_tmp_path):
    """The package, with an empty store in a database."""
    pytest.importorskip("alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return pytest.importorskip("mlflow")


@pytest.mark.nightly
def test_mlflow_store_has_runs_and_equal_points_once_also_by_names_that_it_does_not_allow(folder, space, mlflow):
    assert track(folder, service="mlflow") == []
    finished(folder, space)
    searches.write(folder, space, 2, {}, CURVE, found={"recall@5": 0.5, "x" * 300: 4.0})
    assert track(folder, {"best_trial": "t0001", "best@5": 1.5}, "mlflow") == []
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tunediff")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"night", "t0000", "t0001", "t0002"}
    search_run, trial = runs["night"], runs["t0001"]
    assert trial.data.tags["search"] == "night"
    assert (trial.info.status, trial.data.tags["status"]) == ("FAILED", "oom")
    assert trial.data.params["optimizer.lr"] == "0.01"
    curve = client.get_metric_history(trial.info.run_id, "frechet")
    assert [(point.step, point.value) for point in curve] == [(1000, 4.0), (4000, 2.0)]
    assert curve[1].timestamp - curve[0].timestamp == 15_000
    assert {"recall_5", "x" * 250} <= runs["t0002"].data.metrics.keys()
    assert (search_run.data.tags["best_trial"], search_run.data.tags["best_5"]) == ("t0001", "1.5")
    assert {item.path for item in client.list_artifacts(search_run.info.run_id)} == {"report.html"}
    assert client.list_artifacts(trial.info.run_id, "images")


@pytest.mark.nightly
def test_trackio_database_has_runs_with_knobs_and_points(folder, space, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert track(folder, service="trackio") == []
    finished(folder, space)
    assert track(folder, {"best_trial": "t0001"}, "trackio") == []
    runs = {run.name: run for run in trackio.Api().runs("tunediff")}
    assert set(runs) == {"night", "night/t0000", "night/t0001"}
    assert runs["night/t0001"].config["optimizer.lr"] == 1e-2


def test_points_that_are_not_finite_are_not_sent(folder, space):
    searches.write(folder, space, 0, {}, CURVE, found={"kid": math.inf, "label": "FD"})
    point = read_trial(folder / "trials" / "t0000").points[0]
    assert tracking.numbers(point)["train_s"] == 5.0
    assert "system/step_s" in tracking.numbers(point)
    assert not {"kid", "label", "disturbed", "seconds"} & tracking.numbers(point).keys()
