"""A GPU learns what a CPU learns, in every form that a search draws: ten steps of a small U-Net.

Two trainings are compared by the noise that their networks predict in the same images, computed in float32 on the CPU.
Weights say less: Adam moves those whose gradient is nearly 0 by the sign of rounding errors.
"""

import copy
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import CPU, Dies, KilledError, Told, digits, pair, train
from tunediff.distributed import World
from tunediff.training import compilation, memory
from tunediff.training import optimizer as adam
from tunediff.training.observer import Observer
from tunediff.training.trial import Trial
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps import KINDS
from tunediff.workloads.diffusion.train import squared_errors
from tunediff.workloads.diffusion.unet import ResidualBlock, network

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = World(0, 1, torch.device("cuda"))
SMALL = {
    "model__channels": 16, "model__norm_groups": 4, "model__multipliers": [1, 2], "model__dropout": 0.0,
    "loader__batch_size": 8, "loader__workers": 0, "data__max_images": 256, "evaluation__points": 1,
    "optimizer__warmup": 0.0, "optimizer__lr": 1e-3, "optimizer__implementation": "for_loop", "process__steps": 100,
    "precision__conv_tf32": False,
}  # fmt: skip
"""In IEEE float32, in which stock PyTorch does not compute a GPU's convolutions."""
FORMATS = {
    "float32": ({}, 1e-3), "TF32": ({"precision__matmul": "high", "precision__conv_tf32": True}, 5e-3),
    "bf16": ({"precision__amp": "bf16"}, 0.015), "fp16": ({"precision__amp": "fp16"}, 5e-3),
}  # fmt: skip
"""Knobs and the largest distance that rounding explains. On a CPU below 1e-5 (float32, other kernels), 0.003 (bf16) and
6e-4 (fp16, whose mantissa has as many bits as TF32's) were seen; AdamW's beta2 of 0.9 instead of 0.999 makes 0.02."""
FORMS = {
    "for_loop": {}, "foreach": {"optimizer__implementation": "foreach"}, "fused": {"optimizer__implementation": "fused"},
    "channels_last": {"memory__channels_last": True}, "resident": {"loader__resident": True},
    "checkpoint": {"memory__checkpoint": 1.0}, "accumulation": {"loader__accumulation": 2},
    "all": {"optimizer__implementation": "fused", "memory__channels_last": True, "loader__resident": True},
}  # fmt: skip
COMPILED = [
    {"compile__mode": mode, "compile__scope": scope}
    for mode, scope in itertools.product(("default", "reduce-overhead", "max-autotune"), ("model", "blocks"))
    if (mode, scope) != ("reduce-overhead", "blocks")
]
SAMPLERS = sorted(kind().name for kind in KINDS)
OPTIMIZERS = ("muon", "adam", "sgd")


def small(**changes):
    values = SMALL | changes
    if "optimizer__name" in values:
        del values["optimizer__implementation"]
    return digits(**values)


