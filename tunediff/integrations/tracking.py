"""Track a search with a service for experiments: `--track wandb|mlflow|trackio|tensorboard`.

A process of its own does it, at low priority: `tracker`. Whatever the service does, no trial waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.integrations import tracker
from tunediff.integrations.services import SERVICES
from tunediff.integrations.tracker import Facts
from tunediff.search_space import SearchSpace

log = logging.getLogger(__name__)

LOG = "tracking.log"
"""File in the folder of a search: what the service's package printed."""


def check(service: str | None) -> None:
    """Raise `ConfigError` where the package of a service is absent."""
    if service is not None and importlib.util.find_spec(package := SERVICES[service][0]) is None:
        raise ConfigError(f"--track: {service}: {package} is not installed; run: pip install tunediff[{service}]")


class Tracking:
    """The tracker of a running search."""

    def __init__(self, facts: Facts | None = None, say: Callable[[str], object] = log.warning) -> None:
        """Start the tracker; `facts`: None where nothing is tracked."""
        self._facts, self._say, self._verdict = facts, say, ""
        self._process: subprocess.Popen[str] | None = None
        if facts is not None:
            self._process = _start(facts)
            threading.Thread(target=self._listen, args=[self._process.stdout], daemon=True).start()

    def tell(self, say: Callable[[str], object]) -> None:
        """Call `say` with what the tracker says."""
        self._say = say

    def finish(self, verdict: Mapping[str, Any]) -> None:
        """Take the result of the search, which is sent at the end."""
        scalars = {name: value for name, value in verdict.items() if isinstance(value, str | bool | int | float)}
        self._verdict = json.dumps(scalars)

    def close(self) -> None:
        """Let the tracker send the rest, for a while; where that fails, say how it can be sent later."""
        if self._facts is None or self._process is None:
            return
        try:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                assert self._process.stdin is not None
                self._process.stdin.write(self._verdict)
                self._process.stdin.close()
                self._process.wait(self._facts.patience_s + 10)
        finally:  # also after a second Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.wait() != 0:
            folder, service = self._facts.folder, self._facts.service
            rest = text.command("search", "--resume", folder.name, storage=folder.parent)
            log.warning("--track %s: not everything was sent (%s); to send the rest: %s", service, folder / LOG, rest)

    def _listen(self, lines: Iterable[str]) -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in lines:
                self._say(line.rstrip())


def _start(facts: Facts) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", tracker.__name__, json.dumps(dataclasses.asdict(facts), default=str)]
    pipe = subprocess.PIPE
    with open(facts.folder / LOG, "ab") as output:  # a session of its own: Ctrl-C is for the search alone
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=output, text=True, start_new_session=True)


@contextlib.contextmanager
def tracked(folder: Path, space: SearchSpace, say: Callable[[str], object]) -> Iterator[Tracking]:
    """Track the search in `folder` with the service that its file names, if any; `say` what that says."""
    if (service := space.track) is None:
        yield Tracking()
        return
    config = {"workload": space.workload.name, "objective": space.metric, "direction": space.mode, "seed": space.seed}
    config |= {f"budget.{name}": value for name, value in space.budget.lines.items()}
    tracking = Tracking(Facts(folder, service, space.metric, config), say)
    try:
        yield tracking
    finally:
        tracking.close()
