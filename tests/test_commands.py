"""Commands: what they refuse before anything starts, what they print, what they leave behind."""

import argparse
import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
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

import tunediff
from tests import searches
from tests.helpers import measure_here, point, shipped_toy
from tests.toy import train as toy_train
from tunediff import analysis, cli, compare, export, profile, search, search_space, train
from tunediff import config as cfg
from tunediff.analysis import evidence
from tunediff.api import search_run, search_setup, train_run
from tunediff.api.search_setup import SearchOptions, SearchRequest
from tunediff.api.stop_signals import stop_signals
from tunediff.api.train_run import TrainOptions
from tunediff.core import environment
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.core.lock import alone
from tunediff.core.progress import EventLines
from tunediff.report import outputs, plan, summary
from tunediff.report.sections import curves
from tunediff.training import hardware, probe
from tunediff.tuning import experiment, resources, sessions

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
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(FILE))
    return str(tmp_path / "space.yaml")


def refused(capsys, command, *words):
    assert command(list(words)) == 2
    return capsys.readouterr().err


def test_the_devices_of_a_training_share_its_budget(capsys):
    args = argparse.Namespace(budget="40s", unit="device", samples=None, every=None)
    four = cfg.override(cfg.baseline("digits"), {"parallel.workers": 4})
    assert train_run._budget(args, four).seconds == 10.0
    assert "--unit: device goes with --budget" in refused(capsys, train.main, "--config", "digits", "--unit", "device")


# ------------------------------------------------------------------------------------------------------------- search
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "error: nowhere.yaml: no such search file; shipped:"),
        (["a.yaml", "b.yaml"], "error: command line: one search file at most"),
        (["loader.wrkers=2"], "error: command line: loader.wrkers: no such knob; did you mean loader.workers"),
        (["optimizer.lr=fast"], "error: command line: optimizer.lr: 'fast' is not allowed; allowed: a number"),
        (["seed=1", "seed=2"], "error: command line: seed: is given twice: seed=1, seed=2"),
        (["optimise=1"], "error: command line: optimise: no such knob; did you mean"),
        (["frechet=1"], "error: command line: frechet: no such knob; sections: "),
        (["ema.half_life=7"], "ema.half_life: 7 is not allowed; allowed: a number above 0 and at most 1"),
        (["--budget", "20"], "error: --budget: '20' is not a duration; allowed: a number with its unit"),
        (["--budget", "0s"], "error: --budget: '0s' is empty"),
        (["--total", "0"], "error: --total: '0' is not a duration"),
        (["--trials", "0"], "error: --trials: 0 is not allowed; allowed: a whole number of at least 1"),
        (["--seed", "-1"], "--seed: -1 is not allowed"),
        (["--name", "../x"], "--name: '../x' is not allowed; allowed: a plain folder name"),
        (["--name", ""], "--name: '' is not allowed"),
        (["--resume", "gone"], "gone: no such search in"),
        (
            ["--resume", "gone", "--seed", "3"],
            "--resume: takes file, knobs and budget from the folder; only --trials, --total and --track",
        ),
        (["parallel.workers=64"], "parallel.workers: 64 is not allowed on this machine; each worker needs one"),
        (["data.name=images", "data.path=nowhere"], "nowhere"),
    ],
)
def test_search_refuses(file, capsys, monkeypatch, words, message):
    monkeypatch.setattr(resources, "local", lambda: resources.Machine(2, 0))
    if not words[0].endswith(".yaml") and words[0] != "--resume":
        words = [file, *words]
    assert message in refused(capsys, search.main, *words)
    assert not os.path.exists("ray_results"), "a refused search leaves nothing behind"


