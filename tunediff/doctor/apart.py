"""Questions asked in processes of their own: what is looked at may crash, hang, or leave its process unusable."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ANSWER = "answer: "


def ask(probe: str, *, ranks: int = 1, within_s: float) -> dict[str, Any]:
    """Return what `answer` printed in `python -m tunediff.doctor.probes PROBE`, on rank 0 of several.

    Raises RuntimeError with the last line that one of them wrote, and TimeoutError.
    """
    command, env = [sys.executable, "-m", "tunediff.doctor.probes", probe], dict(os.environ)
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory(prefix="tunediff-doctor-", ignore_cleanup_errors=True) as folder:
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(ranks)]
        processes = []
        try:
            for rank, path in enumerate(outputs):
                own = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
                with open(path, "wb") as file:  # a session of its own: all that it starts can be ended with it
                    settings: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True, "env": own}
                    processes.append(subprocess.Popen(command, **settings))
            code = _wait(processes, time.monotonic() + within_s)
        finally:
            for process in processes:
                _end(process)
        lines = [path.read_text(errors="replace").splitlines() for path in outputs]
    if code is None:
        raise TimeoutError(f"no answer within {within_s:.0f} s")
    for line in lines[0] if code == 0 else []:
        if line.startswith(ANSWER):
            result: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return result
    last = next((line for own in lines for line in reversed(own) if line.strip()), f"exit code {code}")
    raise RuntimeError(last.strip())


def _wait(processes: Sequence[subprocess.Popen[bytes]], until: float) -> int | None:
    """Return the first exit code that is not 0, else 0; None if one of the processes still runs."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sent)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def answer(**values: Any) -> None:
    """Print the result of a process that `ask` started."""
    print(ANSWER + json.dumps(values), flush=True)
