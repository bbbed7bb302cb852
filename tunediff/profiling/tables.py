"""A profile in words: sections of sentences and tables, for a terminal and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunediff.core.point import one_of
from tunediff.core.text import knobs, number, seconds, table
from tunediff.profiling import binding
from tunediff.profiling.result import Owner, Profile, held_mib

PARTS = {
    "data_wait": "waiting for {unit}",
    "host_to_device": "{unit} to the device",
    "optimizer": "update",
}
"""Labels of parts of the step whose names say too little."""
STATIC = {"parameters": "weights", "optimizer": "optimizer state", "samples": "{unit}"}
OWNERS: dict[Owner, str] = {
    "static_mib": "what stays: weights, optimizer, …",
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


def part(profile: Profile, name: str) -> str:
    """Return the label of a part of the step."""
    return PARTS.get(name, profile["names"].get(name, name)).format(unit=profile["unit"])


# ---- sections
@dataclasses.dataclass(frozen=True)
class ProfileSection:
    """A part of the report: sentences, then a table with words in its first column."""

    title: str
    sentences: Sequence[str] = ()
    rows: Sequence[tuple[str, ...]] = ()  # the first one is the header

    def text(self) -> str:
        """Return the section for a terminal."""
        lines = [*self.sentences, *(table(self.rows) if len(self.rows) > 1 else [])]
        return "\n".join([f"{self.title}:", *(f"  {line}" for line in lines)])

    def markdown(self) -> str:
        """Return the section as Markdown."""
        lines = [f"## {self.title}\n", *(f"{sentence}\n" for sentence in self.sentences)]
        if len(self.rows) > 1:
            head, *rows = self.rows
            for row in (head, ("---", *["---:"] * (len(head) - 1)), *rows):
                cells = [cell.replace("|", r"\|") for cell in row]
                lines.append(f"| {' | '.join(cells)} |")
            lines.append("")
        return "\n".join(lines)


def sections(profile: Profile) -> list[ProfileSection]:
    """Return all sections of the report, in reading order."""
    return [
        _summary(profile),
        _step(profile),
        _operations(profile),
        ProfileSection("the loader", [feeding(profile)]),
        _memory(profile),
        _advice(profile),
    ]


def _summary(profile: Profile) -> ProfileSection:
    step, device, first = profile["step"], profile["device"], profile["first"]
    unit, sd = profile["unit"], step["samples_per_s_sd"]
    threads = "1 thread" if device["threads"] == 1 else f"{device['threads']} threads"
    lines = [
        f"{device['name']}, {threads}; batch {step['batch_size']}, {step['steps']} steps measured",
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
    lines.append(binding.of_profile(profile))
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
    return ProfileSection("profile", lines)


def _step(profile: Profile) -> ProfileSection:
    step_s, parts = profile["step"]["step_s"], profile["step"]["parts_s"]
    rows = [("part", "time", "share")]
    for name, spent in sorted(parts.items(), key=lambda part: -part[1]):
        rows.append((part(profile, name), milliseconds(spent), percent(spent / step_s)))
    return ProfileSection("where the step goes", [], rows)


def _operations(profile: Profile) -> ProfileSection:
    device = "GPU" if profile["device"]["type"] == "cuda" else "CPU"
    rows = [("operation", "calls per step", "per step", "share")]
    for row in profile["operations"]["longest"]:
        name, calls = row["operation"], number(row["calls_per_step"])
        name = name if len(name) <= 60 else f"{name[:59]}…"
        rows.append((name, calls, milliseconds(row["self_s_per_step"]), percent(row["share"])))
    sentence = f"{device} self time, under the profiler, which slows small ones down"
    return ProfileSection(f"the ten longest {profile['operations']['kind']}", [sentence], rows)


def feeding(profile: Profile) -> str:
    """Return a sentence on the rate of the loader alone."""
    loader, unit = profile["loader_alone"], profile["unit"]
    if profile["config"]["loader.resident"]:
        return f"loader.resident is on: the {unit} lie on the device, and the loader plays no part"
    if loader is None:
        return "not measured: the workload has its own loader"
    alone, both = loader["samples_per_s"], profile["step"]["samples_per_s"]
    return f"alone, the loader gives {rate(alone)} {unit}/s; the training takes {rate(both)}"


def _memory(profile: Profile) -> ProfileSection:
    step, static, peak = profile["step"], profile["memory"]["static"], profile["memory"]["peak"]
    unit = profile["unit"]
    if profile["device"]["type"] == "cuda":
        lines = [
            f"peak {mebibytes(step['peak_memory_mib'])} (allocated on the GPU)",
            f"reserved {mebibytes(held_mib(step))}, host {mebibytes(step['peak_host_memory_mib'])}",
        ]
    else:
        scope = f"resident set of the process, libraries and {unit} included"
        lines = [f"peak {mebibytes(step['peak_memory_mib'])} ({scope})"]
    sizes = [
        (STATIC.get(name, name).format(unit=unit), size)
        for name, size in static.items()
        if size >= 0.05
    ]
    if peak is not None:
        during = f"tensors at their peak, during {part(profile, peak['phase'])}"
        lines.append(f"{during}: {mebibytes(peak['total_mib'])}")
        if (before := peak["static_mib"] - sum(static.values())) > 0.5:
            sizes.append(("other, from before the step", before))
        sizes += [(words, peak[name]) for name, words in OWNERS.items() if name != "static_mib"]
    rows = [("tensors", "size"), *((name, mebibytes(size)) for name, size in sizes)]
    return ProfileSection("memory", lines, rows)


def _advice(profile: Profile) -> ProfileSection:
    lines = [
        f"{rank}. {knobs(advice.change)}: {advice.reason}"
        for rank, advice in enumerate(profile["advice"], 1)
    ]
    return ProfileSection("what to try next", lines or ["nothing stands out"])