def test_search_says_which_searched_knob_the_command_line_fixes(file, capsys, monkeypatch):
    assert search.main([file, "optimizer.lr=0.1", "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "optimizer.lr is fixed at 0.1 by the command line; what space.yaml says of it is not searched\n" in err
    assert "optimizer.lr" not in json.loads(out)["space"]


def test_search_needs_inception_weights_or_says_how_to_get_them(tmp_path, capsys, monkeypatch):
    from tunediff.evaluation import weights

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "URL", "http://127.0.0.1:9/none.pth")
    content = FILE | {"fixed": TINY | {"evaluation.extractor": "inception", "data.image_size": 32}}
    (tmp_path / "i.yaml").write_text(yaml.safe_dump(content))
    error = refused(capsys, search.main, "i.yaml")
    assert "evaluation.weights_path" in error
    assert "network" in error or "download" in error


@pytest.fixture
def overloaded(monkeypatch):
    """A machine on which Ray's processes come too late."""
    late = "The current node timed out during startup. This could happen because some of the raylet failed to startup."

    def init(**_):
        raise Exception(late)

    monkeypatch.setattr("ray.init", init)
    return late


def test_cluster_that_comes_too_late_is_started_once_more(monkeypatch, overloaded):
    import ray

    late, started = ray.init, []

    def init(**options):
        started.append(options)
        return late() if len(started) == 1 else "context"

    monkeypatch.setattr("ray.init", init)
    with experiment.cluster(None) as context:
        assert context == "context"
    assert len(started) == 2
    assert started[0] == started[1]


def test_search_whose_cluster_does_not_start_leaves_its_name_free(file, capsys, overloaded):
    assert search.main([file, "--name", "night", "--quiet"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: Ray did not start: {overloaded}"
    assert list(Path("ray_results").iterdir()) == []


def test_resume_whose_cluster_does_not_start_says_how_to_go_on(file, capsys, overloaded):
    wanted = search_space.load(Path(file))
    experiment.create(Path("ray_results/night").absolute(), wanted, FILE)
    assert search.main(["--resume", "night", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert f"error: Ray did not start: {overloaded}; everything measured is in" in error
    assert error.splitlines()[-1] == "resume: python -m tunediff.search --resume night"
    assert Path("ray_results/night").is_dir()


def test_comparison_whose_cluster_does_not_start_leaves_its_name_free(file, capsys, overloaded):
    words = ["digits", "loader.batch_size=32", "--budget", "3s", "--name", "ab", "--quiet"]
    assert compare.main(words) == 1
    assert "error: Ray did not start" in capsys.readouterr().err
    assert list(Path("ray_results").iterdir()) == []


def test_search_refuses_storage_that_is_a_file(file, tmp_path, capsys):
    (tmp_path / "occupied").write_text("")
    assert "--storage:" in refused(capsys, search.main, file, "--storage", "occupied", "--name", "x")


def test_gpu_only_values_are_refused_without_a_gpu():
    loaded = search_space.parse(FILE | {"search": {"compile.mode": ["none", "reduce-overhead"]}}, "x.yaml")
    with pytest.raises(
        cfg.ConfigError, match="x.yaml: compile.mode: 'reduce-overhead' needs a GPU, and there are 2 CPU"
    ):
        resources.share(loaded, resources.Machine(2, 0))
    assert resources.share(loaded, resources.Machine(8, 1)).gpu


@pytest.mark.parametrize(
    "lines", [{"fixed": {"evaluation.precision": "tf32"}}, {"final": {"evaluation.precision": "tf32"}}], ids=str
)
def test_tf32_is_refused_without_a_gpu(lines):
    loaded = search_space.parse(FILE | lines, "x.yaml")
    with pytest.raises(cfg.ConfigError, match="x.yaml: evaluation.precision: 'tf32' needs a GPU, and there are 2 CPU"):
        resources.share(loaded, resources.Machine(2, 0))
    assert resources.share(loaded, resources.Machine(8, 1)).gpu


def test_no_search_varies_the_precision_of_its_ruler():
    with pytest.raises(cfg.ConfigError, match=r"evaluation.precision"):
        search_space.parse(FILE | {"search": {"evaluation.precision": ["fp32", "bf16"]}}, "x.yaml")


def test_shares_never_fill_the_machine():
    loaded = search_space.parse(FILE | {"search": {"parallel.workers": [1, 2]}}, "x.yaml")
    share = resources.share(loaded, resources.Machine(2, 0))
    one, two = (share.place(share.machines, size) for size in (1, 2))
    assert (share.slots, one.threads, two.threads) == (1, 2, 1)
    assert one.cpus + 0.01 < 2
    assert 2 * two.cpus + 0.01 < 2
    gpus = resources.share(loaded, resources.Machine(16, 8))
    assert (gpus.slots, gpus.least, gpus.place(gpus.machines, 2).resources["GPU"]) == (8, 4, 1.0)
    assert 8 * gpus.place(gpus.machines, 1).cpus < 16


def test_dry_run_says_what_it_costs_and_starts_nothing(file, capsys):
    assert search.main([file, "--dry-run", "--trials", "5"]) == 0
    out = capsys.readouterr().out
    assert "trials: 5 × 3s training, 1 at once" in out or "trials: 5 × 3s training" in out
    assert "parameters: " in out
    assert "(fits)" in out
    assert "first 0: baseline" in out
    assert not os.path.exists("ray_results")


@pytest.mark.parametrize("gpus", [0, 4])
def test_dry_run_says_that_dp_is_slow_or_why_it_is_not_there(file, tmp_path, monkeypatch, gpus, capsys):
    content = {key: value for key, value in FILE.items() if key != "search"}
    content["grid"] = {"parallel.workers": "all", "parallel.strategy": "all"}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(resources, "local", lambda: resources.Machine(4, gpus))
    assert search.main([file, "--dry-run"]) == 0
    out = capsys.readouterr().out
    slow = "parallel.strategy=dp is the slow one, for comparison: ddp learns the same in less time"
    missing = "parallel.strategy=dp is not compared: torch.nn.DataParallel needs GPUs"
    assert (slow in out, missing in out) == (bool(gpus), not gpus)


def test_dry_run_says_how_many_device_hours_and_what_they_cost(file, tmp_path, capsys):
    """Four trials of an hour: on one or two devices at most eight of theirs; of device-hours just four."""
    grid = {"search": None, "grid": {"loader.batch_size": [64, 128], "parallel.workers": [1, 2]}}
    for unit, hours, words in (("wall", 8, "4 × 1h00m training"), ("device", 4, "4 × 1h00m device time")):
        budget = {"per_trial": "1h", "unit": unit, "price_per_device_hour": 2.5}
        content = {key: value for key, value in (FILE | grid).items() if value is not None and key != "first"}
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(content | {"budget": budget}))
        assert search.main([file, "--dry-run", "--force"]) == 0
        out = capsys.readouterr().out
        assert f"\ntrials: {words}" in out
        assert f"\ndevice_hours: at most {hours:.2f} of training, confirming runs included\n" in out
        assert f"\nprice: at most {2.5 * hours:g}\n" in out


def test_energy_that_nothing_here_measures_is_no_objective(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "POWERCAP", tmp_path)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(FILE | {"objective": ["frechet", "energy_wh"]}))
    monkeypatch.setattr(resources, "local", lambda: resources.Machine(2, 0))
    assert "space.yaml: objective: cost: 'energy_wh' cannot be measured here: " in refused(capsys, search.main, file)


def test_dry_run_refuses_a_storage_that_cannot_be_made(file, tmp_path, capsys):
    assert f"--storage: {tmp_path / 'space.yaml'}" in refused(
        capsys, search.main, file, "--dry-run", "--name", "x", "--storage", "space.yaml"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["space.yaml"], "nothing is left behind"


def test_train_takes_a_name_as_search_does(capsys, tmp_path):
    args = argparse.Namespace(name="run", out=None, storage=tmp_path, config=cfg.baseline("digits"))
    assert train_run._folder(args) == tmp_path / "run"
    both = refused(capsys, train.main, "--config", "digits", "--name", "a", "--out", "b", "--budget", "1s")
    assert "--name: names a folder in the folder of all trainings" in both
    words = ["--config", "digits", "--name", "../a", "--budget", "1s"]
    assert "--name: '../a' is not allowed" in refused(capsys, train.main, *words)


def test_a_training_of_another_budget_is_named_by_its_options():
    assert train_run._options(6.0, None) == "--budget 6s"
    assert train_run._options(None, 100) == "--samples 100"
    assert train_run._options(6.0, 100) == "--budget 6s and --samples 100"


def test_dry_run_names_the_runs_of_the_baseline(file, capsys):
    assert search.main([file, "--dry-run", "--trials", "6"]) == 0
    out = capsys.readouterr().out
    assert ", 2 of them the baseline, for the noise" in out
    assert "first 0: baseline\n  first 1: seed=1\n" in out
    assert search.main([file, "--dry-run", "--trials", "5"]) == 0
    out = capsys.readouterr().out
    assert "seed=" not in out
    assert "of them the baseline" not in out


def test_dry_run_says_what_judging_costs(file, tmp_path, capsys, monkeypatch):
    final = {"evaluation.images": 640, "evaluation.steps": 50}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(FILE | {"confirm": {"of": 2, "seeds": 3, "final": final}}))
    measure_here(monkeypatch, seconds=29.0)
    assert search.main([file, "--dry-run", "--trials", "100"]) == 0
    out = capsys.readouterr().out
    assert "\nevaluation: 1h36m (2 × 29s per trial, as timed on this machine)\n" in out
    assert re.search("\nconfirmation: up to about .*, 29s per run for its final evaluation\n", out)
    assert re.search("\nwall-clock: about .h..m\n", out)
    assert "\n  evaluation.points=1: 29s instead of 58s per trial\n" in out
    each = FILE["budget"]["per_trial"]
    assert f"\nconfirming: at most 9 × {each} training; it ends when it is decided\n" in out


def test_dry_run_says_that_evaluation_was_not_timed(file, capsys, monkeypatch):
    monkeypatch.setattr(probe, "before_search", lambda *_: {})
    assert search.main([file, "--dry-run"]) == 0
    assert "\nevaluation: unknown (not timed)\n" in (out := capsys.readouterr().out)
    assert re.search("\nwall-clock: .* and evaluation\n", out)


def test_nobody_is_told_that_the_evaluation_of_a_users_file_is_timed(file, tmp_path, monkeypatch):
    timed, lines = [], []
    monkeypatch.setattr(probe, "before_search", lambda config, evaluates, *_: timed.append(evaluates) or {})
    plain = {"workload": str(Path(__file__).parent / "users/plain.py"), "search": {"width": [4, 8]}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**FILE, "fixed": {}, **plain}))
    for path in (file, tmp_path / "own.yaml"):
        search_setup.measure(search_space.load(Path(path)), lines.append)
    assert timed == [True, False]
    assert lines == ["looking at the data and timing one evaluation", "looking at the data"]


def test_what_nobody_can_mean_is_refused_unless_insisted_on(file, capsys, monkeypatch):
    monkeypatch.setattr(search_setup, "create", lambda *_: pytest.fail("started"))
    for words, why in (
        (["--trials", "10000000"], "10,000,000 trials: over 100,000; change --trials or give a limit, --total"),
        (
            ["--budget", "1000000000h"],
            "days of wall-clock: over 30; change --trials, --budget or evaluation.*, or give",
        ),
    ):
        assert search.main([file, *words]) == 2
        assert re.fullmatch(f"error: command line: .*{re.escape(why)}.*; --force starts it all the same\n",
                            capsys.readouterr().err)  # fmt: skip
        assert search.main([file, *words, "--dry-run"]) == 2
        told = capsys.readouterr()
        assert "\nwall-clock: about " in told.out
        assert why in told.err
        assert search.main([file, *words, "--dry-run", "--force"]) == 0
        capsys.readouterr()
    assert search.main([file, "--trials", "10000000", "--total", "1h", "--dry-run"]) == 0, (
        "as many as there is time for"
    )
    assert "; the limit of 1h00m has room for about " in capsys.readouterr().out
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: mock.Mock(free=1000))
    assert search.main([file, "--dry-run"]) == 2
    assert "MiB of weights on a disk with 0 MiB free; change --trials or --storage" in capsys.readouterr().err


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
        journal.start(config, knobs, 20.0, number)
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


