"""Write a profile into its folder: tables, figures, the report and all numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tunediff import cli
from tunediff.core.files import write_csv
from tunediff.profiling import tables
from tunediff.profiling.result import Profile


def write_all(profile: Profile, folder: Path) -> dict[str, Path]:
    """Write tables, figures, the report and all numbers into `folder`; return their paths by what
    they are."""
    from tunediff.profiling import figures  # imports matplotlib: memory is measured without it

    names = {
        "report": "profile.md",
        "numbers": "profile.json",
        "operations": "operations.csv",
        "step_figure": "step.png",
    }
    rows = profile["operations"]["longest"]
    write_csv(folder / "operations.csv", rows[0] if rows else (), (row.values() for row in rows))
    figures.step(profile, folder / "step.png")
    if (lines := profile["memory"]["timeline"]) is not None:
        names |= {"memory": "memory.csv", "memory_figure": "memory.png"}
        write_csv(folder / "memory.csv", lines, zip(*lines.values(), strict=True))
        figures.memory(profile, folder / "memory.png")
    (folder / "profile.json").write_text(numbers(profile), encoding="utf-8")
    (folder / "profile.md").write_text(markdown(profile, list(names.values())), encoding="utf-8")
    return {kind: folder / name for kind, name in names.items()}


def numbers(profile: Profile) -> str:
    """Return the profile as JSON, without the timeline, which memory.csv holds."""
    memory = {key: profile["memory"].get(key) for key in ("static", "peak")}
    advice = [
        {key: value for key, value in dataclasses.asdict(entry).items() if key != "tried" or value}
        for entry in profile["advice"]
    ]
    content = cli.versioned({**profile, "memory": memory, "advice": advice})
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def markdown(profile: Profile, files: Sequence[str]) -> str:
    """Return the report as Markdown, with those of the figures that are among `files`."""
    machine = profile["environment"]
    parts = [
        f"# Profile of {profile['name']}\n\n`{profile['command']}`\n",
        f"{machine['cpu']}, {machine['cpu_cores']} cores, {machine['memory_gib']} GiB;"
        f" torch {machine['versions']['torch']}, Python {machine['python']}\n",
        *(section.markdown(files) for section in tables.sections(profile)),
        f"`{profile['trace']}` opens in Perfetto (ui.perfetto.dev). On a GPU the parts of the step"
        " are NVTX ranges as well, for Nsight Systems: `nsys profile -t cuda,nvtx python -m"
        " tunediff.train …`.\n",
    ]
    if profile["snapshot"] is not None:
        parts.append(f"`{profile['snapshot']}` opens in pytorch.org/memory_viz.\n")
    return "\n".join(parts)
