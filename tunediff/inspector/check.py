"""Check a user's file before a search: short trials of its baseline, whose journals are compared.

One trial of two steps and two evaluations; the same one interrupted after its first step, and
resumed; one with another seed. Each is trained by the worker of every trial, in processes of its
own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Systems
from tunediff.config.systems import eager
from tunediff.core import template
from tunediff.core import trial_record as record
from tunediff.core.clock import Budget
from tunediff.core.outcomes import Status
from tunediff.core.template import TemplateError
from tunediff.core.text import number
from tunediff.core.trial_record import NEVER_READ, TrialRecord
from tunediff.inspector.probe import Measured
from tunediff.inspector.watched_run import FACTS, answer
from tunediff.search_space import SearchSpace
from tunediff.training import entries
from tunediff.tuning import experiment
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
SEVERAL = {"loader.workers": 1, "parallel.workers": 2}
"""Knobs whose least value that shows whether several processes work is tried, where it is searched."""
GPU_TOLERANCE = 1e-3
"""Relative difference of equal trainings' findings on a GPU: sums have no fixed order."""
FINAL = "final_"
"""Prefix of what the saved weights are judged by once more."""

_KEEP = (
    "trial.keep(name=…) takes all that changes while it trains, and its load_state_dict restores it"
)
_EXPORT = (
    "trial.export_model(model) names the model that is judged and saved, such as averaged weights"
)
_ALIKE = "so runs on new seeds are more alike than they should be"
REFUSED = {
    "other_trained": "the model that is trained is not the one that was prepared; net ="
    " trial.prepare(net) returns the model to call",
    "none_changed": "the steps changed no parameter of the prepared model; does the optimizer have"
    " them? make it of net.parameters(), after net = trial.prepare(net)",
    "other_weights": f"evaluate_with: judges other weights than those that are saved; {_EXPORT}",
    "other_judged": "the evaluation judges another model than the one that would be exported;"
    f" {_EXPORT}",
    "ranks_differ": "two ranks have learned different models; is one of them wrapped again, made"
    " anew, trained through its methods, or changed by what only one rank does?",
    "starts_again": "a resumed training starts from the beginning: {why}; a checkpoint holds"
    " tensors, numbers, strings, lists and dictionaries",
    "resumed": f"a resumed training ends with other {{names}}; {_KEEP}",
    "saved": "evaluate_with: {names} of the saved weights differ from those in the training;"
    f" {_EXPORT}",
}
"""What a search cannot begin with."""
WARNED = {
    "methods": "the prepared model was trained through its methods and never called, and DDP and"
    " torch.compile see calls alone: write  forward = NAME_OF_THE_METHOD  in its class, and call"
    " net(…)",
    "early_steps": "train(trial) makes optimizer steps before its first batch ({early_steps}),"
    " which the budget counts with setup: charged only (budget: in a search file)",
    "seed_set": "train(trial) sets torch's seed itself: the knob seed does not change the initial"
    f" weights, {_ALIKE}",
    "same_batches": "all ranks train the same batches: a loader of your own needs a sampler that"
    " divides the data; a stream divides itself by trial.replicas.rank and .size",
    "long": "whether a resumed training and one on another seed are as they should be was not"
    " checked: it takes about {seconds:.0f} s",
    "chance": "{names} differ when a run is repeated with the same seed: its randomness is part of"
    " every comparison",
    "begins_anew": "a resumed training does not go on as if it had not been interrupted: {names}"
    " differ; what train(trial) changes beside trial.keep(…), such as environments, buffers and the"
    " place in its data, begins anew",
    "same_initial": "the initial weights are the same for two values of the knob seed,"
    f" {_ALIKE} unless they are read from a file",
    "same_data": "the first batches are the same for two values of the knob seed,"
    f" {_ALIKE}: does the loader shuffle?",
    "imported": "{names} has another value whenever the file is imported: let it follow"
    " trial.config.seed",
}
"""What may be a mistake of the user, and does not prevent a search."""

Train = Callable[[TrialSpec, bool], object]
"""Trains a run to its end, or interrupted after its first point; its journal has the result."""


class Report(Measured, total=False):
    """The result of a check that found no mistake."""

    unread: list[str]
    """Knobs that its training never looked at."""
    warnings: list[str]
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