def test_a_figure_that_cannot_be_drawn_takes_nothing_else_along(found, monkeypatch):
    monkeypatch.setattr(curves, "of_trials", mock.Mock(side_effect=ValueError("no such font")))
    outputs.write_all(found)
    assert (found.folder / "trials.csv").is_file()
    assert not (found.folder / "curves.png").exists()


def test_results(found):
    assert (found.leader.name, found.baseline.name, found.label) == ("t0001", "t0000", "FD (classifier)")
    assert [outcome.trial.name for outcome in found.ranked] == ["t0001", "t0000"]
    assert found.versus_baseline(found.leader) == 0.5
    assert found.time_to_target_speedup(found.leader) == 2.0  # the baseline's 6.0 is reached after 10 of 20 seconds
    assert found.seconds()["train"] == 50.0
    table = found.table().set_index("trial")
    assert list(table["status"]) == ["ok", "ok", "oom", "running"]
    assert table.loc["t0001", "loader.batch_size"] == 64
    assert len(found.curves()) == 5


def test_summary_is_key_value(found):
    block = summary.values(evidence.read(found), 100.0)
    assert block["best_value"] == 3.0
    assert block["baseline_value"] == 6.0
    assert block["speedup_unknown"] == "one run each, and their noise is not known"
    assert (block["training_s"], block["evaluation_s"], block["overhead_s"]) == (50.0, 5.0, 45.0)
    assert [block["statuses"][name] for name in ("ok", "oom", "unfinished")] == [2, 1, 1]
    assert block["best_configuration"]["loader.batch_size"] == 64
    printed = "\n".join(summary.lines(evidence.read(found)))
    assert "\ntrials: 4\nok: 2\noom: 1\nunfinished: 1\nmetric: FD (classifier)\n" in printed
    assert "\nbest_value: 3\nbaseline_value: 6\nspeedup_unknown: one run each, " in printed
    assert not re.search("None|null|unmoved_trials|within_noise_of_best", printed)


