"""One process on two devices, here two threads that share the weights; torch has no DataParallel without GPUs."""

import sys
import threading

import pytest
import torch
from torch import nn

from tests.helpers import CPU, Told, assert_equal, toy, train, weights
from tests.toy.train import IMAGES, STEPS
from tunediff.config import ConfigError
from tunediff.distributed import World
from tunediff.training import strategies
from tunediff.training.strategies import dp, single

DP = {"parallel__strategy": "dp", "parallel__workers": 2}
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def in_threads(modules, inputs, kwargs, devices):
    """As torch does it: of autocast a thread knows whether there is any, and not which."""
    found, grad, cast = {}, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def run(i):
        torch.set_grad_enabled(grad)
        with torch.autocast("cpu", enabled=cast):
            found[i] = modules[i](*inputs[i], **kwargs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(modules))]
    for thread in threads:
        thread.start()
        thread.join()
    return [found[i] for i in range(len(modules))]


@pytest.fixture
def two(monkeypatch):
    """What was seeded: (device, seed)."""

    def init(self, model, devices):
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = model, devices, devices[0], 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs, kwargs, devices):
        parts = list(zip(*(one.chunk(len(devices)) for one in inputs), strict=True))
        return parts, [{}] * len(parts)

    seeded = []
    for owner, name, fake in (
        (dp, "gpus", lambda device, count: list(range(count))),
        (dp, "_seed", lambda device, seed: seeded.append((device, seed))),
        (sys.modules[nn.DataParallel.__module__], "parallel_apply", in_threads),
        (dp.Copies, "__init__", init),
        (dp.Copies, "scatter", scatter),
        (dp.Copies, "replicate", lambda self, model, devices: [model] * len(devices)),
        (dp.Copies, "gather", lambda self, outputs, device: torch.cat(outputs)),
    ):
        monkeypatch.setattr(owner, name, fake)
    return seeded


@pytest.mark.parametrize("knobs", [{}, {"loader__accumulation": 2}, {"precision__amp": "bf16"}])
def test_two_devices_learn_what_one_learns(two, knobs):
    told, alone = Told(), Told()
    both = train(toy(norm=False, **DP, **knobs), samples=IMAGES, observer=told, evaluates=True)
    one = train(toy(norm=False, **knobs), samples=IMAGES, observer=alone, evaluates=True)
    assert_equal(weights(both), weights(one), **({"rtol": 2e-2, "atol": 2e-2} if "precision__amp" in knobs else NEAR))
    assert both.samples == one.samples == IMAGES, "the batch is that of all devices"
    last = told.points[-1]
    assert last.device_s == pytest.approx(2 * last.train_s)
    assert {device for device, _ in two} == {1}
    passes = STEPS * knobs.get("loader__accumulation", 1)
    assert len({seed for _, seed in two}) == passes, "no two drop the same units there; the warm-up's are drawn again"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_run_in_the_callers_number_format(two, dtype):
    """torch 2 hands on to its threads that there is autocast, and they take the device's default."""
    net = dp.Copies(nn.Linear(2, 2), [0, 1])
    with torch.autocast("cpu", dtype):
        assert net(torch.zeros(4, 2)).dtype == dtype
    assert net(torch.zeros(4, 2)).dtype == torch.float32


def test_without_as_many_gpus_it_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="dp is not allowed: parallel.workers = 2 needs as many GPUs, and this proc"):
        train(toy(norm=False, **DP), samples=IMAGES)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert dp.gpus(torch.device("cuda", 1), 3) == [1, 2, 3]
    with pytest.raises(ConfigError, match="parallel.workers = 5 needs as many GPUs, and this process has 4; allowed"):
        dp.gpus(torch.device("cuda", 0), 5)


def test_one_worker_is_one_process():
    assert type(dp_of(1)) is single.Single
    assert (type(dp_of(2)), dp_of(2).devices, dp_of(2).replicas.size) == (dp.Dp, 2, 1)


def dp_of(workers):
    return strategies.build(
        toy(norm=False, parallel__strategy="dp", parallel__workers=workers), World(0, 1, CPU.device)
    )
