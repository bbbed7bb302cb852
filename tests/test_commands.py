"""Commands: what they refuse before anything starts, what they print, what they leave behind."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file
from tensorboard.backend.event_processing import event_accumulator

from tests import searches
from tests.helpers import measure_here, point, shipped_toy
from tests.json_schemas import validate
from tests.toy import train as toy_train
from tests.users import plain
from tunediff import Trial, analysis, export, search, search_space, train
from tunediff import config as cfg
from tunediff.api import search_setup, train_run
from tunediff.api.options import SearchOptions
from tunediff.api.train_run import TrainOptions
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.lock import exclusive_lock
from tunediff.ray_backend import connection
from tunediff.report import plan as plan_module
from tunediff.training.stop_signals import stop_signals
from tunediff.tuning import experiment, sessions

TINY = {
    "data.max_images": 256, "model.multipliers": [1], "model.attention": [], "model.channels": 8,
    "evaluation.images": 64, "evaluation.steps": 5, "evaluation.points": 2, "optimizer.warmup": 0.2,
}  # fmt: skip
FILE = {
    "workload": "digits",
    "budget": {"per_trial": "3s", "trials": 3},
    "fixed": TINY,
    "search": {"loader.batch_size": [32, 64, 128], "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
}


@pytest.fixture
def file(tmp_path, monkeypatch, at_tmp_path):
    measure_here(monkeypatch)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(FILE))
    return str(tmp_path / "space.yaml")


# ------------------------------------------------------------------------------------------------------------- search
def planned(capsys, *words):
    """The plan of a dry run, as text and as JSON."""
    assert search.main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert search.main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    validate(plan, "search-dry-run-output")
    return text, plan


def write_file(**lines):
    content = FILE | lines
    Path("space.yaml").write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))


def test_dry_run_says_what_runs_and_starts_nothing(file, capsys):
    text, plan = planned(capsys, file, "--trials", "6")
    assert (plan["trials"], plan["budget_s"], plan["baseline_runs"], plan["first"]) == (6, 3.0, 2, [{}, {"seed": 1}])
    assert plan["space"].keys() == {"loader.batch_size", "optimizer.lr"}
    assert "trials: 6 × 3s training" in text
    assert "first 0: baseline\n  first 1: seed=1\n" in text
    assert planned(capsys, file, "--trials", "5")[1]["baseline_runs"] == 1
    assert not Path("ray_results").exists()


def test_a_knob_of_the_command_line_is_not_searched(file, capsys):
    assert search.main([file, "optimizer.lr=0.1", "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "optimizer.lr is fixed at 0.1 by the command line" in err
    assert json.loads(out)["space"].keys() == {"loader.batch_size"}


def test_dry_run_says_what_judging_costs(file, capsys, monkeypatch, probe_says):
    write_file(confirm={"of": 2, "seeds": 3, "final": {"evaluation.images": 640, "evaluation.steps": 50}})
    measure_here(monkeypatch, seconds=29.0)
    _, plan = planned(capsys, file, "--trials", "100")
    assert (plan["evaluation_s"], plan["evaluations_per_run"], plan["seconds"]["evaluation"]) == (29, 2, 5800)
    assert plan["final_evaluation_s_per_confirming_run"] == 29
    assert plan["confirming_runs"] == 9
    probe_says({})
    assert planned(capsys, file)[1]["wall_clock_lacks"] == ["evaluation"]
    Path("own.yaml").write_text(
        "command: true {lr} {seed}\nobjective: {name: loss}\nbaseline: {lr: 1.0}\noutcome: final\n"
        "search: {lr: [1.0, 2.0]}\nbudget: {per_trial: 1s, trials: 2}\n"
    )
    assert planned(capsys, "own.yaml", "--no-check")[1]["wall_clock_lacks"] == ["training"]


def test_what_is_likely_a_mistake_needs_force(file, capsys, monkeypatch):
    for words in (["--trials", "10000000"], ["--budget", "1000000000h"]):
        assert search.main([file, *words]) == search.main([file, *words, "--dry-run"]) == 2
        assert not Path("ray_results").exists(), "not started"
        refusal = capsys.readouterr().err.splitlines()[-1]
        _, plan = planned(capsys, file, *words, "--force")
        assert plan["refused"] in refusal
    _, plan = planned(capsys, file, "--trials", "10000000", "--total", "1h")
    assert plan["trials_within_limit"] < 10_000, "as many as there is time for"
    monkeypatch.setattr(plan_module.shutil, "disk_usage", lambda _: mock.Mock(free=1000))
    assert search.main([file, "--dry-run"]) == 2


# ------------------------------------------------------------------------------------ a cluster that does not start
LATE = "The current node timed out during startup."


@pytest.fixture
def ray_comes_too_late(monkeypatch):
    def init(**options):
        raise Exception(LATE)

    monkeypatch.setattr("ray.init", init)


@pytest.mark.usefixtures("ray_comes_too_late")
def test_a_cluster_that_does_not_start_leaves_the_name_free(file, capsys):
    assert search.main([file, "--name", "night", "--quiet"]) == 1
    assert f"error: Ray did not start: {LATE}" in capsys.readouterr().err
    assert list(Path("ray_results").iterdir()) == []


# ----------------------------------------------------------------------------------------------------- results, export
def finished(folder, loaded):
    """A search folder as a search leaves it: the baseline, a better, a failed and an unfinished trial."""
    experiment.create(folder, loaded, FILE)
    curves = [[9.0, 6.0], [6.0, 3.0], [], [5.0]]
    drawn = [loaded.candidates[0]] + [{"loader.batch_size": size, "optimizer.lr": 1e-3} for size in (64, 32, 64)]
    drawn[3]["optimizer.lr"] = 2e-3
    for number, (values, knobs) in enumerate(zip(curves, drawn, strict=True)):
        config = loaded.config(knobs)
        journal = Journal(folder / "trials" / f"t{number:04d}")
        journal.start(*cfg.identity(config), knobs, 20.0, number)
        for index, value in enumerate(values, 1):
            seconds = {"train": 10.0 * index, "evaluation": 1.0 * index}
            journal.point(
                point(index, 10.0 * index, frechet=value, samples=1000 * index, samples_per_s=100.0,
                      label="FD (classifier)", seconds=seconds)
            )  # fmt: skip
        if number == 2:
            journal.end(record.End("oom", "out of memory"))
        elif number < 2:
            journal.end(record.End("ok", seconds={"train": 20.0, "evaluation": 2.0}))
            (journal.path.parent / "weights.safetensors").write_bytes(b"weights of %d" % number)
    return analysis.read(folder)


@pytest.fixture
def found(tmp_path):
    return finished(tmp_path / "results" / "night", search_space.parse(FILE, "space.yaml"))


def test_a_resume_that_has_nothing_to_run_starts_nothing_and_spends_nothing(tmp_path, monkeypatch, capsys):
    """Each would use up the limit, which is why nothing is run."""
    budget = {"per_trial": "20s", "trials": 8, "total": "20s"}
    wanted = searches.make(tmp_path / "night", searches.FILE | {"budget": budget})
    for number, size in enumerate((128, 64)):
        searches.write(tmp_path / "night", wanted, number, {"loader.batch_size": size})
    with sessions.recorded_session(tmp_path / "night", "search"):
        pass
    monkeypatch.setattr(connection, "workers", None)
    spent_s = sessions.all_spent_s(tmp_path / "night")
    assert search.main(["--resume", "night", "--storage", str(tmp_path)]) == 0
    assert sessions.all_spent_s(tmp_path / "night") == spent_s
    left_out = "Not begun: 6 of 8 trials: another would not end within 20s; to run them: "
    assert f"{left_out}tunediff search --resume night --total 2m00s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options", "total_s"),
    [
        (("digits",), {}, 480.0),
        (("digits",), {"trials": 4}, None),
        (("digits",), {"budget": "3s"}, None),
        (("digits",), {"trials": 4, "total": "1m"}, 60.0),
        (("own.yaml",), {"trials": 4}, 300.0),
    ],
)
def test_own_trials_lift_the_limit_that_a_shipped_file_has_and_no_other(file, caplog, words, options, total_s):
    caplog.set_level("INFO")
    Path("own.yaml").write_text(yaml.safe_dump(FILE | {"budget": FILE["budget"] | {"total": "5m"}}))
    space = search_setup.requested(SearchOptions(words=words, **options)).space
    assert space.budget.total_s == total_s
    lifted = [message for message in caplog.messages if "no limit for the whole search: the 8m of digits" in message]
    assert len(lifted) == (total_s is None)


def test_a_search_that_confirmed_nothing_confirms_when_it_is_resumed(tmp_path, capsys):
    folder = searches.night(tmp_path / "night")
    words = ["--resume", "night", "--storage", str(tmp_path), "--confirm"]
    assert search.main([*words, "1", "--dry-run"]) == 0
    assert "confirming: at most" in capsys.readouterr().out
    assert experiment.reopen(folder).finalists == 0, "a dry run leaves everything as it is"
    for finalists in (2, 0):
        search_setup.requested(SearchOptions(resume="night", storage=tmp_path, confirm=finalists))
        assert experiment.reopen(folder).finalists == finalists


def test_a_running_search_is_refused_before_its_workload_is_imported(found, capsys):
    (found.folder / "baseline.yaml").write_text("workload: workload/raises.py\n")
    with exclusive_lock(found.folder):
        assert search.main(["--resume", found.folder.name, "--storage", str(found.folder.parent)]) == 2
    assert "is running in another process" in capsys.readouterr().err


def test_export_writes_a_configuration_that_loads_and_says_where_it_is_from(found, capsys):
    assert export.main(["night", "--storage", str(found.folder.parent)]) == 0
    best = found.folder / "best.yaml"
    assert cfg.load(best) == cfg.from_dict(cfg.nest(found.leader.config), "x")
    assert best.with_suffix(".safetensors").read_bytes() == b"weights of 1"
    text = best.read_text()
    assert "# trial t0001 of search night" in text
    assert "# FD (classifier) 3 after 20.0 training seconds; baseline 6" in text
    assert f"torch {environment.describe()['versions']['torch']}" in text
    assert "train: tunediff train --config" in capsys.readouterr().out
    # It is the baseline of the next search.
    content = {key: value for key, value in FILE.items() if key not in ("workload", "fixed")}
    assert search_space.parse(content | {"workload": str(best)}, "next.yaml").baseline == cfg.load(best)


# -------------------------------------------------------------------------------------------------------------- train
@pytest.fixture
def config(tmp_path, at_tmp_path):
    (tmp_path / "best.yaml").write_text(cfg.dump(cfg.override(cfg.baseline("digits"), TINY)))
    return "best.yaml"


@pytest.mark.usefixtures("in_this_process", "poor_judge")
def test_train_writes_weights_and_images_and_does_nothing_twice(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path / "cache"))
    command = ["--config", config, "--samples", "256", "--out", "out"]
    assert train.main(command) == 0
    first = capsys.readouterr().out
    assert "FD (classifier): " in first
    assert "steps: 2" in first
    assert (tmp_path / "out" / "samples.png").read_bytes().startswith(b"\x89PNG")
    journal = (tmp_path / "out" / "journal.jsonl").read_text()
    for words in ([], ["parallel.bucket_mib=5.0"]):  # what workers share changes nothing that is learned
        assert train.main([*command, *words]) == 0
        assert first.endswith(capsys.readouterr().out), "the result again, and no training"
    assert (tmp_path / "out" / "journal.jsonl").read_text() == journal
    for words in (["optimizer.lr=0.002"], ["--budget", "9s"]):
        assert train.main([*command, *words]) == 2
        assert "; repeat it to resume, or" in capsys.readouterr().err
    # Curves for TensorBoard.
    events = event_accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/learning_rate", "evaluation/frechet", "evaluation/validation_loss"} <= tags
    assert [event.step for event in events.Scalars("evaluation/frechet")] == [128, 256]
    # The exported weights are a starting point.
    words = ["--config", config, "--samples", "128", "--initial", "out/weights.safetensors"]
    assert train.main([*words, "--out", "more"]) == 0
    assert train.main([*words, "--out", "wider", "model.channels=64"]) == 2


def test_the_devices_of_a_training_share_its_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = TrainOptions(
        config=Path("digits"), words=["parallel.workers=4"], budget=40, unit="device", storage=tmp_path, name="run"
    )
    request = train_run.prepare(options)
    assert (request.budget.seconds, request.folder) == (10.0, tmp_path / "run")


WAITS_IN_ITS_SECOND_EVALUATION = """
    if "WAITS" in os.environ and os.path.exists("out/checkpoint.pt"):
        time.sleep(3600)