def test_summary_says_what_was_disturbed_what_did_not_move_and_why_nothing_is_confirmed(tmp_path, capsys):
    folder = tmp_path / "night"
    wanted = searches.make(folder, searches.FILE | {"confirm": {"of": 1, "seeds": 4}})
    curve = ((5.0, 1000, 12.5), (20.0, 4000, 12.5))
    searches.write(folder, wanted, 0, curve=curve, found={"disturbed": True})
    searches.write(folder, wanted, 1, {"loader.batch_size": 64}, curve=curve[:1], status="pruned")
    found = analysis.read(folder)
    assert list(found.table()["disturbed"]) == [True, False]
    block = summary.values(evidence.read(found), 100.0)
    assert (block["nothing_to_confirm"], block["disturbed_trials"], block["unmoved_trials"]) == (
        "only the baseline finished", 1, 1,
    )  # fmt: skip
    said = "\n".join(summary.lines(evidence.read(found)))
    assert "During 1 of 2 trials (the baseline among them) others used the machine: their speed" in said
    assert "The objective did not move in any trial with a result: from the first evaluation to the last" in said
    searches.write(folder, wanted, 1, {"loader.batch_size": 64}, curve=((5.0, 1000, 12.5), (20.0, 4000, 3.0)))
    searches.write(folder, wanted, 0)
    said = "\n".join(summary.lines(evidence.read(analysis.read(folder))))
    assert not re.search("nothing_to_confirm|disturbed_trials|unmoved_trials", said)


