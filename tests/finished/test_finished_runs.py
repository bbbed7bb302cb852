"""Runs that have ended elsewhere are read from their logs."""

import json

import pytest

from tunediff.config import ConfigError
from tunediff.core.target import Target
from tunediff.finished.runs import FinishedRun, RunReader

LOG = """import torch  # val_loss: not yet
step:0/20 val_loss:10.8258 train_time:0ms
step:10/20 train_loss:4.1
step:10/20 val_loss:3.5 train_time:1500ms
step:20/20 val_loss:3.2791 train_time:3010ms step_avg:150ms
"""


@pytest.fixture
def logs(tmp_path):
    for side, last in (("a", "3.2791"), ("b", "nan")):
        for seed in (1, 2):
            file = tmp_path / side / f"seed_{seed}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(LOG.replace("3.2791", last))
    return tmp_path


def test_a_folder_holds_a_log_a_run(logs):
    reader = RunReader(objective="val_loss", time=r"train_time:(\d+)ms")
    run = FinishedRun("seed_1.txt", 3.2791, 3.01, 3, 20.0)
    assert reader.read(str(logs / "a")) == [run, run._replace(name="seed_2.txt")]
    assert [one.name for one in reader.read(str(logs / "*" / "seed_1.txt"))] == [
        "a/seed_1.txt",
        "b/seed_1.txt",
    ]


def test_seconds_end_at_the_first_evaluation_that_meets_the_target(logs):
    until = Target.of("val_loss<=4", "--target")
    reader = RunReader(objective="val_loss", time=r"train_time:(\d+)ms", until=until)
    assert [run.seconds for run in reader.read(str(logs / "a"))] == [1.5, 1.5]
    missed = RunReader(objective="val_loss", time=r"train_time:(\d+)ms", until=Target("val_loss", "<", 1))
    assert missed.read(str(logs / "a"))[0].seconds is None


def test_seconds_may_stand_in_lines_of_their_own(tmp_path):
    for name in ("1.log", "2.log"):
        (tmp_path / name).write_text("elapsed 2.5 min\nloss: 0.4\nelapsed 5 min\nloss: 0.3\n")
    run = RunReader(objective="loss", time=r"elapsed ([\d.]+)").read(str(tmp_path))[0]
    assert (run.value, run.seconds, run.evaluations) == (0.3, 300.0, 2)


def test_a_table_has_a_row_a_run(tmp_path):
    (tmp_path / "runs.csv").write_text("Name,State,Runtime,val/loss\none,finished,60,0.31\ntwo,crashed,9,\n")
    reader = RunReader(objective="val/loss", time="Runtime")
    found = reader.read(str(tmp_path / "runs.csv"))
    assert found[0] == FinishedRun("one", 0.31, 60.0, 1, None)
    assert (found[1].name, found[1].value) == ("two", None)
    rows = [{"run": "x", "eval": {"loss": 0.2}, "step": 5}, {"run": "y", "eval": {"loss": 0.3}}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_key = RunReader(objective="eval.loss").read(str(tmp_path / "runs.jsonl"))
    assert [(run.name, run.value, run.length) for run in by_key] == [("x", 0.2, 5.0), ("y", 0.3, None)]


def test_a_chart_of_wandb_has_a_column_a_run(tmp_path):
    head = '"Step","warm-1 - loss","warm-1 - loss__MIN","cold-2 - loss"\n'
    (tmp_path / "chart.csv").write_text(head + '"1","0.5","0.5","0.7"\n"2","0.4","0.4",""\n')
    found = RunReader(objective="loss").read(str(tmp_path / "chart.csv"))
    assert found == [FinishedRun("warm-1", 0.4, None, 2, 2.0), FinishedRun("cold-2", 0.7, None, 1, 1.0)]


def test_a_csv_in_a_folder_is_the_curve_of_a_run(tmp_path):
    for seed in (1, 2):
        (tmp_path / f"{seed}").mkdir()
        (tmp_path / f"{seed}" / "m.csv").write_text(f"time,global_step,acc\n1,10,0.5\n2,20,0.{seed}\n")
    found = RunReader(objective="acc", time="time", reduce="max").read(str(tmp_path))
    assert [(run.name, run.value, run.seconds, run.length) for run in found] == [
        ("1/m.csv", 0.5, 2.0, 20.0),
        ("2/m.csv", 0.5, 2.0, 20.0),
    ]


def test_a_log_that_is_not_understood_is_named_with_its_first_lines(tmp_path):
    (tmp_path / "run.log").write_text("epoch 1\nloss: 0.3\n")
    with pytest.raises(ConfigError, match=r"run.log: has no value of acc.*loss[\s\S]*\| epoch 1"):
        RunReader(objective="acc").read(str(tmp_path))
    with pytest.raises(ConfigError, match="nothing: has no logs"):
        RunReader(objective="acc").read(str(tmp_path / "nothing"))


def test_a_run_without_seconds_among_others_is_named(tmp_path):
    """It would count as longer than any."""
    (tmp_path / "1.log").write_text("loss: 0.4 in 9 s\n")
    (tmp_path / "2.jsonl").write_text('{"loss": 0.4, "in": 8}\n{"loss": 0.3, "in": "n/a"}\n')
    with pytest.raises(ConfigError, match="2.jsonl: row 2 has no seconds"):
        RunReader(objective="loss", time="in").read(str(tmp_path / "2*"))
    (tmp_path / "3.log").write_text("loss: 0.4\nloss: 0.3 in 9 s\n")
    until = Target.of("loss<=0.5", "--target")
    with pytest.raises(ConfigError, match="3.log has no seconds"):
        RunReader(objective="loss", time=r"in (\d+)", until=until).read(str(tmp_path / "*.log"))
