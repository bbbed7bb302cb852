"""One short run of the check: a trial, trained by the worker of every trial, that is watched."""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from tunediff import config as cfg
from tunediff.config import Systems
from tunediff.distributed import World, world_of_environment
from tunediff.training import adapters, prepared, weights
from tunediff.training.engine import Engine, Facts, Observer
from tunediff.tuning import worker
from tunediff.tuning.trial_spec import TrialSpec

BATCHES = 3
"""Batches that two runs are compared by."""
FACTS = "inspected"
"""Key of the journal's event `about` that has what was watched."""
METHODS = (
    "the prepared model was trained through its methods and never called, and DDP and torch.compile"
    " see calls alone: write  forward = NAME_OF_THE_METHOD  in its class, and call net(…)"
)
"""For models such as agents with `get_action_and_value`."""


class _Calls:
    """Counts calls with gradients. Copies of a model that carries it count by themselves."""

    count = 0

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.count += torch.is_grad_enabled()


class Watch(Observer):
    """Train; note what a run begins with, trains on and is judged by, and refuse silent mistakes.

    The facts go into the journal, where `check` compares them with those of other runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.early_steps = 0
        """Optimizer steps before the first batch."""
        self._early = register_optimizer_step_post_hook(self._count_early)
        self.initial = self.restored = ""
        """Digests of the parameters before the first step, and of the exported weights when the
        first batch is trained, after a resume."""
        self.batches = list[str]()
        self.makes_data = False
        """Whether the loop draws or collects its data itself."""
        self._judged = set[int]()
        """Ids of the modules that the last evaluation called."""

    def _count_early(self, *_: Any) -> None:
        self.early_steps += 1

    def close(self) -> None:
        self._early.remove()

    # ---- hooks of the training
    def after_prepare(self, run: Engine, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return a module other than the given one, to tell which of them is trained."""
        outer = prepared if prepared is not model else copy.copy(model)
        outer._forward_pre_hooks = collections.OrderedDict(outer._forward_pre_hooks)
        self._plain, self._outer = model, outer
        self._calls, self._plain_calls = _Calls(), _Calls()
        outer.register_forward_pre_hook(self._calls)
        model.register_forward_pre_hook(self._plain_calls)
        self.initial = digest(list(model.parameters()))
        return outer

    def begin(self, run: Engine) -> bool:
        self.close()
        return True

    def batch(self, run: Engine, batch: Any) -> contextlib.AbstractContextManager[object]:
        if not run.warming_up:
            self.restored = self.restored or _exported(run)
            self.makes_data = isinstance(batch, int)
            if len(self.batches) < BATCHES and not self.makes_data:
                self.batches.append(digest(batch))
        return super().batch(run, batch)

    def evaluate(self, run: Engine, evaluate: Facts) -> Mapping[str, Any]:
        """Judge. Raises `WorkloadError` where other weights are judged than those exported, such as
        an average that is swapped in."""
        assert run.result is not None
        before = {id(one): digest(one) for one in run.result.parameters()}
        parts, swapped = {id(part) for part in run.result.modules()}, list[bool]()
        self._judged = set()

        def note(module: nn.Module, inputs: Any) -> None:
            self._judged.add(id(module))
            if id(module) in parts and not swapped and (own := list(module.parameters())):
                swapped.append(any(before.get(id(one)) != digest(one) for one in own))

        hook = register_module_forward_pre_hook(note)
        try:
            findings = super().evaluate(run, evaluate)
        finally:
            hook.remove()
        if any(swapped) and run.judged_digest is None:  # the workload has not named them itself
            raise run.mistake(
                "evaluate_with: judges other weights than those that are saved;"
                " trial.export_model(model) names the model that is judged and saved, such as"
                " averaged weights"
            )
        learned = _exported(run)  # an evaluation may have swapped others in, and back
        self._note(run, {f"learned_{len(run.points) + 1}": learned})
        return findings

    def after_loop(self, run: Engine) -> None:
        if run.evaluates:
            self._check_model(run)
        firsts = run.world.gather(next(iter(self.batches), None))
        facts = {
            "initial": self.initial, "restored": self.restored, "batches": self.batches,
            "same_batches": run.strategy.replicas.size > 1 and len({*firsts}) == 1 and bool(firsts[0]),
            "makes_data": self.makes_data, "called": self._called(run), "adopted": run.adopted,
            "early_steps": self.early_steps, "seeded": run.seeded, "notes": run.notes,
            "parameters": sum(parameter.numel() for parameter in self._plain.parameters()),
            "saved_parameters": sum(tensor.numel() for tensor in (run.judged or {}).values()),
            "exact": run.device.type == "cpu", "top_values": top_values(run.config),
        }  # fmt: skip
        self._note(run, facts)

    def _note(self, run: Engine, facts: Mapping[str, Any]) -> None:
        run.about({FACTS: facts})

    def _called(self, run: Engine) -> bool:
        """Return whether the prepared model was called to train it."""
        return self._calls.count > 0 or run.adopted or run.strategy.owns_passes

    def _check_model(self, run: Engine) -> None:
        """Raise `WorkloadError` unless the prepared model was trained, and judged, on all ranks."""
        learned = digest(list(self._plain.parameters()))
        called, has_learned = self._called(run), learned != self.initial
        if not called and (self._plain_calls.count or not has_learned):
            raise run.mistake(
                "the model that is trained is not the one that was prepared; net ="
                " trial.prepare(net) returns the model to call"
            )
        if not called and (run.world.size > 1 or run.config.compile.active):
            raise run.mistake(METHODS)
        if not has_learned:
            raise run.mistake(
                "the steps changed no parameter of the prepared model; does the optimizer have"
                " them? make it of net.parameters(), after net = trial.prepare(net)"
            )
        results = [model for model in (run.result, self._outer) if model is not None]
        exported = {id(part) for model in results for part in model.modules()}
        if self._judged and not self._judged & exported:
            raise run.mistake(
                "the evaluation judges another model than the one that would be exported;"
                " trial.export_model(model) names the one that is judged, such as averaged weights"
            )
        of_ranks = run.world.gather(digest([learned, *results[0].parameters()]))
        if len({*of_ranks}) > 1 and run.config.parallel.strategy == "ddp":
            raise run.mistake(
                "two ranks have learned different models; is one of them wrapped again, made anew,"
                " or changed by what only one rank does?"
            )