@pytest.mark.parametrize(("status", "said"), [("pruned", True), ("ok", False)])
def test_search_says_at_its_end_that_there_is_nothing_to_confirm(tmp_path, monkeypatch, capsys, status, said):
    folder = tmp_path / "night"
    wanted = searches.make(folder, searches.FILE | {"confirm": {"of": 1, "seeds": 4}})

    def run_trials(*_):
        searches.write(folder, wanted, 0)
        searches.write(folder, wanted, 1, {"loader.batch_size": 64}, curve=((5.0, 1000, 9.0),), status=status)

    workers = contextlib.nullcontext(mock.Mock())
    monkeypatch.setattr(experiment, "workers", lambda *_: workers)
    monkeypatch.setattr(experiment, "search", run_trials)
    monkeypatch.setattr(search_run, "_run_again", lambda *_: None)
    search_run.run(SearchRequest(folder, wanted), SearchOptions(), EventLines())
    assert ("] nothing to confirm: only the baseline finished\n" in capsys.readouterr().out) == said


def test_figures_and_tables_are_written(found):
    written = outputs.write_all(found)
    assert written["curves.png"].read_bytes().startswith(b"\x89PNG")
    assert written["trials.csv"].read_text().count("\n") == 5
    assert written["curves.csv"].read_text().splitlines()[0].startswith("trial,")


def test_a_search_without_a_trial_has_results(tmp_path):
    loaded = search_space.parse(FILE, "space.yaml")
    experiment.create(tmp_path / "empty", loaded, FILE)
    nothing = analysis.read(tmp_path / "empty")
    assert (nothing.leader, nothing.baseline) == (None, None)
    outputs.write_all(nothing)
    assert summary.values(evidence.read(nothing), 0.0)["trials"] == 0


def test_the_folder_keeps_the_space(found):
    again = search_space.load(found.folder / "search.yaml")
    original = search_space.parse(FILE, "space.yaml")
    assert again.baseline == original.baseline
    assert (again.dimensions, again.candidates) == (original.dimensions, original.candidates)
    assert again.budget == original.budget


def test_limits_of_a_search_can_be_raised_and_long_ones_are_kept(found):
    raised = experiment.reopen(found.folder, {"trials": 9, "total": "300h"})
    again = search_space.load(found.folder / "search.yaml")
    assert (
        (again.budget.trials, again.budget.total_s) == (raised.budget.trials, raised.budget.total_s) == (9, 1_080_000)
    )
    experiment.create(found.folder.parent / "long", again, FILE)
    assert search_space.load(found.folder.parent / "long" / "search.yaml").budget == again.budget


def test_a_running_search_is_locked(found):
    refusal = pytest.raises(cfg.ConfigError, match="is running in another process")
    with alone(found.folder), refusal, alone(found.folder):
        pass


