"""Check a user's workload in processes of its own: two steps and evaluations."""

from __future__ import annotations

import collections
import copy
import hashlib
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypedDict, cast

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tunediff import config as cfg
from tunediff.config import ConfigError, code
from tunediff.config.code import WorkloadError
from tunediff.config.systems import Systems, eager
from tunediff.core import machine, template_ask, text
from tunediff.core.clock import Budget
from tunediff.core.outcomes import Status
from tunediff.core.template import TemplateError
from tunediff.distributed import World, world_of_environment
from tunediff.training import hardware, memory, prepared, rerun, state, weights
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.recorded_runs import Record
from tunediff.training.run_trial import end_of
from tunediff.training.training_run import TrainingRun
from tunediff.training.trial import TrainingOutcome, run

STEPS = 2
"""With an evaluation after each step, so that the last one need not be the best."""
RUNS = 3
"""Further runs: from the checkpoint, from the weights, with another seed."""
LONGEST_S = 900.0


class Report(TypedDict, total=False):
    """The result of a check."""

    error: str
    """Why the workload cannot be searched; the only key then."""
    unread: list[str]
    """Knobs that its training never looked at."""
    warnings: list[str]
    """What does not prevent a search, and may be a mistake of the user."""
    parameters: int
    saved_parameters: int
    """Numbers in the file of weights: an adapter's are without its frozen base."""
    step_s: float
    evaluation_s: float
    loaded: dict[Path, Path]
    """The user's files that were loaded, by their paths in a copy."""
    other_load_share: float
    """Share of the cores that other processes used meanwhile."""
    disturbed: bool
    """Whether that was so much that the seconds may be too many."""
    value: float
    """The objective after two steps."""


class _Calls:
    """Counts calls with gradients. Copies of a model that carries it count by themselves."""

    count = 0

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.count += torch.is_grad_enabled()


class Check(Record):
    """Train, watching what the workload does with its model."""

    def __init__(self) -> None:
        super().__init__()
        self.early_steps = 0
        """Optimizer steps before the first batch."""
        self.early = register_optimizer_step_post_hook(self._note_early)

    def _note_early(self, *_: Any) -> None:
        self.early_steps += 1

    def begin(self, run: TrainingRun) -> bool:
        self.early.remove()
        return super().begin(run)

    outer: nn.Module
    plain: nn.Module
    passes = 0
    """Of strategies that own them."""

    def after_prepare(self, run: TrainingRun, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return a module other than the given one, to tell which of them is trained."""
        self.plain = model
        self.outer = prepared if prepared is not model else copy.copy(model)
        self.calls, hooks = (
            _Calls(),
            collections.OrderedDict[int, Any](self.outer._forward_pre_hooks),
        )
        self.outer._forward_pre_hooks = hooks
        self.outer.register_forward_pre_hook(self.calls)
        self.plain_calls = _Calls()
        model.register_forward_pre_hook(self.plain_calls)
        self.before = state.copied(model.state_dict())
        return self.outer

    @property
    def called(self) -> int:
        """Return how often the prepared model was called to train it."""
        return self.calls.count + self.passes

    def on_passes(self, run: TrainingRun) -> None:
        self.passes += 1

    def before_save(self, run: TrainingRun) -> None:
        with run.strategy.states_for_file():
            contents = run.state.take()["kept"]
        for name, content in contents.items():
            if where := state.unreadable_part(content):
                holds = "a checkpoint holds tensors, numbers, strings, lists and dictionaries"
                raise run.mistake(f"keep({name}=…): {where}; {holds}")


def check(config: Systems, world: World, folder: Path | None = None) -> Report:
    """Train and judge a workload. Raises its errors, and `WorkloadError` for silent faults.

    `folder`: of the checkpoint, for all ranks; without it, a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="tunediff-check-") as temporary:
        return _check(config, world, folder or Path(temporary))


