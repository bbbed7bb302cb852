"""Folders of searches made by hand."""

import json
import math

import numpy as np
from PIL import Image

from tunediff import analysis, search_space
from tunediff import config as cfg
from tunediff.experiment.model import is_search
from tunediff.tuning import experiment

FILE = {
    "workload": "digits",
    "budget": {"per_trial": "20s", "trials": 8},
    "search": {
        "loader.batch_size": [32, 64, 128, 256],
        "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "precision.amp": ["none", "bf16"],
    },
}
PARTS = ("data_wait", "host_to_device", "sampler", "forward", "backward", "optimizer", "ema", "other")


def make(folder, content=FILE):
    """The folder of a search that has no trial yet."""
    wanted = search_space.parse(content, "night.yaml")
    experiment.create(folder, wanted, content)
    return wanted


def write(folder, wanted, number, point=None, curve=((5.0, 1000, 4.0), (20.0, 4000, 2.0)), *, status="ok", **more):
    """One journal, as text: `curve` holds (train_s, samples, objective); status None leaves it under way."""
    own, diffusion = wanted.workload.objective.name, wanted.workload.name == "diffusion"
    parts = PARTS if diffusion else [part for part in PARTS if part not in ("sampler", "ema")]
    drawn = wanted.expand(point or {}, "test")
    drawn = more.pop("drawn", drawn)
    config, name = wanted.config(drawn), f"t{number:04d}"
    role = "repeat" if "seed" in drawn and wanted.seeds == 1 else "draw"
    role = "confirm" if is_search(folder.parent) else role
    seconds = {"setup": 1.0, "compile": more.get("compile_s", 0.0), "data_wait": 0.5, "train": 19.5, "evaluation": 2.0}
    lines = [
        {
            "event": "start", "time": 1000.0 + number, "name": name, "number": number, "drawn": drawn, "role": role,
            "budget_s": wanted.budget.of(config.devices).seconds, "unit": wanted.budget.unit,
            "config": cfg.flat(config) | more.get("config", {}), "fingerprint": cfg.fingerprint(config),
            "environment": {"cpu": "slow one", "cpu_cores": 2, "versions": {"torch": "2.15"}} | more.get("machine", {}),
        },
        {"event": "worker", "time": 1001.0 + number, "device": "cpu", "threads": more.get("threads", 2),
         "samples": 1797},
    ]  # fmt: skip
    for index, (train_s, samples, value) in enumerate(curve, 1):
        rate, steps = more.get("rate", samples / train_s), max(1, samples // config.loader.batch_size)
        size = samples / steps
        step = {f"step_{part}_s": size / rate / len(parts) for part in parts}
        label = {"label": more.get("label", "FD (classifier)")} if diffusion else {}
        lines.append(
            {
                "event": "point", "time": 1002.0 + number + index, "index": index, "device_s": train_s * config.devices,
                "train_s": train_s, "samples": samples,
                "samples_per_s": rate, "steps": steps, "step_s": size / rate, **step,
                "peak_memory_mib": 500.0 + number, "effective_weight": [1.0, 2.0], "seconds": seconds,
            } | label | more.get("found", {}) | ({own: value} if value is not None else {})
        )  # fmt: skip
    if status is not None:
        lines.append({"event": "end", "time": 1030.0 + number, "status": status, "reason": more.get("reason", ""),
                      "seconds": seconds})  # fmt: skip
    place = folder / "trials" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def random_points(wanted, count, seed=0):
    """As a search without knowledge draws them."""
    rng, points = np.random.default_rng(seed), []
    for _ in range(count):
        point = {}
        for dimension in wanted.dimensions:
            if not dimension.active(point):
                continue
            if dimension.choices is not None:
                point[dimension.name] = dimension.choices[rng.integers(len(dimension.choices))]
            else:
                low, high = (math.log(end) if dimension.log else end for end in (dimension.low, dimension.high))
                value = rng.uniform(low, high)
                point[dimension.name] = math.exp(value) if dimension.log else value
        points.append(point)
    return points


def night(folder):
    """The baseline and a winner that is twice as fast, both with images."""
    wanted = make(folder)
    for number, point, curve in (
        (0, {}, ((5.0, 1000, 8.0), (10.0, 2000, 4.0), (20.0, 4000, 2.0))),
        (1, {"precision.amp": "bf16"}, ((5.0, 2000, 4.0), (10.0, 4000, 1.6), (20.0, 8000, 0.8))),
        (2, {"loader.batch_size": 256}, ((5.0, 1200, 6.0), (10.0, 2400, 5.0), (20.0, 4800, 3.0))),
    ):
        place = write(folder, wanted, number, point, curve)
        Image.new("L", (40, 40), 90 * number).save(place / "samples.png")
    (folder / "sessions.jsonl").write_text(
        '{"event": "begin", "time": 990.0, "monotonic_s": 0, "command": "tunediff search digits --name night"}\n'
        '{"event": "end", "time": 1090.0, "monotonic_s": 100}\n'
    )  # fmt: skip
    return folder


def again(folder, share=1.02, number=7):
    """The folder's baseline runs once more, on the next seed, `share` times as high at every point: its noise is known."""
    found = analysis.read(folder)
    base, metric = found.baseline, found.metric
    curve = [(p.train_s, p.samples, p.get(metric, 1.0) * share) for p in base.points]
    drawn = {**found.space.candidates[0], "seed": found.space.baseline.seed + 1}
    write(folder, found.space, number, curve=curve, drawn=drawn, rate=base.points[-1].samples_per_s * share)
    return folder


def noisy(folder, repeats=(2.24,), others=(1.2, 1.0, 1.3, 1.9, 3.0), content=FILE, baseline=2.0, **of_baseline):
    """A search whose baseline ran again on the next seeds; a value at the end for each run of it, and for other trials.

    `of_baseline`: what `write` takes, for its first run.
    """

    def curve(end):
        return (5.0, 1000, 4 * end), (10.0, 2000, 2 * end), (20.0, 4000, end)

    wanted = make(folder, content)
    write(folder, wanted, 0, **({"curve": curve(baseline)} | of_baseline))
    for number, end in enumerate(repeats, 1):
        drawn = {**wanted.candidates[0], "seed": wanted.baseline.seed + number}
        write(folder, wanted, number, curve=curve(end), drawn=drawn)
    points = [{"loader.batch_size": size, "precision.amp": amp} for amp in ("none", "bf16") for size in (32, 64, 256)]
    for number, (point, end) in enumerate(zip(points, others, strict=False), 1 + len(repeats)):
        write(folder, wanted, number, point, curve(end))
    return folder