def test_a_running_search_is_refused_before_its_workload_is_imported(found, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "reopen", lambda *_, **__: pytest.fail("imported"))
    with alone(found.folder):
        error = refused(capsys, search.main, "--resume", found.folder.name, "--storage", str(found.folder.parent))
    assert "is running in another process; wait for it, or stop it" in error


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_file_system_without_locks_is_a_warning_not_another_process(found, monkeypatch, caplog, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    with alone(found.folder):
        pass
    storage = found.folder.parent
    assert f"--storage: no file can be locked in {storage} ({os.strerror(code)})" in caplog.text


def test_wall_clock_of_killed_sessions_is_kept(tmp_path):
    lines = [("begin", 100), ("end", 160), ("begin", 1000)]  # the second was killed; its last sign of life is a point
    text = "".join(json.dumps({"event": event, "time": time_s}) + "\n" for event, time_s in lines)
    (tmp_path / "sessions.jsonl").write_text(text)
    trial = tmp_path / "trials" / "t0000"
    trial.mkdir(parents=True)
    (trial / "journal.jsonl").write_text('{"event": "point", "time": 1030, "index": 1}\n')
    assert sessions.spent_s(tmp_path) == 90


def test_export_writes_a_configuration_that_loads_and_says_where_it_is_from(found, capsys):
    assert export.main(["night", "--storage", str(found.folder.parent)]) == 0
    best = found.folder / "best.yaml"
    assert cfg.load(best) == cfg.from_dict(cfg.nest(found.leader.config), "x")
    assert best.with_suffix(".safetensors").read_bytes() == b"weights of 1"
    text = best.read_text()
    assert "# trial t0001 of search night" in text
    assert "# FD (classifier) 3 after 20.0 training seconds; baseline 6" in text
    assert f"torch {environment.describe()['versions']['torch']}" in text
    assert "train: python -m tunediff.train --config" in capsys.readouterr().out
    # It is a base for the next search.
    content = {key: value for key, value in FILE.items() if key not in ("workload", "fixed")}
    assert search_space.parse(content | {"base": str(best)}, "next.yaml").baseline == cfg.load(best)


def test_export_of_one_trial_and_refusals(found, capsys):
    storage = ["--storage", str(found.folder.parent)]
    assert export.main(["night", "--trial", "t0000", "--out", str(found.folder / "base.yaml"), *storage]) == 0
    assert cfg.load(found.folder / "base.yaml") == found.space.baseline
    capsys.readouterr()
    assert "there are: night" in refused(capsys, export.main, "day", *storage)
    assert "'t0009' is not in night; there are: t0000" in refused(
        capsys, export.main, "night", "--trial", "t0009", *storage
    )
    assert "ends in .yaml" in refused(capsys, export.main, "night", "--out", "x.txt", *storage)


def test_export_for_a_script_says_absolute_paths_and_the_storage(found, capsys, monkeypatch):
    monkeypatch.chdir(found.folder.parent.parent)
    storage = found.folder.parent
    assert export.main(["night", "--storage", str(storage), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["configuration"] == str(found.folder / "best.yaml")
    assert told["weights"] == str(found.folder / "best.safetensors")
    assert f"--config {found.folder / 'best.yaml'}" in told["train"]
    other = shutil.copytree(storage, storage.parent / "elsewhere")
    assert export.main(["night", "--storage", str(other)]) == 0
    assert "--storage elsewhere\n" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------------- train
@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best.yaml").write_text(cfg.dump(cfg.override(cfg.baseline("digits"), TINY)))
    return "best.yaml"


def test_train_writes_weights_and_images_and_does_nothing_twice(config, tmp_path, capsys):
    command = ["--config", config, "--samples", "3840", "--out", "out"]
    assert train.main(command) == 0
    first = capsys.readouterr().out
    assert "FD (classifier): " in first
    assert "steps: 30" in first
    assert (tmp_path / "out" / "samples.png").read_bytes().startswith(b"\x89PNG")
    journal = (tmp_path / "out" / "journal.jsonl").read_text()
    assert train.main(command) == 0
    assert (tmp_path / "out" / "journal.jsonl").read_text() == journal
    assert first.endswith(capsys.readouterr().out)  # the result again, and no training
    assert train.main([*command, "parallel.bucket_mib=5.0"]) == 0  # what workers share changes nothing that is learned
    assert first.endswith(capsys.readouterr().out)
    error = refused(capsys, train.main, *command, "optimizer.lr=0.002")
    assert "holds a training of another configuration (optimizer.lr=0.002)" in error
    assert "holds a training with --samples 3840; repeat it" in refused(
        capsys, train.main, "--config", config, "--budget", "9s", "--out", "out"
    )
    # Curves for TensorBoard.
    events = event_accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/learning_rate", "evaluation/frechet", "evaluation/validation_loss"} <= tags
    assert [event.step for event in events.Scalars("evaluation/frechet")] == [1920, 3840]
    # The exported weights are a starting point.
    words = ["--config", config, "--samples", "128", "--out", "more"]
    assert train.main([*words, "--initial", "out/weights.safetensors"]) == 0
    wider = [*words[:-1], "wider", "--initial", "out/weights.safetensors", "model.channels=64"]
    assert "has shape" in refused(capsys, train.main, *wider)


WAITS_AFTER_A_POINT = """
import sys, time
from tunediff import train
from tunediff.training.console import ConsoleRecorder
point = ConsoleRecorder.point
ConsoleRecorder.point = lambda self, found: point(self, found) and time.sleep(3600)
sys.exit(train.main(sys.argv[1:]))
"""
"""The command `train`, which waits after its first evaluation until it is killed."""


def test_train_resumes_after_kill_which_leaves_no_process_behind(config, tmp_path, capsys):
    """Fork server, resource tracker and loader processes end with the training."""
    words = ["--config", config, "--budget", "1s", "--out", "out", "loader.workers=2"]
    process = subprocess.Popen([sys.executable, "-c", WAITS_AFTER_A_POINT, *words], start_new_session=True)
    until_points(process, tmp_path / "out", 1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 4
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(started, timeout=1200)
    for child in left:
        child.kill()
    assert left == []
    assert train.main(words) == 0
    trial = record.read_trial(tmp_path / "out")
    assert (trial.status, trial.attempts, len(trial.points)) == ("ok", 2, 2)
    assert capsys.readouterr().out.count("images/s") == 1  # only the second half was trained
    assert 0.5 <= trial.points[0]["train_s"] < 1.0 <= trial.points[1]["train_s"]


def until_points(process, folder, count):
    """Wait until the training of this process has so many points; pytest's limit ends both where that takes too long."""
    try:
        while not ((trial := record.read_trial(folder)) and len(trial.points) >= count):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.decay=cosine"], "optimizer.decay: 'cosine' is not allowed without --budget or --samples"),
        (["--budget", "5s", "--every", "1s"], "--every: 1s goes without --budget"),
        (["--every", "5"], "--every: '5' is not a duration"),
        (["--budget", "5"], "--budget: '5' is not a duration"),
        (["--samples", "0"], "--samples: 0 is not allowed"),
        (["--budget", "5s", "lr=1"], "command line: lr: no such knob; did you mean optimizer.lr"),
        (["--budget", "5s", "--initial", "none.safetensors"], "--initial: none.safetensors: no such file"),
        (
            ["--budget", "5s", "parallel.workers=2"],
            "parallel.workers: 2 is not allowed with 1 process; start it as torchrun --nproc-per-node 2 -m tunediff.train "
            "--config {config} --budget 5s parallel.workers=2, or set parallel.workers=1\n",
        ),
    ],
)
def test_train_refuses(config, capsys, words, message):
    assert message.format(config=config) in refused(capsys, train.main, "--config", config, *words)


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


@pytest.mark.parametrize("delay_s", [0, 0.1])
def test_forked_processes_of_a_training_end_when_they_are_terminated(delay_s):
    """As `multiprocessing.Pool` ends its workers, for which it then waits."""
    with stop_signals() as received:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
        process.start()
        time.sleep(delay_s)
        process.terminate()
        process.join(60)
        process.kill()
        assert process.exitcode == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]


def test_train_takes_the_name_of_a_workload(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [f"{name}={json.dumps(value)}" for name, value in TINY.items()]
    assert train.main(["--config", "digits", "--samples", "256", *words]) == 0
    assert (tmp_path / "ray_results" / "train-digits" / "config.yaml").exists()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Trains the toy in a folder of its own; what it returns is the command with its words."""
    monkeypatch.chdir(tmp_path)
    with shipped_toy():
        yield lambda *words: train.main(["--config", "toy", "--samples", "80", "--out", "out", *words])


def out_of_memory(trial):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


def test_train_out_of_memory_is_a_status_and_one_line(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toy_train, "train", out_of_memory)
    assert toy() == 1
    error = capsys.readouterr().err
    assert "error: out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB." in error
    assert "Traceback" not in error
    end = record.read_trial(tmp_path / "out").end
    assert (end.status, end.memory["demand_mib"] > 9 * 1024) == ("oom", True)


def test_train_points_of_a_restart_replace_the_old_ones(toy, tmp_path):
    """With its checkpoint damaged, a training starts over: its journal must not mix the two."""
    assert toy() == 0
    out = tmp_path / "out"
    journal = out / "journal.jsonl"
    journal.write_text("".join(line + "\n" for line in journal.read_text().splitlines() if '"end"' not in line))
    (out / "checkpoint.pt").write_bytes(b"torn")
    assert toy() == 0
    after = record.read_trial(out).points
    assert [point.index for point in after] == [1, 2]
    lines = [line["train_s"] for line in record.events(out) if line["event"] == "point"]
    assert [point.train_s for point in after] == lines[2:]
    assert not set(lines[:2]) & set(lines[2:])


def test_train_starts_over_where_another_rank_has_removed_the_journal(tmp_path, monkeypatch):
    request = TrainOptions(Path("digits"), samples=80, out=tmp_path)
    Journal(tmp_path).start(cfg.baseline("digits"), {"samples": 80}, None)
    killed = record.read_trial(tmp_path)
    (tmp_path / record.JOURNAL).unlink()
    monkeypatch.setattr(record, "read_trial", lambda folder: killed)
    assert train_run.prepare(request).folder == tmp_path


@pytest.mark.parametrize("chosen", [False, True])
def test_train_computes_with_the_cores_of_its_quota_unless_told_otherwise(toy, monkeypatch, chosen):
    """By itself torch knows the affinity alone: 64 threads on the 3 cores of a quota."""
    before, threads, train_toy = torch.get_num_threads(), [], toy_train.train
    monkeypatch.setattr("tunediff.core.machine.cores", lambda: before + 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", str(before))
    monkeypatch.setattr(toy_train, "train", lambda trial: threads.append(torch.get_num_threads()) or train_toy(trial))
    assert toy() == 0
    assert threads == [before if chosen else before + 3]
    assert torch.get_num_threads() == before


SETS_THREADS = """
from pathlib import Path

import torch

from tests.toy.knobs import OBJECTIVE, Knobs
from tests.toy.train import train as train_toy

torch.set_num_threads(1)
BASELINE = {"loader.batch_size": 8, "loader.workers": 0, "evaluation.points": 2}


def train(trial):
    Path("threads").write_text(str(torch.get_num_threads()))
    train_toy(trial)
"""


@pytest.mark.parametrize("how", ["command", "call"])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_the_file_sets_stay_outside_a_search_as_within(tmp_path, monkeypatch, how, threads):
    """1 is also torch's own number here, as torchrun would have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tunediff.core.machine.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("mine.py").write_text(SETS_THREADS.replace("threads(1)", f"threads({threads})  # {how}"))
    if how == "command":
        assert train.main(["--config", "mine.py", "--samples", "80", "--out", "out"]) == 0
    else:
        tunediff.run_training("mine.py", samples=80, out="out")
    assert int(Path("threads").read_text()) == threads


def test_train_is_refused_while_another_process_trains_in_the_folder(toy, tmp_path, capsys):
    """Whose journal, without a point yet, looks like that of a training that was killed."""
    out = tmp_path / "out"
    Journal(out).start(cfg.baseline("toy"), {"samples": 80}, None)
    with alone(out):
        assert toy() == 2
        assert f"--out: {out} is trained by another process; wait for it, or stop it" in capsys.readouterr().err
    assert len(list(record.events(out))) == 1
    assert toy() == 0
    with alone(out):
        assert toy() == 0, "what has ended is only printed"


def test_a_forked_process_that_lives_on_does_not_keep_the_lock(tmp_path):
    """As the loader processes of a training that has failed, whose traceback is kept."""
    with alone(tmp_path):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60.0,), daemon=True)
        forked.start()
    try:
        with alone(tmp_path):
            assert forked.is_alive()
    finally:
        forked.kill()
        forked.join()


