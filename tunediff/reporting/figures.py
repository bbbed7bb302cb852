"""Figures of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from tunediff.cli import number, seconds
from tunediff.report import study_figure, study_table
from tunediff.reporting.comparison import Comparison, Group, compare
from tunediff.reporting.results import Results

LINE_STYLES = ("-", "--", ":", "-.")
"""One for each ten colours."""


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
    positive = all((point.get(found.metric) or 0.0) > 0 for trial in found.trials for point in trial.points)
    _label_axes(axes, found, positive)
    about = f"{_protocol(found)}; " if found.metric == "frechet" else ""
    axes.set_title(f"{found.folder.name}: {about}grey: other trials", fontsize=10)
    if base is not None or best is not None:
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def comparison(found: Results, compared: Comparison, path: Path) -> None:
    """The objective against training seconds: mean over the seeds and ± one standard deviation. Writes a PNG.

    Where two knobs were varied there is one panel for each value of the one with fewer; the baseline is in all of them.
    """
    shown = [group for group in compared.groups if group.curve(found.metric)]
    panel_knob, line_knob = _panels_and_lines(shown) or (None, None)
    values = _values(shown, panel_knob) if panel_knob is not None else [""]
    figure, panels = plt.subplots(
        nrows=1,
        ncols=len(values),
        sharey=True,
        squeeze=False,
        figsize=(4.2 * len(values) + 3.3, 5),
        layout="constrained",
    )
    positive = all(point[found.metric] > point["sd"] for group in shown for point in group.curve(found.metric))
    named = [(group, group.name if line_knob is None else _line_name(group, shown, line_knob)) for group in shown]
    styles = {name: _style(i) for i, name in enumerate(dict.fromkeys(name for group, name in named if group.changed))}
    lines: dict[str, Line2D] = {}
    for axes, value in zip(panels[0], values, strict=True):
        for group, name in named:
            if not group.changed:
                style: dict[str, Any] = {"color": "black", "linewidth": 2.2, "zorder": 3}
                if panel_knob is not None:
                    name = f"baseline ({name}, {number(group.knobs[panel_knob])})"
            elif panel_knob is None or number(group.knobs[panel_knob]) == value:
                style = styles[name]
            else:
                continue
            points = group.curve(found.metric)
            seconds, mean, sd = (np.array([point[key] for point in points]) for key in ("train_s", found.metric, "sd"))
            (line,) = axes.plot(seconds, mean, marker="o", markersize=3.5, **style)
            axes.fill_between(seconds, mean - sd, mean + sd, color=style["color"], alpha=0.12, linewidth=0)
            lines.setdefault(name, line)
        _label_axes(axes, found, positive)
        axes.label_outer()
        if panel_knob is not None:
            axes.set_title(f"{panel_knob} = {value}", fontsize=10)
    about = f"{_protocol(found)}, {compared.seeds} seeds: mean ± sd"
    figure.suptitle(f"{found.folder.name}: {about}", fontsize=11)
    if lines:
        order = sorted(lines, key=lambda name: list(styles).index(name) if name in styles else -1)  # baseline first
        figure.legend(
            [lines[name] for name in order],
            order,
            loc="outside right upper",
            title=line_knob,
            fontsize=9,
            frameon=False,
        )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_all(found: Results) -> dict[str, Path]:
    """Write the tables and figures of a search into its folder; returns their paths by file name.

    trials.csv, curves.csv and curves.png; of two objectives also pareto.csv; of several seeds also comparison.csv,
    comparison.md and comparison.png; of a study also study.csv, study.md and, where it has one, the figure study.png.
    """
    written = {name: found.folder / name for name in ("trials.csv", "curves.csv", "curves.png")}
    found.table().to_csv(written["trials.csv"], index=False)
    found.curves().to_csv(written["curves.csv"], index=False)
    curves(found, written["curves.png"])
    if found.space.cost is not None:
        written["pareto.csv"] = found.folder / "pareto.csv"
        found.pareto_table().to_csv(written["pareto.csv"], index=False)
    if found.space.seeds > 1:
        compared = compare(found)
        written |= {name: found.folder / name for name in ("comparison.csv", "comparison.md", "comparison.png")}
        compared.table().to_csv(written["comparison.csv"], index=False)
        lines = [
            f"# {found.folder.name}",
            "",
            compared.markdown(),
            "",
            *(f"- {said}" for said in compared.conclusions()),
        ]
        written["comparison.md"].write_text("\n".join(lines) + "\n", encoding="utf-8")
        comparison(found, compared, written["comparison.png"])
    if found.space.study is not None:
        written |= study(found, study_table.table(found))
    return written


def study(found: Results, table: study_table.Table) -> dict[str, Path]:
    """Write the table and the figure of a study; returns their paths by file name."""
    names = ["study.csv", "study.md", *(["study.png"] if table.study.has_figure else [])]
    written = {name: found.folder / name for name in names}
    table.frame().to_csv(written["study.csv"], index=False)
    about = measured_on(found)
    lines = [f"# {table.study.title or found.folder.name}", "", *([about + ".", ""] if about else []), table.markdown()]
    written["study.md"].write_text("\n".join(lines) + "\n", encoding="utf-8")
    if table.study.has_figure:
        study_figure.draw(table, about, written["study.png"])
    return written


def measured_on(found: Results) -> str:
    """Device, cores, torch and budget of the trials, in a line; '' before the first one began."""
    known = next((trial.environment for trial in found.trials if "device" in trial.environment), None)
    if known is None:
        return ""
    where = known.get("cpu", "CPU") if known["device"] == "cpu" else known["device"]
    torch = known.get("versions", {}).get("torch", "?")
    budget = seconds(found.space.budget.per_trial_s)
    return f"{where}, {known.get('cpu_cores', '?')} CPU cores, torch {torch}, {budget} training each"


def _label_axes(axes: Axes, found: Results, positive: bool) -> None:
    """Names, limits and the scale of the objective: logarithmic for a Fréchet distance that is `positive`."""
    axes.set_xlabel("training seconds")
    axes.set_xlim(left=0)
    axes.set_ylabel(found.label if found.metric != "frechet" else f"{found.label}, lower is better")
    if positive and found.metric == "frechet":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 4, 6)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))  # 0.6 and 10, not 6×10⁻¹ and 10¹
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(True, which="both", color="0.92")


def _protocol(found: Results) -> str:
    """How the objective was measured: `1,000 images, DDIM 20 steps`."""
    protocol = found.space.baseline.evaluation
    steps = f" {protocol.steps} steps" if protocol.sampler == "ddim" else ""
    return f"{protocol.images:,} images, {protocol.sampler.upper()}{steps}"


def _style(place: int) -> dict[str, Any]:
    """Ten colours, then the same in another line style."""
    return {"color": plt.get_cmap("tab10")(place % 10), "linewidth": 1.5, "linestyle": LINE_STYLES[place // 10 % 4]}


def _values(groups: list[Group], knob: str) -> list[str]:
    """The values of a knob in words, in the order of their first use."""
    return list(dict.fromkeys(number(group.knobs[knob]) for group in groups))


def _varied(groups: list[Group]) -> list[str]:
    """Knobs that every configuration has and that have several values."""
    common = [name for name in groups[0].knobs if all(name in group.knobs for group in groups)] if groups else []
    return [name for name in common if len(_values(groups, name)) > 1]


def _panels_and_lines(groups: list[Group]) -> tuple[str, str] | None:
    """Where two knobs were varied: the one with fewer values makes the panels, the other the lines."""
    if len(varied := _varied(groups)) != 2:
        return None
    panels, lines = sorted(varied, key=lambda name: len(_values(groups, name)))
    return panels, lines


def _line_name(group: Group, groups: list[Group], lines: str) -> str:
    """The value of the knob that the lines show, and of knobs that only some configurations have."""
    special = {k: v for k, v in group.knobs.items() if not all(k in other.knobs for other in groups)}
    words = [f"{name.rpartition('.')[2]}={number(value)}" for name, value in special.items()]
    return ", ".join([number(group.knobs[lines]), *words])
