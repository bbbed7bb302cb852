"""A profile in words: sections of sentences and tables, for a terminal, as Markdown, as CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunediff.core.point import one_of
from tunediff.core.text import knobs, number, seconds, table
from tunediff.profiling.result import Advice, Owner, Profile, held_mib

PARTS = {
    "data_wait": "waiting for {unit}",
    "host_to_device": "{unit} to the device",
    "optimizer": "update",
}
"""Parts of the step whose own names say too little."""
STATIC = {"parameters": "weights", "optimizer": "optimizer state", "samples": "{unit}"}
OWNERS: dict[Owner, str] = {
    "static_mib": "what stays: weights, optimizer, …", "batch_mib": "batch",
    "forward_mib": "activations (from forward)", "backward_mib": "gradients (from backward)", "rest_mib": "rest",
}  # fmt: skip


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
class Section:
    """A part of the report: sentences, then a table whose first column is words and the others
    numbers."""

    title: str
    sentences: Sequence[str] = ()
    rows: Sequence[tuple[str, ...]] = ()  # the first one is the header
    figure: str = ""

    def text(self) -> str:
        """Return the section for a terminal."""
        lines = [*self.sentences, *(table(self.rows) if len(self.rows) > 1 else [])]
        return "\n".join([f"{self.title}:", *(f"  {line}" for line in lines)])

    def markdown(self, files: Sequence[str]) -> str:
        """Return the section as Markdown, with the figure where it is one of `files`."""
        lines = [
            f"## {self.title}",
            "",
            *(line for sentence in self.sentences for line in (sentence, "")),
        ]
        if len(self.rows) > 1:
            rows = [self.rows[0], ("---", *["---:"] * (len(self.rows[0]) - 1)), *self.rows[1:]]
            lines += [
                " | ".join(["", *(cell.replace("|", r"\|") for cell in row), ""]).strip()
                for row in rows
            ]
            lines.append("")
        if self.figure in files:
            lines += [f"![{self.title}]({self.figure})", ""]
        return "\n".join(lines)


def sections(profile: Profile) -> list[Section]:
    """Return all sections of the report, in reading order."""
    return [
        _summary(profile), _step(profile), _operations(profile),
        Section("the loader and the model", [feeding(profile)]), _memory(profile), _advice(profile),
    ]  # fmt: skip


def _summary(profile: Profile) -> Section:
    step, device, first, unit = (
        profile["step"],
        profile["device"],
        profile["first"],
        profile["unit"],
    )
    sd = "" if step["samples_per_s_sd"] is None else f" ± {rate(step['samples_per_s_sd'])}"
    threads = "1 thread" if device["threads"] == 1 else f"{device['threads']} threads"
    lines = [
        f"{device['name']}, {threads}; batch {step['batch_size']}, {step['steps']} steps measured",
        (
            f"{rate(step['samples_per_s'])}{sd} {unit}/s, {milliseconds(step['step_s'])} per step;"
            f" the first step of the process took {milliseconds(first['first_step_s'])}"
        ),
    ]
    if "peak_share" in step:
        lines.append(
            f"{number(step['flops_per_sample'] / 1e9)} GFLOP per {one_of(unit)}:"
            f" {percent(step['peak_share'])} of {number(step['peak_flops_per_s'] / 1e12)} TFLOP/s,"
            " the fastest matrix product measured here"
        )
    if first["compile_s"]:
        lines.append(
            f"compiling took {seconds(first['compile_s'])}, less where a cache had it already"
        )
    if "device_busy_share" in profile:
        lines.append(f"the GPU computes {percent(profile['device_busy_share'])} of the time")
    if profile["workers"] > 1:
        lines.append(
            f"this is one of {profile['workers']} training workers with its part of the batch;"
            " averaging gradients between them is not in it"
        )
    if step["disturbed"]:
        lines.append(
            "others used the machine meanwhile: measure again when it is quiet, these numbers are"
            " not its own"
        )
    return Section("profile", lines)


def _step(profile: Profile) -> Section:
    parts = sorted(profile["step"]["parts_s"].items(), key=lambda part: -part[1])
    whole = profile["step"]["step_s"]
    rows = [
        (part(profile, name), milliseconds(spent), percent(spent / whole)) for name, spent in parts
    ]
    return Section("where the step goes", [], [("part", "time", "share"), *rows], "step.png")


def _operations(profile: Profile) -> Section:
    device = "GPU" if profile["device"]["type"] == "cuda" else "CPU"
    rows = [("operation", "calls per step", "per step", "share")]
    for row in profile["operations"]["longest"]:
        name = name if len(name := row["operation"]) <= 60 else f"{name[:59]}…"
        rows.append(
            (
                name,
                number(row["calls_per_step"]),
                milliseconds(row["self_s_per_step"]),
                percent(row["share"]),
            )
        )
    sentence = f"{device} time of their own, under the profiler, which slows small ones down"
    return Section(f"the ten longest {profile['operations']['kind']}", [sentence], rows)


def feeding(profile: Profile) -> str:
    """Return a sentence on the rates of loader and model alone."""
    loader, model, ratio, unit = (
        profile["loader_alone"],
        profile["model_alone"],
        profile["feed_ratio"],
        profile["unit"],
    )
    if profile["config"]["loader.resident"]:
        return f"loader.resident is on: the {unit} lie on the device, and the loader plays no part"
    if loader is None:
        return "not measured: the workload has a loader of its own"
    sentence = f"alone, the loader gives {rate(loader['samples_per_s'])} {unit}/s"
    if model is None or ratio is None:
        if not profile["samples"]["mib"]:
            return (
                f"{sentence}; the model is not measured alone, since the data set is not made of"
                " tensors"
            )
        return f"{sentence}; the device cannot hold all {unit}"
    sentence += (
        f" and the model takes {rate(model['samples_per_s'])} {unit}/s: the loader can feed "
        f"{f'{ratio:.1f}' if ratio < 100 else rate(ratio)}× what the model takes"
    )
    if profile["config"]["loader.workers"] == 0:
        sentence += (
            f"; with loader.workers=0 they take turns, the loader {percent(1 / (1 + ratio))} of the"
            " time"
        )
    return sentence


def _memory(profile: Profile) -> Section:
    step, static, peak = profile["step"], profile["memory"]["static"], profile["memory"]["peak"]
    cuda, unit = profile["device"]["type"] == "cuda", profile["unit"]
    scope = (
        "allocated on the GPU"
        if cuda
        else f"resident set of the process, libraries and {unit} included"
    )
    lines = [f"peak {mebibytes(step['peak_memory_mib'])} ({scope})"]
    if cuda:
        lines.append(
            f"reserved {mebibytes(held_mib(step))}, host {mebibytes(step['peak_host_memory_mib'])}"
        )
    rows = [("tensors", "size")]
    rows += [
        (STATIC.get(name, name).format(unit=unit), mebibytes(size))
        for name, size in static.items()
        if size >= 0.05
    ]
    if peak is not None:
        lines.append(
            f"tensors at their peak, during {part(profile, peak['phase'])}:"
            f" {mebibytes(peak['total_mib'])}"
        )
        if (more := peak["static_mib"] - sum(static.values())) > 0.5:
            rows.append(("other, from before the step", mebibytes(more)))
        rows += [
            (words, mebibytes(peak[name])) for name, words in OWNERS.items() if name != "static_mib"
        ]
    if profile["snapshot"] is None:
        lines.append("no snapshot of the allocator: that is for CUDA")
    return Section("memory", lines, rows, "memory.png")


def _advice(profile: Profile) -> Section:
    lines = ["(measured while others used the machine: rather guesses than findings)"] * profile[
        "step"
    ]["disturbed"]
    for place, advice in enumerate(profile["advice"], 1):
        lines.append(f"{place}. {knobs(advice.change)}: {advice.reason}{_bound(advice)}")
    return Section(
        "what to try next", lines if profile["advice"] else [*lines, "nothing stands out"]
    )


def _bound(advice: Advice) -> str:
    if (tried := advice.tried) is not None:
        if "failed" in tried:
            return f"; tried: {tried['failed']}"
        return (
            f"; tried: {tried['gain']:.2f}×{', within the noise' if tried['within_noise'] else ''}"
        )
    if advice.bound is None:
        return ""
    return f"; up to about {advice.bound:.2f}×"
