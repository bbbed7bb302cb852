"""Studies: every quantity as worked out by hand, tables and figures from a folder alone, whatever became of the trials."""

import pytest
import yaml

from tests import searches
from tunediff import analysis, search_space
from tunediff import config as cfg
from tunediff.core.journal import Journal
from tunediff.report import files, study
from tunediff.tuning import experiment

GRID = """
workload: digits
objective: samples_per_s
budget: {per_trial: 5s}
grid:
  parallel.workers: [1, 2]
  loader.batch_size: [64, 128]
study:
  title: Time per epoch
  columns: [parallel.workers, loader.batch_size, samples_per_s, epoch_s, epoch_data_wait_s, versus_baseline,
            percent_of_base, memory_percent_of_base, speedup_over_one_worker, scaling_efficiency, step_s]
  x: loader.batch_size
  y: epoch_s
"""
RATES = {(1, 64): 100.0, (1, 128): 125.0, (2, 64): 160.0, (2, 128): 250.0}


def by_grid(config):
    rate = RATES[config.parallel.workers, config.loader.batch_size]
    return {
        "samples_per_s": rate, "data_wait_share": 0.1, "step_s": config.loader.batch_size / rate,
        "peak_memory_mib": 100.0 * config.loader.batch_size / 128, "disturbed": False,
    }  # fmt: skip


def finished(folder, text, measure, ends=None, number=None):
    """A search folder of which every trial was measured by `measure(config)`; a set of 1,000 images.

    `ends[i]`: how trial i ended, (status, reason) or None for one that still runs; None in place of a point: none yet.
    """
    content = yaml.safe_load(text)
    wanted = search_space.parse(content, "x.yaml")
    experiment.create(folder, wanted, content)
    for i, drawn in enumerate(wanted.candidates[:number]):
        config, trial = wanted.config(drawn), folder / "trials" / f"t{i:04d}"
        journal = Journal(trial)
        journal.write(
            "start", name=f"t{i:04d}", number=i, config=cfg.flat(config), drawn=drawn, role="draw", budget_s=5.0,
            fingerprint=cfg.fingerprint(config), environment={"cpu": "abacus", "cpu_cores": 2, "versions": {"torch": "9"}},
        )  # fmt: skip
        journal.write("worker", threads=2, device="cpu", not_effective=cfg.not_effective(config, "cpu"))
        journal.write("about", samples=1000)
        point = measure(config)
        seconds = {"train": 4.5, "data_wait": 0.5, "compile": point.pop("compile", 0.0), "setup": 1.0} if point else {}
        if point is not None:
            journal.write("point", index=1, train_s=5.0, samples=500, steps=10, seconds=seconds, **point)
        end = (ends or {}).get(i, ("ok", ""))
        if end is not None:
            journal.write("end", status=end[0], reason=end[1], seconds=seconds)
    return analysis.read(folder)


def column(table, name):
    return [None if value is None or value != value else value for value in table.frame()[name].astype(object)]


# ----------------------------------------------------------------------------------------------------------- quantities
def test_rates_become_epochs_and_ratios(tmp_path):
    table = study.table(finished(tmp_path / "night", GRID, by_grid))
    # as the file lists them, although the baseline (128) ran first
    assert list(zip(column(table, "parallel.workers"), column(table, "loader.batch_size"), strict=True)) == list(RATES)
    assert column(table, "epoch_s") == pytest.approx([10.0, 8.0, 6.25, 4.0])
    assert column(table, "epoch_data_wait_s") == pytest.approx([1.0, 0.8, 0.625, 0.4])
    assert column(table, "versus_baseline") == pytest.approx([0.8, 1.0, 1.28, 2.0])
    assert column(table, "percent_of_base") == pytest.approx([80, 100, 128, 200])
    assert column(table, "memory_percent_of_base") == pytest.approx([50, 100, 50, 100])
    assert column(table, "speedup_over_one_worker") == pytest.approx([1.0, 1.0, 1.6, 2.0])
    assert column(table, "scaling_efficiency") == pytest.approx([1.0, 1.0, 0.8, 1.0])


COMPILED = """
workload: digits
objective: samples_per_s
budget: {per_trial: 5s}
grid:
  compile.mode: [none, default]
  compile.scope: {choice: [model, blocks], when: {compile.mode: default}}
study:
  columns: [compile.mode, compile.scope, compile_s, versus_uncompiled, samples_to_break_even, break_even_s]
  y: [compile_s, epoch_s]
"""


def test_when_compiling_has_paid_for_itself(tmp_path):
    def measure(config):
        if config.compile.mode == "none":
            return {"samples_per_s": 100.0}
        faster = config.compile.scope == "model"
        return {"samples_per_s": 125.0 if faster else 80.0, "compile": 30.0 if faster else 10.0}

    table = study.table(finished(tmp_path / "night", COMPILED, measure))
    assert column(table, "compile_s") == [0.0, 30.0, 10.0]
    assert column(table, "compile.scope") == [None, "model", "blocks"], "empty where it does not apply"
    assert column(table, "versus_uncompiled") == [None, 1.25, 0.8]
    # 15,000 images: 150 s without compilation; 30 s + 120 s with it. What is slower never pays.
    assert column(table, "samples_to_break_even") == [None, pytest.approx(15000), None]
    assert column(table, "break_even_s") == [None, pytest.approx(150), None]


