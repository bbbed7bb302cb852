"""A profile as tables, sentences and figures, from the dictionary that was measured."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, also where there is a screen
import matplotlib.pyplot as plt
from matplotlib import ticker
from matplotlib.patches import Patch

from tunediff.cli import knobs, number, seconds
from tunediff.training.phases import PHASES

IN_WORDS = {
    "data_wait": "waiting for images", "host_to_device": "images to the device", "sampler": "timesteps and noise",
    "forward": "forward", "backward": "backward", "optimizer": "update", "ema": "weight average", "other": "other",
}  # fmt: skip
STATIC_IN_WORDS = {
    "parameters": "weights", "optimizer": "optimizer state", "ema": "weight average", "images": "images",
}  # fmt: skip
OWNERS_IN_WORDS = {
    "static": "what stays: weights, optimizer, …", "batch": "batch and noise", "forward": "activations (from forward)",
    "backward": "gradients (from backward)", "rest": "rest",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the report: sentences, then a table whose first column is words and the others numbers."""

    title: str
    sentences: list[str] = dataclasses.field(default_factory=list)
    header: Sequence[str] = ()
    rows: Sequence[tuple[str, ...]] = ()

    def text(self) -> str:
        """For a terminal."""
        rows = [tuple(self.header), *self.rows] if self.rows else []
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.header))] if rows else []
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.title}:", *(f"  {line}" for line in [*self.sentences, *lines])])

    def markdown(self) -> str:
        """For a file."""
        lines = [f"## {self.title}", ""]
        for sentence in self.sentences:
            lines += [sentence, ""]
        if self.rows:
            align = ["---", *["---:"] * (len(self.header) - 1)]
            escaped = [tuple(cell.replace("|", "\\|") for cell in row) for row in (self.header, align, *self.rows)]
            lines += [*(f"| {' | '.join(row)} |" for row in escaped), ""]
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- numbers
def milliseconds(value: float) -> str:
    """`12.3 ms`, `3.98 s`."""
    return f"{number(1000.0 * value)} ms" if value < 1 else f"{number(float(value))} s"