def _check(config: Systems, world: World, folder: Path) -> Report:
    short = cfg.override(eager(config), {"evaluation.points": STEPS}, check=False)
    budget, began, before = Budget(steps=STEPS), time.monotonic(), hardware.Usage.now()
    program = Check()
    engine = Engine(short, budget, world, Observer(), program, folder=folder)
    try:
        outcome = run(engine)
    finally:
        program.early.remove()
    spent_s, used = time.monotonic() - began, hardware.Usage.now().since(before)
    load = hardware.disturbance(used, sum(world.gather(used.own_s)), machine.cores())[
        "other_load_share"
    ]
    _check_model(engine, program)
    if world.main:
        weights.save(outcome.weights, folder / weights.NAME, {})
    world.barrier()
    last = outcome.points[-1]
    report: Report = {
        "unread": list(outcome.unread), "warnings": _warnings(engine, program, outcome),
        "parameters": sum(parameter.numel() for parameter in program.plain.parameters()),
        "saved_parameters": sum(tensor.numel() for tensor in outcome.weights.values()),
        "step_s": last.step_s or 0.0, "evaluation_s": outcome.seconds.get("evaluation",
        0.0) / STEPS,
        "other_load_share": load, "disturbed": load > hardware.DISTURBED,
        "value": float(last[cfg.of(config).objective.name]),
    }  # fmt: skip
    first = program.record
    del engine, program, outcome  # the device may not hold two trainings at once
    memory.reset(world.device)
    report["warnings"] += rerun.warnings(short, world, folder, budget, first, RUNS * spent_s)
    return report


def _check_model(run: TrainingRun, program: Check) -> None:
    title, world = cfg.of(run.config).title, run.world
    after = program.plain.state_dict()
    learned = [name for name, _ in program.plain.named_parameters()]
    has_learned = any(bool((after[name].cpu() != program.before[name]).any()) for name in learned)
    if not program.called and (program.plain_calls.count or not has_learned):
        write = "net = trial.prepare(net) returns the model to call"
        raise WorkloadError(
            f"{title}: the model that is trained is not the one that was prepared; {write}"
        )
    if not program.called and (world.size > 1 or run.config.compile.active):
        raise WorkloadError(f"{title}: {METHODS}")
    if not has_learned:
        make = "make it of net.parameters(), after net = trial.prepare(net)"
        raise WorkloadError(
            f"{title}: two steps changed no parameter of the prepared model; does the optimizer"
            f" have them? {make}"
        )
    result = {id(module) for module in (run.result, program.outer) if module is not None}
    result |= {id(module) for module in run.result.modules()} if run.result is not None else set()
    if program.judging and not program.judging & result:
        say = "trial.export_model(model) names the one that is judged, such as averaged weights"
        raise WorkloadError(
            f"{title}: the evaluation judges another model than the one that would be exported;"
            f" {say}"
        )
    compared = [after[name] for name in learned]
    if run.result is not None and run.result is not program.plain:  # such as averaged weights
        exported = run.result.state_dict()
        compared += [
            exported[name] for name, _ in run.result.named_parameters() if name in exported
        ]
    sums = [float(one.detach().double().sum()) for one in compared]
    if any(other != sums for other in world.gather(sums)):
        raise WorkloadError(
            f"{title}: two ranks have learned different models; is one of them wrapped again, made"
            " anew, or changed by what only one rank does?"
        )


METHODS = (
    "the prepared model was trained through its methods and never called, and DDP and torch.compile"
    " see calls alone: write  forward = NAME_OF_THE_METHOD  in its class, and call net(…)"
)
"""For models such as agents with `get_action_and_value`."""


def _warnings(run: TrainingRun, program: Check, outcome: TrainingOutcome) -> list[str]:
    warnings = [*run.notes, *([] if program.called else [METHODS])]
    if outcome.reason:
        warnings.append(outcome.reason)
    if program.early_steps:
        steps = text.pluralize(program.early_steps, "optimizer step")
        warnings.append(
            f"train(trial) makes {steps} before its first batch, which the budget counts with"
            " setup: charged only (budget: in a search file)"
        )
    if not run.seeded:
        warnings.append(
            "train(trial) sets torch's seed itself: the knob seed does not change the initial"
            " weights, and runs on new seeds are more alike than they should be"
        )
    firsts = run.world.gather(next(iter(program.record.batches), None))
    if run.strategy.replicas.size > 1 and len(set(firsts)) == 1 and firsts[0] is not None:
        warnings.append(
            "all ranks train the same batches: a loader of your own needs a sampler that divides"
            " the data; a stream divides itself by trial.replicas.rank and .size"
        )
    return warnings


