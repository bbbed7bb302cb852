"""Journals survive torn lines and restarts; derived values are what they say."""

import dataclasses
import os
from pathlib import Path

import pytest

import tunediff
from tests.helpers import point, shipped_toy, toy
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.core import environment, trial_record
from tunediff.core.journal import Journal, to_json
from tunediff.core.machine import cards
from tunediff.core.point import Point
from tunediff.core.trial_record import End, read_trial
from tunediff.report import sentences

START = {"name": "t0003", "number": 3, "config": {"seed": 0}, "drawn": {}, "fingerprint": "abc", "budget_s": 20.0,
         "role": "draw"}  # fmt: skip


def test_round_trip(tmp_path):
    journal = Journal(tmp_path / "t0003")
    journal.write("start", **START)
    assert journal.point(point(1, 5.0, error=9.0))
    unfinished = read_trial(tmp_path / "t0003")
    assert (unfinished.finished, unfinished.status, unfinished.value("error")) == (False, None, None)
    journal.point(point(2, 10.0, error=4.0))
    end = End("ok", seconds={"train": 9.0}, steps=7, peak={"peak_memory_mib": 8.0})
    journal.end(end)
    found = read_trial(tmp_path / "t0003")
    assert (found.name, found.status, found.value("error"), found.end) == ("t0003", "ok", 4.0, end)
    assert [p.train_s for p in found.points] == [5.0, 10.0]


def test_an_attempt_begins_with_all_that_identifies_it(tmp_path):
    config = toy(width=4, seed=5)
    for _ in range(2):
        Journal(tmp_path / "t0007").start(*cfg.identity(config), {"width": 4}, 20.0, number=7)
    found = read_trial(tmp_path / "t0007")
    assert (found.name, found.number, found.attempts, found.budget_s) == ("t0007", 7, 2, 20.0)
    assert (found.config, found.drawn, found.fingerprint) == (cfg.flat(config), {"width": 4}, cfg.fingerprint(config))
    assert found.environment == environment.describe()
    assert [event["seed"] for event in trial_record.events(tmp_path / "t0007")] == [5, 5]


def test_a_point_is_what_its_flat_form_says(tmp_path):
    whole = point(
        2, 3.0, loss=0.5, step_s=0.1, phases_s={"forward": 0.06, "own_part": 0.04}, seconds={"train": 3.0}, error=4.0,
        label="E",
    )  # fmt: skip
    assert (whole["step_own_part_s"], whole["error"], whole["loss"], whole.get("label")) == (0.04, 4.0, 0.5, "E")
    assert "flops_per_sample" not in whole, "what is not known is absent"
    assert whole.get("flops_per_sample") is None
    assert whole.get("kid", 7) == 7
    with pytest.raises(KeyError):
        whole["kid"]
    assert Point.of(whole.flat) == whole
    assert Point.of(whole.flat).step_s == 0.1, "the whole step is no part of it"
    journal = Journal(tmp_path)
    journal.write("start", **START)
    journal.point(whole)
    (read,) = read_trial(tmp_path).points
    assert read == whole
    with pytest.raises(TypeError):
        Point.of({"index": 1})


def test_a_measurement_is_written_once(tmp_path):
    """A resumed training tells its points again; only another measurement is another line."""
    journal = Journal(tmp_path)
    journal.write("start", **START)
    first = point(1, 5.0, steps=10, error=9.0)
    assert journal.point(first)
    assert not journal.point(first)
    assert not Journal(tmp_path).point(dataclasses.replace(first, train_s=6.0)), "seconds identify nothing"
    assert journal.point(dataclasses.replace(first, steps=11)), "the same place of the curve, measured anew"
    assert sum(line["event"] == "point" for line in trial_record.events(tmp_path)) == 2


def test_a_number_that_is_not_finite_is_as_if_it_was_not_measured(tmp_path):
    """No journal of ours has one; JSON readers of others write and read NaN."""
    journal = Journal(tmp_path)
    journal.write("start", **START)
    line = to_json({"event": "point", "time": 1.0, **point(1, 5.0, error=9.0).flat}).replace("9.0", "NaN")
    with open(journal.path, "a") as file:
        file.write(line + '\n{"event": "end", "time": 2.0, "status": "ok"}\n')
    found = read_trial(tmp_path)
    assert (found.value("error"), found.points[0].get("error"), "error" in found.points[0]) == (None, None, False)


