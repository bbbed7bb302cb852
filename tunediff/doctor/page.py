"""The findings as one HTML file that needs nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunediff.core.environment import hardware
from tunediff.core.files import write_text
from tunediff.doctor.finding import Finding
from tunediff.report.html import Html, el, join, page, table


def write(path: Path, whole: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Raises `OSError`."""
    device = hardware({**whole["environment"], "device": whole["device"]})
    head = join(
        el("h1", "doctor"),
        el("p", f"{device}, {time.strftime('%Y-%m-%d %H:%M')}", class_="soft"),
        el("p", whole["verdict"], class_="lead"),
    )
    sections = [("machine", "This machine", _table(findings))]
    foot = join(el("p", "Written by ", el("code", whole["command"])), el("p", f"It took {whole['wall_s']:.0f} s."))
    write_text(path, page("doctor", head, sections, foot))


def _table(findings: Sequence[Finding]) -> Html:
    marks = ["rest" if finding.state in ("ok", "skipped") else "" for finding in findings]
    rows = [
        [el("strong", finding.state) if finding.stops else finding.state, finding.name, finding.found, finding.means]
        for finding in findings
    ]
    return table(["", "what", "found", "what it means for a search"], rows, marks, words=4)