def percent(value: float) -> str:
    """`22 %`, `0.4 %`."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.0f} %" if value >= 0.095 else f"{100 * value:.1f} %"


def mebibytes(value: float) -> str:
    """`1,234 MiB`, `0.8 MiB`."""
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


def rate(value: float) -> str:
    """`4,012`, `3.1`."""
    return f"{value:,.0f}" if value >= 100 else number(float(value))


# ------------------------------------------------------------------------------------------------------------ sections
def sections(found: dict[str, Any]) -> list[Section]:
    """All parts of the report, in reading order."""
    return [*_measured(found), _advice(found)]


def _measured(found: dict[str, Any]) -> Iterator[Section]:
    yield _summary(found)
    yield _step(found)
    yield _operations(found)
    yield _feeding(found)
    yield _memory(found)
    if found["sweep"] is not None:
        yield _sweep(found)
    yield _compile(found)


def _summary(found: dict[str, Any]) -> Section:
    step, device = found["step"], found["device"]
    sd = "" if step["images_per_s_sd"] is None else f" ± {rate(step['images_per_s_sd'])}"
    threads = "1 thread" if device["threads"] == 1 else f"{device['threads']} threads"
    lines = [
        f"{device['name']}, {threads}; batch {step['batch_size']}, {step['steps']} steps measured",
        f"{rate(step['images_per_s'])}{sd} images/s, {milliseconds(step['step_s'])} per step; the first step of the "
        f"process took {milliseconds(found['first']['first_step_s'])}",
    ]
    if "peak_share" in step:
        lines.append(
            f"{number(step['flops_per_image'] / 1e9)} GFLOP per image: {percent(step['peak_share'])} of "
            f"{number(step['peak_flops_per_s'] / 1e12)} TFLOP/s, the fastest matrix product measured here"
        )
    if found["first"]["compile_s"]:
        lines.append(f"compiling took {seconds(found['first']['compile_s'])}, less where a cache had it already")
    if "device_busy_share" in found:
        lines.append(f"the GPU computes {percent(found['device_busy_share'])} of the time")
    if found["workers"] > 1:
        lines.append(
            f"this is one of {found['workers']} training workers with its part of the batch; averaging gradients "
            "between them is not in it"
        )
    if step["disturbed"]:
        lines.append("others used the machine meanwhile: measure again when it is quiet, these numbers are not its own")
    return Section("profile", lines)


def _step(found: dict[str, Any]) -> Section:
    step = found["step"]
    parts = sorted(step["parts_s"].items(), key=lambda part: -part[1])
    rows = [(IN_WORDS[name], milliseconds(spent), percent(spent / step["step_s"])) for name, spent in parts]
    return Section("where the step goes", header=("part", "time", "share"), rows=rows)


def _operations(found: dict[str, Any]) -> Section:
    table = found["operations"]
    device = "GPU" if found["device"]["type"] == "cuda" else "CPU"
    rows = [
        (
            _short(row["operation"]),
            number(row["calls_per_step"]),
            milliseconds(row["self_s_per_step"]),
            percent(row["share"]),
        )
        for row in table["longest"]
    ]
    sentence = f"{device} time of their own, under the profiler, which slows small ones down"
    return Section(
        f"the ten longest {table['kind']}", [sentence], ("operation", "calls per step", "per step", "share"), rows
    )


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _feeding(found: dict[str, Any]) -> Section:
    return Section("the loader and the model", [feeding(found)])


def feeding(found: dict[str, Any]) -> str:
    """Loader against model, in words."""
    if (loader := found["loader_alone"]) is None:
        return "loader.resident is on: the images lie on the device, and the loader plays no part"
    if found["model_alone"] is None:
        return f"alone, the loader gives {rate(loader['images_per_s'])} images/s; the device cannot hold all images"
    eaten, ratio = found["model_alone"]["images_per_s"], found["feed_ratio"]
    said = (
        f"alone, the loader gives {rate(loader['images_per_s'])} images/s and the model takes {rate(eaten)} "
        f"images/s: the loader can feed {f'{ratio:.1f}' if ratio < 100 else rate(ratio)}× what the model eats"
    )
    if found["config"]["loader.workers"] == 0:
        said += f"; with loader.workers=0 they take turns, the loader {percent(1 / (1 + ratio))} of the time"
    return said


def _memory(found: dict[str, Any]) -> Section:
    step, memory = found["step"], found["memory"]
    cuda = found["device"]["type"] == "cuda"
    what = "allocated on the GPU" if cuda else "resident set of the process, libraries and images included"
    lines = [f"peak {mebibytes(step['peak_memory_mib'])} ({what})"]
    if cuda:
        lines.append(f"reserved {mebibytes(step['peak_reserved_mib'])}, host {mebibytes(step['peak_host_memory_mib'])}")
    static, peak = memory["static"], memory["peak"]
    rows = [(STATIC_IN_WORDS[name], mebibytes(size)) for name, size in static.items() if size]
    if peak is not None:
        lines.append(f"tensors at their peak, during {IN_WORDS[peak['phase']]}: {mebibytes(peak['total_mib'])}")
        if (more := peak["static_mib"] - sum(static.values())) > 0.5:
            rows.append(("other, from before the step", mebibytes(more)))
        rows += [(OWNERS_IN_WORDS[name], mebibytes(peak[f"{name}_mib"])) for name in list(OWNERS_IN_WORDS)[1:]]
    if found["snapshot"] is None:
        lines.append("no snapshot of the allocator: that is for CUDA")
    return Section("memory", lines, ("tensors", "size"), rows)


def _sweep(found: dict[str, Any]) -> Section:
    sweep = found["sweep"]
    key = "peak_reserved_mib" if found["device"]["type"] == "cuda" else "peak_memory_mib"
    rows = [
        (
            str(row["batch_size"]),
            rate(row["images_per_s"]),
            milliseconds(row["step_s"]),
            mebibytes(row[key]),
            "disturbed" if row["disturbed"] else "",
        )
        for row in sweep["rows"]
    ]
    lines = [f"ended: {sweep['stopped']}"]
    if sweep["limit_batch"]:
        lines.append(
            f"memory ({mebibytes(sweep['memory_limit_mib'])} may be taken) would end at a batch of about "
            f"{sweep['limit_batch']:,}, on a straight line through the two largest"
        )
    return Section("batch sizes", lines, ("batch", "images/s", "per step", "peak memory", ""), rows)


def _compile(found: dict[str, Any]) -> Section:
    return Section("torch.compile", [compiling(found["compile"])])


def compiling(cost: dict[str, Any]) -> str:
    """The break-even of compiling, in words."""
    if "skipped" in cost:
        return f"not measured: {cost['skipped']}"
    if "failed" in cost:
        return f"mode {cost['mode']} failed: {cost['failed']}"
    said = (
        f"mode {cost['mode']}: {rate(cost['eager_images_per_s'])} → {rate(cost['compiled_images_per_s'])} images/s "
        f"({cost['speedup']:.2f}×), compiling takes {seconds(cost['compile_s'])}: "
    )
    paid = cost["break_even"]
    said += "never pays" if paid is None else f"pays after {seconds(paid['seconds'])} / {paid['images']:,.0f} images"
    said += "; the difference is within the noise" if cost["within_noise"] else ""
    return said + ("; others used the machine meanwhile" if cost["disturbed"] else "")


def _advice(found: dict[str, Any]) -> Section:
    lines = []
    if found["step"]["disturbed"]:
        lines.append("(measured while others used the machine: rather guesses than findings)")
    for place, advice in enumerate(found["advice"], 1):
        lines.append(f"{place}. {knobs(advice['change'])}: {advice['reason']}{_bound(advice)}")
    return Section("what to try next", lines if found["advice"] else [*lines, "nothing stands out"])


def _bound(advice: dict[str, Any]) -> str:
    if (tried := advice.get("tried")) is not None:
        if "failed" in tried:
            return f"; tried: {tried['failed']}"
        noise = ", within the noise" if tried["within_noise"] else ""
        return f"; tried: {tried['gain']:.2f}×{noise}"
    if advice["bound"] is None:
        return ""
    return f"; measured {advice['bound']:.2f}×" if advice["measured"] else f"; at most {advice['bound']:.2f}×"


# --------------------------------------------------------------------------------------------------------------- files
def write_all(found: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Write tables, figures, the report and all numbers into `folder`; returns their paths by what they are."""
    names = {
        "report": "profile.md", "numbers": "profile.json", "operations": "operations.csv",
        "operations_figure": "operations.png", "step_figure": "step.png",
    }  # fmt: skip
    _csv(found["operations"]["longest"], folder / "operations.csv")
    operations(found, folder / "operations.png")
    step(found, folder / "step.png")
    lines = (found["memory"].get("timeline") or {}).items()
    if lines:
        names |= {"memory": "memory.csv", "memory_figure": "memory.png"}
        columns = [(name, values) for name, values in lines]
        _csv(
            [
                dict(zip((name for name, _ in columns), row, strict=True))
                for row in zip(*(v for _, v in columns), strict=True)
            ],
            folder / "memory.csv",
        )
        memory(found, folder / "memory.png")
    if found["sweep"] is not None and found["sweep"]["rows"]:
        names |= {"batch_sweep": "batch_sweep.csv", "batch_sweep_figure": "batch_sweep.png"}
        _csv(found["sweep"]["rows"], folder / "batch_sweep.csv")
        sweep(found, folder / "batch_sweep.png")
    written = {what: folder / name for what, name in names.items()}
    # The timeline is in memory.csv; what is read by eye stays readable.
    plain = found | {"memory": {k: v for k, v in found["memory"].items() if k not in ("timeline", "phases")}}
    written["numbers"].write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    written["report"].write_text(markdown(found, [path.name for path in written.values()]), encoding="utf-8")
    return written


