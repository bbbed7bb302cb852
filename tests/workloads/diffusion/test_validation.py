from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tunediff.config import baseline, override
from tunediff.data import images as data
from tunediff.data.images import Images
from tunediff.distributed import alone
from tunediff.evaluation.distance import NonFiniteError
from tunediff.workloads.diffusion.evaluator import BINS, Losses, Validation, held_out
from tunediff.workloads.diffusion.knobs import Process
from tunediff.workloads.diffusion.process import Diffusion, equal_bins


def process(prediction: str = "epsilon", schedule: str = "linear", steps: int = 1000) -> Diffusion:
    return Diffusion(Process(prediction=prediction, schedule=schedule, steps=steps))


def taken(config: Any, images: Images) -> tuple[Tensor, str]:
    return held_out(config.data, images, config.evaluation.validation_images)


def measured(images: Images, predict: Any, diffusion: Diffusion, **knobs: Any) -> Losses:
    config = override(baseline("digits"), {"evaluation.validation_images": 64} | knobs)
    pixels, _ = taken(config, images)
    return Validation(pixels, diffusion, alone("cpu"), config.evaluation.batch_size)(predict)


# --------------------------------------------------------------------------------------------------------------- bins
def in_bins(diffusion: Diffusion) -> tuple[list[list[int]], list[float]]:
    """The timesteps of each bin; the edges."""
    bins, edges = equal_bins(diffusion.log_snr, BINS)
    return [(bins == b).nonzero().squeeze(1).tolist() for b in range(BINS)], edges


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [2, 7, 50, 1000])
def test_every_timestep_lies_in_one_bin(schedule: str, steps: int) -> None:
    diffusion = process(schedule=schedule, steps=steps)
    members, edges = in_bins(diffusion)
    assert sorted(t for of in members for t in of) == list(range(steps))
    assert len(edges) == 11
    assert np.diff(edges) == pytest.approx([(edges[-1] - edges[0]) / 10] * 10)
    log_snr = diffusion.snr_table.log().clamp(-12, 12)
    for b in range(BINS):
        for value in log_snr[members[b]].tolist():
            assert edges[b] - 1e-9 <= value <= edges[b + 1] + 1e-9


def test_edges_end_where_the_chain_does_but_never_beyond_12() -> None:
    _, linear = in_bins(process())
    assert (linear[0], linear[-1]) == pytest.approx((math.log(4.03583e-5), math.log(9999)), rel=1e-4)
    assert in_bins(process(schedule="cosine"))[1][0] == -12


# ------------------------------------------------------------------------------------------------------------- losses
def test_each_image_is_seen_once_per_bin_at_evenly_spread_timesteps(digits: Images) -> None:
    seen: list[int] = []

    def predict(x: Tensor, t: Tensor) -> Tensor:
        seen.extend(t.tolist())
        return torch.zeros_like(x)

    diffusion = process(steps=50)
    config = {"evaluation.validation_images": 64, "evaluation.batch_size": 64}
    losses = measured(digits, predict, diffusion, **config)
    members, edges = in_bins(diffusion)
    filled = [b for b in range(BINS) if members[b]]
    assert len(seen) == 64 * len(filled)
    assert [mse is None for mse in losses["validation_mse"]] == [not of for of in members]
    assert losses["validation_log_snr"] == edges
    for b in filled:
        visits = [seen.count(t) for t in members[b]]
        assert sum(visits) == 64
        assert max(visits) - min(visits) <= 1


def test_an_empty_bin_has_no_error(digits: Images) -> None:
    losses = measured(digits, lambda x, t: torch.zeros_like(x), process(steps=2))
    assert sum(mse is None for mse in losses["validation_mse"]) == 8
    assert losses["validation_loss"] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_loss_is_the_mean_over_uniform_timesteps(digits: Images, schedule: str) -> None:
    """ε̂ = k(t) for every pixel is wrong by 1 + k² on average."""
    size = torch.where(torch.arange(1000) < 300, 3.0, torch.where(torch.arange(1000) < 850, 1.0, 0.0))
    losses = measured(
        digits, lambda x, t: size[t][:, None, None, None].expand_as(x), process(schedule=schedule),
        **{"evaluation.validation_images": 512},
    )  # fmt: skip
    assert losses["validation_loss"] == pytest.approx(0.3 * 10 + 0.55 * 2 + 0.15 * 1, rel=0.01)
    assert losses["validation_mse"][-1] == pytest.approx(10, rel=0.02)
    assert losses["validation_mse"][0] == pytest.approx(1, rel=0.02)


