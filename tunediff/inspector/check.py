"""Check a user's file before a search: short trials of its baseline, whose journals are compared.

One trial of two steps and two evaluations; the same one interrupted after its first step, and
resumed; one with another seed. Each is trained by the worker of every trial, in processes of its
own.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypedDict

from tunediff import config as cfg
from tunediff.config import ConfigError, Systems
from tunediff.config.code import WorkloadError
from tunediff.config.systems import eager
from tunediff.core import machine, template_ask, text
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.outcomes import Status
from tunediff.core.template import TemplateError
from tunediff.core.trial_record import NEVER_READ, TrialRecord
from tunediff.inspector.watched_run import FACTS, METHODS, answer
from tunediff.training import entries
from tunediff.tuning.trial_spec import TrialSpec

STEPS = 2
"""With an evaluation after each step: a checkpoint lies between them."""
LONGEST_S = 900.0
MOST_S = 240.0
"""Most seconds for the further runs, by the first one; longer ones are left out."""
SEED_OFFSET = 100_003
"""From the first seed to the second; unlikely to be written in a file."""
RUNS = 3
"""Further runs: interrupted, resumed, with another seed."""
GPU_TOLERANCE = 1e-3
"""Relative difference of equal trainings' findings on a GPU: sums have no fixed order."""
FINAL = "final_"
"""Prefix of what the saved weights are judged by once more."""
SAVED = (
    "trial.export_model(model) names the model that is judged and saved, such as averaged weights"
)
PLAIN = "a checkpoint holds tensors, numbers, strings, lists and dictionaries"
KEEP = (
    "trial.keep(name=…) takes all that changes while it trains, and its load_state_dict restores it"
)

Train = Callable[[TrialSpec, bool], object]
"""Trains a run to its end, or interrupted after its first point; its journal has the result."""


class Report(TypedDict, total=False):
    """The result of a check that found no mistake."""

    unread: list[str]
    """Knobs that its training never looked at."""
    warnings: list[str]
    """What does not prevent a search, and may be a mistake of the user."""
    parameters: int
    saved_parameters: int
    """Numbers in the file of weights: an adapter's are without its frozen base."""
    evaluation_s: float
    value: float
    """The objective after two steps."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that has ended, as its journal has it."""

    trial: TrialRecord
    facts: Mapping[str, Any]
    """Of `watched_run.Watch`."""

    @property
    def findings(self) -> dict[str, Any]:
        """Return what its last evaluation found, and the digest of the exported weights."""
        last = self.trial.points[-1]
        weights = {"weights": last.weights_digest} if self.facts["exact"] else {}
        found = {name: v for name, v in last.metrics.items() if not name.startswith(FINAL)}
        return {**found, **weights}

    def differing(self, other: Mapping[str, Any]) -> set[str]:
        """Return the names of the values that are not those of this run."""
        tolerance = 0.0 if self.facts["exact"] else GPU_TOLERANCE
        mine = self.findings
        return {name for name in other if not _equal(mine.get(name), other[name], tolerance)}


def before_search(
    config: Systems, say: Callable[[str], None], imports_twice: bool = False
) -> Report:
    """Check the configuration of a user's workload in processes of its own; raise `ConfigError`
    with what is wrong. `imports_twice`: warn of what has another value whenever the file is
    imported."""
    title, workers = cfg.of(config).title, config.parallel.workers
    if 0 < (gpus := len(machine.gpus())) < workers:  # a search on a cluster may start elsewhere
        batch = config.loader.batch_size // workers * gpus
        here = {"parallel.workers": gpus, "loader.batch_size": batch}
        config = cfg.override(config, here, check=False)
        say(f"{title}: parallel.workers = {workers} is checked with {text.pluralize(gpus, 'GPU')}")
    ranks = config.parallel.processes
    on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
    say(f"checking {title}: {STEPS} steps and {STEPS} evaluations{on_ranks}")
    options = {"workload": config.schema.workload, "trains": False}

    def train(job: TrialSpec, interrupted: bool) -> None:
        with tempfile.TemporaryFile() as output:
            try:
                template_ask.ask(
                    answer, (job, interrupted), ranks=ranks,
                    within_s=LONGEST_S, prepare=entries.prepare, options=options, output=output,
                    base=entries.BASE,
                )  # fmt: skip
            except TimeoutError:
                raise ConfigError(
                    f"{title}: two steps and two evaluations take over {LONGEST_S:.0f} s;"
                    " --no-check starts the search all the same"
                ) from None
            except TemplateError as error:
                if (trial := record.read_trial(job.folder)) is None or trial.end is None:
                    why = f"its process died: {error}{_last_line(output)}"
                    raise ConfigError(f"{title}: {why}") from None

    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as folder:
        return check(config, train, Path(folder), imports_twice)


