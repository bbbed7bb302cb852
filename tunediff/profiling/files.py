"""Write a profile into its folder: the report, all numbers, the longest operations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tunediff.core import text
from tunediff.core.files import write_csv
from tunediff.profiling import tables
from tunediff.profiling.result import Profile


def write_all(profile: Profile, folder: Path) -> dict[str, Path]:
    """Write all files into `folder`; return their paths by what they are."""
    paths = {
        "report": folder / "profile.md",
        "numbers": folder / "profile.json",
        "operations": folder / "operations.csv",
    }
    paths["report"].write_text(markdown(profile), encoding="utf-8")
    paths["numbers"].write_text(numbers(profile), encoding="utf-8")
    rows = profile["operations"]["longest"]
    write_csv(paths["operations"], rows[0] if rows else (), (row.values() for row in rows))
    return paths


def numbers(profile: Profile) -> str:
    """Return the profile as JSON."""
    advice = [dataclasses.asdict(entry) for entry in profile["advice"]]
    content = text.versioned({**profile, "advice": advice})
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def markdown(profile: Profile) -> str:
    """Return the report as Markdown."""
    machine = profile["environment"]
    parts = [
        f"# Profile of {profile['name']}\n\n`{profile['command']}`\n",
        f"{machine['cpu']}, {machine['cpu_cores']} cores, {machine['memory_gib']} GiB;"
        f" torch {machine['versions']['torch']}, Python {machine['python']}\n",
        *(section.markdown() for section in tables.sections(profile)),
        f"`{profile['trace']}` opens in Perfetto (ui.perfetto.dev). On a GPU the parts of the step"
        " are NVTX ranges as well, for Nsight Systems: `nsys profile -t cuda,nvtx python -m"
        " tunediff.train …`.\n",
    ]
    return "\n".join(parts)