@functools.cache
def images_noise_timesteps():
    """Noise and timesteps are part of the data: two devices draw different numbers from one seed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(256, 1, 8, 8, generator=generator).round() * 2 - 1
    return images, torch.randn(images.shape, generator=generator), torch.randint(100, (256,), generator=generator)


def learn(trial):
    """Train the U-Net of the configuration on `images_noise_timesteps`."""
    knobs, net = trial.knobs, network(trial.knobs)
    process = Diffusion(knobs.process, trial.device)
    trial.prepare(net, blocks=ResidualBlock)
    optimizer = adam.build(knobs.optimizer, trial.config.loader.batch_size, net)
    trial.keep(network=net, optimizer=optimizer)
    for x0, noise, t in trial.batches(images_noise_timesteps()):
        trial.forward_backward((process.add_noise(x0, noise, t), t), (noise,), squared_errors)
        if trial.sync_gradients:
            trial.update(optimizer, clip_norm=knobs.optimizer.clip_norm)


@torch.no_grad()
def prediction(config, outcome):
    """The noise that the trained model predicts, computed in float32 on the CPU: [64, 1, 8, 8]."""
    net, process = network(config.knobs), Diffusion(config.knobs.process, CPU.device)
    net.load_state_dict({name: tensor.cpu().contiguous() for name, tensor in outcome.weights.items()})
    images, noise, t = (column[:64] for column in images_noise_timesteps())
    return net.eval()(process.add_noise(images, noise, t), t)


def trained(config, world, steps=10, **how):
    outcome = train(config, samples=steps * config.loader.batch_size, world=world, body=learn, **how)
    return prediction(config, outcome)


@functools.cache
def reference():
    return trained(small(), CPU)


def distance(predicted, expected):
    """Euclidean norm of the difference over that of `expected`; an untrained network predicts 0."""
    return float((predicted - expected).norm() / expected.norm())


@pytest.mark.nightly  # of use to the tests on a GPU alone
def test_distance_of_two_trainings_sees_a_wrong_optimizer_and_allows_rounding():
    assert distance(trained(small(**FORMS["all"]), CPU), reference()) < FORMATS["float32"][1]
    knobs, bound = FORMATS["bf16"]
    assert FORMATS["float32"][1] < distance(trained(small(**knobs), CPU), reference()) < bound
    wrong = distance(trained(small(optimizer__beta2=0.9), CPU), reference())
    assert wrong > max(bound for _, bound in FORMATS.values())


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number_format", FORMATS)
def test_gpu_parity_of_number_format_and_form(number_format, form):
    knobs, bound = FORMATS[number_format]
    assert distance(trained(small(**knobs, **FORMS[form]), GPU), reference()) < bound


class Graphs(Observer):
    """Counts compiled graphs after every step."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def after_step(self):
        self.counts.append(compilation.graphs())


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("knobs", COMPILED, ids=lambda knobs: "-".join(knobs.values()))
def test_gpu_parity_compiled_once(knobs):
    graphs, before = Graphs(), compilation.graphs()
    config = small(**knobs)
    try:
        with compilation.cold_cache(config.compile):
            assert distance(trained(config, GPU, observer=graphs), reference()) < FORMATS["float32"][1]
    finally:
        torch.compiler.reset()
    assert set(graphs.counts) == {graphs.counts[0]}, "compiled again while it trained"
    assert graphs.counts[0] > before


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_gpu_resume_of_every_sampler(tmp_path, sampler):
    config = small(timesteps__name=sampler, evaluation__points=2)
    whole = train(config, samples=48, world=GPU)
    with pytest.raises(KilledError):
        train(config, samples=48, world=GPU, folder=tmp_path, observer=Dies())
    resumed = train(config, samples=48, world=GPU, folder=tmp_path)
    assert distance(*(prediction(config, outcome) for outcome in (resumed, whole))) < FORMATS["float32"][1]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gpu_parity_of_optimizers(name):
    config = small(optimizer__name=name)
    bound = FORMATS["bf16" if name == "muon" else "float32"][1]  # Muon's matrices are in bfloat16 on a GPU
    assert distance(trained(config, GPU), trained(config, CPU)) < bound


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "knobs",
    [
        *({"timesteps__name": sampler} for sampler in SAMPLERS),
        *({"optimizer__name": name} for name in OPTIMIZERS),
        *({"weighting__name": name} for name in ("min_snr", "uncertainty")),
        {"precision__amp": "bf16"},
    ],
    ids=lambda knobs: next(iter(knobs.values())),
)
def test_gpu_step_does_not_wait_for_the_device(knobs):
    """Torch raises where the workload's part of a step makes the host wait."""
    batches = Trial.batches

    def watched(self, *args, **options):
        for batch in batches(self, *args, **options):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")

    config = small(**{"optimizer__implementation": "fused"} | knobs, loader__resident=True)
    with mock.patch.object(Trial, "batches", watched):
        train(config, samples=160, world=GPU)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "knobs",
    [
        *({"timesteps__name": sampler} for sampler in SAMPLERS if sampler != "beta_policy"),
        *(changes for changes, _ in FORMATS.values()),
        {"loader__accumulation": 2}, {"compile__mode": "default"},
        {"memory__channels_last": True, "precision__cudnn_benchmark": True, "model__dropout": 0.1},
        {"optimizer__name": "sgd", "optimizer__implementation": "fused"}, {"optimizer__name": "muon"},
    ],
    ids=lambda knobs: "-".join(map(str, knobs.values())) or "float32",
)  # fmt: skip
def test_gpu_capture_learns_what_the_loop_does(knobs):
    fused = {"optimizer__implementation": "fused", "optimizer__warmup": 0.2, "compile__capture": "step"}
    told = Told()
    outcome = train(digits(**SMALL | fused | knobs), samples=320, world=GPU, observer=told)
    assert told.facts["capture"] == "captured"
    assert told.points[-1].steps == 40
    assert all(tensor.isfinite().all() for tensor in outcome.weights.values())
    if "model__dropout" not in knobs:
        eager = train(digits(**SMALL | fused | knobs | {"compile__capture": "none"}), samples=320, world=GPU)
        assert distance(*(torch.cat([one.weights[name].flatten().cpu() for name in sorted(one.weights)])
                          for one in (outcome, eager))) < 0.02  # fmt: skip


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_fused_norm_computes_what_float64_does(dtype):
    from tests.workloads.diffusion.test_unet import fused_norm, in_torch, inputs

    for channels, side in ((128, 32), (256, 16), (384, 16), (512, 4)):
        tensors = [one.detach().cuda().requires_grad_() for one in inputs(channels, side, dtype)]
        exact = [one.detach().double().requires_grad_() for one in tensors]
        y, expected = fused_norm.norm_silu(*tensors, 32, 1e-6), in_torch(*exact, 32)
        dy = torch.randn_like(y)
        found = (y, *torch.autograd.grad(y, tensors, dy))
        right = (expected, *torch.autograd.grad(expected, exact, dy.double()))
        for one, other in zip(found, right, strict=True):
            assert distance(one.double(), other) < (1e-4 if dtype == torch.float32 else 0.01)
        compiled = torch.compile(fused_norm.norm_silu, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*tensors, 32, 1e-6), y, rtol=0, atol=0)


