"""Averages, loaders and checkpoints of trainings on two ranks: what a rank has for itself, and what all must share."""

import contextlib
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import CPU, Told, assert_equal, ranks, toy, train, weights
from tests.toy.train import IMAGES, INPUTS, STEPS, TARGETS, error, network
from tests.training.test_ranks import squares
from tunediff import epochs, steps
from tunediff.config import ConfigError
from tunediff.distributed import World
from tunediff.training import state, strategies
from tunediff.training.strategies import dp, single
from tunediff.training.strategies.fsdp import Fsdp

NEAR = {"rtol": 1e-4, "atol": 1e-5}
FEW = 8 * 4
TWO = {"norm": False, "parallel__workers": 2}
PIPELINE = {"parallel__strategy": "pipeline", "parallel__microbatches": 2}
FSDP = {"parallel__strategy": "fsdp"}


def prepared(trial):
    """The plain network inside the prepared one, the prepared one and an optimizer, kept."""
    plain = network(trial.knobs)
    net = trial.prepare(plain)
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    return plain, net, optimizer


def averaged(trial):
    """A training whose average is exported, and judged by rank 0 alone."""
    plain, _, optimizer = prepared(trial)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    trial.export_model(average)
    trial.keep(average=average)
    trial.evaluate_with(lambda: trial.world.tell(error(average) if trial.world.main else None))
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        trial.forward_backward((inputs,), (targets,), squares)
        trial.update(optimizer, clip_norm=0.5)
        average.update_parameters(plain)
    states[:] = [len(optimizer.state)]


states: list[int] = []


def learned(world, folder, **knobs):
    """What is learned by `averaged`; the model is asked for its weights by this rank alone."""
    outcome = train(toy(**knobs), samples=FEW, world=world, body=averaged, evaluates=True, folder=folder)
    return {"weights": weights(outcome), "errors": [point["error"] for point in outcome.points], "states": states[:]}


def learned_in_two_starts(world, folder, **knobs):
    stop = Told(stop=lambda told: told.steps >= 2)
    train(toy(**knobs), samples=FEW, world=world, body=averaged, evaluates=True, folder=folder, observer=stop)
    return learned(world, folder, **knobs)


def assert_learned_alike(both, one):
    for answers in both:
        assert_equal(one["weights"], answers["weights"], **NEAR)
        assert answers["errors"] == pytest.approx(one["errors"], rel=1e-4)


# ------------------------------------------------------------------------------------------------------ own loaders
def own_loader(call, size=8, drop_last=True):
    """A training over a loader of its own, whose order is another on each rank; targets have noise of the rank's."""

    def body(trial):
        _, _, optimizer = prepared(trial)
        order = torch.Generator().manual_seed(3 + trial.world.rank)
        data = TensorDataset(INPUTS, TARGETS)
        loader = DataLoader(data, size, shuffle=True, drop_last=drop_last, generator=order)
        passes = epochs(trial, loader) if call == "epochs" else [(0, steps(trial, loader))]
        for _, batches in passes:
            for inputs, targets in batches:
                trial.forward_backward((inputs,), (targets + trial.world.rank,), squares)
                trial.update(optimizer)

    return body


def over_own_loaders(world):
    answers = {}
    for call in ("epochs", "steps"):
        outcome = train(toy(**TWO, **PIPELINE), samples=8 * 10, world=world, body=own_loader(call))
        answers[call] = {"weights": weights(outcome), "losses": [point.loss for point in outcome.points]}
    uneven = toy(**TWO, **PIPELINE)
    for name, how in {"shorter": {"drop_last": False}, "odd": {"size": 7}}.items():
        with contextlib.suppress(ConfigError):
            try:
                train(uneven, samples=8 * 10, world=world, body=own_loader("epochs", **how))
            except ConfigError as refusal:
                answers[name] = str(refusal)
    return answers