def create(
    folder: Path, space: SearchSpace, content: Lines, say: Callable[[str], None]
) -> tuple[SearchSpace, Report]:
    """Check the workload, then `experiment.create`; return the space and the report.

    Warns of searched knobs that the check has not seen read: another configuration may read them.
    Raises `ConfigError` with what is wrong with the workload, or where no searched knob is read.
    """
    tried: Systems = space.baseline
    for dimension in space.dimensions:
        least = SEVERAL.get(dimension.name)
        if least is not None and least <= max(dimension.choices or [dimension.high]):
            with contextlib.suppress(ConfigError):  # such as a batch that two cannot share
                tried = cfg.override(tried, {dimension.name: least})
    report = before_search(tried, say)
    title, searched = space.workload.title, {dimension.name for dimension in space.dimensions}
    value = f"{space.workload.objective.name} {number(report['value'])}"
    say(f"{title}: passed; {value} after {STEPS} steps")
    unread = searched.intersection(report["unread"])
    # where none is read, no value of any of them can lead to where one is
    if searched and unread == searched:
        raise ConfigError(
            f"{title}: nothing to search: train(trial) never reads {', '.join(sorted(searched))};"
            " use trial.knobs, trial.loader_options and trial.autocast() where they should act"
        )
    never = f"the check never saw train(trial) read {', '.join(sorted(unread))}: searched all the"
    effect = " same, without effect unless another configuration reads them"
    for warning in [*report["warnings"], *[never + effect] * bool(unread)]:
        say(f"WARNING: {title}: {warning}")
    return experiment.create(folder, space, content), report


def before_search(
    config: Systems, say: Callable[[str], None], imports_twice: bool = False
) -> Report:
    """Check the configuration of a user's workload in processes of its own; raise `ConfigError`
    with what is wrong. `imports_twice`: warn of what has another value whenever the file is
    imported."""
    title, ranks = cfg.of(config).title, config.parallel.processes
    on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
    say(f"checking {title}: {STEPS} steps and {STEPS} evaluations{on_ranks}")

    def train(job: TrialSpec, interrupted: bool) -> None:
        with tempfile.TemporaryFile() as output:
            try:
                template.ask(
                    answer, (job, interrupted), ranks=ranks,
                    within_s=LONGEST_S, prepare=entries.prepare,
                    options=config.schema.workload, output=output, base=entries.prepare_base,
                )  # fmt: skip
            except TimeoutError:
                raise ConfigError(
                    f"{title}: two steps and two evaluations take over {LONGEST_S:.0f} s;"
                    " --no-check starts the search all the same"
                ) from None
            except TemplateError as error:
                if (trial := record.read_trial(job.folder)) is None or trial.end is None:
                    output.seek(0)
                    said = output.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise ConfigError(f"{title}: its process died: {error}: {said}") from None

    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as folder:
        return check(config, train, Path(folder), imports_twice)


def check(config: Systems, train: Train, folder: Path, imports_twice: bool = False) -> Report:
    """Check a workload by runs in `folder`. Raises `ConfigError` with what is wrong with it."""
    short = cfg.override(eager(config), {"evaluation.points": STEPS}, check=False)
    began = time.monotonic()
    # judges the weights that it leaves once more, as `tunediff.evaluate` does
    first = _trained(short, folder / "t0000", train, final={"evaluation.points": STEPS})
    further_s, last = RUNS * (time.monotonic() - began), first.trial.points[-1]
    report: Report = {
        "unread": [knob for knob, why in first.trial.not_effective.items() if why == NEVER_READ],
        "parameters": first.facts["parameters"],
        "saved_parameters": first.facts["saved_parameters"],
        "evaluation_s": last.seconds.get("evaluation", 0.0) / STEPS,
        "value": float(last[cfg.of(config).objective.name]),
        "warnings": [*first.facts["notes"], *filter(None, [first.trial.reason])],
    }
    tell = functools.partial(_tell, cfg.of(config).title, report["warnings"])
    for fault in first.facts["faults"]:
        tell(fault, early_steps=first.facts["early_steps"])
    if further_s > MOST_S:
        tell("long", seconds=further_s)
        return report
    # the first run has shown that loader processes work
    short = cfg.override(short, {"loader.workers": 0}, check=False)
    _check_resume(short, folder, train, first, tell)
    other = cfg.override(short, {"seed": config.seed + SEED_OFFSET}, check=False)
    second = _trained(other, folder / "t0003", train, "it has another seed", evaluates=False).facts
    if "seed_set" not in first.facts["faults"] and first.facts["initial"] == second["initial"]:
        tell("same_initial")
    if len({*first.facts["batches"]}) > 1 and first.facts["batches"] == second["batches"]:
        tell("same_data")
    values = second["top_values"]
    differing = [name for name, v in first.facts["top_values"].items() if values.get(name) != v]
    for name in differing if imports_twice else ():
        tell("imported", names=[name])
    return report


