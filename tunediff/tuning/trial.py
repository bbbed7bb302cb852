"""The driver of one trial: what Ray Tune starts. It imports no torch: its slot's workers do the training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.result import RESULT_DUPLICATE

from tunediff import config as cfg
from tunediff import record
from tunediff.config import Config
from tunediff.space import SearchSpace

ATTEMPTS = 2
"""Worker groups a trial may use up: a killed worker is not the configuration's fault, a second one is suspicious."""

_HIDDEN = ("event", "kind", "seconds", "time")


def plan(space: SearchSpace, experiment: Path, slots: list[str]) -> dict[str, Any]:
    """What all drivers of a search have in common; plain values, so that it travels. `slots`: their actors' names."""
    return {
        "slots": slots,
        "experiment": str(experiment),
        "baseline": cfg.to_dict(space.baseline),
        "source": space.source,
        "metric": space.metric,
        "budget": {"seconds": space.budget.per_trial_s, "compile_charged": space.budget.compile_charged},
        "deadline_s": space.budget.trial_deadline_s,
        "fresh": space.fresh,
        "profile_steps": space.operations,
        "final": space.final,
    }


def configuration(drawn: dict[str, Any], plan: dict[str, Any]) -> Config:
    """The full configuration of the drawn knobs."""
    return cfg.override(cfg.from_dict(plan["baseline"], plan["source"]), drawn, plan["source"])


class Driver(tune.Trainable):  # type: ignore[misc]
    """One trial after the other in the same process, as starting one takes seconds; each `step` is one point.

    A scheduler that stops a trial asks for no further step: the slot learns of it from the next trial, or at the end.
    """

    def setup(self, config: dict[str, Any], plan: dict[str, Any]) -> None:
        self._plan = plan
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._points = points(new_config, self._plan)
        return True

    def step(self) -> dict[str, Any]:
        return next(self._points, {"done": True, RESULT_DUPLICATE: True})  # the end brings no numbers of its own


def points(params: dict[str, Any], plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hand the trial to its slot and yield its points for Tune, until it ended one way or another.

    `params`: the drawn knobs by dotted name, `trial` (its name) and `slot`. A driver that is started again after a
    kill attaches to the running job, or finds in the journal that all is done. To ask for the point after the next one
    is to let the workers train on.
    """
    import ray

    from tunediff.tuning.slot import get, kind_of_group

    name, folder = params["trial"], Path(plan["experiment"]) / "trials" / params["trial"]
    drawn = {knob: value for knob, value in params.items() if knob in cfg.knobs()}
    config = configuration(drawn, plan)
    journal = record.Journal(folder)
    if (known := record.read_trial(folder)) is not None and known.finished:
        yield from (_for_tune(point, plan["metric"]) for point in known.points)
        return

    slot, started = get(plan["slots"][params["slot"]]), time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        journal.write(
            "start",
            name=name,
            number=int(name.lstrip("t")),
            config=cfg.flat(config),
            drawn=drawn,
            fingerprint=cfg.fingerprint(config),
            budget_s=plan["budget"]["seconds"],
            environment=environment.describe(),
            pid=os.getpid(),
        )
        job = {
            "name": name,
            "key": f"{name}/{attempt}",
            "config": cfg.to_dict(config),
            "budget": plan["budget"],
            "folder": str(folder),
            "kind": kind_of_group(config),
            "fresh": plan["fresh"] or config.compile.mode != "none",  # caches of compilation outlive a trial
            "evaluate": plan["metric"] == "frechet",
            "keep": plan["metric"] == "frechet",
        }
        job |= {key: plan[key] for key in ("profile_steps", "final") if plan[key]}
        serial, cursor = ray.get(slot.submit.remote(job)), 0
        while True:
            event = ray.get(slot.event.remote(serial, cursor))
            late = time.monotonic() - started > plan["deadline_s"]
            if late and (event is None or event["kind"] == "point"):  # an end that came late is an end all the same
                ray.get(slot.kill.remote("past its deadline"))
                reason = f"not done after {plan['deadline_s']:.0f} s of wall-clock"
                journal.write("end", status="timeout", reason=reason)
                return
            if event is None:
                continue
            cursor += 1
            if event["kind"] == "point":
                yield _for_tune(event, plan["metric"])
                ray.get(slot.let_go_on.remote(serial, event["index"]))
            elif event["kind"] == "end":
                if (ended := record.read_trial(folder)) is None or not ended.finished:  # the worker could not write it
                    journal.write("end", **{key: value for key, value in event.items() if key != "kind"})
                return
            else:  # the group died, or the slot was restarted and knows nothing of this job
                reason = _short(event.get("reason", "its slot was restarted"))
                if any(os.strerror(code) in reason for code in record.DISK_FAULTS):
                    raise OSError(reason)  # the disk's fault: the trial has no end, and the search looks at the disk
                if "outofmemory" in reason.lower().replace(" ", ""):
                    journal.write("end", status="oom", reason=reason)
                    return
                if attempt == ATTEMPTS:
                    journal.write("end", status="error", reason=f"the workers died {ATTEMPTS} times: {reason}")
                    return
                break


def _for_tune(point: dict[str, Any], metric: str) -> dict[str, Any]:
    """What Tune's scheduler and pages need of a point."""
    numbers = {key: value for key, value in point.items() if key not in _HIDDEN and isinstance(value, int | float)}
    return {**numbers, "objective": numbers[metric] if math.isfinite(numbers[metric]) else math.inf}


def _short(reason: str) -> str:
    """The telling line of a Ray error, which brings pages."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "died" in line.lower() or "killed" in line.lower()]
    return (telling or lines or ["no reason given"])[-1][:300]
