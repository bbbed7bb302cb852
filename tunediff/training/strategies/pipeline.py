"""Every process has a part of the model; micro-batches go through all (pipelining)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tunediff.config.knobs import refuse
from tunediff.config.systems import Systems
from tunediff.distributed import World, alone
from tunediff.training.strategies.single import Context, LossOf, Single

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(Single):
    """Each rank learns one stage: consecutive links of the model, of about equal cost.

    All ranks have the complete model, but gradients and optimizer state of their own stage alone,
    and see the complete batch. What others have learned is filled in to judge or save the model.
    """

    owns_passes = True

    def __init__(self, config: Systems, world: World) -> None:
        super().__init__(config, world)
        self.replicas = alone(world.device)
        self._owners, self._alone = dict[str, int](), False
        self._models: list[nn.Module] = []
        self._schedule: Any = None
        self._count = 0
        """Items of each batch."""

    def wrap(self, model: nn.Module, blocks: type[nn.Module] | None = None) -> nn.Module:
        self._model, self._links = model, chain(model)
        refuse(
            len(self._links) < self._world.size,
            f"parallel.workers: {self._world.size} is not allowed: the model has"
            f" {len(self._links)} links to divide; allowed: as many workers at most",
        )

        def guard(module: nn.Module, inputs: Any) -> None:
            refuse(
                module is model and not self._alone,
                "parallel.strategy: pipeline needs trial.forward_backward(…) in place of net(…) and"
                " trial.step",
            )

        model.register_forward_pre_hook(guard)
        return model

    # ---- the passes
    def passes(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss_of: LossOf,
        weights: Tensor,
        autocast: Context,
    ) -> Tensor:
        if self._schedule is None:
            self._cut(inputs, autocast)
        refuse(  # the stages receive one shape
            len(inputs[0]) != self._count,
            f"parallel.strategy: pipeline is not allowed with a batch of {len(inputs[0])} items:"
            f" the first has {self._count}; allowed: a loader with drop_last=True",
        )
        # The last rank's own targets may belong to other inputs: its loader, or the loop, may draw
        # from the rank's generators.
        targets = [self._of_first_rank(target) for target in targets]
        self._world.first(weights)
        rank, last, device = self._world.rank, self._world.size - 1, self._world.device
        rows = torch.arange(len(weights), device=device)
        all_losses = torch.zeros(len(weights), device=device)

        def loss(output: Tensor, rows: Tensor) -> Tensor:
            losses = loss_of(output, *(target[rows] for target in targets))
            all_losses[rows] = losses.detach()
            return (weights[rows] * losses).sum()

        self._loss = loss
        received, target = inputs if rank == 0 else (), rows if rank == last else None
        self._schedule.step(*received, target=target, return_outputs=False)
        return self._world.sum(all_losses)  # only the last rank has found any

    def _of_first_rank(self, mine: Tensor) -> Tensor:
        """Return rank 0's tensor; this rank's, perhaps the data set's, stays as it is."""
        if self._world.main:
            return self._world.first(mine.detach().contiguous())
        return self._world.first(torch.empty_like(mine, memory_format=torch.contiguous_format))

    # ---- dividing the model
    def _cut(self, inputs: Sequence[Tensor], autocast: Context) -> None:
        """Divide the model by its links' costs on rank 0; make the schedule. All ranks call it."""
        count, self._count = self._options.microbatches, len(inputs[0])
        refuse(
            self._count % count,
            f"parallel.microbatches: {count} is not allowed with batches of {self._count} items;"
            " allowed: a divisor of it",
        )
        carried, costs = self._measured([one[: len(one) // count] for one in inputs], autocast)
        ends = cuts(self._world.tell(costs), self._world.size)
        for rank in range(self._world.size):
            for link in self._links[ends[rank] : ends[rank + 1]]:
                self._assign(link, rank)
        first, end = ends[self._world.rank : self._world.rank + 2]
        stage = PipelineStage(
            Stage(self._links[first:end], autocast),
            self._world.rank,
            self._world.size,
            self._world.device,
            input_args=carried[first],
            output_args=carried[end],
        )
        schedule = SCHEDULES[self._options.schedule]
        self._schedule = schedule(
            stage, count, loss_fn=lambda output, rows: self._loss(output, rows), scale_grads=False
        )

    def _measured(
        self, inputs: list[Tensor], autocast: Context
    ) -> tuple[list[tuple[Tensor, ...]], list[float]]:
        """Return the shapes between the links, and the seconds of each link's forward pass."""
        modes = [(module, module.training) for module in self._model.modules()]
        devices = [self._world.device] if self._world.device.type == "cuda" else []
        now, costs = tuple(inputs), list[float]()
        carried = [tuple(torch.empty_like(one, device="meta") for one in now)]
        self._model.eval()  # batch statistics stay as they are
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), torch.random.fork_rng(devices), autocast():
            for link in self._links:
                seconds = []
                for _ in range(3):
                    self._world.synchronize()
                    began = time.perf_counter()
                    after = link(*now)
                    self._world.synchronize()
                    seconds.append(time.perf_counter() - began)
                now = after if isinstance(after, tuple) else (after,)
                costs.append(min(seconds))
                carried.append(tuple(shape_of(one) for one in now))
        for module, training in modes:
            module.training = training
        return carried, costs

    def _assign(self, link: nn.Module, rank: int) -> None:
        """Note that a rank learns a link's tensors. Raises `ConfigError` if another does."""
        of_link = {id(one) for one in named_tensors(link).values()}
        for name, tensor in named_tensors(self._model).items():
            if id(tensor) in of_link:
                refuse(
                    self._owners.setdefault(name, rank) != rank,
                    f"parallel.strategy: pipeline is not allowed: {name} would belong to two"
                    " stages",
                )

    # ---- what is learned
    def keeps(self, stateful: Any) -> None:
        if isinstance(stateful, nn.Module):
            self._models.append(stateful)
        if isinstance(stateful, torch.optim.Optimizer):
            stateful.register_state_dict_post_hook(self._join)
            stateful.register_load_state_dict_pre_hook(
                lambda optimizer, state: {**state, "state": self._mine(optimizer, state)}
            )

    def complete(self, *models: nn.Module) -> None:
        for model in dict.fromkeys((*self._models, *models)):
            for tensor, rank in self._learned_by(model):
                self._world.of(rank, tensor.detach())

    def _learned_by(self, model: nn.Module) -> list[tuple[Tensor, int]]:
        """Return the tensors of a model that one rank has learned, and the rank.

        They are the prepared model's own, and those of complete copies of it, which may lie within
        another module, as in `AveragedModel`. A name alone says nothing: a part of the prepared
        model has the names of other parts.
        """
        ours, theirs = named_tensors(self._model), named_tensors(model)
        ranks = {id(ours[name]): rank for name, rank in self._owners.items() if name in ours}
        learned = {id(one): (one, ranks[id(one)]) for one in theirs.values() if id(one) in ranks}
        names = [name for name, _ in self._model.named_parameters() if name in self._owners]
        for prefix in [f"{name}." if name else "" for name, _ in model.named_modules()]:
            if all(prefix + name in theirs for name in names):
                for name, rank in self._owners.items():
                    if (copy := theirs.get(prefix + name)) is not None:
                        learned[id(copy)] = copy, rank
        return list(learned.values())

    @contextlib.contextmanager
    def callable_alone(self, *models: nn.Module) -> Iterator[None]:
        self.complete(*models)
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        mine = [one for one in parameters if one.grad is not None]
        stage_norm = nn.utils.get_total_norm([one.grad for one in mine if one.grad is not None])
        total = self._world.sum(stage_norm.to(self._world.device).square()).sqrt()
        nn.utils.clip_grads_with_norm_(mine, norm, total)

    def _mine(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[int, Any]:
        """Return the states of parameters that this rank learns, and of those beside the model."""
        names = {id(one): name for name, one in self._model.named_parameters()}
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        mine = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            owner = self._owners.get(names.get(id(parameter), ""), self._world.rank)
            if number in state["state"] and owner == self._world.rank:
                mine[number] = state["state"][number]
        return mine

    def _join(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with that of all ranks' parameters, in host memory."""
        mine = {
            number: {
                name: value.cpu() if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for number, values in self._mine(optimizer, state).items()
        }
        joined: dict[int, Any] = {}
        for part in self._world.gather(mine):
            joined |= part
        return {**state, "state": dict(sorted(joined.items()))}


# ---- the links of a model
class Stage(nn.Module):
    """Some links, one after the other; takes and gives what is carried."""

    def __init__(self, links: Sequence[nn.Module], autocast: Context) -> None:
        super().__init__()
        self.links, self._autocast = nn.ModuleList(links), autocast

    def forward(self, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        now: Any = carried
        with self._autocast():
            for link in self.links:
                now = link(*now)
                now = now if isinstance(now, tuple) else (now,)
        # What is only handed on is no result of this stage, and gets a gradient all the same.
        results = [
            one.view_as(one) if any(one is other for other in carried) else one.contiguous()
            for one in now
        ]
        return tuple(results) if len(results) > 1 else results[0]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def shape_of(tensor: Tensor) -> Tensor:
    needs_gradient = tensor.is_floating_point()
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=needs_gradient
    )


def chain(model: nn.Module) -> list[nn.Module]:
    """Return a model's links: its `chain()`, or nn.Sequential's parts. Raises `ConfigError`."""
    links: list[nn.Module] = []
    if isinstance(model, nn.Sequential):
        links = list(model.children())
    elif (make := getattr(model, "chain", None)) is not None:
        links = list(make())
    refuse(
        not links,
        f"parallel.strategy: pipeline is not allowed: {type(model).__name__} is no nn.Sequential"
        " and has no chain(); allowed: ddp, fsdp, single",
    )
    return links


def cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the cuts at which the dearest stage costs least: 0, …, number of links."""

    @functools.cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[first:]), (len(costs),)
        options = []
        for end in range(first + 1, len(costs) - left + 2):
            rest, ends = best(end, left - 1)
            options.append((max(sum(costs[first:end]), rest), (end, *ends)))
        return min(options)

    return [0, *best(0, stages)[1]]
