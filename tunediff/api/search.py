"""Searches from Python: `tunediff.run_search`, `tunediff.open_search`, and their `Search`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import search_space
from tunediff.analysis.evidence import Evidence
from tunediff.api import command_calls, notebook, search_run, search_setup
from tunediff.api.calls import (
    Knobs,
    ProgressKeywords,
    as_printed,
    called,
    folder,
    keywords,
    options_of,
    words,
)
from tunediff.api.command_calls import CommandSearchKeywords
from tunediff.api.display import display_of, lines_of, show_figures
from tunediff.api.search_results import BestTrial
from tunediff.api.search_setup import SearchKeywords, SearchOptions
from tunediff.config import ConfigError
from tunediff.core import text
from tunediff.core.errors import TunediffError
from tunediff.core.lock import runner
from tunediff.core.options import option
from tunediff.report import context, page, style, summary, verdicts
from tunediff.report import words as phrases
from tunediff.report.html import el, join, table
from tunediff.report.search_result import SearchVerdict
from tunediff.report.sections import curves

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Search:
    """A search in its folder: results so far, and how to stop it and to go on.

    Every call reads the folder again, so that a search that runs in the background, in a shell or
    on another machine shows what it has.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process`: the one that runs it, if this process started it in the background."""
        self.folder, self._process = folder, process

    @property
    def name(self) -> str:
        """Return the name of the search, which is that of its folder."""
        return self.folder.name

    @property
    def log(self) -> Path:
        """Return the file with the output of a search in the background."""
        return self.folder.with_name(f".{self.name}.log")

    # ---- results
    def json(self) -> dict[str, Any]:
        """Return the result as `tunediff search --json` prints it.

        `tunediff/schemas/search-output.json` describes its keys.
        """
        return as_printed(summary.as_json(self._evidence()))

    def trials(self) -> pd.DataFrame:
        """Return one row per trial: knobs by dotted name, value, status, times; the same as
        trials.csv."""
        return self._evidence().table()

    def curves(self) -> pd.DataFrame:
        """Return one row per evaluation of every trial; the same as curves.csv."""
        return self._evidence().results.curves()

    @property
    def best(self) -> BestTrial | None:
        """Return the best trial; None while no trial has a result."""
        if (trial := self._evidence().best) is None:
            return None
        verdict = self.verdict
        return BestTrial(
            trial=trial.name,
            configuration=verdict.best_configuration or {},
            knobs=dict(trial.config),
            value=verdict.best_value,
            values=verdict.best_values,
            folder=self.folder,
        )

    @property
    def verdict(self) -> SearchVerdict:
        """Return what the search has shown."""
        confirmation, values = self._evidence().confirmation, self.json()
        del values["schema"]
        sentences = verdicts.sentences(confirmation) if confirmation is not None else []
        return SearchVerdict(**values, sentences=sentences)

    def figure(self, kind: str = "curves") -> Figure:
        """Return a figure of the report: `curves` of all trials, `importance`, `effects`,
        `trade_offs`, `step` …

        Raises `TunediffError` that lists the figures which the report has, for any other.
        """
        show_figures()
        about = self._context()
        with style.drawing():
            if kind == "curves":  # also of trials with one evaluation, which the report leaves out
                return curves.of_trials(about.results, about.highlights)
            builders = page.figures(about)
            if (figure := builders[kind]() if kind in builders else None) is not None:
                return figure
            drawn = [name for name, build in builders.items() if build() is not None]
        allowed = ", ".join(dict.fromkeys(["curves", *drawn]))
        raise TunediffError(f"figure: {kind!r} is not allowed; allowed: {allowed}")

    def report(self) -> Path:
        """Write report.html into the folder of the search and return its path."""
        with called():
            return page.write_all(self._context(), self.folder)["report"]

    def _repr_html_(self) -> str:
        if not self.folder.exists():
            state = "starting" if self.running else f"did not start, see {self.log}"
            return str(el("p", f"{self.name}: {state}"))
        evidence = self._evidence()
        results, confirmation, best = evidence.results, evidence.confirmation, evidence.best
        trials, ended = results.space.budget.trials, sum(trial.finished for trial in results.trials)
        state = "finished"
        if self.running:
            state = "running"
        elif ended < trials:
            state = "stopped"
        elif confirmation is not None and not confirmation.over:
            state = "stopped while confirming"
        head = f"{self.name}: {state}, {ended} of {text.pluralize(trials, 'trial')} ended"
        rows: list[list[object]] = []
        for role, trial in (("baseline", evidence.baseline), ("best", best)):
            if trial is not None and (outcome := evidence.outcome(trial)).values:
                value = phrases.noted(text.number(outcome.value), outcome)
                rows.append([f"{role} ({trial.name})", text.knobs(results.changed(trial)), value])
        sentences = verdicts.sentences(confirmation) if confirmation is not None else []
        if not sentences and best is not None:
            sentences = [f"Speed-up: {phrases.speedup(evidence.speedup(best))}"]
        results_table = table(["", "configuration", results.label], rows, words=2) if rows else None
        parts = [el("p", el("b", head)), results_table, *(el("p", line) for line in sentences)]
        return str(join(*parts))

    def __repr__(self) -> str:
        return f"Search({str(self.folder)!r})"

    # ---- running
    @property
    def running(self) -> bool:
        """Return whether a process runs this search now."""
        started = self._process is not None and self._process.poll() is None
        return started or runner(self.folder) is not None

    def wait(self, timeout: float | None = None) -> Search:
        """Wait until the search has ended, at most `timeout` seconds; return it.

        Raises `TunediffError` with the last lines of its log where a search in the background has
        failed, and `TimeoutError`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.running:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.name} runs after {timeout:g} s")
            time.sleep(0.2)
        if self._process is not None and (code := self._process.wait()) not in (0, 3):
            lines = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise TunediffError(f"{self.name} ended with exit code {code}: " + "\n".join(lines))
        return self

    def stop(self, timeout: float = 60.0) -> None:
        """Stop the search as Ctrl-C does, and wait until it has; `resume` goes on with it.

        Raises `TunediffError` where it runs on another machine or in this process, and
        `TimeoutError`.
        """
        process, holder = self._process, runner(self.folder)
        pid = process.pid if process is not None and process.poll() is None else None
        if holder is not None:
            pid = holder.pid
            if holder.host != socket.gethostname() or pid == os.getpid():
                where = f"in process {pid} on {holder.host}; stop it there"
                raise TunediffError(f"{self.name} runs {where}")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TunediffError):  # what it ends with says that it was stopped
            self.wait(timeout)

    def resume(
        self, trials: int | None = None, total: str | float | None = None, *,
        track: str | None = None, address: str | None = None,
        cpus: int | None = None, gpus: int | None = None,
        background: bool = False, progress: bool = True,
    ) -> Search:  # fmt: skip
        """Go on with a search that was interrupted, or with more trials than before; see
        `run_search`."""
        with called():
            options = SearchOptions(
                resume=self._begun().name, storage=self.folder.parent, trials=trials, total=total,
                track=track, address=address, cpus=cpus, gpus=gpus,
            )  # fmt: skip
        self._process = _run(options, background, progress)._process
        return self

    # ---- reading
    def _begun(self) -> Path:
        """Return the folder, which a search in the background makes after it has checked what it is
        to run.

        Raises `ConfigError` where the search has not begun, and `TunediffError` as `wait` does.
        """
        file = self.folder / "search.yaml"
        while self._process is not None and not file.is_file():
            if self._process.poll() is not None and not file.is_file():
                self.wait()  # raises what the process ended with
                break
            time.sleep(0.2)
        return search_space.of_search(self.folder).parent

    def _context(self) -> context.ReportContext:
        return context.read(self._begun(), self.name, self.folder.parent)

    def _evidence(self) -> Evidence:
        return search_run.read(self._begun())


@dataclasses.dataclass(kw_only=True)
class SearchCall(ProgressKeywords, CommandSearchKeywords, SearchKeywords):
    """The keywords of `run_search`."""

    background: bool = option(
        False,
        "return at once; the search runs in a process of its own, and goes on when this one ends",
    )


@keywords(SearchCall)
def run_search(workload: Any = None, *knobs: Knobs, **options: Any) -> Search:
    """Search for the configuration with the best result for its training seconds; return the
    finished search.

    Args:
        workload: A search file (path, or the name of a shipped one; default: digits), or a workload
            that is searched around its baseline: a path to its file, the name of a module, a
            module, or an object with `Knobs`, `OBJECTIVE` and `train`, also one that a notebook's
            cells define. With `command=`, `objective=`, `baseline=` and `search=` a command is
            searched instead: what a search file has as its keys.
        knobs: Knobs that are set: `"optimizer.lr=1e-3"`, or `{"optimizer.lr": 1e-3}`.
        options: See `SearchCall`. Durations are seconds, or text such as `"10m"`.

    Raises:
        TunediffError: Something is not allowed or has failed; the message is the one of the
            command.
        KeyboardInterrupt: It was interrupted. Everything measured stays, and `Search.resume` goes
            on with it.

    Example:
        >>> search = tunediff.run_search("digits", trials=8, budget="5s")
        >>> search.best.configuration
    """
    with called():
        call = SearchCall(**options)
        if call.command is not None:
            if workload is not None:
                raise ConfigError("workload: is not allowed with command=; allowed: one of them")
            workload = command_calls.search_file(call)
            call = dataclasses.replace(call, target=None)  # the file has it
        else:
            call.check_unused()
        named = [] if workload is None else [notebook.named(workload, folder(call.storage))]
        asked = options_of(call, SearchOptions, words=[*named, *words(knobs)])
    return _run(asked, call.background, call.progress)


def open_search(name: str | Path, storage: str | Path = text.STORAGE) -> Search:
    """Return a search that any process has started, by its name in `storage` or the path of its
    folder.

    Raises `ConfigError` where there is none.
    """
    with called():
        return Search(
            search_space.of_search(search_space.folder_of(str(name), folder(storage))).parent
        )


def _run(options: SearchOptions, background: bool, progress: bool) -> Search:
    lines = lines_of(progress)
    # The loss of a cluster's head ends the process that waits for Ray.
    if background or options.address is not None:
        search = _started(options)
        try:
            return search if background else search.wait()
        except KeyboardInterrupt:
            search.stop()
            raise
    with called(cluster=True):
        request = search_setup.prepare(options)
        search_run.run(request, options, lines, display_of(lines))
    return Search(request.folder)


def _started(options: SearchOptions) -> Search:
    """Check what is asked for, and start the command in a process that outlives this one."""
    with called():
        request = search_setup.prepare(options)
        if options.resume is None:
            options = dataclasses.replace(options, name=request.folder.name)
        search = Search(request.folder)
        search.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *shlex.split(options.command_line("search", SearchOptions))[1:]]
        with open(search.log, "wb") as log:
            search._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
    return search
