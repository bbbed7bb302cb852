"""Figures of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
import matplotlib.pyplot as plt
from matplotlib import ticker

from tunediff.reporting.results import Results


def curves(found: Results, path: Path) -> None:
    """The objective against training seconds: all trials, the baseline and the best on top. Writes a PNG."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    best, base = found.best, found.baseline
    for trial in found.trials:
        seconds = [point["train_s"] for point in trial.points]
        values = [float(point[found.metric]) for point in trial.points if found.metric in point]
        if not seconds or len(values) < len(seconds):
            continue
        style: dict[str, Any] = {"color": "0.75", "linewidth": 1.0, "zorder": 1, "markersize": 3.0}
        if trial.status != "ok":
            style |= {"linestyle": ":"}
        if base is not None and trial.name == base.name:
            style = {"color": "black", "linewidth": 2.0, "zorder": 3, "label": f"baseline ({trial.name})"}
        if best is not None and trial.name == best.name:
            style = {"color": "tab:red", "linewidth": 2.0, "zorder": 4, "label": f"best ({trial.name})"}
        axes.plot(seconds, values, marker="o", **style)
    axes.set_xlabel("training seconds")
    axes.set_xlim(left=0)
    axes.set_ylabel(found.label if found.metric != "frechet" else f"{found.label}, lower is better")
    positive = all((point.get(found.metric) or 0.0) > 0 for trial in found.trials for point in trial.points)
    if positive and found.metric == "frechet":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 4, 6)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))  # 0.6 and 10, not 6×10⁻¹ and 10¹
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    protocol = found.space.baseline.evaluation
    how = f"{protocol.sampler.upper()}" + (f" {protocol.steps} steps" if protocol.sampler == "ddim" else "")
    axes.set_title(f"{found.folder.name}: {protocol.images:,} images, {how}; grey: other trials", fontsize=10)
    axes.grid(True, which="both", color="0.92")
    if base is not None or best is not None:
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_all(found: Results) -> dict[str, Path]:
    """Write trials.csv, curves.csv and curves.png into the folder of the search; returns their paths by kind."""
    written = {name: found.folder / name for name in ("trials.csv", "curves.csv", "curves.png")}
    found.table().to_csv(written["trials.csv"], index=False)
    found.curves().to_csv(written["curves.csv"], index=False)
    curves(found, written["curves.png"])
    return written
