"""Time an evaluation of a workload before a search, for `probe`: what its process does."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from tunediff import config as cfg
from tunediff.config import ConfigError, Values
from tunediff.config.code import described
from tunediff.config.systems import Systems, eager
from tunediff.core import progress
from tunediff.core.clock import Budget
from tunediff.core.trial_record import NotFiniteError
from tunediff.data import images
from tunediff.data.knobs import Data
from tunediff.distributed import World, alone
from tunediff.training import number_formats, prepared
from tunediff.training.engine import Engine, Facts
from tunediff.training.evaluation import evaluate
from tunediff.training.observer import Observer
from tunediff.training.trial import run

ENOUGH_S = 2.0
"""An evaluation that takes longer is not finished: its progress tells how long all of it would
take."""
FIRST_STEPS = 30
"""Steps after which a network says something about number formats; an untrained one gives zeros."""


class _LongEvaluationError(BaseException):
    """Ends an evaluation that takes over `ENOUGH_S`; no `Exception`, which workloads may catch."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s


def seconds_of(evaluate: Callable[[], object]) -> float:
    """Call a function; return its seconds, estimated by its progress beyond `ENOUGH_S`."""
    began, left_s = time.monotonic(), 0.0

    def end_early(work: progress.Progress) -> None:
        if time.monotonic() - began > ENOUGH_S and 0 < work.done < work.total:
            raise _LongEvaluationError(work.left_s)

    with progress.subscribe(end_early):
        try:
            evaluate()
        except NotFiniteError:  # of a model without training
            pass
        except _LongEvaluationError as error:
            left_s = error.left_s
    return time.monotonic() - began + left_s


class Rehearse(Observer):
    """Build all that precedes the first batch and time an evaluation; train nothing, or the few
    steps that the choice of a number format needs."""

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.seconds, self._trains, self.facts = 0.0, trains, dict[str, Any]()

    def about(self, facts: Mapping[str, Any]) -> None:
        self.facts |= facts

    def begin(self, run: Engine) -> bool:
        if not self._trains:
            self._time(run)
        return self._trains

    def evaluate(self, run: Engine, evaluate: Facts) -> Mapping[str, Any]:
        seconds_of(evaluate)  # chooses the format
        self._time(run)
        return {}

    def _time(self, run: Engine) -> None:
        seconds = seconds_of(lambda: evaluate(run))
        self.seconds = seconds / run.config.parallel.processes


def evaluation_s(config: Systems, world: World, program: Rehearse, steps: int = 0) -> float:
    """Return the seconds of one evaluation without torch.compile, of a model that has been trained
    for so many steps."""
    config = cfg.override(eager(config), {"evaluation.points": 1}, check=False)
    budget = Budget(samples=steps * config.loader.batch_size or 1)
    run(Engine(config, budget, world, program))
    return program.seconds


def measured(
    config: Systems,
    world: World,
    evaluates: bool,
    finals: Mapping[str, Values] | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Look at the data and time one evaluation; leave in the cache folder what trials need.

    `finals`: knobs of further evaluations to time, by the field of `probe.Measured` that takes
    their seconds. `tell` gets what is known before an evaluation is prepared and timed. Raises what
    the data or the set-up of the training raise.
    """
    data, result = getattr(config.knobs, "data", None), dict[str, Any](data=[])
    if isinstance(data, Data):
        result["data"] = images.load(data).summary
    if (network := cfg.of(config).get_hook("network")) is not None:
        with torch.device("meta"):
            result["parameters"] = sum(one.numel() for one in network(config.knobs).parameters())
    tell(result)
    if not evaluates:
        return result
    for name, protocol in {"evaluation_s": {}, **(finals or {})}.items():
        judged = cfg.override(config, protocol)
        steps = FIRST_STEPS if number_formats.is_open(judged, world.device.type) else 0
        program = Rehearse(trains=steps > 0)
        result[name] = evaluation_s(judged, world, program, steps)
        if (choice := program.facts.get("evaluation_format")) is not None:
            result["evaluation_format"] = choice
            config = number_formats.pinned(config, choice)
    return result


def answer(connection: Connection, content: tuple[bytes, bool, Mapping[str, Values]]) -> None:
    """Send what `measured` returns, or why the data cannot be used; the function of a template's
    run. `content`: the configuration, and the arguments."""
    pickled, evaluates, finals = content
    prepared.begin()
    result: Mapping[str, Any] = {}
    try:
        with progress.EventLines().work():
            config = pickle.loads(pickled)
            result = measured(config, alone(), evaluates, finals, connection.send)
    except ConfigError as error:
        result = {"refused": str(error)}
    except Exception as error:
        why = f"what a trial costs could not be measured: {described(error)}"
        print(f"WARNING: {why}", file=sys.stderr)
    connection.send(result)