# ---- in its processes
def before_search(
    config: Systems, say: Callable[[str], None], imports_twice: bool = False
) -> Report:
    """Check a configuration of a user's workload in processes of its own; raise `ConfigError` with
    what is wrong. `imports_twice`: warn of what has another value whenever the file is imported."""
    title, workers = cfg.of(config).title, config.parallel.workers
    config = _for_this_machine(config)
    ranks = config.parallel.processes
    if config.parallel.workers < workers:
        gpus = text.pluralize(config.parallel.workers, "GPU")
        say(f"{title}: parallel.workers = {workers} is checked with the {gpus} of this machine")
    on_ranks = f" on {ranks} ranks" if ranks > 1 else ""
    doing = f"checking {title}: {STEPS} steps and {STEPS} evaluations{on_ranks}"
    content = pickle.dumps(config)
    options = {"workload": config.schema.workload, "trains": False}
    say(doing)
    with (
        tempfile.TemporaryDirectory(prefix="tunediff-check-") as folder,
        tempfile.TemporaryFile() as output,
    ):
        try:
            report = template_ask.ask(
                "tunediff.training.check:answer", (content, folder), within_s=LONGEST_S,
                ranks=ranks, prepare=prepared.PREPARE, options=options, output=output,
                base=prepared.BASE,
            )  # fmt: skip
        except TimeoutError:
            raise ConfigError(
                f"{title}: two steps and two evaluations take over {LONGEST_S:.0f} s; --no-check"
                " starts the search all the same"
            ) from None
        except TemplateError as error:
            raise ConfigError(f"{title}: its process died: {error}{_last_line(output)}") from None
    if "error" in report:
        raise ConfigError(report["error"])
    report["warnings"] += changing(config.schema.workload) if imports_twice else []
    return cast("Report", report)


def changing(workload: str) -> list[str]:
    """Return warnings of values at the top of a user's file that two imports of it differ in, such
    as an order that is drawn there: a side of a comparison has one import for all of its runs."""
    one, other = (
        template_ask.ask(
            "tunediff.training.check:top_values", workload, within_s=LONGEST_S,
            prepare=prepared.PREPARE, options={"workload": workload, "trains": False},
            base=prepared.BASE,
        )
        for _ in range(2)
    )  # fmt: skip
    why = "has another value whenever the file is imported: let it follow trial.config.seed"
    return [f"{name} {why}" for name, digest in one.items() if other.get(name) != digest]


def top_values(connection: Connection, workload: str) -> None:
    """Send the digests of the numbers, texts, arrays and tensors at the top of a user's file."""
    digests = dict[str, str]()
    for name, value in vars(cfg.find(workload).code).items():
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        if isinstance(array, bool | int | float | str | np.ndarray):
            content = array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode()
            digests[name] = hashlib.sha256(content).hexdigest()
    connection.send(digests)


def _for_this_machine(config: Systems) -> Systems:
    """Return the configuration with this machine's workers, each with its former batch.

    A search on a cluster may start on a machine with fewer GPUs than a trial gets elsewhere.
    """
    workers, gpus = config.parallel.workers, len(machine.gpus())
    if not 0 < gpus < workers:
        return config
    batch, (_, divides) = config.loader.batch_size, config.parallel.parts
    batch = batch // workers * gpus if divides == "parallel.workers" else batch
    return cfg.override(config, {"parallel.workers": gpus, "loader.batch_size": batch}, check=False)


def _last_line(output: IO[bytes]) -> str:
    """Return the last line that the processes wrote, as a clause; '' for none."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    return next((f": {line}" for line in reversed(lines) if line), "")


def answer(connection: Connection, content: tuple[bytes, str]) -> None:
    """Check on one rank, and send the report or why the workload cannot be searched; the function
    of a template's run. `content`: a configuration, and a folder that all ranks find."""
    pickled, folder = content
    prepared.begin()
    config: Systems | None = None
    try:
        config = pickle.loads(pickled)
        with world_of_environment() as world:
            report = check(config, world, Path(folder))
            if world.main:
                connection.send(report)
    except (ConfigError, WorkloadError) as error:
        connection.send({"error": str(error)})
    except BaseException as error:
        connection.send({"error": _failure(error, config)})


def _failure(error: BaseException, config: Systems | None) -> str:
    """Return what went wrong in a user's training, with traceback unless a loss diverged.

    The user reads it, so a disk fault or a lost rank is reported like any other error.
    """
    end = end_of(error)
    if config is None:
        return f"{end.reason}\n{code.trace(error)}"
    message = f"{Path(config.schema.workload).name}: {end.reason}"
    if end.status == Status.NAN:
        return message
    hint = (
        f" (with loader.batch_size = {config.loader.batch_size})"
        if end.status == Status.OOM
        else ""
    )
    return f"{message}{hint}\n{code.trace(error)}"