def markdown(found: dict[str, Any], files: list[str]) -> str:
    """The report as a file, with those of the figures that are among `files`."""
    figures = {
        "where the step goes": "step.png", "batch sizes": "batch_sweep.png", "memory": "memory.png",
        f"the ten longest {found['operations']['kind']}": "operations.png",
    }  # fmt: skip
    environment = found["environment"]
    lines = [
        f"# Profile of {found['name']}",
        "",
        f"`{found['command']}`",
        "",
        f"{environment['cpu']}, {environment['cpu_cores']} cores, {environment['memory_gib']} GiB; "
        f"torch {environment['versions']['torch']}, Python {environment['python']}",
        "",
    ]
    for section in sections(found):
        lines.append(section.markdown())
        if (figure := figures.get(section.title)) in files:
            lines += [f"![{section.title}]({figure})", ""]
    lines += [
        f"`{found['trace']}` opens in Perfetto (ui.perfetto.dev). On a GPU the parts of the step are NVTX ranges as "
        "well, for Nsight Systems: `nsys profile -t cuda,nvtx python -m tunediff.train …`.",
        "",
    ]
    if found["snapshot"] is not None:
        lines += [f"`{found['snapshot']}` opens in pytorch.org/memory_viz.", ""]
    return "\n".join(lines)


