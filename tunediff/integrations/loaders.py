"""Loaders of the user's own under the budget of a trial: `tunediff.steps`, `tunediff.epochs`, and
what frameworks are given in the place of a loader; with what their adapters share: schedules over
the budget, folders, and unavailable knobs. Uses public calls of `Trial`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from tunediff.data import randomness
from tunediff.data.items import tensors_in
from tunediff.training.trial import Trial


def steps(trial: Trial, batches: Iterable[Any], *, samples: int | None = None) -> Iterator[Any]:
    """Yield a loader's batches, over and over until the budget is spent; resumes restart it.

    `samples` of one of its batches, counted in `UNIT`; None: as many as the first tensor of the
    first batch has rows. A shorter last batch counts as much: all ranks make equal steps. The
    knobs of `loader` have no effect but where the loader is made of them.
    """
    return trial.train_on(UserLoader(trial, batches, samples=samples).feed)


def epochs(
    trial: Trial, loader: Iterable[Any], *, samples: int | None = None
) -> Iterator[tuple[int, Iterable[Any]]]:
    """Yield each pass over a loader, as its number and batches, until the budget is spent.

    A resume goes on within the pass. Ranks divide a torch DataLoader without a sampler of the
    user's own. `samples`: see `steps`.
    """
    yield from UserLoader(trial, divided(loader, trial), samples=samples, by_passes=True).passes()


class UserLoader:
    """Any iterable, run through again and again; an iteration of it is a pass over `loader`.

    It is the feed of the training, whose loop is a generator of steps, each a list of batches. That
    is resumed by `fill` whenever the batches of the next step are needed: then it counts the step
    before, and where it is time evaluates, saves and reports. So an iteration

    - gives the batches of the first step again, for the warm-up that is undone;
    - begins within a pass after a resume;
    - ends early when the budget is spent;
    - ends its pass when the loop leaves it, but during the warm-up.

    Attributes are those of `loader`.
    """

    def __init__(
        self,
        trial: Trial,
        loader: Iterable[Any],
        *,
        samples: int | None = None,
        group: int | None = None,
        by_passes: bool = False,
    ) -> None:
        """`samples` of each batch and rank, None: as the first ones have; `group`: batches of a
        step that a framework accumulates by itself; `by_passes`: whether it is iterated over."""
        self._trial, self._loader, self._samples = trial, loader, samples
        self._accumulates, self._by_passes = group is not None, by_passes or group is not None
        self._size = group or 1
        self._pass: Iterator[Any] = iter(())
        self._ahead = list[Any]()
        """Batches of this pass that were fetched to see whether it goes on."""
        self._first = list[Any]()
        """The first item, which was fetched to count its rows."""
        self.position: dict[str, Any] = {
            "epoch": -1, "batches": 0, "complete": False, "left": False, "rows": 0, "generators": [],
        }  # fmt: skip
        """How far it is behind the item that was moved last: number of the pass, batches of it so
        far, whether these are all, or the loop has left it, rows of the training's first item, and
        the generators' states when the pass began, which draw its order."""
        self._fetched = self.position
        self._steps: Iterator[list[Any]] | None = None
        self._next: list[Any] | None = None
        """Batches of the next step, of which none was given out."""
        self.finished = False
        """Whether the budget is spent."""
        self.last_of_step = True
        """Whether the batch that was given out last is the last of its step."""
        self.schedulers = list[BudgetScheduler]()
        """They follow the budget before the first batch of each step is given out."""
        self.after_step: Callable[[], object] = lambda: None
        """Called when all batches of a step were given out and the next one is asked for."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    # ---- the feed of the training
    def feed(self, positions: Sequence[Any]) -> tuple[UserLoader, int]:
        """Go on where this rank was, or begin; return this and the samples of an item."""
        world = self._trial.world
        if len(positions) == world.size:
            self._go_on(positions[world.rank])
        elif positions:  # of another number of ranks: the pass begins anew
            self._fetched = {**self.position, "epoch": positions[0]["epoch"] - 1}
        if self._samples is not None:
            return self, self._samples * self._size
        if not self._fetched["rows"]:
            self._first.append(self.fetch())
            rows = map(_rows, self._first[0][0])
            self._fetched["rows"] = self._first[0][1]["rows"] = sum(rows)
        return self, self._fetched["rows"]

    def _go_on(self, position: dict[str, Any]) -> None:
        """Begin the pass again as it was begun, and skip the batches so far."""
        self._fetched = self.position = position
        if position["epoch"] < 0:
            return
        with randomness.forked():
            # Persistent loader processes draw a seed when they start, and not at the beginning of a
            # later pass. `base_dataloader`: what accelerate wraps.
            loader = getattr(self._loader, "base_dataloader", self._loader)
            if position["epoch"] > 0 and getattr(loader, "persistent_workers", False):
                iter(loader)
            of_torch, libraries, own = position["generators"]
            # Fewer exist where a sampler makes its generator, and seeds it, when a pass begins.
            for generator, state in zip(self._generators(), own, strict=False):
                generator.set_state(state)
            torch.set_rng_state(of_torch)
            randomness.set_library_state(libraries)
            self._begin_pass(position["epoch"])
            for _ in itertools.islice(self._pass, position["batches"]):
                pass
            self._is_complete(position["batches"])
        if position["left"]:
            self._pass, self._ahead = iter(()), []

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that the loader and its samplers draw from."""
        samplers = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler")]
        parts = (self._loader, *samplers, getattr(samplers[1], "sampler", None))
        generators = [getattr(part, "generator", None) for part in parts]
        return [one for one in generators if isinstance(one, torch.Generator)]

    def _begin_pass(self, epoch: int) -> None:
        """Tell the loader and its samplers the pass's number, and begin it."""
        names = ("sampler", "batch_sampler")
        for part in (self._loader, *(getattr(self._loader, name, None) for name in names)):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
        self._pass, self._ahead = iter(self._loader), []

    def _take(self) -> list[Any]:
        """Return the batches of the next item of this pass."""
        ahead, self._ahead = self._ahead, []
        return [*ahead, *itertools.islice(self._pass, self._size - len(ahead))]

    def _is_complete(self, batches: int) -> bool:
        """Return whether so many batches are all of a pass; without a length the next one tells."""
        try:
            return batches >= len(self)
        except TypeError:
            self._ahead = list(itertools.islice(self._pass, 1))
            return not self._ahead

    def fetch(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the batches of the next item, and the position behind them."""
        if self._first:
            return self._first.pop()  # type: ignore[no-any-return]
        batches, before = self._take(), self._fetched
        if not batches:  # the next pass begins
            states = [generator.get_state() for generator in self._generators()]
            drawn = [torch.get_rng_state(), randomness.library_state(), states]
            before = {**before, "epoch": before["epoch"] + 1, "batches": 0, "generators": drawn}
            self._begin_pass(before["epoch"])
            batches = self._take()
        if not batches:
            raise RuntimeError("the loader has no batches, or cannot be run through twice")
        count = before["batches"] + len(batches)
        complete = self._is_complete(count)
        self._fetched = {**before, "batches": count, "complete": complete, "left": False}
        return batches, self._fetched

    def move(self, fetched: tuple[list[Any], dict[str, Any]]) -> Any:
        """Return the batches on the device; where it is not iterated over, the one of an item."""
        batches, self.position = fetched
        # Torch's own pinned memory is not written to while it is copied; a user's may be
        pinned = isinstance(self._loader, DataLoader) and self._loader.pin_memory
        moved = [self._trial.to_device(batch, non_blocking=pinned) for batch in batches]
        return moved if self._by_passes else moved[0]

    def close(self) -> None:
        """Leave the loader to the user, and end its present pass."""
        self._pass = iter(())

    # ---- its passes
    def fill(self) -> bool:
        """Fetch the next step's batches, account for the last; return whether there is a step."""
        if self._steps is None:
            self._steps = self._trial.train_on(
                self.feed, by_itself=True, complete_steps=self._accumulates
            )
        if self._next is None and not self.finished:
            self.after_step()
            self._next = next(self._steps, None)
            self.finished = self._next is None
        return not self.finished

    def __iter__(self) -> Iterator[Any]:
        epoch = None
        while self.fill():
            epoch = self.position["epoch"] if epoch is None else epoch
            if self.position["epoch"] != epoch:
                return  # the loader has fewer batches than its length says
            for scheduler in self.schedulers:
                scheduler.follow()
            batches, self._next = self._next or [], None
            for number, batch in enumerate(batches, 1):
                self.last_of_step = number == len(batches)
                try:
                    yield batch
                except GeneratorExit:  # the loop was left, for the next pass
                    if not (self.position["complete"] or self._trial.warming_up):
                        self._pass, self._ahead = iter(()), []
                        self._fetched = self.position = {**self.position, "left": True}
                    raise
            if self.position["complete"]:
                return

    def passes(self) -> Iterator[tuple[int, UserLoader]]:
        """Yield the number of each pass and this loader, until the budget is spent.

        Raises `WorkloadError` if the loop took no batch of a pass, which would repeat for ever.
        """
        while self.fill():
            step = self._next
            yield self.position["epoch"], self
            if self._next is step:
                self._trial.fail(
                    "train(trial): a pass of epochs(trial, loader) was not iterated: for epoch,"
                    " batches in epochs(trial, loader) needs a loop over batches, not over loader"
                )

    def left_of_pass(self, length: int) -> tuple[int, int]:
        """Return how many batches the next iteration gives, of a pass of `length`, replays of the
        warm-up included; and of how many steps those are. Call it after `fill`."""
        size = len(self._next or ())
        replays = self._trial.replays
        return length - (self.position["batches"] - size) + replays * size, replays


def _rows(batch: Any) -> int:
    """Return the rows of the first tensor of a batch."""
    return next((len(one) for one in tensors_in(batch) if one.dim()), 1)


def divided(loader: Any, trial: Trial) -> Any:
    """Return a DataLoader divided over ranks; itself with a sampler of the user's own."""
    world = trial.replicas
    if world.size == 1 or type(loader) is not DataLoader:
        return loader
    samplers = type(loader.batch_sampler), type(loader.sampler)
    if samplers[0] is not BatchSampler or samplers[1] not in (RandomSampler, SequentialSampler):
        return loader
    dataset: Any = loader.dataset
    if len(loader.sampler) != len(dataset):  # type: ignore[arg-type]
        return loader
    shuffle, seed = isinstance(loader.sampler, RandomSampler), trial.config.seed
    sampler = DistributedSampler[Any](dataset, world.size, world.rank, shuffle, seed)
    names = (
        "dataset batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn"
        " multiprocessing_context generator prefetch_factor persistent_workers"
    )
    options = {name: getattr(loader, name) for name in names.split()}
    return DataLoader(**options, sampler=sampler)


# ---- what adapters share
class BudgetScheduler:
    """A learning rate scheduler of `total` steps whose last one is the end of the budget.

    Frameworks call `step`, which does nothing: `follow` moves to where the budget is. With a budget
    of `total` steps every rate is that of the framework alone.
    """

    def __init__(self, scheduler: Any, total: float, trial: Trial) -> None:
        """Raise `WorkloadError` for one that does not count its steps, such as ChainedScheduler."""
        if not hasattr(scheduler, "last_epoch"):
            trial.fail(
                f"{type(scheduler).__name__} is not allowed with a schedule over the budget, since"
                " it has no last_epoch; allowed: SequentialLR, LambdaLR or another single"
                " scheduler of torch.optim.lr_scheduler"
            )
        self._scheduler, self._total, self._trial = scheduler, total, trial

    def step(self, *_: Any) -> None:
        """Do nothing."""

    def follow(self) -> None:
        """Make the steps that the progress of the training asks for."""
        scheduler, target = self._scheduler, int(self._trial.progress * self._total + 1e-6)
        if isinstance(
            scheduler, torch.optim.lr_scheduler.LambdaLR | torch.optim.lr_scheduler.OneCycleLR
        ):
            # their rates follow from the position alone
            scheduler.last_epoch = max(scheduler.last_epoch, target - 1)
        while scheduler.last_epoch < target:
            scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_scheduler"], name)


def in_folder(trial: Trial, path: str | os.PathLike[str] | None) -> Path:
    """Return where a run writes what the user's file would write to `path`: below the working
    directory, each run in the same place of its own folder. None: that folder."""
    place, working_folder = Path(path or "").absolute(), Path.cwd()
    if place.is_relative_to(working_folder) and not place.is_relative_to(trial.folder):
        return trial.folder / place.relative_to(working_folder)
    return place


class StepLosses:
    """Sums the losses of a framework's backward passes, and records each step that it has made."""

    def __init__(
        self, trial: Trial, loader: UserLoader, optimizers: Callable[[], Sequence[Any]]
    ) -> None:
        """`optimizers`: returns those of the framework; the first one's rate is recorded."""
        self._trial, self._optimizers = trial, optimizers
        self._sum: torch.Tensor | None = None
        loader.after_step = self._record

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a backward pass, before loss scaling."""
        # a copy: a CUDA graph of torch.compile overwrites its output
        self._sum = loss.detach().clone() if self._sum is None else self._sum + loss.detach()

    def _record(self) -> None:
        """Record the step since the last call; a batch that was not trained is none."""
        if self._sum is not None:
            self._trial.record_step(self._sum, next(iter(self._optimizers()), None))
            self._sum = None


class Attributes:
    """The state of an object that lies in some of its attributes, for `trial.keep`."""

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        self._owner, self._names = owner, tuple(names)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._names:
            value, now = state[name], getattr(self._owner, name)
            setattr(
                self._owner, name, value.to(now.device) if isinstance(now, torch.Tensor) else value
            )


def refuse_knobs(trial: Trial, framework: str) -> None:
    """Raise `WorkloadError` for knobs the framework cannot have; note what it ignores."""
    config = trial.config
    strategy, several = config.parallel.strategy, config.parallel.workers > 1
    if several and strategy != "ddp":
        trial.fail(f"parallel.strategy: {strategy} is not allowed with {framework}; allowed: ddp")
    if config.compile.active and config.compile.scope == "blocks":
        trial.fail(f"compile.scope: blocks is not allowed with {framework}; allowed: model")
    if several and config.parallel.gradients != "float32":
        trial.ignores("parallel.gradients")


SHARDING = ("fsdp", "fsdp_plugin", "deepspeed", "deepspeed_plugin", "parallelism_config")
"""Settings of transformers and accelerate that divide a model over ranks."""


def without_settings(
    trial: Trial, kind: type[Any], settings: Mapping[str, Any], knobs: Mapping[str, str],
    made: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the settings of a class of the framework, without those that a knob makes: it wins.

    One warning names those that ask for something else than `made`. Raises `WorkloadError` for
    `SHARDING`, which no knob stands for.
    """
    for name in SHARDING:
        if settings.get(name):
            trial.fail(
                f"{kind.__name__}: {name} is not allowed; allowed: ranks by parallel.workers"
            )
    other = [
        f"{name}={value!r} ({knobs[name]})"
        for name, value in settings.items()
        if name in knobs and repr(value) != repr(made.get(name))  # 1.0 may mean all, and 1 one
    ]
    if other:
        trial.warn(
            f"{kind.__name__}: {', '.join(other)}: what stands in brackets sets it;"
            ' BASELINE = {"KNOB": VALUE} in your file is for the baseline'
        )
    return {name: value for name, value in settings.items() if name not in knobs}


def without_early_stopping(trial: Trial, callbacks: Sequence[Any], kind: type[Any]) -> list[Any]:
    """Return the callbacks without those of the framework's early stopping, with a warning."""
    kept = [one for one in callbacks if not isinstance(one, kind)]
    if len(kept) < len(callbacks):
        off = "is off: the budget ends a trial, or early_stopping of a search"
        trial.warn(f"{kind.__name__} {off}")
    return kept


def check_finished(trial: Trial, finished: bool, framework: str, causes: str) -> None:
    """Raise `WorkloadError` if the framework ended the training before the budget."""
    if not finished and not trial.is_over:
        steps = trial.step_count
        trial.fail(
            f"{framework} ended its training after {steps} steps, before the budget: {causes}"
        )


def begin_accelerate(trial: Trial) -> None:
    """Let accelerate see this trial's ranks, not an earlier one's of the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if trial.world.size > 1:
        # or accelerate would change it
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def in_float32(model: torch.nn.Module, judge: Callable[[], Any]) -> Any:
    """Call `judge` while the model's forward pass is without accelerate's autocast."""
    attributes = vars(model)
    mixed, plain = attributes.get("forward"), attributes.get("_original_forward")
    if plain is None:
        return judge()
    attributes["forward"] = plain
    try:
        return judge()
    finally:
        attributes["forward"] = mixed