def _tell(
    title: str, warnings: list[str], fault: str, names: Iterable[str] = (), **facts: Any
) -> None:
    """Add a fault's warning. Raises `ConfigError` where it is one that a search cannot have."""
    facts["names"] = ", ".join(names)
    if fault in REFUSED:
        raise ConfigError(f"{title}: {REFUSED[fault].format_map(facts)}")
    warnings.append(WARNED[fault].format_map(facts))


# ---- one run
def _trained(config: Systems, folder: Path, train: Train, when: str = "", **settings: Any) -> _Run:
    """Train a run and return it. Raises `ConfigError` where it fails; `when`: what is special."""
    _train(config, folder, train, False, when, settings)
    trial, events = record.read_begun(folder), record.events(folder)
    facts = (event[FACTS] for event in events if event["event"] == "about" and FACTS in event)
    return _Run(trial, next(facts))


def _train(
    config: Systems, folder: Path, train: Train, interrupted: bool, when: str,
    settings: Mapping[str, Any],
) -> None:  # fmt: skip
    objective, title = cfg.of(config).objective, cfg.of(config).title
    spec = TrialSpec(
        name=folder.name, folder=folder, workload=config.schema.workload, points=STEPS,
        budget=Budget(steps=STEPS),
        deadline_s=LONGEST_S, metric=objective.name, mode=objective.mode, **settings,
    )  # fmt: skip
    spec.begin(config, {})
    train(spec, interrupted)
    trial = record.read_trial(folder)
    if trial is None or trial.end is None or trial.end.status == Status.OK:
        return
    # ---- it failed: the user's own line, and the traceback unless the message says it all
    kind, _, message = trial.end.reason.partition(": ")
    if kind in ("WorkloadError", "ConfigError") and not when:
        raise ConfigError(message)
    fails = f"train(trial) works once and fails when {when}: " if when else ""
    traces = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("traceback-*"))]
    raise ConfigError("\n".join([f"{title}: {fails}{trial.end.reason}", *traces[:1]]))


def _check_resume(
    config: Systems, folder: Path, train: Train, first: _Run, tell: Callable[..., None]
) -> None:
    """Interrupt a run after its first step, resume it, and compare it with the first run; and that
    one with what was found of the weights that it has saved."""
    _train(config, folder / "t0001", train, True, "", {})
    resumed = _trained(config, folder / "t0001", train, "it goes on from its checkpoint")
    for why in resumed.trial.restarts:
        tell("starts_again", why=why)
    metrics = first.trial.points[-1].metrics
    final = {name.removeprefix(FINAL): v for name, v in metrics.items() if name.startswith(FINAL)}
    saved, changed = first.differing(final), first.differing(resumed.findings)
    learned = {"weights", cfg.of(config).objective.name}
    if saved or changed:  # is it the resume, or do equal runs differ?
        chance = first.differing(_trained(config, folder / "t0002", train).findings)
        saved, changed = saved - chance, changed - chance
        if chance & learned:
            tell("chance", names=sorted(chance & learned))
    # data that begin anew, and what a framework counts, are no fault of the checkpoint
    accumulation = config.loader.accumulation
    goes_on = first.facts["batches"][accumulation:][:1] == resumed.facts["batches"][:1] != []
    counted = first.facts["adopted"] and not changed & learned
    if changed:
        tell("resumed" if goes_on and not counted else "begins_anew", names=sorted(changed))
    elif saved:
        tell("saved", names=sorted(saved))


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    """Return whether findings are equal, numbers up to a relative difference."""
    mine, others = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(others) and all(map(functools.partial(_near, tolerance), mine, others))


def _near(tolerance: float, a: Any, b: Any) -> bool:
    numbers = isinstance(a, float) and isinstance(b, float)
    return bool(a == b or (numbers and math.isclose(a, b, rel_tol=tolerance)))