def _exported(run: Engine) -> str:
    """Return the digest of the weights that would be exported now, on rank 0. All ranks call it."""
    run.strategy.complete(*[run.result] if run.result is not None else [])
    with run.strategy.states_for_file():
        return weights.digest(adapters.state_of(run.result)) if run.result is not None else ""


def digest(content: Any) -> str:
    """Return a digest of tensors, in containers too, and of what else there is as it is printed."""
    if isinstance(content, Tensor):
        local = content.to_local() if hasattr(content, "to_local") else content
        flat = local.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    if isinstance(content, Mapping | tuple | list):
        parts = content.values() if isinstance(content, Mapping) else content
        return hashlib.sha256(repr([digest(part) for part in parts]).encode()).hexdigest()
    return repr(content)


def top_values(config: Systems) -> dict[str, str]:
    """Return digests of the numbers, texts, arrays and tensors at the top of a user's file."""
    values = {
        name: torch.as_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
        else value for name, value in vars(cfg.of(config).code).items()
    }  # fmt: skip
    kinds = Tensor | bool | int | float | str
    return {name: digest(value) for name, value in values.items() if isinstance(value, kinds)}


# ---- in its process
class _Answers:
    """The connection of a run's worker to nobody: training goes on after every point, or the worker
    finds its parent gone, as if it was killed."""

    def __init__(self, interrupted: bool) -> None:
        self._interrupted = interrupted

    def send(self, message: object) -> None:
        """Drop it: the journal has it."""

    def recv(self) -> str:
        if self._interrupted:
            raise EOFError
        return "go"


def train(job: TrialSpec, interrupted: bool, world: World) -> None:
    """Train a run as every worker does. `interrupted`: leave it after its first point without an
    end, like one that was killed. All ranks call it."""
    watch = Watch()
    try:
        worker.work(job, cast(Connection, _Answers(interrupted)), world, watch)
    except worker.ParentLostError:
        pass
    finally:
        watch.close()


def answer(connection: Connection, content: tuple[TrialSpec, bool]) -> None:
    """Train a run on one rank; the function of a template's run."""
    prepared.begin()
    with world_of_environment() as world:
        train(*content, world)
        if world.main:
            connection.send("done")