def check(config: Systems, train: Train, folder: Path, imports_twice: bool = False) -> Report:
    """Check a workload by runs in `folder`. Raises `ConfigError` with what is wrong with it."""
    short = cfg.override(eager(config), {"evaluation.points": STEPS}, check=False)
    began, title = time.monotonic(), cfg.of(config).title
    # judges the weights that it leaves once more, as `tunediff.evaluate` does
    first = _trained(short, folder / "t0000", train, final={"evaluation.points": STEPS})
    further_s, last = RUNS * (time.monotonic() - began), first.trial.points[-1]
    report: Report = {
        "unread": [knob for knob, why in first.trial.not_effective.items() if why == NEVER_READ],
        "parameters": first.facts["parameters"],
        "saved_parameters": first.facts["saved_parameters"],
        "evaluation_s": last.seconds.get("evaluation", 0.0) / STEPS,
        "value": float(last[cfg.of(config).objective.name]),
        "warnings": _warnings(first),
    }
    if further_s > MOST_S:
        report["warnings"].append(
            "whether a resumed training and one on another seed are as they should be was not"
            f" checked: it takes about {further_s:.0f} s"
        )
        return report
    # the first run has shown that loader processes work
    short = cfg.override(short, {"loader.workers": 0}, check=False)
    other = cfg.override(short, {"seed": config.seed + SEED_OFFSET}, check=False)
    try:
        report["warnings"] += _of_resume(short, folder, train, first)
        second = _trained(other, folder / "t0003", train, "it has another seed", evaluates=False)
    except WorkloadError as error:
        raise ConfigError(f"{title}: {error}") from None
    report["warnings"] += _of_seeds(first, second)
    if imports_twice:
        why = "has another value whenever the file is imported: let it follow trial.config.seed"
        values = second.facts["top_values"]
        differing = [n for n, value in first.facts["top_values"].items() if values.get(n) != value]
        report["warnings"] += [f"{name} {why}" for name in differing]
    return report


# ---- one run
def _trained(config: Systems, folder: Path, train: Train, when: str = "", **settings: Any) -> _Run:
    """Train a run and return it. Raises `ConfigError` where it fails; `when`: what is special."""
    _train(config, folder, train, False, when, settings)
    trial, events = record.read_trial(folder), record.events(folder)
    facts = [event[FACTS] for event in events if event["event"] == "about" and FACTS in event]
    assert trial is not None
    return _Run(trial, dict(ChainMap(*reversed(facts))))


def _train(
    config: Systems, folder: Path, train: Train, interrupted: bool, when: str,
    settings: Mapping[str, Any],
) -> None:  # fmt: skip
    objective, title = cfg.of(config).objective, cfg.of(config).title
    spec = TrialSpec(
        name=folder.name, folder=folder, drawn={}, pickled=pickle.dumps(config),
        workload=config.schema.workload, points=STEPS, budget=Budget(steps=STEPS),
        deadline_s=LONGEST_S, metric=objective.name, mode=objective.mode, **settings,
    )  # fmt: skip
    spec.begin()
    train(spec, interrupted)
    trial = record.read_trial(folder)
    if trial is None or trial.end is None or trial.end.status == Status.OK:
        return
    # ---- it failed: the user's own line, and the traceback unless the message says it all
    end, traces = trial.end, sorted(folder.glob("traceback-*"))
    kind, _, message = end.reason.partition(": ")
    if kind in ("WorkloadError", "ConfigError") and not when:
        raise ConfigError(message)
    hint = (
        f" (with loader.batch_size = {config.loader.batch_size})"
        if end.status == Status.OOM
        else ""
    )
    fails = f"train(trial) works once and fails when {when}: " if when else ""
    trace = "".join(f"\n{path.read_text(encoding='utf-8')}" for path in traces[:1])
    raise ConfigError(f"{title}: {fails}{end.reason}{hint}{trace}")