def test_models_that_say_the_same_in_other_words_are_equal(digits: Images) -> None:
    def noise(x: Tensor, t: Tensor) -> Tensor:
        return 0.7 * x + 0.1 * torch.sin(t.float())[:, None, None, None]

    found = {}
    for prediction in ("epsilon", "x0", "v"):
        diffusion = process(prediction)
        signal, level = diffusion.alphas_cumprod.sqrt(), (1 - diffusion.alphas_cumprod).sqrt()

        def predict(
            x: Tensor, t: Tensor, prediction: str = prediction, signal: Tensor = signal, level: Tensor = level
        ) -> Tensor:
            s, n = signal[t][:, None, None, None], level[t][:, None, None, None]
            epsilon = noise(x, t).double()
            x0 = (x - n * epsilon) / s
            return {"epsilon": epsilon, "x0": x0, "v": s * epsilon - n * x0}[prediction].float()

        found[prediction] = measured(digits, predict, diffusion)
    for prediction in ("x0", "v"):
        assert found[prediction]["validation_mse"] == pytest.approx(found["epsilon"]["validation_mse"], rel=1e-4)
    assert np.ptp(found["epsilon"]["validation_mse"]) > 0.1


def predict(x: Tensor, t: Tensor) -> Tensor:
    return 0.9 * x + 1e-3 * t[:, None, None, None]


def test_what_changes_the_training_changes_nothing_here(digits: Images) -> None:
    plain = measured(digits, predict, process())
    assert measured(digits, predict, process()) == plain
    for knobs in ({"timesteps.name": "speed"}, {"weighting.name": "min_snr"}, {"seed": 5}, {"evaluation.seed": 5}):
        assert measured(digits, predict, process(), **knobs) == plain
    for batch in (1, 7, 1000):
        assert measured(digits, predict, process(), **{"evaluation.batch_size": batch}) == plain


def test_global_state_is_left_alone_and_no_gradient_is_kept(digits: Images) -> None:
    state = torch.get_rng_state()

    def watching(x: Tensor, t: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        return predict(x, t)

    with torch.autocast("cpu", torch.bfloat16):
        measured(digits, watching, process())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_diverged_model_is_refused(digits: Images) -> None:
    with pytest.raises(NonFiniteError, match="non-finite errors on the validation images"):
        measured(digits, lambda x, t: torch.where(t[:, None, None, None] == t.max(), x * math.nan, x), process())


# ------------------------------------------------------------------------------------------------------------- images
def test_without_a_held_out_split_learned_images_are_taken(digits: Images) -> None:
    config = override(baseline("digits"), {"evaluation.validation_images": 60})
    found, split = taken(config, digits)
    assert split == "all"
    classes = [digits.labels[(digits.pixels == image).flatten(1).all(1)][0].item() for image in found]
    assert set(classes) == set(range(10)), "a mixture"
    more, _ = taken(override(config, {"evaluation.validation_images": 100}), digits)
    assert torch.equal(more[:60], found)
    every, _ = taken(override(config, {"evaluation.validation_images": 5000}), digits)
    assert len(every) == 1797


def folder(root: Path, **shades: int) -> Any:
    """Ten grey images of one shade in each split."""
    for split, shade in shades.items():
        (root / split).mkdir()
        for number in range(10):
            Image.fromarray(np.full((8, 8), shade + number, np.uint8)).save(root / split / f"{number}.png")
    changes = {"data.name": "images", "data.path": str(root), "data.image_size": 8, "data.channels": 1}
    changes |= {"data.split": "train", "evaluation.extractor": "classifier", "data.max_images": 4}
    return override(baseline("digits"), changes | {"evaluation.validation_images": 6})


def test_the_test_split_is_taken_where_it_is_not_learned(tmp_path: Path) -> None:
    config = folder(tmp_path, train=10, test=200)
    found, split = taken(config, data.load(config.data))
    assert (split, len(found)) == ("test", 6)
    assert found.min() >= 200
    learned = override(config, {"data.split": "test"})
    assert taken(learned, data.load(learned.data))[1] == "test"
    both = override(config, {"data.split": "all", "data.max_images": None})
    assert taken(both, data.load(both.data))[1] == "all", "the test images are learned as well"
    single = override(config, {"evaluation.validation_images": 1})
    assert len(taken(single, data.load(config.data))[0]) == 1


def test_pixels_are_scaled_as_in_training(tmp_path: Path) -> None:
    config = folder(tmp_path, train=10, test=245)  # the test images have 245…254, which is 0.92…0.99
    cleanest: list[float] = []

    def watching(x: Tensor, t: Tensor) -> Tensor:
        cleanest.extend(x[t < 5].mean((1, 2, 3)).tolist())
        return x

    pixels, _ = taken(config, data.load(config.data))
    Validation(pixels, process(), alone("cpu"), 256)(watching)
    assert len(cleanest) >= 4
    assert all(0.9 < value < 1.01 for value in cleanest)
