"""Write a profile into its folder: tables, figures, the report and all numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tunediff import cli
from tunediff.profiling import tables
from tunediff.profiling.result import Profile


def write_all(found: Profile, folder: Path) -> dict[str, Path]:
    """Write tables, figures, the report and all numbers into `folder`; returns their paths by what they are."""
    from tunediff.profiling import figures  # imports matplotlib, which would count in the memory that is measured

    names = {
        "report": "profile.md", "numbers": "profile.json", "operations": "operations.csv", "step_figure": "step.png",
    }  # fmt: skip
    pd.DataFrame(found["operations"]["longest"]).to_csv(folder / "operations.csv", index=False)
    figures.step(found, folder / "step.png")
    if (lines := found["memory"]["timeline"]) is not None:
        names |= {"memory": "memory.csv", "memory_figure": "memory.png"}
        pd.DataFrame(lines).to_csv(folder / "memory.csv", index=False)
        figures.memory(found, folder / "memory.png")
    if found["sweep"] is not None and found["sweep"]["rows"]:
        names |= {"batch_sweep": "batch_sweep.csv", "batch_sweep_figure": "batch_sweep.png"}
        pd.DataFrame(found["sweep"]["rows"]).to_csv(folder / "batch_sweep.csv", index=False)
        figures.sweep(found, found["sweep"], folder / "batch_sweep.png")
    (folder / "profile.json").write_text(numbers(found), encoding="utf-8")
    (folder / "profile.md").write_text(markdown(found, list(names.values())), encoding="utf-8")
    return {what: folder / name for what, name in names.items()}


def numbers(found: Profile) -> str:
    """All of it as JSON, but for what is in memory.csv and was not tried: what is read by eye stays readable."""
    memory = {name: value for name, value in found["memory"].items() if name not in ("timeline", "phases")}
    advice = [dataclasses.asdict(one) for one in found["advice"]]
    for one in advice:
        if one["tried"] is None:
            del one["tried"]
    return (
        json.dumps({"schema": cli.SCHEMA, **found, "memory": memory, "advice": advice}, indent=1, allow_nan=False)
        + "\n"
    )


def markdown(found: Profile, files: Sequence[str]) -> str:
    """The report as a file, with those of the figures that are among `files`."""
    machine = found["environment"]
    about = (
        f"{machine['cpu']}, {machine['cpu_cores']} cores, {machine['memory_gib']} GiB; "
        f"torch {machine['versions']['torch']}, Python {machine['python']}"
    )
    parts = [section.markdown(files) for section in tables.sections(found)]
    after = (
        f"`{found['trace']}` opens in Perfetto (ui.perfetto.dev). On a GPU the parts of the step are NVTX ranges as "
        "well, for Nsight Systems: `nsys profile -t cuda,nvtx python -m tunediff.train …`.\n"
    )
    snapshot = [] if found["snapshot"] is None else [f"`{found['snapshot']}` opens in pytorch.org/memory_viz.\n"]
    return "\n".join([f"# Profile of {found['name']}\n\n`{found['command']}`\n\n{about}\n", *parts, after, *snapshot])