def test_pipeline_trains_on_rank_0s_batches_of_an_own_loader(tmp_path):
    both = ranks(over_own_loaders, tmp_path)
    for call in ("epochs", "steps"):
        one = train(toy(norm=False), samples=8 * 10, body=own_loader(call))
        for answers in both:
            assert_equal(weights(one), answers[call]["weights"], **NEAR)
            assert answers[call]["losses"] == pytest.approx([point.loss for point in one.points], rel=1e-4)
    for answers in both:
        assert answers["shorter"].startswith("parallel.strategy: pipeline is not allowed with a batch of 4 items")
        assert answers["odd"].startswith("parallel.microbatches: 2 is not allowed with batches of 7 items")


# --------------------------------------------------------------------------------------------------------- averages
def test_pipeline_exports_an_averaged_model_with_all_stages(tmp_path):
    both = ranks(piped, tmp_path, tmp_path)
    assert_learned_alike([answers["whole"] for answers in both], learned(CPU, tmp_path / "one", norm=False))
    assert_learned_alike([answers["resumed"] for answers in both], learned(CPU, tmp_path / "one", norm=False))
    for name in ("whole", "resumed"):
        kept = sum(answers[name]["states"][0] for answers in both)
        assert kept == len(list(network(toy(norm=False).knobs).parameters())), "a rank keeps those of its stage alone"


def piped(world, folder):
    knobs = TWO | PIPELINE
    return {
        "whole": learned(world, folder / "whole", **knobs),
        "resumed": learned_in_two_starts(world, folder / "resumed", **knobs),
    }


def exported_part(trial):
    """The exported model is the second half of the prepared one; its first layer has the name of the other half."""
    half = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), half)
    trial.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.export_model(half)
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        trial.forward_backward((inputs,), (targets,), squares)
        trial.update(optimizer)


def piped_part(world):
    return weights(train(toy(**TWO, **PIPELINE), samples=FEW, world=world, body=exported_part))


def test_pipeline_exports_a_part_of_the_prepared_model(tmp_path):
    one = weights(train(toy(norm=False), samples=FEW, body=exported_part))
    for exported in ranks(piped_part, tmp_path):
        assert_equal(one, exported, **NEAR)


def sharded(world, folder):
    knobs = TWO | FSDP
    return {
        "whole": learned(world, folder / "whole", **knobs),
        "resumed": learned_in_two_starts(world, folder / "resumed", **knobs),
    }


def test_fsdp_lets_one_rank_use_an_exported_averaged_model(tmp_path):
    both = ranks(sharded, tmp_path, tmp_path)
    for name in ("whole", "resumed"):
        assert_learned_alike([answers[name] for answers in both], learned(CPU, tmp_path / name, norm=False))


def judged_statistics(world):
    statistics = []

    def body(trial):
        plain, net, optimizer = prepared(trial)
        average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        trial.export_model(average)

        def judge():
            statistics.append({name: one.clone() for name, one in average.named_buffers()})
            return error(average)

        trial.evaluate_with(judge)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.step(F.mse_loss(net(inputs), targets), optimizer)
            average.update_parameters(plain)

    train(toy(parallel__workers=2), samples=FEW, world=world, body=body, evaluates=True)
    return statistics


def test_all_ranks_judge_an_average_with_equal_batch_statistics(tmp_path):
    first, second = ranks(judged_statistics, tmp_path)
    assert len(first) == 2
    assert_equal(first, second)


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_fsdp_states_need_no_memory_of_the_device_in_a_checkpoint(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        strategy = Fsdp(toy(**TWO, **FSDP), World(0, 1, torch.device("cuda", 0)))
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16))).cuda()
        before = state.copied(net.state_dict())
        strategy.wrap(net)
        with strategy.states_as_shares():
            shares = state.copied(net.state_dict())
        assert {one.to_local().device.type for one in shares.values()} == {"cpu"}
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with strategy.states_for_file():
            whole = net.state_dict()
        assert torch.cuda.max_memory_allocated() - held < 4 * 2**20, "some of the 16 MiB at a time"
        assert_equal(before, dict(whole))
        with torch.no_grad():
            for one in net.parameters():
                one.zero_()
        net.load_state_dict(shares)
        assert_equal(before, state.copied(net.state_dict()))
    finally:
        torch.distributed.destroy_process_group()


# ---------- one process on two devices, here two threads that share the weights; torch has no DataParallel without GPUs
DP = {"parallel__strategy": "dp", "parallel__workers": 2}


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