def _warnings(first: _Run) -> list[str]:
    facts = first.facts
    warnings = [*facts["notes"], *([] if facts["called"] else [METHODS])]
    warnings += [first.trial.reason] if first.trial.reason else []
    if facts["early_steps"]:
        steps = text.pluralize(facts["early_steps"], "optimizer step")
        warnings.append(
            f"train(trial) makes {steps} before its first batch, which the budget counts with"
            " setup: charged only (budget: in a search file)"
        )
    if not facts["seeded"]:
        warnings.append(
            "train(trial) sets torch's seed itself: the knob seed does not change the initial"
            " weights, and runs on new seeds are more alike than they should be"
        )
    if facts["same_batches"]:
        warnings.append(
            "all ranks train the same batches: a loader of your own needs a sampler that divides"
            " the data; a stream divides itself by trial.replicas.rank and .size"
        )
    return warnings


# ---- runs beside each other
def _of_resume(config: Systems, folder: Path, train: Train, first: _Run) -> list[str]:
    """Interrupt a run after its first step, resume it, and compare it with the first run.

    Raises `WorkloadError` for what a checkpoint lacks, and for weights that are judged otherwise
    once they are saved.
    """
    when, objective = "it goes on from its checkpoint", cfg.of(config).objective.name
    _train(config, folder / "t0001", train, True, "", {})
    resumed = _trained(config, folder / "t0001", train, when)
    if resumed.trial.restarts:
        why = resumed.trial.restarts[0]
        raise WorkloadError(f"a resumed training starts from the beginning: {why}; {PLAIN}")
    metrics = first.trial.points[-1].metrics
    final = {name.removeprefix(FINAL): v for name, v in metrics.items() if name.startswith(FINAL)}
    saved, changed = first.differing(final), first.differing(resumed.findings)
    warnings, by_chance = list[str](), set[str]()
    if saved or changed:  # is it the resume, or do equal runs differ?
        by_chance = first.differing(_trained(config, folder / "t0002", train).findings)
        saved, changed = saved - by_chance, changed - by_chance
    if differing := sorted(by_chance & {objective, "weights"}):
        warnings.append(
            f'"{differing[0]}" differs when a run is repeated with the same seed: its randomness is'
            " part of every comparison"
        )
    if resumed.facts["restored"] != resumed.facts["learned_1"]:
        raise WorkloadError(f"evaluate_with: judges other weights after a resume; {KEEP}")

    # ---- data that begin anew are no fault of the checkpoint
    batches, accumulation = first.facts["batches"], config.loader.accumulation
    same_data = batches[accumulation : accumulation + 1] == resumed.facts["batches"][:1]
    if changed and (first.facts["makes_data"] or not same_data):
        return [
            *warnings,
            "a resumed training does not go on as if it had not been interrupted: what train(trial)"
            " changes beside trial.keep(…), such as environments, buffers and the place in its"
            " data, begins anew",
        ]
    if changed and first.facts["adopted"] and not changed & {objective, "weights"}:
        names = ", ".join(sorted(changed))
        return [
            *warnings, f"after a resume the framework's {names} begin anew or differ otherwise"
        ]  # fmt: skip
    if changed == {"weights"}:
        raise WorkloadError(f"a resumed training ends with other weights; {KEEP}")
    if changed:
        name = min(changed)
        a, b = (run.findings.get(name, "missing") for run in (first, resumed))
        what = f'evaluate_with: "{name}" is {a} in a training and {b} in one that was resumed'
        raise WorkloadError(f"{what}; {KEEP}")
    if saved:
        name = min(saved)
        raise WorkloadError(
            f'evaluate_with: "{name}" is {metrics[name]} in the training and {final[name]} of the'
            f" saved weights; {SAVED}"
        )
    return warnings


def _of_seeds(first: _Run, second: _Run) -> list[str]:
    """Return what stays equal in a run with another seed."""
    warnings, alike = [], "so runs on new seeds are more alike than they should be"
    if first.facts["seeded"] and first.facts["initial"] == second.facts["initial"]:
        same = "the initial weights are the same for two values of the knob seed"
        warnings.append(f"{same}, {alike} unless they are read from a file")
    batches = first.facts["batches"]
    if len({*batches}) > 1 and batches == second.facts["batches"]:
        warnings.append(
            f"the first batches are the same for two values of the knob seed, {alike}: does the"
            " loader shuffle?"
        )
    return warnings


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _last_line(output: IO[bytes]) -> str:
    """Return the last line that the processes wrote, as a clause; '' for none."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    return next((f": {line}" for line in reversed(lines) if line), "")