@pytest.mark.parametrize("words", [[], ["loader.batch_size=4"]])
def test_train_starts_over_after_running_out_of_memory(toy, tmp_path, monkeypatch, words):
    """Nothing was kept, so that the same folder takes a smaller batch, too."""
    with monkeypatch.context() as patch:
        patch.setattr(toy_train, "train", out_of_memory)
        assert toy() == 1
    assert toy(*words) == 0
    trial = record.read_trial(tmp_path / "out")
    assert (trial.status, trial.attempts, [point.samples for point in trial.points]) == ("ok", 1, [40, 80])


def test_train_goes_on_from_its_checkpoint_after_running_out_of_memory(toy, tmp_path, monkeypatch):
    needs_too_much = [True]

    def after_a_point(trial):
        net, optimizer = toy_train.begin(trial)
        trial.evaluate_with(lambda: toy_train.error(net))
        for step, batch in enumerate(trial.batches((toy_train.INPUTS, toy_train.TARGETS))):
            if step == 8 and needs_too_much:  # the first evaluation, after 5 steps, wrote a checkpoint
                out_of_memory(trial)
            trial.step(toy_train.loss_of(net, batch), optimizer)

    monkeypatch.setattr(toy_train, "train", after_a_point)
    assert toy() == 1
    assert (record.read_trial(tmp_path / "out").status, (tmp_path / "out" / "checkpoint.pt").exists()) == ("oom", True)
    assert toy("loader.batch_size=4") == 2, "the folder holds a training that can go on"
    needs_too_much.clear()
    assert toy() == 0
    trial = record.read_trial(tmp_path / "out")
    assert (trial.status, trial.attempts, [point.samples for point in trial.points]) == ("ok", 2, [40, 80])


