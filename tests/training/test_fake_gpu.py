"""What only a GPU executes, on a GPU that is not there: each branch on `cuda` is entered by a test."""

import ast
import itertools
import os
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import yaml

import tunediff
from tests.fake_cuda import DEVICE, GPU, fake_cuda
from tests.helpers import CPU, Told, assert_equal, tiny, toy, train, weights
from tests.toy.train import INPUTS, TARGETS
from tests.training.test_capture import EXACT, FEW, fused, told_of
from tunediff import distributed, steps
from tunediff.api.train_run import TrainOptions, prepare
from tunediff.config import dump
from tunediff.config.schema import not_effective
from tunediff.config.systems import Precision
from tunediff.core import machine
from tunediff.distributed import World
from tunediff.evaluation import generation
from tunediff.profiling import measure
from tunediff.training import compilation, hardware, memory
from tunediff.training.precision import set_backends
from tunediff.workloads.diffusion import unet

PACKAGE = Path(tunediff.__file__).parent


def captured_training_equals_that_of_a_cpu(cuda):
    told = Told()
    on_gpu = train(tiny(**EXACT, compile__capture="step"), samples=FEW, world=GPU, observer=told)
    point = told.points[-1]
    assert (told.facts["capture"], point.capture) == ("captured", "captured")
    assert (point.peak_memory_mib, point.peak_reserved_mib) == (100.0, 200.0)
    assert point.phases_s["backward"] > 0, "by events of the device, replayed ones too"
    assert 1 in cuda.sync_modes, "torch was asked to warn of what makes the host wait"
    assert cuda.sync_mode == 0
    return on_gpu


def loader_of_a_user_is_ordered_before_the_captured_steps(cuda):
    """His threads work in the default stream; once all is made, that goes on behind the steps."""
    side = []

    def body(trial):
        net, optimizer = fused(trial)
        side.append(cuda.current)
        predict = trial.captured(net)
        trial.evaluate_with(lambda: {"error": F.mse_loss(predict(INPUTS), TARGETS).item()})
        dataset = torch.utils.data.TensorDataset(INPUTS, TARGETS)
        for inputs, targets in steps(trial, torch.utils.data.DataLoader(dataset, 8, drop_last=True)):
            trial.before_step(lambda: net[0].weight.detach().sum().item())
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    told, default = Told(), cuda.default
    config = toy(**{"evaluation.points": 2, "compile.capture": "auto"})
    train(config, samples=96, world=GPU, body=body, observer=told, evaluates=True)
    assert told.facts["capture"] == "captured"
    assert side[0] is not default
    assert cuda.current is default
    assert default.waits_for[0] is side[0]
    assert side[0].waits_for.count(default) >= 12
    assert {stream for _, stream in cuda.recorded} == set(side)


def auto_trains_eagerly_beside_what_step_is_refused_with(cuda):
    told = Told()
    config = tiny(**EXACT, compile__capture="auto", memory__checkpoint=1.0)
    train(config, samples=32, world=GPU, observer=told)
    assert told.facts["capture"].startswith("refused: ")
    assert "memory.checkpoint puts generators back in every step" in told.points[-1].capture
    assert cuda.current is cuda.default


def knobs_without_effect_are_named_by_device(cuda):
    config = tiny(compile__mode="reduce-overhead", memory__keep_freed=True)
    assert "compile.mode" in not_effective(config, "cpu")
    assert "compile.capture" in not_effective(tiny(compile__capture="auto"), "cpu")
    assert "memory.keep_freed" in not_effective(config, "cuda")
    before = torch.backends.cudnn.benchmark
    set_backends(Precision(cudnn_benchmark=True), "cuda")
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before
    for keep, device in ((False, DEVICE), (False, CPU.device), (True, CPU.device)):
        memory.keep_freed(keep, device)
        World(0, 1, device).synchronize()