def test_a_training_that_begins_anew_voids_what_was_measured(tmp_path):
    journal = Journal(tmp_path)
    journal.start(*cfg.identity(toy()), {}, 10.0)
    journal.restarted()
    assert journal.point(point(1, 2.0, error=3.0))
    journal.restarted()  # as after a damaged checkpoint: the same steps are measured again
    assert read_trial(tmp_path).points == []
    assert journal.point(point(1, 2.5, error=4.0)), "another measurement, though of the same index and steps"
    assert not journal.point(point(1, 2.5, error=4.0))
    (one,) = read_trial(tmp_path).points
    assert one.train_s == 2.5
    assert [line["event"] for line in trial_record.events(tmp_path)] == ["start", "point", "restarted", "point"]


def test_a_training_that_goes_on_after_an_end_has_not_ended(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", **START)
    journal.end(End("oom", "no room"))
    assert read_trial(tmp_path).status == "oom"
    journal.write("start", **START)
    resumed = read_trial(tmp_path)
    assert (resumed.finished, resumed.status, resumed.ended, resumed.attempts) == (False, None, 0.0, 2)


def test_a_restart_is_recorded_with_its_reason_and_a_first_start_is_none(tmp_path):
    journal = Journal(tmp_path)
    journal.start(*cfg.identity(toy()), {}, 10.0)
    assert not journal.restarted()
    assert journal.restarted("checkpoint.pt cannot be read (EOFError)"), "although no point was reached before"
    journal.point(point(1, 2.0, error=3.0))
    assert journal.restarted()
    found = read_trial(tmp_path)
    assert found.restarts == ["checkpoint.pt cannot be read (EOFError)", "no checkpoint"]
    assert sentences.of_trial(found).startswith("started from the beginning: checkpoint.pt cannot be read (EOFError); ")


def test_a_journal_says_its_format_and_one_of_a_newer_format_is_refused(tmp_path):
    Journal(tmp_path / "t0000").start(*cfg.identity(toy()), {}, 20.0)
    (start,) = trial_record.events(tmp_path / "t0000")
    assert start["format"] == cfg.FORMAT
    Journal(tmp_path / "old").write("start", **START)
    assert read_trial(tmp_path / "old").number == 3, "the first journals had no number"
    Journal(tmp_path / "new").write("start", **START, format=cfg.FORMAT + 1)
    with pytest.raises(ConfigError, match="journal.jsonl: format: 2 is not allowed; allowed: 1 to 1; a newer version"):
        read_trial(tmp_path / "new")


def test_a_point_measured_again_replaces_it_and_what_came_after(tmp_path):
    journal = Journal(tmp_path)
    for event, content in [
        ("start", START), ("point", point(1, 5.0, error=9.0).flat), ("point", point(2, 10.0, error=6.0).flat),
        ("start", START), ("point", point(1, 5.0, error=8.0).flat),
    ]:  # fmt: skip
        journal.write(event, **content)
    found = read_trial(tmp_path)
    assert found.attempts == 2
    assert [p["error"] for p in found.points] == [8.0]


def test_journal_line_is_synced_to_disk_before_write_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "tunediff.core.journal.os.fsync", lambda file: synced.append((tmp_path / trial_record.JOURNAL).read_text())
    )
    journal = Journal(tmp_path)
    journal.write("start", **START)
    journal.end(End("ok"))
    assert [len(text.splitlines()) for text in synced] == [1, 2], "the whole line is in the file when it is synced"


def test_record_is_read_by_a_file_that_was_opened(tmp_path, monkeypatch):
    """NFS caches what `stat` says of a path for seconds; to open a file asks the server again."""
    journal = Journal(tmp_path / "t0003")
    journal.write("start", **START)
    stale = journal.path.stat()
    assert not read_trial(journal.folder).finished
    journal.end(End("ok"))
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: stale if path == journal.path else stat(path, **how))
    assert read_trial(journal.folder).finished


def test_trials_come_in_order(tmp_path):
    for number in (10_000, 10, 9999, 2):
        Journal(tmp_path / "trials" / f"t{number:04d}").write("start", **(START | {"number": number}))
    assert [found.number for found in trial_record.read_trials(tmp_path)] == [2, 10, 9999, 10_000]


XEON = "Intel(R) Xeon(R) Processor"