@gpu
@pytest.mark.gpu
def test_gpu_memory_that_runs_out_is_recognised_and_given_back():
    before, taken = torch.cuda.memory_allocated(), []
    with pytest.raises(RuntimeError) as error:
        while True:
            taken.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))
    assert memory.is_oom(error.value)
    del error
    taken.clear()
    memory.reset(GPU.device)
    assert torch.cuda.memory_allocated() - before < 2**20
    assert distance(trained(small(), GPU), reference()) < FORMATS["float32"][1]


@gpu
@pytest.mark.gpu
def test_gpu_peak_memory_is_the_trainings_own():
    peaks = []
    for _ in range(3):  # the first one loads libraries
        outcome = train(small(), samples=80, world=GPU, body=learn)
        peaks.append(outcome.peak["peak_memory_mib"] - torch.cuda.memory_allocated() / 2**20)
        del outcome
        torch.ones(2**27, device="cuda")  # half a GiB, freed at once
    assert max(peaks[1:]) < 64.0
    assert peaks[2] == pytest.approx(peaks[1], abs=8.0)


@gpu
@pytest.mark.gpu
def test_gpu_gradients_through_a_group_of_one(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net, inputs = torch.nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
        plain = copy.deepcopy(net)
        for model in (torch.nn.parallel.DistributedDataParallel(net), plain):
            F.mse_loss(model(inputs), torch.zeros_like(inputs)).backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_gpu_parity_of_two_ranks(tmp_path, strategy):
    pair(_on_two_gpus, tmp_path, strategy)
    assert distance(torch.load(tmp_path / "prediction.pt"), reference()) < FORMATS["float32"][1]


def _on_two_gpus(rank, port, folder, strategy):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    config = small(parallel__workers=2, parallel__strategy=strategy)
    predicted = trained(config, World(rank, 2, device))
    if rank == 0:
        torch.save(predicted, folder / "prediction.pt")
    torch.distributed.destroy_process_group()
