"""What adapters of frameworks call of a `Trial`, in place of its loop: the framework owns that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from tunediff.training import loop, model_setup
from tunediff.training.engine import Engine, Facts
from tunediff.training.epochs import EpochLoader, divided

log = logging.getLogger(__name__)


class FrameworkCalls:
    """Calls of `Trial` for frameworks that wrap the model or iterate over the loader."""

    engine: Engine

    def fail(self, message: str) -> NoReturn:
        """Raise the `WorkloadError` that names the workload and what is wrong in it."""
        raise self.engine.mistake(message) from None

    def warn(self, message: str) -> None:
        """Say what the framework does otherwise here: the check before a search tells the user."""
        self.engine.notes.append(message)
        if self.engine.world.main:
            log.warning("%s", message)

    def adopt(self, model: nn.Module) -> None:
        """Take a model that the framework wraps, compiles and calls, instead of `prepare`."""
        model_setup.adopt(self.engine, model)

    def ignores(self, *knobs: str) -> None:
        """Note knobs, by dotted name, that the framework cannot follow."""
        self.engine.not_followed.update(knobs)

    def epoch_loader(
        self,
        loader: Iterable[Any],
        *,
        samples: int | None = None,
        group: int | None = None,
        divide: bool = False,
    ) -> EpochLoader:
        """Return `loader` under the budget: an iteration is a pass, and ends with the budget.

        `group`: batches of an optimizer step, for a framework that accumulates by itself; `divide`:
        give each rank its part of a torch DataLoader without a sampler of the user's own.
        """
        if divide:
            loader = divided(loader, self.engine.strategy.replicas, self.engine.config.seed)
        # a training that is alone draws what its loop would draw without tunediff
        reseed = self.engine.world.size > 1
        return EpochLoader(self.engine, loader, samples=samples, group=group, reseed=reseed)

    @property
    def evaluator(self) -> Facts | None:
        """Return what `evaluate_with` was given, if anything."""
        return self.engine.evaluation

    @property
    def exported(self) -> nn.Module | None:
        """Return the model that is judged and saved."""
        return self.engine.result

    @property
    def has_begun(self) -> bool:
        """Return whether the first batch was requested and something is trained."""
        return self.engine.feed is not None

    @property
    def is_over(self) -> bool:
        """Return whether the workload gets no further batch."""
        return self.engine.done

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Return the scaler of losses, which is kept in checkpoints and enabled for float16."""
        return self.engine.amp.scaler

    def note_judged(self) -> None:
        """Note the present weights as the judged ones, for evaluations that swap weights."""
        loop.note_judged(self.engine)

    @contextlib.contextmanager
    def preserve_generators(self) -> Iterator[None]:
        """Put the global random generators back at the end."""
        before = self.engine.state.global_generators()
        try:
            yield
        finally:
            self.engine.state.set_global_generators(*before)