LADDER = """
workload: digits
objective: samples_per_s
budget: {per_trial: 5s}
fixed: {loader.pin_memory: false, loader.non_blocking: false}
ladder:
  bf16: {precision.amp: bf16}
  batch of 256: {loader.batch_size: 256}
  pinned: {loader.pin_memory: true, loader.non_blocking: true}
study:
  title: Rungs
  columns: [configuration, samples_per_s, percent_of_base, versus_previous, peak_memory_mib]
  y: samples_per_s
"""


def by_rung(config):
    rate = 100.0 * (1.5 if config.precision.amp == "bf16" else 1.0) * (2.0 if config.loader.batch_size == 256 else 1.0)
    return {"samples_per_s": rate, "peak_memory_mib": 10.0}


def test_runs_with_several_seeds_are_averaged(tmp_path):
    text = GRID.replace("objective:", "seeds: 2\nobjective:").replace("versus_baseline,", "versus_baseline, runs,")

    def measure(config):
        point = by_grid(config)
        return point | {"samples_per_s": point["samples_per_s"] * (1.1 if config.seed else 0.9)}

    found = finished(tmp_path / "night", text, measure, ends={5: ("oom", "full")})
    table = study.table(found)
    failed = found.trials[5].config["loader.batch_size"], found.trials[5].config["parallel.workers"]
    assert failed == (64, 1)
    assert column(table, "samples_per_s") == pytest.approx([90, 125, 160, 250]), "the failed run does not count"
    assert column(table, "runs") == [1, 2, 2, 2]
    assert column(table, "status")[0] == "ok, oom"
    assert column(table, "versus_baseline") == pytest.approx([90 / 125, 1, 1.28, 2])


def test_what_not_every_seed_measured_has_no_mean(tmp_path):
    text = GRID.replace("objective:", "seeds: 2\nobjective:")
    table = study.table(
        finished(
            tmp_path / "night", text, lambda config: {"samples_per_s": 10.0} | ({} if config.seed else {"step_s": 1.0})
        )
    )
    assert column(table, "samples_per_s") == [10.0] * 4
    assert column(table, "step_s") == [None] * 4


# ---------------------------------------------------------------------------------------------------------------- marks
def test_disturbed_and_failed_trials_are_named(tmp_path):
    def measure(config):
        point = by_grid(config) | {"disturbed": config.loader.batch_size == 64}
        return None if (config.parallel.workers, config.loader.batch_size) == (2, 128) else point

    found = finished(tmp_path / "night", GRID, measure, ends={3: ("oom", "9 GiB asked for"), 1: None})
    assert found.trials[3].config["loader.batch_size"] == 128
    table = study.table(found)
    assert column(table, "status") == ["running", "ok", "ok", "oom"]
    assert table.columns[-1] == "status"
    assert column(table, "samples_per_s")[0] == 100, "of a running trial what is known so far"
    assert column(table, "samples_per_s")[3] is None
    assert column(table, "disturbed") == [True, False, True, False]
    assert table.notes() == [
        "others used the machine during loader.batch_size=64, parallel.workers=2 loader.batch_size=64",
        "parallel.workers=2: oom: 9 GiB asked for",
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- figures
def with_axes(text, x, *y):
    content = yaml.safe_load(text)
    content["study"] = {**{k: v for k, v in content["study"].items() if k != "x"}, "y": list(y)} | (
        {"x": x} if x else {}
    )
    return yaml.safe_dump(content, sort_keys=False)


FIGURES = {
    "lines": GRID,
    "panels": with_axes(GRID, "parallel.workers", "samples_per_s", "step_s"),
    "measured": with_axes(GRID, "peak_memory_mib", "samples_per_s"),
    "bars": with_axes(GRID, None, "epoch_s", "peak_memory_mib"),
    "stacked": with_axes(GRID, None, "epoch_data_wait_s", "epoch_s"),
    "ladder": LADDER,
}


@pytest.mark.parametrize("kind", FIGURES)
@pytest.mark.parametrize("fate", ["failed", "running", "nothing"])
def test_every_kind_of_figure_is_drawn_whatever_became_of_the_trials(tmp_path, kind, fate):
    ends = {"failed": dict.fromkeys(range(9), ("oom", "full")), "running": {1: None}, "nothing": {}}[fate]
    measure = by_rung if kind == "ladder" else by_grid
    found = finished(tmp_path / "night", FIGURES[kind], measure, ends, number=0 if fate == "nothing" else None)
    assert {"study.csv", "study.md", "study.png"} <= {*files.write_search(found)}
    assert (found.folder / "study.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_repeat_the_baseline_are_one_row(tmp_path):
    columns = ["configuration", "runs", "samples_per_s", "versus_baseline"]
    found = analysis.read(searches.noisy(tmp_path / "night", content=searches.FILE | {"study": {"columns": columns}}))
    rows = study.table(found).frame().to_dict("records")
    assert [(row["configuration"], row["runs"]) for row in rows[:2]] == [("baseline", 2), ("loader.batch_size=32", 1)]
    assert rows[1]["versus_baseline"] == 1.0


@pytest.mark.parametrize("status", ["oom", "pruned", None])
def test_nothing_is_compared_with_a_baseline_without_an_end(tmp_path, status):
    columns = ["configuration", "versus_baseline", "percent_of_base", "memory_percent_of_base"]
    of_baseline = {"curve": ((5.0, 1000, 8.0),), "content": searches.FILE | {"study": {"columns": columns}}}
    rows = study.table(analysis.read(searches.noisy(tmp_path / "night", (), status=status, **of_baseline))).frame()
    assert len(rows) == 6
    assert rows[columns[1:]].isna().all(axis=None)
