"""Pictures of a profile, as PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tunediff.core import colors
from tunediff.profiling.result import Profile
from tunediff.profiling.tables import OWNERS, mebibytes, milliseconds, part, percent, rate

_UPDATE, _FORWARD, _BACKWARD, _BATCH, _COPY, _WAIT, _EMA = colors.SERIES
COLORS = {
    "data_wait": _WAIT,
    "host_to_device": _COPY,
    "sampler": _BATCH,
    "forward": _FORWARD,
    "backward": _BACKWARD,
    "optimizer": _UPDATE,
    "ema": _EMA,
    "other": colors.OTHER,
    "static_mib": colors.OTHER,
    "batch_mib": _BATCH,
    "forward_mib": _FORWARD,
    "backward_mib": _BACKWARD,
    "rest_mib": _UPDATE,
}
"""By part of the step and by owner of memory; parts that only a workload has are `NAMELESS`."""
NAMELESS = colors.PLAIN


def step(profile: Profile, path: Path) -> None:
    """Draw the milliseconds of each part of the step."""
    times, unit = profile["step"], profile["unit"]
    parts = dict(reversed(times["parts_s"].items()))
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    names = [part(profile, name) for name in parts]
    colors_of_parts = [COLORS.get(name, NAMELESS) for name in parts]
    bars = axes.barh(names, [1000 * spent for spent in parts.values()], color=colors_of_parts)
    step_s = times["step_s"]
    shares = [f"{milliseconds(spent)}, {percent(spent / step_s)}" for spent in parts.values()]
    axes.bar_label(bars, shares, padding=4, fontsize=9)
    axes.set_xlim(right=1.22 * 1000 * max(parts.values()))
    axes.set_xlabel("ms per step")
    title = f"{profile['name']}: a step of {milliseconds(step_s)}, batch {times['batch_size']}"
    title += f", {rate(times['samples_per_s'])} {unit}/s"
    axes.set_title(title, fontsize=10, wrap=True)
    _save(figure, path, grid="x")


def memory(profile: Profile, path: Path) -> None:
    """Draw the tensors' memory over the traced steps, by the phase that allocated it."""
    traced = profile["memory"]
    lines, peak, phases = traced["timeline"], traced["peak"], traced["phases"]
    assert lines is not None
    assert peak is not None
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    owners = [owner for owner in OWNERS if any(lines[owner])]
    moments = [1000 * moment for moment in lines["seconds"]]
    heights, shades = [lines[owner] for owner in owners], [COLORS[owner] for owner in owners]
    areas = axes.stackplot(moments, heights, colors=shades, step="post", linewidth=0)
    for begin, end, name in phases:  # a ribbon above the curve
        color = COLORS.get(name, NAMELESS)
        axes.axvspan(1000 * begin, 1000 * end, ymin=0.965, color=color, linewidth=0)
    axes.set_ylim(0, 1.12 * peak["total_mib"])
    axes.set_xlim(0, moments[-1])
    axes.set_xlabel("ms (under the profiler)")
    axes.set_ylabel("MiB")
    peaks = f"peak {mebibytes(peak['total_mib'])} during {part(profile, peak['phase'])}"
    axes.set_title(f"{profile['name']}: tensors in memory, {peaks}", fontsize=10, wrap=True)
    words = [OWNERS[owner] for owner in owners[::-1]]
    title = "memory, by who took it"
    figure.legend(areas[::-1], words, fontsize=8, title=title, loc="outside right upper")
    drawn = {name for _, _, name in phases}
    ribbons = [
        Patch(label=part(profile, name), color=COLORS.get(name, NAMELESS))
        for name in profile["step"]["parts_s"]
        if name in drawn
    ]
    figure.legend(handles=ribbons, fontsize=8, title="ribbon: the step", loc="outside right lower")
    _save(figure, path, grid="y")


def _save(figure: Figure, path: Path, grid: str) -> None:
    for axes in figure.axes:
        axes.grid(True, axis=grid, color="0.92")  # type: ignore[arg-type]
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