"""


def test_train_resumes_after_kill_which_leaves_no_process_behind(tmp_path, capfd, at_tmp_path):
    """Template, run, fork server, resource tracker and loader processes end with the command."""
    judges = "def judge(net):\n"
    text = Path(plain.__file__).read_text().replace(judges, judges + WAITS_IN_ITS_SECOND_EVALUATION)
    Path("mine.py").write_text("import os, time\n" + text)
    words = ["--config", "mine.py", "--samples", "64", "--out", "out", "loader.workers=2"]
    command, environment = [sys.executable, "-m", "tunediff.train", *words], {**os.environ, "WAITS": "1"}
    before = psutil.pids()
    process = subprocess.Popen(command, start_new_session=True, env=environment, stdout=subprocess.DEVNULL)
    until_points(process, tmp_path / "out", 1)
    started = [other for other in psutil.process_iter() if works_in(other, tmp_path) and other.pid not in before]
    assert len(started) >= 7
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(started, timeout=1200)
    for child in left:
        child.kill()
    assert left == []
    assert train.main(words) == 0
    trial = record.read_trial(tmp_path / "out")
    assert (trial.status, trial.attempts, len(trial.points)) == ("ok", 2, 2)
    assert capfd.readouterr().out.count("samples/s") == 1  # only the second half was trained


def works_in(process, folder):
    """Whether a process runs in this folder or below."""
    with contextlib.suppress(psutil.Error):
        return Path(process.cwd()).is_relative_to(folder)
    return False


def until_points(process, folder, count):
    """Wait until the training of this process has so many points; pytest's limit ends both where that takes too long."""
    try:
        while not ((trial := record.read_trial(folder)) and len(trial.points) >= count):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise


