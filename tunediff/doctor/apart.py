"""Questions asked in processes of their own: what is looked at may crash, hang, or leave its process unusable."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff.core import processes

ANSWER = "answer: "


def ask(probe: str, *, ranks: int = 1, within_s: float) -> dict[str, Any]:
    """Return what `answer` printed in `python -m tunediff.doctor.probes PROBE`, on rank 0 of several.

    Raises RuntimeError with the last line that one of them wrote, and TimeoutError.
    """
    with tempfile.TemporaryDirectory(prefix="tunediff-doctor-", ignore_cleanup_errors=True) as folder:
        output = Path(folder) / "output.txt"
        with processes.started("tunediff.doctor.probes", probe, ranks=ranks, output=output) as started:
            code = _wait(started, time.monotonic() + within_s)
        lines, last = output.read_text(errors="replace").splitlines(), processes.last_line(output)
    if code is None:
        raise TimeoutError(f"no answer within {within_s:.0f} s")
    for line in lines if code == 0 else []:
        if line.startswith(ANSWER):
            result: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return result
    raise RuntimeError(last or f"exit code {code}")


def _wait(started: Sequence[processes.Process], until: float) -> int | None:
    """Return the first exit code that is not 0, else 0; None if one of the processes still runs."""
    while time.monotonic() < until:
        codes = [process.poll() for process in started]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)
    return None


def answer(**values: Any) -> None:
    """Print the result of a process that `ask` started."""
    print(ANSWER + json.dumps(values), flush=True)
