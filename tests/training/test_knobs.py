"""Every systems knob really changes what it says. That what is learned stays is tested with the trainings."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import CPU as ALONE
from tests.helpers import Hands, Told, assert_equal, timed, tiny, toy, train, weights
from tests.toy.train import INPUTS, TARGETS, begin, loss_of, network
from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.config.systems import CUDA_GRAPHS, Compile
from tunediff.core.clock import Budget
from tunediff.data import loader
from tunediff.data.images import in_unit_range
from tunediff.distributed import World
from tunediff.training import strategies
from tunediff.training.compilation import Compilation, cold_cache
from tunediff.training.engine import Engine
from tunediff.training.precision import Amp, fastest_matmul, set_backends
from tunediff.training.strategies.pipeline import cuts
from tunediff.training.trial import Trial
from tunediff.workloads.diffusion import unet
from tunediff.workloads.diffusion.unet import ResidualBlock

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Recorder:
    """Stands in for a class or function and keeps what it was called with."""

    def __init__(self, result=None):
        self.calls, self.result = [], result

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.result if self.result is not None else args[0]

    @property
    def last(self):
        return self.calls[-1][1]


@pytest.fixture
def recorded(monkeypatch):
    """Puts a recorder in the place of a class or function, and returns it."""

    def put(module, name, recorder=None):
        monkeypatch.setattr(module, name, recorder := recorder or Recorder())
        return recorder

    return put


def unet_of(**knobs):
    return unet.network(tiny(**knobs).knobs)


def trained(watch, **knobs):
    """Two steps; `watch` is called after each."""

    class Watching(Told):
        def after_step(self):
            watch()

    train(toy(**knobs), samples=16, observer=Watching())


def batches_of(source, config, device=CPU):
    order = loader.Order(len(source), config.loader.batch_size, config.loader.accumulation, 0, 1, 0)
    return loader.build(source, config.loader, order, device, 0, in_unit_range(flip=False))


@pytest.fixture
def pixels(images):
    return images.pixels


# ------------------------------------------------------------------------------------------------------------- loader
@pytest.mark.parametrize(
    ("knobs", "device", "options"),
    [
        ({"loader__pin_memory": True, "loader__workers": 0}, CUDA, {"pin_memory": True, "num_workers": 0}),
        ({"loader__pin_memory": True}, CPU, {"pin_memory": False}),
        ({"loader__pin_memory": False}, CUDA, {"pin_memory": False}),
        (
            {"loader__workers": 3, "loader__prefetch_factor": 5, "loader__persistent_workers": False}, CPU,
            {"num_workers": 3, "prefetch_factor": 5, "persistent_workers": False},
        ),
    ],
)  # fmt: skip
def test_knobs_of_the_loader_are_options_of_torchs(monkeypatch, pixels, knobs, device, options):
    calls = []
    monkeypatch.setattr(loader, "DataLoader", lambda *_, **given: calls.append(given) or [pixels[:16]])
    batches_of(pixels, tiny(**knobs), device)
    assert options.items() <= calls[-1].items()
    assert ("prefetch_factor" in calls[-1]) == (calls[-1]["num_workers"] > 0)


# ---------------------------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize(("amp", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_amp(amp, dtype):
    layer, setting = nn.Linear(4, 4), Amp(toy(precision__amp=amp).precision, CPU)
    with setting.autocast():
        assert layer(torch.zeros(2, 4)).dtype == dtype
    assert setting.scaler.is_enabled() == (amp == "fp16")
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
def test_matmul(matmul):
    found, stock = [], torch.backends.cudnn.allow_tf32
    try:
        trained(lambda: found.append(torch.get_float32_matmul_precision()), precision__matmul=matmul)
        assert found == [matmul] * 2
        for tf32 in (True, False):
            set_backends(tiny(precision__matmul=matmul, precision__conv_tf32=tf32).precision, "cuda")
            assert torch.backends.cudnn.allow_tf32 == tf32, "convolutions have a knob of their own"
            assert torch.get_float32_matmul_precision() == matmul
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = stock


@pytest.mark.nightly  # a process that nobody has touched
def test_the_baseline_runs_as_pytorch_does_unless_told_otherwise():
    """In a process that nobody has touched."""
    look = "torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()"
    stock = f"import torch; print({look})"
    told = "from tunediff.config.systems import Precision; from tunediff.training import precision"
    code = f"{stock}; {told}; precision.set_backends(Precision(), 'cuda'); print({look})"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == lines[1] == "True False highest"


def test_the_roof_of_float32_is_that_of_the_fastest_units_it_may_use():
    fastest = [fastest_matmul(tiny(precision__conv_tf32=tf32).precision, "cuda") for tf32 in (True, False)]
    assert fastest == ["high", "highest"]
    assert fastest_matmul(tiny(precision__matmul="medium").precision, "cuda") == "medium"
    assert fastest_matmul(tiny().precision, "cpu") == "highest", "no TF32"


# ---------------------------------------------------------------------------------------------------- model, compile
@pytest.mark.parametrize("setting", [True, False])
def test_channels_last(setting):
    engine = Engine(toy(memory__channels_last=setting), Budget(samples=1), ALONE, Told())
    model = Trial(engine).prepare(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) == setting
    assert model(torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last) == setting


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mode": "default"}, {"mode": "default", "dynamic": None}),
        ({"mode": "max-autotune", "dynamic": True}, {"mode": "max-autotune", "dynamic": True}),
        ({"mode": "reduce-overhead"}, {"mode": "reduce-overhead", "dynamic": None}),
    ],
)
def test_compile_mode_and_dynamic(recorded, options, expected):
    recorder, model = recorded(torch, "compile"), unet_of()
    assert Compilation(Compile(**options)).apply(model, model, ResidualBlock) is model
    assert recorder.last == expected


def test_compile_none_and_by_block(monkeypatch, recorded):
    recorder, model = recorded(torch, "compile"), unet_of()
    assert Compilation(Compile()).apply(model, model, ResidualBlock) is model
    blocks = []
    monkeypatch.setattr(ResidualBlock, "compile", lambda self, **how: blocks.append(how))
    Compilation(Compile(mode="default", scope="blocks")).apply(model, model, ResidualBlock)
    assert recorder.calls == []
    assert len(blocks) == sum(isinstance(module, ResidualBlock) for module in model.modules()) > 2
    Compilation(Compile(mode="default", scope="blocks")).apply(model, model, None)
    assert len(recorder.calls) == 1, "without blocks it is the whole"


@pytest.mark.parametrize("levels", [[], [0], [0, 1]])
def test_checkpoint_levels(levels):
    """Which blocks are computed again in the backward pass."""
    runs, model = {}, unet_of(model__checkpoint_levels=levels)
    for name, module in model.named_modules():
        if isinstance(module, ResidualBlock):
            convolution = next(part for part in module.modules() if isinstance(part, nn.Conv2d))
            convolution.register_forward_hook(
                lambda module, inputs, output, name=name: runs.update({name: runs.get(name, 0) + 1})
            )
    model(torch.randn(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)).sum().backward()
    again = [name for name, count in runs.items() if count == 2]
    assert set(runs.values()) <= {1, 2}
    assert bool(again) == bool(levels)
    assert (len(again) == len(runs)) == (levels == [0, 1])


# ---------------------------------------------------------------------------------------------------------- parallel
def test_gradient_buckets_and_static_graph(recorded):
    recorder = recorded(nn.parallel, "DistributedDataParallel")
    config = tiny(parallel__workers=2, parallel__bucket_mib=3.5, parallel__static_graph=True)
    strategies.build(config, World(0, 2, CPU)).wrap(unet_of())
    assert (recorder.last["bucket_cap_mb"], recorder.last["static_graph"]) == (3.5, True)
    assert recorder.last["device_ids"] is None
    with contextlib.suppress(RuntimeError):
        strategies.build(config, World(1, 2, torch.device("cuda", 1))).wrap(unet_of())
    assert recorder.last["device_ids"] == [1]


# ------------------------------------------------------------------------------------------------------- none is missed
def test_stages_are_cut_where_the_dearest_costs_least():
    assert cuts([1, 1, 1, 1], 2) == [0, 2, 4]
    assert cuts([5, 1, 1, 1, 1], 2) == [0, 1, 5]
    assert cuts([1, 1, 1, 1, 5], 3) in ([0, 2, 4, 5], [0, 1, 4, 5], [0, 3, 4, 5])
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    dearest = {ends: max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, 8)))
               for ends in itertools.combinations(range(1, 8), 3)}  # fmt: skip
    assert dearest[tuple(cuts(costs, 4)[1:-1])] == min(dearest.values())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 4), "strategy: pipeline is not allowed: Linear is no nn.Sequential and has no chain"),
        (nn.Sequential(nn.Linear(4, 4)), "workers: 2 is not allowed: the model has 1 links"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, reason):
    with pytest.raises(cfg.ConfigError, match=reason):
        strategies.build(tiny(parallel__workers=2, parallel__strategy="pipeline"), World(0, 2, CPU)).wrap(model)


def test_layers_that_share_weights_stay_in_one_stage():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    strategy = strategies.build(tiny(parallel__workers=2, parallel__strategy="pipeline"), World(0, 2, CPU))
    strategy.wrap(nn.Sequential(first, last))
    targets, weights = torch.zeros(4, 4), torch.full((4,), 0.25)
    with (
        mock.patch.object(World, "tell", lambda self, value: value),
        pytest.raises(cfg.ConfigError, match="weight would belong to two stages"),
    ):
        strategy.passes([torch.zeros(4, 4)], [targets], F.mse_loss, weights, contextlib.nullcontext)


# -------------------------------------- what torch.compile finds and leaves, and whether it compiles all that it should
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
