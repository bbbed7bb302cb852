"""A profile in words, and its files: the report, all numbers, the longest operations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.core import text
from tunediff.core.files import write_csv
from tunediff.core.point import one_of
from tunediff.core.text import number, seconds

PARTS = {
    "data_wait": "waiting for {unit}",
    "host_to_device": "{unit} to the device",
    "optimizer": "update",
}
"""Labels of parts of the step whose names say too little."""
STATIC = {"parameters": "weights", "optimizer": "optimizer state", "samples": "{unit}"}
COLUMNS = ("operation", "calls", "self_s", "total_s", "share")
"""Of an operation, in all profiled steps; `self_s`: without the operations that it calls, on a GPU
the device's; `share`: of the self seconds of all operations."""
OWNERS = {
    "batch_mib": "batch",
    "forward_mib": "activations (from forward)",
    "backward_mib": "gradients (from backward)",
    "rest_mib": "rest",
}


# ---- numbers
def milliseconds(value: float) -> str:
    """Return seconds in words: `12.3 ms`, `3.98 s`."""
    return f"{number(1000.0 * value)} ms" if value < 1 else f"{number(float(value))} s"


def percent(value: float) -> str:
    """Return a share in words: `22 %`, `0.4 %`."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{100 * value:.0f} %" if value >= 0.095 else f"{100 * value:.1f} %"


def mebibytes(value: float) -> str:
    """Return MiB in words: `1,234 MiB`, `0.8 MiB`."""
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.1f} MiB"


def rate(value: float) -> str:
    """Return samples per second in words: `4,012`, `3.1`."""
    return f"{value:,.0f}" if value >= 100 else number(float(value))


# ---- sections
def report(profile: Mapping[str, Any]) -> str:
    """Return all sections of the report as text, in reading order."""
    sections: dict[str, Sequence[str]] = {
        "profile": _summary(profile),
        "where the step goes": _step(profile),
        "the ten longest operations": _operations(profile),
        "memory": _memory(profile),
        "what to try next": [
            f"{rank}. {text.knobs(advice['change'])}: {advice['reason']}"
            for rank, advice in enumerate(profile["advice"], 1)
        ]
        or ["nothing stands out"],
    }
    return "\n\n".join(
        "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
        for title, lines in sections.items()
    )


def _summary(profile: Mapping[str, Any]) -> list[str]:
    step, device, first = profile["step"], profile["device"], profile["first"]
    unit, sd = profile["unit"], step["samples_per_s_sd"]
    lines = [
        f"{device['name']}, {text.pluralize(device['threads'], 'thread')}; batch"
        f" {step['batch_size']}, {step['steps']} steps measured",
        f"{rate(step['samples_per_s'])}{'' if sd is None else f' ± {rate(sd)}'} {unit}/s,"
        f" {milliseconds(step['step_s'])} per step;"
        f" the first step of the process took {milliseconds(first['first_step_s'])}",
    ]
    if "peak_share" in step:
        lines.append(
            f"{number(step['flops_per_sample'] / 1e9)} GFLOP per {one_of(unit)}:"
            f" {percent(step['peak_share'])} of {number(step['peak_flops_per_s'] / 1e12)} TFLOP/s,"
            " the fastest matrix product measured here"
        )
    if (loader := profile["loader_samples_per_s"]) is not None:
        lines.append(f"alone, the loader gives {rate(loader)} {unit}/s")
    if first["compile_s"]:
        taken = seconds(first["compile_s"])
        lines.append(f"compiling took {taken}, less where a cache had it already")
    if "device_busy_share" in profile:
        lines.append(f"the GPU computes {percent(profile['device_busy_share'])} of the time")
    if profile["workers"] > 1:
        lines.append(
            f"this is one of {profile['workers']} training workers with its part of the batch;"
            " averaging gradients between them is not in it"
        )
    if step["disturbed"]:
        lines.append("others used the machine meanwhile: measure again when it is quiet")
    return lines


def _label(profile: Mapping[str, Any], part: str) -> str:
    """Return the label of a part of the step."""
    label: str = PARTS.get(part, profile["names"].get(part, part))
    return label.format(unit=profile["unit"])


def _step(profile: Mapping[str, Any]) -> list[str]:
    step_s, parts = profile["step"]["step_s"], profile["step"]["parts_s"]
    rows = [("part", "time", "share")]
    for name, spent in sorted(parts.items(), key=lambda part: -part[1]):
        rows.append((_label(profile, name), milliseconds(spent), percent(spent / step_s)))
    return text.table(rows)


def _operations(profile: Mapping[str, Any]) -> list[str]:
    device, steps = profile["device"]["type"].upper(), profile["traced_steps"]
    rows = [("operation", "calls per step", "per step", "share")]
    for row in profile["operations"]:
        name, calls = text.truncate(row["operation"], 60), number(row["calls"] / steps)
        rows.append((name, calls, milliseconds(row["self_s"] / steps), percent(row["share"])))
    sentence = f"{device} self time, under the profiler, which slows small ones down"
    return [sentence, *text.table(rows)]


def _memory(profile: Mapping[str, Any]) -> list[str]:
    step, static, peak = profile["step"], profile["memory"]["static"], profile["memory"]["peak"]
    unit = profile["unit"]
    if "peak_reserved_mib" in step:
        lines = [
            f"peak {mebibytes(step['peak_memory_mib'])} (allocated on the GPU)",
            f"reserved {mebibytes(step['peak_reserved_mib'])},"
            f" host {mebibytes(step['peak_host_memory_mib'])}",
        ]
    else:
        scope = f"resident set of the process, libraries and {unit} included"
        lines = [f"peak {mebibytes(step['peak_memory_mib'])} ({scope})"]
    sizes = {
        STATIC.get(name, name).format(unit=unit): size
        for name, size in static.items()
        if size >= 0.05
    }
    if peak is not None:
        during = f"tensors at their peak, during {_label(profile, peak['phase'])}"
        lines.append(f"{during}: {mebibytes(peak['total_mib'])}")
        if (before := peak["static_mib"] - sum(static.values())) > 0.5:
            sizes["other, from before the step"] = before
        sizes |= {words: peak[name] for name, words in OWNERS.items()}
    rows = [("tensors", "size"), *((name, mebibytes(size)) for name, size in sizes.items())]
    return [*lines, *text.table(rows)]


# ---- files
def write_all(profile: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write the profile into `folder`; return the paths of its files by what they are."""
    paths = {"report": folder / "profile.md", "numbers": folder / "profile.json"}
    machine = profile["environment"]
    paths["report"].write_text(
        f"# Profile of {profile['name']}\n\n`{profile['command']}`\n\n"
        f"{machine['cpu']}, {machine['cpu_cores']} cores, {machine['memory_gib']} GiB;"
        f" torch {machine['versions']['torch']}, Python {machine['python']}\n\n"
        f"```text\n{report(profile)}\n```\n\n"
        f"`{profile['trace']}` opens in Perfetto (ui.perfetto.dev). On a GPU the parts of the step"
        " are NVTX ranges as well, for Nsight Systems: `nsys profile -t cuda,nvtx python -m"
        " tunediff.train …`.\n",
        encoding="utf-8",
    )
    content = json.dumps(text.versioned(profile), indent=1, allow_nan=False)
    paths["numbers"].write_text(content + "\n", encoding="utf-8")
    return paths | {"operations": write_operations(profile["operations"], folder)}


def write_operations(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write operations into `operations.csv`, and return its path."""
    path = folder / "operations.csv"
    write_csv(path, COLUMNS, (row.values() for row in rows), digits=6)
    return path
