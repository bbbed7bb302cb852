"""Searches from Python: `tunediff.run_search`, `tunediff.open_search`, and their `Search`."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunediff import analysis, export, models, search_space
from tunediff import config as cfg
from tunediff.analysis import evidence
from tunediff.analysis.evidence import Evidence
from tunediff.api import notebook, run, search_setup
from tunediff.api.calls import Knobs, ProgressKeywords, as_printed, called, folder, keywords, words
from tunediff.api.display import display_of, lines_of, show_figures
from tunediff.api.options import (
    Command,
    SearchOptions,
    refuse_settings_of_commands,
)
from tunediff.command.definition import CommandSettings
from tunediff.command.search import OF_COMMAND, OF_OBJECTIVE
from tunediff.config import ConfigError
from tunediff.core import files
from tunediff.core.errors import NO_SUCCESS, OK, TunediffError
from tunediff.core.files import write_text
from tunediff.core.lock import is_running
from tunediff.core.options import option
from tunediff.experiment.model import RunLimit
from tunediff.models import Saved
from tunediff.report import charts, context, page, reading, style, tables
from tunediff.report.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class BestTrial:
    """The best trial of a search."""

    trial: str
    """Its name, such as `t0003`."""
    configuration: dict[str, Any]
    """The knobs in which it differs from the baseline, by dotted name."""
    knobs: dict[str, Any]
    """All knobs, by dotted name."""
    value: float | None
    """Mean of the objective over its runs in the search."""
    values: list[float]
    """These runs."""
    folder: Path
    """Folder of the search."""

    def export(self, path: str | Path) -> Path:
        """Write its configuration to a YAML file, its weights next to it; return the path."""
        with called():
            export.write(analysis.read(self.folder), self.trial, Path(path))
        return Path(path)

    def load(self) -> Saved:
        """Return its model. Raises `ConfigError` where it kept no weights."""
        return models.find(str(self.folder / "trials" / self.trial))


class Search:
    """A search in its folder: results so far, and how to go on.

    Every call reads the folder again, so that a search that runs in a shell or on another machine
    shows what it has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """Return the name of the search, which is that of its folder."""
        return self.folder.name

    # ---- results
    def json(self) -> dict[str, Any]:
        """Return the result as `tunediff search --json` prints it.

        `tunediff/schemas/result-output.json` describes its keys.
        """
        return as_printed(reading.as_json(self.verdict))

    def trials(self) -> pd.DataFrame:
        """Return one row per trial: knobs by dotted name, value, status, times; the same as
        trials.csv."""
        return tables.trials_frame(self._evidence())

    def curves(self) -> pd.DataFrame:
        """Return one row per evaluation of every trial; the same as curves.csv."""
        return self._evidence().results.curves()

    @property
    def best(self) -> BestTrial | None:
        """Return the best trial; None while no trial has a result."""
        if (trial := self._evidence().best) is None:
            return None
        outcome = self._evidence().outcome(trial)
        return BestTrial(
            trial=trial.name,
            configuration=self._evidence().results.changed(trial),
            knobs=dict(trial.config),
            value=outcome.value,
            values=outcome.values,
            folder=self.folder,
        )

    @property
    def verdict(self) -> Result:
        """Return what the search has shown."""
        return reading.of_search(self._evidence())

    def figure(self, kind: str = "curves") -> Figure:
        """Return a figure of the report: `curves` of all trials, `importance`, `effects`,
        `trade_offs`, `why_curves` …

        Raises `TunediffError` that lists the figures which the report has, for any other.
        """
        show_figures()
        about = self._context()
        with style.drawing():
            if kind == "curves":  # also of trials with one evaluation, which the report leaves out
                return charts.of_trials(about.results, about.highlights)
            builders = page.figures(about)
            if (figure := builders[kind]() if kind in builders else None) is not None:
                return figure
            drawn = [name for name, build in builders.items() if build() is not None]
        allowed = ", ".join(dict.fromkeys(["curves", *drawn]))
        raise TunediffError(f"figure: {kind!r} is not allowed; allowed: {allowed}")

    def report(self) -> Path:
        """Write report.html into the folder of the search and return its path."""
        with called():
            return page.write_search(self._context(), self.folder)

    def __repr__(self) -> str:
        return f"Search({str(self.folder)!r})"

    # ---- running
    @property
    def running(self) -> bool:
        """Return whether a process runs this search now."""
        return is_running(self.folder)

    def resume(
        self, trials: int | None = None, total: str | float | None = None, *,
        track: str | None = None, address: str | None = None,
        cpus: int | None = None, gpus: int | None = None,
        progress: bool = True,
    ) -> Search:  # fmt: skip
        """Go on with a search that was interrupted, or with more trials than before; see
        `run_search`."""
        with called():
            options = SearchOptions(
                resume=self.name, storage=self.folder.parent, trials=trials, total=total,
                track=track, address=address, cpus=cpus, gpus=gpus,
            )  # fmt: skip
        return _run(options, progress)

    # ---- reading
    def _context(self) -> context.ReportContext:
        return context.read(self.folder, self.name, self.folder.parent)

    def _evidence(self) -> Evidence:
        return evidence.read(analysis.read(self.folder))