def _csv(rows: list[dict[str, Any]], path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


# ------------------------------------------------------------------------------------------------------------- figures
_COLORS = {
    "data_wait": "tab:red", "host_to_device": "tab:pink", "sampler": "tab:purple", "forward": "tab:blue",
    "backward": "tab:orange", "optimizer": "tab:green", "ema": "tab:olive", "other": "0.5",
}  # fmt: skip
_OWNER_COLORS = {
    "static": "0.8", "batch": "tab:purple", "forward": "tab:blue", "backward": "tab:orange", "rest": "tab:green",
}  # fmt: skip


def step(found: dict[str, Any], path: Path) -> None:
    """Milliseconds of each part of the step. Writes a PNG."""
    parts, whole = found["step"]["parts_s"], found["step"]["step_s"]
    names = [name for name in (*PHASES, "other") if name in parts][::-1]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    bars = axes.barh(
        [IN_WORDS[name] for name in names],
        [1000 * parts[name] for name in names],
        color=[_COLORS[name] for name in names],
    )
    axes.bar_label(
        bars, [f"{milliseconds(parts[name])}, {percent(parts[name] / whole)}" for name in names], padding=4, fontsize=9
    )
    axes.set_xlim(right=1.22 * 1000 * max(parts.values()))
    axes.set_xlabel("ms per step")
    axes.set_title(
        f"{found['name']}: a step of {milliseconds(whole)}, batch {found['step']['batch_size']}, "
        f"{rate(found['step']['images_per_s'])} images/s",
        fontsize=10,
    )
    _finish(axes, figure, path)


def operations(found: dict[str, Any], path: Path) -> None:
    """The ten longest operations. Writes a PNG."""
    rows = found["operations"]["longest"][::-1]
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    bars = axes.barh(
        range(len(rows)), [1000 * row["self_s_per_step"] for row in rows], color="tab:blue"
    )  # names may be equal once shortened
    axes.set_yticks(range(len(rows)), [_short(row["operation"], 44) for row in rows], fontsize=8)
    labels = [f"{percent(row['share'])}, {number(row['calls_per_step'])}×" for row in rows]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlim(right=1.2 * 1000 * max((row["self_s_per_step"] for row in rows), default=1.0))
    device = "GPU" if found["device"]["type"] == "cuda" else "CPU"
    axes.set_xlabel(f"ms of {device} time per step, their own (share, calls per step)")
    axes.set_title(f"{found['name']}: the ten longest {found['operations']['kind']}", fontsize=10)
    _finish(axes, figure, path)


def memory(found: dict[str, Any], path: Path) -> None:
    """Tensors' memory over the traced steps, by the phase that allocated it. Writes a PNG."""
    lines, peak = found["memory"]["timeline"], found["memory"]["peak"]
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    times = [1000 * moment for moment in lines["seconds"]]
    owners = [owner for owner in OWNERS_IN_WORDS if any(lines[f"{owner}_mib"])]
    axes.stackplot(
        times,
        [lines[f"{owner}_mib"] for owner in owners],
        labels=[OWNERS_IN_WORDS[owner] for owner in owners],
        colors=[_OWNER_COLORS[owner] for owner in owners],
        step="post",
        linewidth=0,
    )
    top = 1.12 * peak["total_mib"]
    for begin, end, name in found["memory"]["phases"]:  # a ribbon above the curve says what was going on
        axes.axvspan(1000 * begin, 1000 * end, ymin=0.965, color=_COLORS[name], linewidth=0)
    axes.set_ylim(0, top)
    axes.set_xlim(0, times[-1])
    axes.set_xlabel("ms (under the profiler)")
    axes.set_ylabel("MiB")
    axes.set_title(
        f"{found['name']}: tensors in memory, peak {mebibytes(peak['total_mib'])} during {IN_WORDS[peak['phase']]}",
        fontsize=10,
    )
    names = dict.fromkeys(name for _, _, name in found["memory"]["phases"])
    ribbons = [Patch(color=_COLORS[name]) for name in PHASES if name in names]
    areas, words = axes.get_legend_handles_labels()
    figure.legend(areas[::-1], words[::-1], loc="outside right upper", title="memory, by who took it", fontsize=8)
    figure.legend(
        ribbons,
        [IN_WORDS[name] for name in PHASES if name in names],
        loc="outside right lower",
        title="ribbon: the step",
        fontsize=8,
    )
    _finish(axes, figure, path, grid="y")


def sweep(found: dict[str, Any], path: Path) -> None:
    """images/s and peak memory against the batch size. Writes a PNG."""
    rows, limit = found["sweep"]["rows"], found["sweep"]["memory_limit_mib"]
    key = "peak_reserved_mib" if found["device"]["type"] == "cuda" else "peak_memory_mib"
    sizes = [row["batch_size"] for row in rows]
    figure, (left, right) = plt.subplots(ncols=2, figsize=(9, 3.8), layout="constrained")
    left.plot(sizes, [row["images_per_s"] for row in rows], marker="o")
    left.set_ylabel("images/s")
    right.plot(sizes, [row[key] for row in rows], marker="o", color="tab:orange")
    right.set_ylabel("peak memory (MiB)")
    if limit < 4 * max(row[key] for row in rows):  # else it would flatten the curve
        right.axhline(limit, color="tab:red", linestyle="--", linewidth=1)
        right.annotate("may be taken", (sizes[0], limit), xytext=(0, 3), textcoords="offset points", fontsize=8)
    for axes in (left, right):
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(ticker.FixedLocator(sizes))
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.axvline(found["step"]["batch_size"], color="0.6", linestyle=":", linewidth=1)
        axes.set_xlabel("batch (dotted: as configured)")
        axes.grid(True, color="0.92")
        axes.set_axisbelow(True)
    figure.suptitle(f"{found['name']}: batch sizes", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _finish(axes: Any, figure: Any, path: Path, grid: str = "x") -> None:
    axes.grid(True, axis=grid, color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
