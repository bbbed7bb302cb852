"""Stored searches and comparisons, made by code: `tests/report/test_golden.py` compares what is said of each with a file."""

import json
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tests import comparisons
from tests.searches import make, write
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
    {"event": "begin", "time": 990.0, "monotonic_s": 0.0, "command": "tunediff search digits --name night"},
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


def only_failures(folder, objective):
    space = begun(folder, objective, 3)
    for number, size in enumerate((128, 64, 256)):
        write(folder, space, number, {"loader.batch_size": size}, (), status="oom", reason=f"out of memory: {size} MiB")


def confirmed(folder, objective, worth=0.5):
    """The finalists run on new seeds, at `worth` times the baseline's values."""
    space = begun(folder, objective, 4, confirm={"of": 2, "seeds": 4})
    write(folder, space, 0, curve=objective.curve(2.0))
    repeated(folder, space, objective, [2.1])
    write(folder, space, 2, {"precision.amp": "bf16"}, objective.curve(0.9))
    write(folder, space, 3, {"loader.batch_size": 64}, objective.curve(1.0))
    results = analysis.read(folder)
    place, runs = confirming.prepare(results)
    for number, point in enumerate(runs.candidates):
        scatter = 1 + 0.02 * ((number * 7) % 5 - 2)
        own = worth if point["precision.amp"] == "bf16" else 1.3 if point["loader.batch_size"] == 64 else 1.0
        write(place, runs, number, drawn=point, curve=objective.curve(2.0 * own * scatter))


def not_confirmed(folder, objective):
    confirmed(folder, objective, worth=1.0)


def seeds(folder, objective, failing=False):
    """A grid on three seeds, of which one configuration may fail on one."""
    space = make(folder, {"workload": objective.workload} | GRID)
    for number, point in enumerate(space.candidates):
        end = {64: 1.0, 128: 2.0, 256: 1.97}[point["loader.batch_size"]]
        end *= (1.02, 1.0, 0.97)[point["seed"] - space.baseline.seed] * (1 + 0.003 * ((number * 7) % 5 - 2))
        bad = failing and (point["loader.batch_size"], point["seed"] - space.baseline.seed) == (64, 1)
        ends = {"status": "nan", "reason": "the loss is not finite"} if bad else {}
        write(folder, space, number, drawn=point, curve=objective.curve(end)[: 1 if bad else 4], **ends)


def failing_seeds(folder, objective):
    seeds(folder, objective, failing=True)


def two_objectives(folder, objective):
    """By device-seconds too, compiled and not, on several devices."""
    budget = {"per_trial": "20s", "trials": 5, "price_per_device_hour": 18}
    metric = "frechet" if objective is FALLS else "accuracy"
    knobs = {"compile.mode": ["none", "default"], "parallel.workers": [1, 2], "loader.batch_size": [64, 128]}
    space = begun(folder, objective, 5, budget=budget, search=knobs, objective=[metric, "device_s"])
    on_two = {"parallel.workers": 2}
    found = {"found": {"price": 0.2}}
    write(folder, space, 0, curve=objective.curve(2.0), **found)
    write(folder, space, 1, {"compile.mode": "default"}, objective.curve(1.5), rate=300.0, compile_s=6.0, **found)
    write(folder, space, 2, on_two, objective.curve(1.2), rate=350.0, **found)
    write(
        folder, space, 3, on_two | {"compile.mode": "default"}, objective.curve(1.1), rate=360.0, compile_s=7.0, **found
    )
    more = {"found": {"compiled_graphs": 12, "graph_breaks": 1}}
    write(folder, space, 4, {"loader.batch_size": 64, "compile.mode": "default"}, objective.curve(3.0), rate=300.0, compile_s=6.0,
          **more)  # fmt: skip


def study(folder, objective, form, **more):
    """A study of throughput."""
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


COLUMNS = ["samples_per_s", "epoch_s", "versus_baseline", "percent_of_base", "memory_percent_of_base"]


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


SEARCHES = {
    f"{build.__name__}-{objective.mode}": (build, objective)
    for build, objective in (
        (finished, FALLS), (interrupted, FALLS), (only_failures, FALLS), (failing_seeds, FALLS), (confirmed, RISES),
        (not_confirmed, FALLS), (seeds, FALLS), (two_objectives, FALLS), (study_ladder, FALLS),
    )
}  # fmt: skip
"""What makes the folder of a search, and its objective, by the name of its golden files."""

WHOLE = ("finished-min", "seeds-min", "two_objectives-min", "study_ladder-min")
"""Golden files with every section of the page; the others have the first ones, which differ."""

COMPARISONS = {
    "compare_better": {"values": comparisons.BETTER},
    "compare_no_difference": {"values": comparisons.CLOSE},
    "compare_failed": {"values": {"A": [2.0, 2.1], "B": [1.0, 1.1]}, "statuses": {("B", 2): "oom"}},
}
"""Arguments of `comparisons.made` by the name of their golden files."""