class SearchCall(ProgressKeywords, CommandSettings, SearchOptions):
    """The keywords of `run_search`."""

    command: Command | None = option(
        None, "a command line or a list of its words, in the place of a workload"
    )
    search: Mapping[str, Any] | None = option(
        None, "with command=: the searched parameters, as `search:` of a search file"
    )
    baseline: Mapping[str, Any] | None = option(
        None, "with command=: the values of its parameters in the baseline"
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
        call.storage = folder(call.storage)
        if call.command is not None:
            if workload is not None:
                raise ConfigError("workload: is not allowed with command=; allowed: one of them")
            workload, call.target = search_file(call), None  # the file has the target
        else:
            refuse_settings_of_commands(call)
        named = [] if workload is None else [notebook.named(workload, folder(call.storage))]
        call.words = (*named, *words(knobs))
    return _run(call, call.progress)


def open_search(name: str | Path, storage: str | Path = files.STORAGE) -> Search:
    """Return a search that any process has started, by its name in `storage` or the path of its
    folder.

    Raises `ConfigError` where there is none.
    """
    with called():
        return Search(
            search_space.of_search(search_space.folder_of(str(name), folder(storage))).parent
        )


def _run(options: SearchOptions, progress: bool) -> Search:
    with called(cluster=options.address is None):
        request = search_setup.prepare(options)
        # The loss of a cluster's head ends the process that waits for Ray.
        if options.address is not None:
            if options.resume is None:
                options.name = request.folder.name
            _run_command(options, request.folder.name)
        else:
            lines = lines_of(progress)
            run.search(request, options, lines, display_of(lines))
    return Search(request.folder)


def search_file(call: SearchCall) -> Path:
    """Write the search file that the keywords of a call describe; return its path. Raises
    `ConfigError`."""
    given = call.given(CommandSettings) | call.given(RunLimit)
    objective = {"name": call.objective} | ({"mode": call.mode} if call.mode else {})
    content = {
        "command": call.command if isinstance(call.command, str) else [*(call.command or ())],
        "objective": objective | {key: given[key] for key in OF_OBJECTIVE if key in given},
        **{key: given[key] for key in OF_COMMAND if key in given},
        "budget": {"per_trial": given.get("budget", "60s"), "trials": call.trials or 20},
        "baseline": dict(call.baseline or {}),
        "search": dict(call.search or {}),
    }
    content_text = cfg.to_yaml(content)
    digest = hashlib.sha256(content_text.encode()).hexdigest()[:8]
    path = folder(call.storage) / notebook.FOLDER / f"command-{digest}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content_text)
    return path


def _run_command(options: SearchOptions, name: str) -> None:
    """Run the command in a process of its own. Raises `TunediffError` with its last lines."""
    words = options.command_words(SearchOptions)
    command = [sys.executable, "-m", "tunediff", "search", *words]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
        try:
            said = process.communicate()[1]
        except KeyboardInterrupt:
            process.terminate()
            process.communicate()
            raise
    if process.returncode not in (OK, NO_SUCCESS):
        lines = "\n".join(said.strip().splitlines()[-3:])
        raise TunediffError(f"{name} ended with exit code {process.returncode}: {lines}")
