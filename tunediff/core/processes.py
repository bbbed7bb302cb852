"""Run a module in processes of its own: what it does may crash, hang, or leave its process
unusable."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def started(
    module: str, *words: str, ranks: int = 1, output: Path | None = None
) -> Iterator[list[Process]]:
    """Yield the processes of `python -m MODULE WORDS`, one for each rank, and end them with all
    that they started.

    `output`: file for their stdout and stderr; None: their stdout is dropped, and their stderr is
    that of this process.
    """
    processes: list[Process] = []
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(output, "wb")) if output is not None else None
        stack.callback(_end_all, processes)
        for variables in _variables(ranks):
            # A session of its own: Ctrl-C is for this process alone, and all that it starts can be
            # ended with it.
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words], env={**os.environ, **variables}, stderr=log,
                stdout=log or subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            processes.append(process)
        yield processes


def _variables(ranks: int) -> list[dict[str, str]]:
    """Return the environment of every rank, as torchrun sets it."""
    if (
        ranks == 1
    ):  # no sign of torchrun, by which a file's own branch for several processes would go
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _end_all(processes: list[Process]) -> None:
    """End these processes and all that they started."""
    for process in processes:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        process.wait()


def answer(module: str, *words: str, ranks: int = 1, within_s: float) -> dict[str, Any]:
    """Return the JSON that `python -m MODULE WORDS FILE` writes into FILE, atomically, and end its
    processes.

    Raises TimeoutError, and RuntimeError with the last line that the processes wrote, if one of
    them has failed or all have ended without an answer.
    """
    with tempfile.TemporaryDirectory(
        prefix="tunediff-answer-", ignore_cleanup_errors=True
    ) as folder:
        path, output, begin = (
            Path(folder) / "answer.json",
            Path(folder) / "output.txt",
            time.monotonic(),
        )
        with started(module, *words, str(path), ranks=ranks, output=output) as processes:
            codes: list[int | None] = [None]
            # A rank that failed leaves the others waiting for it.
            while not path.exists() and None in codes and not any(codes):
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
                if time.monotonic() - begin > within_s:
                    raise TimeoutError(f"no answer within {within_s:.0f} s")
        if not path.exists():
            raise RuntimeError(last_line(output) or f"exit code {next(filter(None, codes), 0)}")
        return read_answer(path)


def read_answer(path: Path) -> dict[str, Any]:
    """Return the JSON in a file that a process wrote; {} if it has written none."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def last_line(output: Path) -> str:
    """Return the last line that the processes wrote; '' for none."""
    lines = output.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