def machine(monkeypatch, tmp_path, flags, smi=""):
    """An environment with these CPU flags, and with an nvidia-smi that says `smi`."""
    info = f"processor\t: 0\nmodel name\t: {XEON}\nflags\t\t: fpu sse2 {flags}\nbugs\t\t: spectre_v1\n"
    (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr("tunediff.core.machine.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("tunediff.core.machine.cards", cards.__wrapped__)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $# = 2 ] || exit 3\nprintf '{smi}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if smi else "/nowhere")
    return environment.describe_machine.__wrapped__()


def test_two_processors_of_one_name_differ_in_what_they_can_do(tmp_path, monkeypatch):
    old = machine(monkeypatch, tmp_path, "avx avx2 avx512f") | {"device": "cpu"}
    new = machine(monkeypatch, tmp_path, "avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile") | {"device": "cpu"}
    assert old["gpus"] == new["gpus"] == []
    assert environment.hardware(old) == f"{XEON} (avx512f)"
    assert environment.hardware(new) == f"{XEON} (avx512_bf16, amx_bf16)"
    assert environment.hardware({"cpu": XEON}) == "", "no worker has begun"


def test_a_gpu_is_named_with_its_power_limit(tmp_path, monkeypatch):
    line = "NVIDIA H200, 450.00 W, 143771 MiB\\n"
    known = machine(monkeypatch, tmp_path, "avx2", 2 * line) | {"device": "NVIDIA H200"}
    assert known["gpus"] == ["NVIDIA H200, 450.00 W, 143771 MiB"] * 2
    assert environment.hardware(known) == "NVIDIA H200 (450 W)"


def test_what_trains_is_part_of_the_environment_and_what_only_reports_is_not(tmp_path):
    for name in ("training", "report"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("one = 1\n")
    before = environment.code_digest(tmp_path)
    (tmp_path / "report" / "a.py").write_text("one = 2\n")
    assert environment.code_digest(tmp_path) == before
    (tmp_path / "training" / "a.py").write_text("one = 2\n")
    assert environment.code_digest(tmp_path) != before
    assert environment.describe()["code"] == environment.code_digest(Path(tunediff.__file__).parent), (
        "the whole package counts"
    )


def test_a_trial_that_goes_on_with_its_workers_keeps_their_device(tmp_path):
    """Its driver starts again, after a kill, and attaches to the job: no other line of a worker comes."""
    Journal(tmp_path).start(*cfg.identity(toy()), {}, 20.0)
    Journal(tmp_path).write("worker", device="cpu", threads=2, environment={"cpu": "another"})
    Journal(tmp_path).start(*cfg.identity(toy()), {}, 20.0)
    found = read_trial(tmp_path)
    assert found.attempts == 2
    assert [found.environment[name] for name in ("device", "threads", "cpu")] == ["cpu", 2, "another"]
    Journal(tmp_path).write("worker", device="NVIDIA H200", threads=8, environment=environment.describe())
    assert read_trial(tmp_path).environment == {**environment.describe(), "device": "NVIDIA H200", "threads": 8}


def test_a_final_evaluation_belongs_to_the_point_it_was_made_after(tmp_path):
    journal = Journal(tmp_path)
    journal.write("start", name="t0000", number=0, config={}, drawn={}, fingerprint="x", budget_s=1.0, role="draw")
    journal.point(point(0, 0.5, steps=5, error=9.0))
    journal.write("resumed", steps=5)
    journal.point(point(1, 1.0, steps=10, error=5.0))
    journal.write("final", steps=10, error=4.0, label="FID")
    first, found = trial_record.read_trial(tmp_path).points
    assert (first["error"], "final_error" in first) == (9.0, False)
    assert (found["error"], found["final_error"], found["final_label"]) == (5.0, 4.0, "FID")
    journal.point(point(1, 1.0, steps=11, error=6.0))  # began anew: the old final is of other weights
    assert "final_error" not in trial_record.read_trial(tmp_path).points[-1]


def test_trainings_that_were_alike_have_one_effective_configuration(tmp_path):
    """What a worker found to change nothing, or never read, does not make two of them."""
    found = []
    for number, values in enumerate(({"loader.workers": 1}, {"loader.workers": 4, "width": 9}, {"seed": 5})):
        journal = Journal(tmp_path / "trials" / f"t{number:04d}")
        config = cfg.override(toy(), {"loader.resident": True} | values)
        journal.start(*cfg.identity(config), values, 20.0, number)
        journal.write("worker", device="cpu", threads=1, not_effective=cfg.not_effective(config, "cpu"))
        journal.write("unread", knobs=["width"])
    with shipped_toy():
        found = [cfg.effective_knobs(trial) for trial in trial_record.read_trials(tmp_path)]
    assert found[0] == found[1]
    assert found[0] != found[2]
    (gone,) = [cfg.effective_knobs(trial) for trial in trial_record.read_trials(tmp_path)][:1]
    assert gone["loader.workers"] == 1, "its workload is gone: as it was recorded"
