"""Train trials in runs of templates, one per workload version. Imports no torch, Ray."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from tunediff.config import ConfigError, code
from tunediff.config.workload import is_users
from tunediff.core.errors import Failure
from tunediff.core.template import Template, TemplateError, TemplateRun
from tunediff.training import entries
from tunediff.tuning.backend import Event
from tunediff.tuning.trial_spec import TrialSpec

log = logging.getLogger(__name__)

_MOST = 2
"""Templates that are kept: the two sides of a comparison take turns."""


class Templates:
    """The templates of one rank, and the trial that is forked from one of them."""

    def __init__(
        self, output: IO[bytes] | None = None, shared: str = "",
        variables: Mapping[str, str] | None = None, import_limit_s: float = 900.0,
    ) -> None:  # fmt: skip
        """`output`: for what trials print, which may be set later; `shared`: name under which
        processes of this machine share them, with the `sys.path` and environment of the first of
        them; `variables`: of that environment, unless it has them; `import_limit_s`: how long a
        workload may take to be imported."""
        self.output, self.shared = output, shared
        self._variables, self._import_limit_s = variables, import_limit_s
        self._kept: dict[tuple[str, str], Template] = {}
        self._named = set[str]()
        """Workloads whose trials are not forked, as was said once."""

    def prepare(self, workload: str) -> Template:
        """Return a workload's template for its files of now; it prepares in the background."""
        key = (workload, _version(workload))
        template = self._kept.pop(key, None)
        if template is not None and not template.alive:
            template.close()
            template = None
        if template is None:
            name = self.shared and f"{self.shared} {key}"
            template = Template(
                entries.prepare, workload, self.output, name, self._variables, entries.prepare_base
            )
        self._kept[key] = template  # the one used last is the last
        while len(self._kept) > _MOST:
            self._kept.pop(next(iter(self._kept))).close()
        return template

    def ready(self, workload: str) -> Template:
        """Return a workload's template once all are prepared. Raises `TemplateError`."""
        template = self.prepare(workload)
        for other in tuple(self._kept.values()):  # the clock would tell of what prepares meanwhile
            with contextlib.suppress(TemplateError, TimeoutError):
                other.ready(self._import_limit_s)
        try:
            template.ready(0.0)
        except TimeoutError:
            template.close()
            why = f"{workload}: is not imported after {self._import_limit_s:.0f} s"
            raise TemplateError(Failure(why)) from None
        return template

    def train(
        self, job: TrialSpec, variables: Mapping[str, str], take: Callable[[TemplateRun, Event],
        None],
        started: Callable[[TemplateRun], object] = lambda run: None,
    ) -> None:  # fmt: skip
        """Train a trial as one rank; pass its run to `started`, its messages to `take`.

        `variables` of the environment describe the rank as torchrun does. Raises `TemplateError`
        with why the run says nothing about the trial, such as that it was killed.
        """
        template = self.ready(job.workload)
        if template.unsafe and job.workload not in self._named:
            self._named.add(job.workload)
            why = template.unsafe
            log.warning("%s: each trial imports it in a new process: %s", job.workload, why)
        streams = [self.output.fileno()] * 2 if self.output is not None else []
        before = (entries.before_run, str(job.folder))
        run = template.start(_start, job, before, variables, streams=streams)
        started(run)
        while (message := run.receive()) is not None:
            take(run, message)

    def kill(self) -> None:
        """End the trial that runs, in any thread; templates that are prepared stay."""
        for template in tuple(self._kept.values()):
            template.kill_run()

    def close(self) -> None:
        """End all templates and the trial that runs."""
        while self._kept:
            self._kept.popitem()[1].close()

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start(connection: Connection, content: Any) -> None:
    """See `worker.start`, which imports torch."""
    from tunediff.tuning import worker

    worker.start(connection, content)


_kept = dict[tuple[int, int, Hashable], Templates]()
"""By process, thread and purpose."""


def kept(purpose: Hashable) -> Templates:
    """Return this thread's templates for a purpose, which stay prepared between calls."""
    key = (os.getpid(), threading.get_ident(), purpose)  # a fork has none
    if key not in _kept:
        _kept[key] = Templates()
        atexit.register(_kept[key].close)
    return _kept[key]


def _version(workload: str) -> str:
    """Return the present version of a user's files; '' if shipped or unreadable."""
    if is_users(workload):
        with contextlib.suppress(ConfigError):
            return code.signature(Path(workload))
    return ""
