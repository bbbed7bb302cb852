from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tunediff.config import baseline, override
from tunediff.evaluation.distance import NonFiniteError
from tunediff.evaluation.generation import ImageNoise, shares
from tunediff.workloads.diffusion.evaluator import generate, to_uint8
from tunediff.workloads.diffusion.knobs import Process
from tunediff.workloads.diffusion.process import Diffusion

SHAPE = (1, 4, 4)


def network(x: Tensor, t: Tensor) -> Tensor:
    return x * 0.9


def images(
    diffusion: Any, n: int, batch: int, world: int = 1, predict: Any = network, precision: str = "fp32", **how: Any
) -> Tensor:
    """All ranks' images, put together."""
    evaluation = override(baseline("digits"), {"evaluation.batch_size": batch}).evaluation
    how |= {"precision": precision}
    whole = torch.full((n, *SHAPE), 77, dtype=torch.uint8)
    seen = torch.zeros(n, dtype=torch.int64)
    for rank in range(world):
        for start, part in generate(predict, diffusion, evaluation, SHAPE, n, "cpu", rank=rank, world=world, **how):
            whole[start : start + len(part)] = part
            seen[start : start + len(part)] += 1
    assert (seen == 1).all(), "every image exactly once"
    return whole


def test_noise_belongs_to_the_image() -> None:
    noise = ImageNoise(3, SHAPE, "cpu")
    whole = noise.initial(0, 300)
    assert whole.shape == (300, *SHAPE)
    for start, stop in [(0, 1), (63, 65), (64, 128), (100, 300), (299, 300)]:
        assert torch.equal(noise.initial(start, stop), whole[start:stop])
        assert torch.equal(noise.step(7, start, stop), noise.step(7, 0, 300)[start:stop])
    assert torch.equal(ImageNoise(3, SHAPE, "cpu").initial(0, 300), whole)


def test_noise_is_standard_normal_and_never_repeats() -> None:
    noise = ImageNoise(3, SHAPE, "cpu")
    draws = [
        noise.initial(0, 512),
        noise.step(0, 0, 512),
        noise.step(1, 0, 512),
        ImageNoise(4, SHAPE, "cpu").initial(0, 512),
    ]
    values = torch.stack([draw.flatten() for draw in draws])
    assert values.mean(1).abs().max() < 0.05
    assert (values.std(1) - 1).abs().max() < 0.05
    assert (torch.corrcoef(values) - torch.eye(4)).abs().max() < 0.05
    blocks = draws[0].view(8, -1)
    assert (torch.corrcoef(blocks) - torch.eye(8)).abs().max() < 0.15


def test_noise_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    ImageNoise(3, SHAPE, "cpu").initial(0, 100)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [7, 50, 1000])
def test_images_do_not_depend_on_batches_and_ranks(identity: Any, world: int, batch: int) -> None:
    whole = images(identity, 130, 130)
    assert torch.equal(images(identity, 130, batch, world), whole)
    assert whole.float().std() > 10


def test_all_batches_have_one_size(identity: Any) -> None:
    sizes = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        sizes.append((len(x), len(t)))
        return x

    images(identity, 130, 50, predict=predict)
    assert sizes == [(44, 44)] * 3


def test_the_evaluation_settings_reach_the_sampler() -> None:
    seen = {}

    class Recorder:
        def sample(self, predict: Any, noise: Tensor, *, step_noise: Any, **how: Any) -> Tensor:
            seen.update(how)
            return noise

    images(Recorder(), 8, 8)
    assert seen == {"sampler": "ddim", "steps": 20, "skip": "linear", "eta": 0.0, "progress": None}


def test_every_step_of_every_batch_is_told() -> None:
    diffusion, told = Diffusion(Process(steps=20)), list[tuple[int, int, int]]()
    images(diffusion, 21, 8, progress=lambda k, steps, x: told.append((k, steps, len(x))))
    assert told == [(k, 20, 7) for k in range(20)] * 3


@pytest.mark.parametrize(("n", "world", "batch"), [(1, 1, 8), (21, 1, 8), (21, 2, 8), (17, 3, 2), (5, 8, 100)])
def test_shares_are_those_of_the_busiest_rank(identity: Any, n: int, world: int, batch: int) -> None:
    evaluation = override(baseline("digits"), {"evaluation.batch_size": batch}).evaluation
    turns, size = shares(n, world, batch)
    starts = [start for start, _ in generate(network, identity, evaluation, SHAPE, n, "cpu", world=world)]
    assert starts == [turn * world * size for turn in range(turns)]
    assert size <= batch


def test_the_precision_covers_the_network_only() -> None:
    class Sampler:
        def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
            assert not torch.is_autocast_enabled("cpu")
            output: Tensor = predict(noise, torch.zeros(len(noise)))
            assert output.dtype == torch.float32
            return output

    def predict(x: Tensor, t: Tensor) -> Tensor:
        product = x.flatten(1) @ torch.eye(16)
        assert product.dtype == torch.bfloat16
        return product.view(x.shape)

    images(Sampler(), 8, 8, predict=predict, precision="bf16")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_images_are_refused(identity: Any, bad: float) -> None:
    with pytest.raises(NonFiniteError, match="non-finite values in generated images 0…7"):
        images(identity, 8, 8, predict=lambda x, t: x * bad)


def test_to_uint8() -> None:
    values = torch.tensor([-3.0, -1.0, -0.999, 0.0, 0.5, 1.0, 2.0])
    assert to_uint8(values).tolist() == [0, 0, 0, 128, 191, 255, 255]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(every.float() / 127.5 - 1), every)
