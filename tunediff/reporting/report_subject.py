"""What a report is about: a search read and looked at once, and the files that are written about it."""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from tunediff import config as cfg
from tunediff import record
from tunediff.config import ConfigError
from tunediff.record import TrialRecord
from tunediff.reporting import comparison, confirmation, report_numbers, report_read
from tunediff.reporting.comparison import BETTER, Comparison, Group
from tunediff.reporting.confirmation import Confirmation
from tunediff.reporting.report_figures import Stars, draw
from tunediff.reporting.report_html import Html, el, join, picture
from tunediff.reporting.report_numbers import Effect, Importance, rate, searched
from tunediff.reporting.results import Results

FOLDER = "report"
"""Beside the page: its data."""
NAMES = (
    *("curves", "trials", "won", "comparison", "study", "why", "why_curves", "step", "importance", "effects"),
    *("trade_offs", "parallel", "compile", "failures", "baseline_samples", "winner_samples", "seconds"),
)
"""Of all tables and pictures that there may be."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A search with everything that several sections need."""

    found: Results
    unreadable: dict[str, str]
    """Journals that are left out, with the reason."""
    sessions: list[dict[str, Any]]
    stars: Stars
    told: Confirmation | None
    """What its confirming runs say, if any of them ended."""
    confirming: str
    """About confirming runs that are not complete; '' otherwise."""
    compared: Comparison | None
    """Of a search with several seeds."""
    effects: list[Effect]
    quality: Importance | None
    """Of the objective, if that is a Fréchet distance."""
    throughput: Importance | None
    """Of images per second."""
    name: str
    storage: str
    """How a user names the search, and the folder of all searches ('': the default)."""
    now: float
    """Unix time."""

    @property
    def by_frechet(self) -> bool:
        """Whether the objective is a Fréchet distance."""
        return self.found.metric == "frechet"

    @property
    def label(self) -> str:
        """What the objective is called."""
        return self.found.label if self.by_frechet else "images/s"

    @property
    def leader(self) -> str:
        """`the winner`, or what it may be called."""
        return "the winner" if self.stars.winner_is == "winner" else "the best trial"

    @property
    def call(self) -> str:
        """How other commands name this search: `NAME`, or `NAME --storage FOLDER`."""
        return shlex.join([self.name, *(["--storage", self.storage] if self.storage else [])])

    @property
    def crossing_s(self) -> float | None:
        """Training seconds after which the winner is as good as the baseline at its end; None: never, or not known."""
        winner, base = self.stars.winner, self.stars.baseline
        if winner is None or base is None or winner.name == base.name or not self.by_frechet:
            return None
        end = base.value("frechet")
        return record.seconds_to(winner.points, "frechet", end) if end is not None else None

    @property
    def crosses_before_first(self) -> bool:
        """Whether the winner is that good at its first evaluation already: when it was so first is not known."""
        winner = self.stars.winner
        return winner is not None and bool(winner.points) and self.crossing_s == winner.points[0]["train_s"]

    def by_weight(self) -> list[str]:
        """The searched knobs, those with the largest share of the objective's variance first."""
        one = self.quality or self.throughput
        shares = one.shares if one is not None else {}
        return sorted((dimension.name for dimension in searched(self.found)), key=lambda name: -shares.get(name, 0.0))


def read(folder: Path, name: str = "", storage: str = "", now: float | None = None) -> Subject:
    """Everything a report needs. Raises `ConfigError` when the folder holds no search."""
    found, unreadable = report_read.read(folder)
    told, confirming = _confirmed(found)
    compared = comparison.compare(found) if found.space.seeds > 1 else None
    best, base = _confirmed_trial(found, told) or found.best, found.baseline
    if best is not None and base is not None and best.config["seed"] != base.config["seed"]:
        base = found.baseline_of(best) or base
    sure = (told is not None and told.winner is not None) or (
        compared is not None and best is not None and group_of(compared, best).difference.verdict == BETTER
    )
    return Subject(
        found=found,
        unreadable=unreadable,
        sessions=report_read.sessions(folder),
        stars=Stars(base, best, "winner" if sure else "best"),
        told=told,
        confirming=confirming,
        compared=compared,
        effects=report_numbers.effects(found),
        quality=report_numbers.importance(found, _frechet) if found.metric == "frechet" else None,
        throughput=report_numbers.importance(found, rate),
        name=name or folder.name,
        storage=storage,
        now=time.time() if now is None else now,
    )