@pytest.mark.nightly
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_open_ended_training_stops_when_asked_and_goes_on(config, tmp_path, stop):
    """The signal reaches the whole process group, as Ctrl-C in a terminal, torchrun and batch schedulers send it, and
    leaves the loader processes to their training."""
    words = [sys.executable, "-m", "tunediff.train", "--config", config, "--every", "0.5s", "--out", "out"]
    words += ["loader.workers=2"]

    def stopped_after(count):
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        until_points(process, tmp_path / "out", count)
        os.killpg(process.pid, stop)
        _, errors = process.communicate(timeout=1200)
        assert process.returncode == 130, errors
        return errors

    errors = stopped_after(3)  # one more than the two of its virtual budget
    assert "open-ended: Ctrl-C stops it" in errors
    assert "the same command again goes on" in errors
    steps = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["pace"]["steps"]
    assert steps >= record.read_trial(tmp_path / "out").points[-1]["steps"]
    stopped_after(4)
    trial = record.read_trial(tmp_path / "out")
    assert trial.status is None
    assert [point["index"] for point in trial.points] == list(range(1, len(trial.points) + 1))
    assert all(p["train_s"] >= 0.4995 * p["index"] for p in trial.points)  # half a second each, and a slow step
    assert (tmp_path / "out" / "samples" / "0003.png").exists()
    assert (tmp_path / "out" / "weights.safetensors").exists()


