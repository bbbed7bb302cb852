"""Stored searches and comparisons, made by code: `tests/report/test_golden.py` compares what is said of each with a file."""

import json
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tests import comparisons
from tests.searches import make, random_points, write
from tunediff import analysis
from tunediff.core.journal import Journal
from tunediff.tuning import confirming


@dataclass(frozen=True)
class Objective:
    """The objective of a stored search: `digits` minimizes a distance, `ranker` maximizes an accuracy."""

    workload: str
    mode: str
    lr: str
    """The name of its learning rate."""

    @property
    def knobs(self):
        lr = {self.lr: {"low": 1e-4, "high": 1e-1, "log": True}}
        return {"loader.batch_size": [32, 64, 128, 256], **lr, "precision.amp": ["none", "bf16"]}

    def curve(self, end, first=2.0, rate=200.0, seconds=(5.0, 10.0, 15.0, 20.0)):
        """Return (seconds, samples, value) from `first * end` down to `end`, as the objective has them."""
        values = np.linspace(first * end, end, len(seconds))
        if self.mode == "max":
            values = 1 - values / 10
        return [(s, int(s * rate), round(float(value), 6)) for s, value in zip(seconds, values, strict=True)]


FALLS, RISES = Objective("digits", "min", "optimizer.lr"), Objective("ranker", "max", "lr")
SESSION = [
    {"event": "begin", "time": 990.0, "monotonic_s": 0.0, "command": "python -m tunediff.search digits --name night"},
    {"event": "end", "time": 1090.0, "monotonic_s": 100.0, "complete": True},
]
GRID = {"budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"loader.batch_size": [64, 128, 256]}}


def begun(folder, of, trials, *, ended=True, **more):
    """Make the folder of a search of so many trials with one session; return its space."""
    content = {"workload": of.workload, "search": of.knobs, "budget": {"per_trial": "20s", "trials": trials}}
    space = make(folder, content | more)
    lines = SESSION if ended else SESSION[:1]
    (folder / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return space


def repeated(folder, space, objective, values, number=1):
    """Run the baseline again on the next seeds, from trial `number` on."""
    for place, value in enumerate(values):
        drawn = {**space.candidates[0], "seed": space.baseline.seed + 1 + place}
        write(folder, space, number + place, drawn=drawn, curve=objective.curve(value, rate=200.0 + 4 * place))


def finished(folder, objective):
    """The best is beyond the noise; others were stopped, failed, were skipped, were disturbed."""
    space = begun(folder, objective, 8)
    write(folder, space, 0, curve=objective.curve(2.0))
    repeated(folder, space, objective, [2.1])
    write(folder, space, 2, {"precision.amp": "bf16"}, objective.curve(0.8, first=3.0, rate=400.0))
    write(folder, space, 3, {objective.lr: 2e-3}, objective.curve(0.83), found={"disturbed": True})
    write(folder, space, 4, {"loader.batch_size": 64}, objective.curve(2.5))
    write(folder, space, 5, {"loader.batch_size": 32}, objective.curve(3.0)[:2], status="pruned")
    write(folder, space, 6, {"loader.batch_size": 256}, (), status="oom", reason="needs 9 GiB")
    write(folder, space, 7, {"loader.batch_size": 256, "precision.amp": "bf16"}, (), status="skipped",
          reason="not run: t0006 ran out of memory")  # fmt: skip
    for number in (0, 2):
        Image.new("L", (40, 40), 90 * number).save(folder / "trials" / f"t000{number}" / "samples.png")


def interrupted(folder, objective):
    """Three of eight trials, one of them under way, and no noise is known."""
    space = begun(folder, objective, 8, ended=False)
    write(folder, space, 0, curve=objective.curve(2.0))
    write(folder, space, 1, {"precision.amp": "bf16"}, objective.curve(1.0))
    write(folder, space, 2, {"loader.batch_size": 64}, objective.curve(1.5)[:2], status=None)


def no_trial(folder, objective):
    begun(folder, objective, 8, ended=False)


def no_end(folder, objective):
    """Two trials are under way, one has an evaluation."""
    space = begun(folder, objective, 8, ended=False)
    write(folder, space, 0, curve=objective.curve(4.0)[:1], status=None)
    write(folder, space, 1, {"precision.amp": "bf16"}, (), status=None)


def only_failures(folder, objective):
    space = begun(folder, objective, 3)
    for number, size in enumerate((128, 64, 256)):
        write(folder, space, number, {"loader.batch_size": size}, (), status="oom", reason=f"out of memory: {size} MiB")


def one_trial(folder, objective):
    """All but the baseline was stopped or failed; the baseline did not move, and others used the machine."""
    space = begun(folder, objective, 3, confirm={"of": 1, "seeds": 3})
    write(folder, space, 0, curve=objective.curve(2.0, first=1.0), found={"disturbed": True})
    write(folder, space, 1, {"loader.batch_size": 64}, objective.curve(4.0)[:1], status="pruned")
    write(folder, space, 2, {"loader.batch_size": 256}, (), status="nan", reason="the loss is not finite")


def failed_baseline(folder, objective):
    space = begun(folder, objective, 3)
    write(folder, space, 0, curve=objective.curve(2.0)[:1], status="oom", reason="needs 9 GiB")
    write(folder, space, 1, {"precision.amp": "bf16"}, objective.curve(1.0))
    write(folder, space, 2, {"loader.batch_size": 64}, objective.curve(1.2))


def baseline_is_best(folder, objective):
    space = begun(folder, objective, 4)
    write(folder, space, 0, curve=objective.curve(2.0))
    repeated(folder, space, objective, [2.2])
    write(folder, space, 2, {"precision.amp": "bf16"}, objective.curve(3.0))
    write(folder, space, 3, {"loader.batch_size": 64}, objective.curve(4.0))


def within_noise(folder, objective):
    """The best is ahead by less than the noise; the best configuration of all failed on a second seed."""
    space = begun(folder, objective, 6)
    write(folder, space, 0, curve=objective.curve(2.0))
    repeated(folder, space, objective, [2.4])
    write(folder, space, 2, {"precision.amp": "bf16"}, objective.curve(1.9))
    write(folder, space, 3, {"loader.batch_size": 64}, objective.curve(0.5))
    drawn = {**space.expand({"loader.batch_size": 64}, "test"), "seed": space.baseline.seed + 1}
    write(folder, space, 4, drawn=drawn, curve=objective.curve(0.5)[:1], status="nan", reason="the loss is not finite")
    write(folder, space, 5, {"loader.batch_size": 32}, objective.curve(1.95))


def early(folder, objective):
    """The best is as good as the baseline at its first evaluation; the budget is in device-seconds."""
    space = begun(folder, objective, 3, budget={"per_trial": "20s", "trials": 3, "unit": "device"})
    write(folder, space, 0, curve=objective.curve(2.0))
    repeated(folder, space, objective, [2.04])
    write(folder, space, 2, {"precision.amp": "bf16"}, objective.curve(0.9, first=1.5))


def confirmed(folder, objective, worth=0.5, ended=None, failing=None, **confirm):
    """The finalists run on new seeds, at `worth` times the baseline's values."""
    space = begun(folder, objective, 4, confirm={"of": 2, "seeds": 4} | confirm)
    write(folder, space, 0, curve=objective.curve(2.0))
    repeated(folder, space, objective, [2.1])
    write(folder, space, 2, {"precision.amp": "bf16"}, objective.curve(0.9))
    write(folder, space, 3, {"loader.batch_size": 64}, objective.curve(1.0))
    results = analysis.read(folder)
    place, runs = confirming.prepare(results)
    again(place, runs, objective, worth, ended, failing)
    for longer, its_runs in confirming.longer(results, place):
        again(longer, its_runs, objective, worth)


def again(place, space, objective, worth, ended=None, failing=None):
    """The confirming runs of two finalists and the baseline."""
    for number, point in enumerate(space.candidates[:ended]):
        scatter = 1 + 0.02 * ((number * 7) % 5 - 2)
        own = worth if point["precision.amp"] == "bf16" else 1.3 if point["loader.batch_size"] == 64 else 1.0
        if number == failing:
            write(place, space, number, drawn=point, curve=objective.curve(2.0)[:1], status="nan", reason="not finite")
        else:
            write(place, space, number, drawn=point, curve=objective.curve(2.0 * own * scatter))


def longer_budgets(folder, objective):
    confirmed(folder, objective, budgets=["1x", "4x"])


def not_confirmed(folder, objective):
    confirmed(folder, objective, worth=1.0)


def undecided(folder, objective):
    confirmed(folder, objective, ended=5)


def unconfirmed_baseline_fails(folder, objective):
    confirmed(folder, objective, failing=0)


def seeds(folder, objective, failing=False, coarse=False):
    """A grid on three seeds, of which one configuration may fail on one; `coarse`: values are equal on all seeds."""
    space = make(folder, {"workload": objective.workload} | GRID)
    for number, point in enumerate(space.candidates):
        end = {64: 1.0, 128: 2.0, 256: 1.97}[point["loader.batch_size"]]
        if not coarse:
            end *= (1.02, 1.0, 0.97)[point["seed"] - space.baseline.seed] * (1 + 0.003 * ((number * 7) % 5 - 2))
        bad = failing and (point["loader.batch_size"], point["seed"] - space.baseline.seed) == (64, 1)
        ends = {"status": "nan", "reason": "the loss is not finite"} if bad else {}
        write(folder, space, number, drawn=point, curve=objective.curve(end)[: 1 if bad else 4], **ends)


def failing_seeds(folder, objective):
    seeds(folder, objective, failing=True)


def coarse(folder, objective):
    """An accuracy of few queries is equal on all seeds: no noise shows, and none is claimed to be absent."""
    seeds(folder, objective, coarse=True)


def two_objectives(folder, objective):
    """By device-seconds too, compiled and not, on several devices."""
    budget = {"per_trial": "20s", "trials": 5, "price_per_device_hour": 18}
    metric = "frechet" if objective is FALLS else "accuracy"
    knobs = {"compile.mode": ["none", "default"], "parallel.workers": [1, 2], "loader.batch_size": [64, 128]}
    space = begun(folder, objective, 5, budget=budget, search=knobs, objective=[metric, "device_s"])
    on_two = {"parallel.workers": 2}
    found = {"found": {"price": 0.2, "energy_wh": 1.5}}
    write(folder, space, 0, curve=objective.curve(2.0), **found)
    write(folder, space, 1, {"compile.mode": "default"}, objective.curve(1.5), rate=300.0, compile_s=6.0, **found)
    write(folder, space, 2, on_two, objective.curve(1.2), rate=350.0, **found)
    write(
        folder, space, 3, on_two | {"compile.mode": "default"}, objective.curve(1.1), rate=360.0, compile_s=7.0, **found
    )
    more = {"found": {"compiled_graphs": 12, "expected_graphs": 11}}
    write(folder, space, 4, {"loader.batch_size": 64, "compile.mode": "default"}, objective.curve(3.0), rate=300.0, compile_s=6.0,
          **more)  # fmt: skip


def many(folder, objective):
    """Twenty-four random trials: importance and effects, of knobs that do not always apply too."""
    knobs = objective.knobs | {"memory.channels_last": [False]}
    if objective is FALLS:
        knobs |= {
            "weighting.name": ["constant", "min_snr"],
            "weighting.gamma": {"low": 1.0, "high": 20.0, "log": True, "when": {"weighting.name": "min_snr"}},
        }
    space = begun(folder, objective, 24, search=knobs)
    rng = np.random.default_rng(0)
    for number, point in enumerate([{}, *random_points(space, 23)]):
        rate = (400.0 if point.get("precision.amp") == "bf16" else 200.0) * math.exp(rng.normal(0, 0.02))
        value = math.exp(math.log(point.get(objective.lr, 1e-3) / 1e-3) ** 2 / 4 + rng.normal(0, 0.1))
        write(folder, space, number, point, objective.curve(value, rate=rate, seconds=(10.0, 20.0)), rate=rate)


def study(folder, objective, form, **more):
    """A study of throughput: by_grid, on a ladder, or of operations."""
    content = (
        {"workload": objective.workload, "objective": "samples_per_s", "budget": {"per_trial": "5s"}} | form | more
    )
    space = make(folder, content)
    for number, point in enumerate(space.candidates):
        config = space.config(point)
        rate = 100.0 * (1.5 if config.precision.amp == "bf16" else 1.0) * config.parallel.workers**0.8
        rate *= math.sqrt(config.loader.batch_size / 128) * (1.2 if config.compile.mode != "none" else 1)
        ends = {"status": "oom", "reason": "full"} if config.loader.batch_size == 512 else {}
        place = write(folder, space, number, drawn=point, curve=() if ends else ((5.0, int(5 * rate), None),), rate=rate,
                      compile_s=6.0 * (config.compile.mode != "none"),
                      found={"data_wait_share": 0.1, "disturbed": config.loader.batch_size == 64}, **ends)  # fmt: skip
        if not ends:
            not_effective = {"loader.pin_memory": "nothing is copied to a GPU"} if config.loader.pin_memory else {}
            Journal(place).write("worker", device="cpu", threads=2, not_effective=not_effective)
        if "operations" in more:
            rows = [f'"aten::op<{i}, float>",{8 * i},{0.1 * i:.1f},{0.2 * i:.1f},{i / 78}' for i in range(1, 13)]
            (place / "operations.csv").write_text("\n".join(["operation,calls,self_s,total_s,share", *rows]) + "\n")


COLUMNS = ["samples_per_s", "epoch_s", "versus_baseline", "percent_of_base", "memory_percent_of_base"]


def study_grid(folder, objective):
    about = {
        "title": "Time per epoch", "x": "loader.batch_size", "y": ["epoch_s", "samples_per_s"],
        "columns": ["parallel.workers", "loader.batch_size", *COLUMNS, "speedup_over_one_worker", "predicted_speedup_4"],
    }  # fmt: skip
    study(folder, objective, {"grid": {"parallel.workers": [1, 2], "loader.batch_size": [64, 128, 512]}}, study=about)


def study_bars(folder, objective, x=None, y=("epoch_s", "peak_memory_mib")):
    grid = {"parallel.workers": [1, 2], "loader.batch_size": [20, 128, 320]}
    about = {"columns": [*grid, *y], "y": list(y)} | ({"x": x} if x else {})
    study(folder, objective, {"grid": grid}, study=about)


def study_stacked(folder, objective):
    study_bars(folder, objective, y=("epoch_data_wait_s", "epoch_s"))


def study_measured(folder, objective):
    """Lines over a measured quantity, of more than a decade."""
    study_bars(folder, objective, "samples_per_s", ["epoch_s"])


def study_ladder(folder, objective):
    rungs = {
        "bf16": {"precision.amp": "bf16"},
        "pinned": {"loader.pin_memory": True},
        "compiled": {"compile.mode": "default"},
    }
    about = {
        "title": "Rungs",
        "columns": ["configuration", *COLUMNS, "versus_previous", "compile_s"],
        "y": "samples_per_s",
    }
    study(folder, objective, {"ladder": rungs, "fixed": {"loader.pin_memory": False}}, study=about)


def study_operations(folder, objective):
    columns = ["configuration", "operation", "calls_per_step", "self_s_per_step", "share"]
    study(folder, objective, {"trials": [{"precision.amp": "bf16"}]}, study={"columns": columns}, operations=4)


SEARCHES = {
    f"{build.__name__}-{objective.mode}": (build, objective)
    for build, objectives in {
        finished: (FALLS, RISES), interrupted: (FALLS,), no_trial: (FALLS,), no_end: (FALLS,), only_failures: (FALLS,),
        one_trial: (FALLS,), failed_baseline: (FALLS,), baseline_is_best: (FALLS, RISES), within_noise: (FALLS, RISES),
        early: (FALLS,), longer_budgets: (FALLS,), confirmed: (RISES,), not_confirmed: (FALLS,), undecided: (FALLS,),
        unconfirmed_baseline_fails: (FALLS,), seeds: (FALLS, RISES), failing_seeds: (FALLS,), coarse: (RISES,),
        two_objectives: (FALLS,), many: (RISES,), study_grid: (FALLS,), study_ladder: (FALLS,),
        study_operations: (FALLS,), study_bars: (FALLS,), study_stacked: (FALLS,), study_measured: (FALLS,),
    }.items()
    for objective in objectives
}  # fmt: skip
"""What makes the folder of a search, and its objective, by the name of its golden files."""

WHOLE = (
    "finished-min",
    "finished-max",
    "longer_budgets-min",
    "seeds-min",
    "two_objectives-min",
    "many-max",
    "study_ladder-min",
)
"""Golden files with every section of the page; the others have the first ones, which differ."""

UP = {"a": "digits_classifier", "b": ("digits_classifier", "loader.batch_size=64")}
COMPARISONS = {
    "compare_better": {"values": comparisons.BETTER},
    "compare_worse-max": {"values": {"A": [0.9, 0.915, 0.888], "B": [0.8, 0.81, 0.79]}, **UP},
    "compare_no_difference": {"values": comparisons.CLOSE},
    "compare_equal": {"values": {"A": [2.0, 2.2, 1.9], "B": [2.001, 2.202, 1.9015]}, "within": 0.02},
    "compare_open": {"values": {"A": [2.0, 2.4], "B": [1.7, 1.8]}},
    "compare_failed": {"values": {"A": [2.0, 2.1], "B": [1.0, 1.1]}, "statuses": {("B", 2): "oom"}},
    "compare_wide": {"values": {"A": [2.0, 2.2, 1.9, 2.1], "B": [0.1, 30.0, 0.2, 9.0]}, "pairs": 4},
    "compare_many": {
        "values": {"A": [2 + 0.01 * (-1) ** i for i in range(12)], "B": [2.05 + 0.02 * (i % 3) for i in range(12)]}
    },
}
"""Arguments of `comparisons.made` by the name of their golden files."""