def _frechet(trial: TrialRecord) -> float | None:
    return trial.value("frechet")


def _confirmed(found: Results) -> tuple[Confirmation | None, str]:
    """What the newest confirming runs say, and what there is to know about them."""
    if found.space.confirm is None or (folder := confirmation.latest(found)) is None:
        return None, ""
    try:
        runs, unreadable = report_read.read(folder)
    except ConfigError as error:
        return None, f"The confirming runs cannot be read: {error}"
    ended, wanted = sum(trial.finished for trial in runs.trials), len(runs.space.points)
    said = "" if ended >= wanted else f"The confirming runs are not complete: {ended} of {wanted} have ended."
    if unreadable:
        said += f" {len(unreadable)} of their journals cannot be read."
    return (confirmation.confirm(found, runs) if runs.ranked else None), said.strip()


def _confirmed_trial(found: Results, told: Confirmation | None) -> TrialRecord | None:
    """The trial of the search whose configuration was confirmed, or came out best without being so."""
    if told is None or (group := told.winner or told.leader) is None:
        return None
    config = {**group.runs[0].config, "seed": 0}
    return next((trial for trial in found.ranked if {**trial.config, "seed": 0} == config), None)


def group_of(compared: Comparison, trial: TrialRecord) -> Group:
    """All seeds of a trial's configuration."""
    return next(group for group in compared.groups if any(run.name == trial.name for run in group.runs))


def changes(found: Results, trial: TrialRecord) -> dict[str, Any]:
    """Knobs of a trial that differ from the baseline's; its seed is none."""
    base = cfg.flat(found.space.baseline)
    return {
        name: value
        for name, value in trial.config.items()
        if name != "seed" and (name not in base or base[name] != value)
    }


# --------------------------------------------------------------------------------------------------------------- files
class Files:
    """The folder of tables and pictures beside the page."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.written: list[str] = []

    def csv(self, name: str, frame: pd.DataFrame) -> None:
        """Write a table. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
        safe = pd.DataFrame(
            {_no_formula(str(column)): [_no_formula(value) for value in frame[column]] for column in frame.columns}
        )
        self.keep(f"{name}.csv", safe.to_csv(index=False).encode("utf-8", "replace"))

    def chart(self, name: str, build: Callable[[], Any], alt: str, *caption: object) -> Html | None:
        """A figure with its caption; None where there is nothing to draw."""
        if (chart := draw(build)) is None:
            return None
        self.keep(f"{name}.png", chart.png)
        return self._figure(name, picture("svg+xml", chart.svg, alt), caption)

    def drawn(self, name: str, write: Callable[[Path], None], alt: str, *caption: object) -> Html | None:
        """A figure of another module, which writes a PNG file; None where it wrote none."""
        with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context({"text.parse_math": False}):
            path = Path(folder) / "figure.png"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write(path)
            if not path.exists():
                return None
            png = path.read_bytes()
        self.keep(f"{name}.png", png)
        return self._figure(name, picture("png", png, alt), caption)

    def _figure(self, name: str, image: Html, caption: Sequence[object]) -> Html:
        return el("figure", image, el("figcaption", *caption, " ", self.links(name)))

    def links(self, name: str) -> Html:
        """Where the data of a section lie."""
        known = [f"{name}.{end}" for end in ("csv", "png") if f"{name}.{end}" in self.written]
        return listed([el("a", file, href=f"{FOLDER}/{file}") for file in known])

    def keep(self, name: str, content: bytes) -> None:
        """Write a file."""
        write(self.folder / name, content)
        self.written.append(name)

    def tidy(self) -> None:
        """Remove what an earlier report left and this one does not have."""
        for name in NAMES:
            for file in (f"{name}.csv", f"{name}.png"):
                if file not in self.written:
                    (self.folder / file).unlink(missing_ok=True)


def listed(parts: Sequence[object]) -> Html:
    """Parts with commas between them."""
    return join([piece for place, part in enumerate(parts) for piece in ((", ", part) if place else (part,))])


def write(path: Path, content: bytes) -> None:
    """All or nothing: a browser that loads the page again never sees half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(tuple("=+-@\t\r")) else value
