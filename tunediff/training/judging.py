"""Judging a finished model by its workload's own evaluation, and how long that takes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from tunediff import cli
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.config.code import described
from tunediff.config.systems import Compile, Systems
from tunediff.core import machine, progress
from tunediff.core.clock import Budget
from tunediff.core.files import write_text
from tunediff.data import images
from tunediff.data.knobs import Data
from tunediff.distributed import World, alone
from tunediff.training import hardware
from tunediff.training.engine import Engine
from tunediff.training.evaluation import evaluate
from tunediff.training.observer import Observer
from tunediff.training.session import Program, Session
from tunediff.training.trial import run


class Judge(Program):
    """A training that asks for its first batch gets none: its model becomes the finished one, and is judged."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.values: Mapping[str, Any] = {}
        """What the evaluation found."""

    def begin(self, session: Session) -> bool:
        self.load(session)
        self.values = self.judge(session, lambda: evaluate(session))
        return False

    def load(self, session: Session) -> None:
        """Give the exported model the finished one's weights."""
        assert session.result is not None
        session.result.load_state_dict(self.weights)


def judged(
    config: Systems, weights: Mapping[str, Tensor], world: World, observer: Observer | None = None
) -> Mapping[str, Any]:
    """Return the workload's evaluation of a model with these weights, as its training exports it; all ranks call it.

    Raises what the workload's evaluation raises.
    """
    eager = dataclasses.replace(config, compile=Compile())
    program = Judge(weights)
    run(Engine(eager, Budget(samples=1), world, observer or Observer(), program))
    return program.values


LONG_ENOUGH_S = 0.15
"""Seconds of passes after which a rate is known."""
ONCE_S = 3.0
"""A pass that takes so long is timed once: loading kernels is little of it."""
ROUNDS, PAUSE_S, ROUNDS_S = 6, 0.5, 10.0
"""While other processes use the cores, passes are timed again: so often, after a pause, for so many seconds at most."""
PROBE_S = 60.0
"""What takes longer to be timed is not known."""


PassS = Mapping[str, float]
"""Seconds of one pass, by the parts of `evaluation_pass`; "" where it has none."""


def pass_s(config: Systems, world: World) -> PassS | None:
    """Measure the seconds that one sample takes through each part of an evaluation, here and now.

    In batches of up to `evaluation.batch_size`, for seconds in all. None where the workload has no `evaluation_pass`.
    """
    if (offered := cfg.of(config).get_hook("evaluation_pass")) is None:
        return None
    runs, most = offered(config.knobs, world.device), getattr(config.evaluation, "batch_size", 64)
    parts = runs if isinstance(runs, Mapping) else {"": runs}
    return {part: rate_s(run, most, world) for part, run in parts.items()}


def pass_s_and_load(config: Systems, world: World) -> tuple[PassS | None, float]:
    """Return `pass_s`, and the share of the cores that other processes used meanwhile.

    Passes beside other processes take many times as long. So the least of several rounds counts, spread in time, until
    one of them has the cores for itself.
    """
    least: PassS | None = None
    load, began = 1.0, time.monotonic()
    for number in range(ROUNDS):
        if number:
            time.sleep(PAUSE_S)
        before = hardware.Usage.now()
        parts_s = pass_s(config, world)
        used = hardware.Usage.now().since(before)
        if parts_s is None:
            return None, 0.0
        least = parts_s if least is None else {part: min(spent_s, parts_s[part]) for part, spent_s in least.items()}
        load = min(load, hardware.disturbance(used, used.own_s, machine.cores())["other_load_share"])
        if load <= hardware.DISTURBED or time.monotonic() - began > ROUNDS_S:
            break
    return least, load


class Measured(TypedDict, total=False):
    """What can be known of a search before it starts."""

    data: list[str]
    """On the images that are learned: see `Images.said`."""
    pass_s: PassS | None
    other_load_share: float
    """Share of the cores that other processes used while passes were timed, in the quietest round."""
    disturbed: bool
    """Whether that was so much that passes may take less than timed."""
    too_long: bool
    """Whether passes were not timed, since that took over `PROBE_S`."""
    evaluation_s: float | None
    """Of one evaluation that was made, where the workload says nothing of its passes."""
    parameters: int
    """Of the model; not there where its workload does not say how to build it."""
    prepared: bool
    """Whether what an evaluation needs once lies in the cache folder now."""


MOST_FILES = 20_000
"""A dry run decodes no more files than these; a search reads them all."""