def test_train_refuses_a_folder_that_began_with_other_initial_weights(toy, tmp_path, capsys):
    config = cfg.baseline("toy")
    for name in ("first", "second"):
        save_file(toy_train.network(config.knobs).state_dict(), tmp_path / f"{name}.safetensors")
    assert toy("--initial", "first.safetensors") == 0
    (tmp_path / "first.safetensors").rename(tmp_path / "moved.safetensors")
    assert toy("--initial", "moved.safetensors") == 0
    capsys.readouterr()
    assert toy("--initial", "second.safetensors") == 2
    assert "--initial: second.safetensors is not allowed: " in (error := capsys.readouterr().err)
    digest = hashlib.sha256((tmp_path / "moved.safetensors").read_bytes()).hexdigest()
    assert f"from weights of sha256 {digest}; repeat it to resume" in error
    assert toy() == 2
    assert "--initial: not given: " in capsys.readouterr().err
    # Journals of earlier versions do not say what their trainings started from.
    journal = tmp_path / "out" / "journal.jsonl"
    journal.write_text(re.sub(r', "initial": "\w+"', "", journal.read_text()))
    assert toy("--initial", "second.safetensors") == 0


@pytest.mark.parametrize("workload", ["toy", "digits"])
def test_train_names_the_option_of_initial_weights_that_are_none(toy, tmp_path, capsys, workload):
    (tmp_path / "mine.py").write_text("no weights")
    assert toy("--config", workload, "--initial", "mine.py") == 2
    error = capsys.readouterr().err
    assert "error: --initial: mine.py: is damaged or holds no plain weights" in error
    assert "; allowed: weights in a .safetensors file, or a diffusers pipeline\n" in error


def test_train_refuses_a_missing_configuration(capsys):
    assert "gone.yaml: no such file" in refused(capsys, train.main, "--config", "gone.yaml", "--budget", "5s")


@pytest.mark.nightly
def test_train_runs_under_torchrun(config, tmp_path):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tunediff.train"]
    words += ["--config", config, "--samples", "1280", "--out", "two", "parallel.workers=2"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps: 10") == 1  # one rank speaks


@pytest.mark.parametrize(("command", "option"), [(train, "--samples"), (profile, "--steps")])
def test_knobs_may_stand_on_both_sides_of_options(command, option, capsys):
    words = ["--config", "digits", "optimizer.lr=1e-3", option, "3", "loader.batch_size=x"]
    assert command.main(words) == cli.BAD_INPUT
    assert "command line: loader.batch_size: 'x' is not allowed" in capsys.readouterr().err