def test_forked_processes_of_a_training_end_when_they_are_terminated():
    """As `multiprocessing.Pool` ends its workers, for which it then waits."""
    with stop_signals() as received:
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        process = context.Process(target=lambda: (begun.set(), time.sleep(600)))
        process.start()
        begun.wait()
        process.terminate()
        process.join(600)
        process.kill()
        assert process.exitcode == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]


@pytest.fixture
def toy(in_this_process, at_tmp_path):
    """Trains the toy in a folder of its own; what it returns is the command with its words."""
    with shipped_toy():
        yield lambda *words: train.main(["--config", "toy", "--samples", "80", "--out", "out", *words])


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


@pytest.fixture
def replace(monkeypatch):
    """Replaces a method of `Trial`: the modules of a training are imported anew, ours are not."""
    return lambda name, method: monkeypatch.setattr(Trial, name, method)


def test_train_is_refused_while_another_process_trains_in_the_folder(toy, tmp_path, capsys):
    """Whose journal, without a point yet, looks like that of a training that was killed."""
    out = tmp_path / "out"
    Journal(out).start(*cfg.identity(cfg.baseline("toy")), {"samples": 80}, None)
    with exclusive_lock(out):
        assert toy() == 2
        assert f"--out: {out} is trained by another process; wait for it, or stop it" in capsys.readouterr().err
    assert len(list(record.events(out))) == 1
    assert toy() == 0


def test_a_forked_process_that_lives_on_does_not_keep_the_lock(tmp_path):
    """As the loader processes of a training that has failed, whose traceback is kept."""
    with exclusive_lock(tmp_path):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60.0,), daemon=True)
        forked.start()
    try:
        with exclusive_lock(tmp_path):
            assert forked.is_alive()
    finally:
        forked.kill()
        forked.join()


@pytest.mark.parametrize("words", [[], ["loader.batch_size=4"]])
def test_train_starts_over_after_running_out_of_memory(toy, tmp_path, replace, words):
    """Nothing was kept, so that the same folder takes a smaller batch, too."""
    before = Trial.prepare
    replace("prepare", out_of_memory)
    assert toy() == 1
    replace("prepare", before)
    assert toy(*words) == 0
    trial = record.read_trial(tmp_path / "out")
    assert (trial.status, trial.attempts, [point.samples for point in trial.points]) == ("ok", 1, [40, 80])


def test_train_refuses_a_folder_that_began_with_other_initial_weights(toy, tmp_path, capsys):
    config = cfg.baseline("toy")
    for name in ("first", "second"):
        save_file(toy_train.network(config.knobs).state_dict(), tmp_path / f"{name}.safetensors")
    assert toy("--initial", "first.safetensors") == 0
    capsys.readouterr()
    for words in (["--initial", "second.safetensors"], []):
        assert toy(*words) == 2
        assert "initial=" in capsys.readouterr().err


@pytest.mark.nightly
def test_train_runs_under_torchrun(config, tmp_path):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tunediff.train"]
    words += ["--config", config, "--samples", "1280", "--out", "two", "parallel.workers=2"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps: 10") == 1  # one rank speaks
