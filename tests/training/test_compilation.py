"""What torch.compile finds and leaves, and whether it compiles all that it should."""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import Hands, assert_equal, timed, toy, train, weights
from tests.toy.train import INPUTS, TARGETS, begin, loss_of, network
from tunediff.config import ConfigError
from tunediff.config.systems import CUDA_GRAPHS, Compile
from tunediff.training.compilation import Compilation, cold_cache


def test_compiled_trials_find_no_cache(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    with cold_cache(Compile()):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"  # nothing is compiled
    with cold_cache(Compile(mode="default")):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert "TRITON_CACHE_DIR" not in os.environ


# --------------------------------------------------------------------------------------------------- graphs that it makes
@pytest.fixture
def eagerly(monkeypatch):
    """Graphs are made as ever, and run by torch itself: no compiler is needed."""
    torch.compiler.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode, **how: compile(model, backend="eager", **how))
    yield
    torch.compiler.reset()


@pytest.fixture
def not_compiled(monkeypatch):
    """What shall be compiled stays as it is; its seconds pass by a clock moved by hand."""
    monkeypatch.setattr(Compilation, "apply", lambda self, model, *rest: model)


class Part(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x):
        return self.linear(F.silu(x))


class Broken(Part):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return F.silu(x)


def points(*parts, judge=None, blocks=Part, **knobs):
    """Of a short training of these, compiled part by part."""

    def body(trial):
        net = trial.prepare(nn.Sequential(*parts), blocks=blocks)
        optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
        trial.keep(net=net, optimizer=optimizer)
        trial.evaluate_with(lambda: {"error": (judge or (lambda net: 0.0))(net)})
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    config = toy(**{"compile__mode": "default", "compile__scope": "blocks"} | knobs)
    return train(config, samples=8 * 4, body=body, evaluates=True).points


def counts(point):
    return point.compiled_graphs, point.graph_breaks


def test_as_many_kinds_of_blocks_as_there_are_are_compiled(eagerly):
    """By itself torch stops at 8 and runs the others as they are."""
    widths = [4, *range(5, 13)]
    parts = [Part(one, two) for one, two in zip(widths, [*widths[1:], 1], strict=True)]
    found = points(*parts, Part(1, 1), Part(1, 1))
    assert counts(found[0]) == counts(found[-1]) == (10, 0), "two are alike and share theirs"


def test_what_is_judged_is_counted_as_well(eagerly):
    found = points(Part(4, 1), judge=lambda net: float(sum(net(INPUTS[:n]).sum() for n in (8, 44))))
    assert [counts(point) for point in found] == [(1, 0), (3, 0)], "two sizes, first judged at the first point"


def test_a_graph_that_breaks_is_counted(eagerly):
    assert counts(points(Broken(4, 4), Part(4, 1))[-1]) == (3, 1)


def test_blocks_that_a_model_has_not_cannot_be_compiled(eagerly):
    with pytest.raises(ConfigError, match="compile.scope: 'blocks' is not allowed: the model has no blocks that"):
        points(nn.Linear(4, 1))


def test_cuda_graphs_are_warm_before_the_clock_runs():
    steps = {mode: Compilation(Compile(mode=mode)).warm_ups("cuda") for mode in ("default", *CUDA_GRAPHS)}
    assert steps == {"default": 1, "reduce-overhead": 3, "max-autotune": 3}
    assert Compilation(Compile(mode="max-autotune")).warm_ups("cpu") == 1, "no CUDA graphs"


def test_steps_of_the_warm_up_leave_no_trace(monkeypatch):
    """Each has the first batch; then all is as it was, whatever they wrote into it."""
    seen = []

    def body(trial):
        net = trial.prepare(network(trial.knobs))
        optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
        trial.keep(net=net, optimizer=optimizer)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            seen.append((trial.warming_up, inputs.clone()))
            trial.step(F.mse_loss(net(inputs), targets), optimizer)
            inputs.zero_()

    once = train(toy(dropout=0.3), samples=8 * 4, body=body)
    monkeypatch.setattr(Compilation, "warm_ups", lambda self, device: 3)
    del seen[:]
    again = train(toy(dropout=0.3), samples=8 * 4, body=body)
    assert [warming for warming, _ in seen] == [True] * 3 + [False] * 4
    assert all(torch.equal(inputs, seen[0][1]) for _, inputs in seen[:4])
    assert (again.steps, again.samples) == (once.steps, once.samples) == (4, 32)
    assert_equal(weights(once), weights(again))


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_whole_is_one_graph(eagerly, dynamic):
    found = points(Part(4, 8), Part(8, 1), compile__scope="model", compile__dynamic=dynamic)
    assert counts(found[-1]) == (1, 0)
    assert points(Part(4, 1), compile__mode="none", compile__scope="model")[-1].graph_breaks is None


# ----------------------------------------------------------------------------------------------- the seconds that it takes
def test_a_budget_that_compiling_has_spent_is_no_result(not_compiled):
    """The untrained model would be judged, and might even be told as the best of a bad lot."""
    hands = Hands()

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            hands.s += 11.0 * trial.warming_up
            trial.step(loss_of(net, batch), optimizer)

    with pytest.raises(
        RuntimeError, match="no step was trained: compiling took 11 s, which the budget is charged with"
    ):
        train(toy(compile__mode="default"), seconds=10.0, clock=timed(10.0, hands), body=body)


@pytest.mark.parametrize("compile_s", [3.0, 6.0, 9.9])
def test_a_step_is_trained_before_the_first_point_however_long_compiling_took(not_compiled, compile_s):
    """Charged compilation took longer than the first of four segments: the rest of the budget is trained."""
    hands = Hands()

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            hands.s += compile_s if trial.warming_up else 0.5
            trial.step(loss_of(net, batch), optimizer)

    config = toy(compile__mode="default", evaluation__points=4)
    outcome = train(config, seconds=10.0, clock=timed(10.0, hands), body=body)
    assert outcome.finished
    assert outcome.points[0].steps == 1
    assert outcome.steps == math.ceil((10.0 - compile_s) / 0.5)


class Replayed(torch.autograd.Function):
    """As a CUDA graph does: every call returns the same memory, which the next one overwrites."""

    BUFFER = torch.zeros(())

    @staticmethod
    def forward(context, loss):
        return Replayed.BUFFER.copy_(loss).detach()

    @staticmethod
    def backward(context, gradient):
        return gradient


@pytest.mark.parametrize("own", [False, True])
def test_the_loss_that_a_cuda_graph_returns_is_kept(not_compiled, own):

    def body(trial):
        net, optimizer = begin(trial)
        for number, batch in enumerate(trial.batches((INPUTS, TARGETS))):
            loss = Replayed.apply(0.0 * loss_of(net, batch) + float(number))
            if own:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                trial.record_step(loss, optimizer)
            else:
                trial.step(loss, optimizer)

    config = toy(compile__mode="reduce-overhead", evaluation__points=1)
    outcome = train(config, samples=200 * config.loader.batch_size, body=body)
    assert outcome.points[-1].loss == pytest.approx(100.5), "the mean of 1 to 200; number 0 is the warm-up"