def other_questions_get_the_answers_of_a_gpu(cuda):
    assert measure.device(GPU)["name"] == "fake"
    assert measure.device(CPU)["type"] == "cpu"
    with mock.patch.object(hardware, "peak_flops_per_s", return_value=1.0):
        assert measure.format_gains(GPU).keys() == {"fp16", "bf16", "tf32"}
        measure.format_gains(CPU)
    noise = [generation.ImageNoise(0, (1, 2, 2), device).step(0, 0, 2) for device in (DEVICE, CPU.device)]
    assert_equal(*noise)
    layer = torch.nn.Linear(2, 2)
    placed = types.SimpleNamespace(
        named_parameters=layer.named_parameters, parameters=lambda: iter([types.SimpleNamespace(device=DEVICE)])
    )
    assert compilation.code_key(placed, tiny()) != compilation.code_key(layer, tiny())
    map_of_gpu = types.SimpleNamespace(is_cuda=True, numel=lambda: 8, is_contiguous=lambda **_: False)
    assert unet.fused_norm(map_of_gpu) is None, "strided"
    begun = mock.patch.object(distributed.dist, "init_process_group")
    ended = mock.patch.object(distributed.dist, "destroy_process_group"), mock.patch.object(distributed.dist, "barrier")
    ranks = mock.patch.dict(os.environ, {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"})
    with begun as begin, ended[0], ended[1], ranks, distributed.world_of_environment() as world:
        assert (world.device, begin.call_args.args) == (DEVICE, ("nccl",))


EXERCISES = (
    captured_training_equals_that_of_a_cpu, loader_of_a_user_is_ordered_before_the_captured_steps,
    auto_trains_eagerly_beside_what_step_is_refused_with, knobs_without_effect_are_named_by_device,
    other_questions_get_the_answers_of_a_gpu,
)  # fmt: skip
ELSEWHERE = {
    "profiling/tables.py": "tests/profiling/test_measure.py",
    "profiling/trace.py": "tests/profiling/test_measure.py",
}
"""Files whose branches read what a profiler of a GPU has written: tests that make it up."""


def test_train_on_a_gpu_captures_unless_it_is_told_otherwise(tmp_path):
    def asked(config, *words):
        options = TrainOptions(config=Path(config), words=words, samples=8, out=tmp_path / "out")
        return prepare(options).config.compile.capture

    with mock.patch.object(machine, "gpus", return_value=["0"]):
        assert asked("digits") == "auto"
        assert asked("digits", "compile.capture=none") == "none"
        (tmp_path / "mine.yaml").write_text(dump(tiny()))
        assert asked(tmp_path / "mine.yaml") == "none", "a file says how it trains"
    assert asked("digits") == "none", "without a GPU"


def test_flagship_is_tried_captured_right_after_its_stock_baseline():
    stock, captured, *_ = yaml.safe_load((PACKAGE.parent / "search_spaces/cifar10.yaml").read_text())["first"]
    assert (stock, captured["compile.capture"]) == ({}, "auto")


# ---- every branch
def counting(trial):
    """A loop that counts before its steps, captured by a recording on a CPU."""
    net, optimizer = fused(trial)
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        trial.before_step(lambda: None)
        trial.step(F.mse_loss(net(inputs), targets), optimizer)


def is_of_cuda(condition):
    """Return whether a condition asks for a GPU."""
    words = {ast.unparse(node) for node in ast.walk(condition) if isinstance(node, ast.expr)}
    return any(
        word in ("'cuda'", "cuda") or word.endswith((".cuda", "._cuda", ".is_cuda", "is_available()")) for word in words
    )


def sides(path):
    """Yield the line of an `if` that asks for a GPU, and the first lines of what it does with and without one."""
    for node in ast.walk(ast.parse(path.read_text())):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            statements = block if isinstance(block, list) else []
            for statement, following in itertools.zip_longest(statements, statements[1:]):
                if isinstance(statement, ast.If) and is_of_cuda(statement.test):
                    without = statement.orelse[0] if statement.orelse else following
                    yield statement.lineno, [one.lineno for one in (statement.body[0], without) if one is not None]


def lines_of(call):
    """Return the lines of the package that a call executes, by file."""
    lines, package = set(), str(PACKAGE)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_each_branch_on_cuda_is_entered_by_an_exercise_and_learns_what_a_cpu_learns():
    found = []

    def exercises():
        for exercise in EXERCISES:
            with fake_cuda() as cuda:
                found.append(exercise(cuda))
        ranks, group = mock.patch.dict(os.environ, WORLD_SIZE="2", RANK="0"), mock.patch.object(distributed, "dist")
        with ranks, group, distributed.world_of_environment():
            pass
        told_of(counting)

    entered = lines_of(exercises)
    missed = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in ELSEWHERE
        for line, firsts in sides(path)
        if not all((str(path), first) in entered for first in firsts)
    ]
    assert missed == []
    assert_equal(weights(found[0]), weights(train(tiny(**EXACT), samples=FEW)))
