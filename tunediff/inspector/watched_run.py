"""One short run of the check: a trial, trained by the worker of every trial, that is watched."""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
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
from tunediff.core.point import Point
from tunediff.data import items
from tunediff.distributed import World, world_of_environment
from tunediff.training import prepared, weights
from tunediff.training.engine import Engine, Facts, Observer
from tunediff.tuning import worker
from tunediff.tuning.trial_spec import TrialSpec

FACTS = "inspected"
"""Key of the journal's event `about` that has what was watched."""


class Watch(Observer):
    """Note what a run begins with, trains on and is judged by, in its journal, for `check`."""

    def __init__(self, interrupted: bool = False) -> None:
        """`interrupted`: leave the run after its first point, as one whose parent was killed."""
        super().__init__()
        self._interrupted, self._swapped = interrupted, False
        self._early_steps, self._initial, self._batches = 0, "", list[str]()
        self._trained, self._judged = weakref.WeakSet[nn.Module](), set[nn.Module]()
        """Modules that were called with gradients, and by the last evaluation."""
        self._early = register_optimizer_step_post_hook(self._count_early)
        self._calls = register_module_forward_pre_hook(self._note_call)

    def close(self) -> None:
        self._early.remove()
        self._calls.remove()

    def _count_early(self, *_: Any) -> None:
        self._early_steps += 1

    def _note_call(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._trained.add(module)

    # ---- hooks of the training
    def after_prepare(self, run: Engine, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return a module other than the given one, to tell which of them is trained."""
        self._plain, self._outer = model, prepared if prepared is not model else copy.copy(model)
        self._initial = digest_of(model)
        return self._outer

    def begin(self, run: Engine) -> bool:
        self._early.remove()
        return True

    def batch(self, run: Engine, batch: Any) -> contextlib.AbstractContextManager[object]:
        if not run.warming_up and not isinstance(batch, int):  # a loop that makes its data counts
            self._batches.append(digest(batch))
        return super().batch(run, batch)

    def evaluate(self, run: Engine, evaluate: Facts) -> Mapping[str, Any]:
        """Judge, and note what is called, and whether its weights are those that are exported: an
        average may be swapped in."""
        result = run.result
        assert result is not None
        before, parts = digest_of(result), {*result.modules()}
        self._judged = set()

        def note(module: nn.Module, inputs: Any) -> None:
            self._judged.add(module)
            if module in parts:
                parts.clear()
                self._swapped |= before != digest_of(result)

        with register_module_forward_pre_hook(note):
            found = evaluate()
        self._swapped &= run.judged_digest is None  # else the workload has named them itself
        return found

    def point(self, point: Point) -> bool:
        if self._interrupted:
            raise worker.ParentLostError
        return True

    def after_loop(self, run: Engine) -> None:
        assert run.result is not None
        learned, divided = digest_of(self._plain), run.strategy.replicas.size > 1
        called = self._outer in self._trained or run.adopted or run.strategy.owns_passes
        known = {part for model in (run.result, self._outer) for part in model.modules()}
        firsts = run.world.gather(next(iter(self._batches), None))
        of_ranks = run.world.gather((learned, digest_of(run.result)))
        found = {
            "other_trained": not called
            and (self._plain in self._trained or learned == self._initial),
            "none_changed": learned == self._initial,
            "other_weights": self._swapped,
            "other_judged": bool(self._judged) and not self._judged & known,
            "ranks_differ": run.config.parallel.strategy == "ddp" and len({*of_ranks}) > 1,
            "methods": not called,
            "early_steps": self._early_steps > 0,
            "seed_set": not run.seeded,
            "same_batches": divided and len({*firsts}) == 1 and bool(firsts[0]),
        }
        of_all = run.world.gather([name for name, is_so in found.items() if is_so])
        facts = {
            "faults": [name for name in found if any(name in faults for faults in of_all)],
            "early_steps": self._early_steps, "notes": run.notes, "adopted": run.adopted,
            "initial": self._initial, "batches": self._batches,
            "parameters": sum(parameter.numel() for parameter in self._plain.parameters()),
            "saved_parameters": sum(tensor.numel() for tensor in (run.judged or {}).values()),
            "exact": run.device.type == "cpu", "top_values": top_values(run.config),
        }  # fmt: skip
        run.about({FACTS: facts})


def digest_of(model: nn.Module) -> str:
    """Return a digest of a model's parameters, as far as this rank has them."""
    parameters = model.parameters()
    return digest([one.to_local() if hasattr(one, "to_local") else one for one in parameters])


def digest(content: Any) -> str:
    """Return a digest of the tensors in a batch, or what it is without them, as it is printed."""
    tensors = {str(index): one for index, one in enumerate(items.tensors_in(content))}
    return weights.digest(tensors) if tensors else repr(content)


def top_values(config: Systems) -> dict[str, str]:
    """Return digests of the numbers, texts, arrays and tensors at the top of a user's file."""
    values = {
        name: torch.as_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
        else value for name, value in vars(cfg.of(config).code).items()
    }  # fmt: skip
    kinds = Tensor | bool | int | float | str
    return {name: digest(value) for name, value in values.items() if isinstance(value, kinds)}


# ---- in its process
def train(job: TrialSpec, interrupted: bool, world: World) -> None:
    """Train a run as every worker does, to its end or interrupted after its first point. All ranks
    call it."""
    watch = Watch(interrupted)
    nobody = types.SimpleNamespace(send=lambda message: None, recv=lambda: "go")
    try:
        worker.work(job, cast(Connection, nobody), world, watch)
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