def measured(
    config: Systems, world: World, evaluates: bool, prepare: bool, tell: Callable[[Measured], None] = lambda _: None
) -> Measured:
    """Look at the data and time the parts of an evaluation; `prepare`: leave in the cache folder what trials need.

    `tell` gets what is known before passes are timed. Raises what the data or the set-up of the training raise.
    """
    data, result = getattr(config.knobs, "data", None), Measured(data=[], pass_s=None, prepared=prepare)
    if isinstance(data, Data):
        result["data"] = images.told(data, None if prepare else MOST_FILES)
    if prepare:
        eager, budget = dataclasses.replace(config, compile=Compile()), Budget(samples=1)
        run(Engine(eager, budget, world, Observer(), Build(), evaluates=evaluates))
    if (network := cfg.of(config).get_hook("network")) is not None:
        with torch.device("meta"):
            result["parameters"] = sum(parameter.numel() for parameter in network(config.knobs).parameters())
    if evaluates:
        tell(result)
        result["pass_s"], result["other_load_share"] = pass_s_and_load(config, world)
        result["disturbed"] = result["other_load_share"] > hardware.DISTURBED
    return result


class Build(Program):
    """A training that asks for its first batch gets none: all that it makes before is made."""

    def begin(self, session: Session) -> bool:
        return False


def before_search(config: Systems, evaluates: bool, prepare: bool = True) -> Measured:
    """Call `measured` in a process of its own, which leaves nothing where the search runs; report it on stderr.

    {} where that fails, after a line that says why; without passes where timing them takes over `PROBE_S`. Raises
    `ConfigError` for data that cannot be used, as every trial would.
    """
    with tempfile.TemporaryDirectory(prefix="tunediff-measure-") as folder:
        path, answer = Path(folder) / "config.yaml", Path(folder) / "answer.json"
        path.write_text(cfg.dump(config), encoding="utf-8")
        flags = [str(int(evaluates)), str(int(prepare))]
        command = [sys.executable, "-m", "tunediff.training.judging", str(path), str(answer), *flags]
        # Ctrl-C is for the search alone, which kills this.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            ended = _wait(process, answer)
        finally:
            process.kill()
            process.wait()
        answered = json.loads(answer.read_text()) if answer.exists() else {}
    if refused := answered.get("refused"):
        raise ConfigError(refused)
    if answered and not ended:
        answered["too_long"] = True
        why = f"one evaluation could not be timed: a few passes take over {PROBE_S:.0f} s here"
        print(f"WARNING: {why}", file=sys.stderr)
    return cast("Measured", answered)


def _wait(process: subprocess.Popen[bytes], answer: Path) -> bool:
    """Wait until the process has ended; False once it has timed passes for too long."""
    timing: float | None = None
    while process.poll() is None:
        time.sleep(0.05)
        timing = time.monotonic() if timing is None and answer.exists() else timing
        if timing is not None and time.monotonic() - timing > PROBE_S:
            return False
    return True


def _main(path: str, answer: str, evaluates: str, prepare: str = "1") -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    result: Mapping[str, Any] = {}

    def tell(measured_so_far: Measured) -> None:
        write_text(Path(answer), json.dumps(measured_so_far))

    try:
        with progress.shown():
            result = measured(cfg.load(Path(path)), alone(), bool(int(evaluates)), bool(int(prepare)), tell)
    except ConfigError as error:
        result = {"refused": str(error)}
    except Exception as error:
        print(f"WARNING: what a trial costs could not be measured: {described(error)}", file=sys.stderr)
    write_text(Path(answer), json.dumps(result))


def _end_with(parent: int) -> None:
    """End this process when the search that started it is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(cli.FAILED)


def rate_s(run: Callable[[int], object], most: int, world: World, enough_s: float | None = None) -> float:
    """Measure the seconds of a sample in `run(count)`: batches of up to `most`, or until one takes `enough_s` and is no
    cheaper for each of its samples than a smaller one."""
    count, before, enough_s = 1, math.inf, LONG_ENOUGH_S if enough_s is None else enough_s
    while True:
        taken: list[float] = []
        # The first loads kernels, others may be disturbed.
        while not _timed_enough(taken, enough_s):
            world.synchronize()
            begin = time.perf_counter()
            run(count)
            world.synchronize()
            taken.append(time.perf_counter() - begin)
        unit_s = min(taken) / count
        slow = min(taken) >= 10 * enough_s  # larger batches would keep the user waiting
        if count >= most or slow or (min(taken) >= enough_s and unit_s > 0.7 * before):
            return min(unit_s, before)
        count, before = min(4 * count, most), unit_s


def _timed_enough(taken: list[float], enough_s: float) -> bool:
    """Return whether these calls suffice to know how long one takes."""
    if not taken or min(taken) >= ONCE_S:
        return bool(taken)
    return sum(taken) >= enough_s and len(taken) >= (3 if min(taken) < enough_s else 2)


if __name__ == "__main__":
    _main(*sys.argv[1:])
