import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers import ranks
from tests.workloads.diffusion.conftest import Identity
from tunediff.config import ConfigError, baseline, override
from tunediff.data import images
from tunediff.data.images import Images
from tunediff.distributed import World, alone
from tunediff.evaluation import judge as judging
from tunediff.evaluation.distance import FeatureStatistics, NonFiniteError, frechet
from tunediff.training import number_formats
from tunediff.workloads.diffusion import evaluator
from tunediff.workloads.diffusion.evaluator import BINS, Evaluator, Validation, generate, held_out
from tunediff.workloads.diffusion.knobs import Process
from tunediff.workloads.diffusion.process import Diffusion, equal_bins

CPU = alone("cpu")


def judge(config: Any, real: Images, world: World = CPU) -> Evaluator:
    return Evaluator(config.data, config.evaluation, real, world)


def network(x: Tensor, t: Tensor) -> Tensor:
    return x


# ---------------------------------------------------------------------------------------------------------- evaluator
def test_scores(digits: Images, config: Any, identity: Any) -> None:
    evaluator = judge(config, digits)
    state = torch.get_rng_state()
    scores = evaluator(network, identity)
    assert torch.equal(torch.get_rng_state(), state)
    assert (scores["evaluation_images"], scores["label"]) == (130, "FD (classifier)")
    assert scores["kid"] is not None
    assert scores["kid"] > 0
    made = torch.cat([part for _, part in generate(network, identity, config.evaluation, (1, 8, 8), 130, "cpu")])
    statistics = FeatureStatistics(64)
    statistics.update(evaluator.judge.extractor(made))
    assert scores["frechet"] == pytest.approx(frechet(statistics, evaluator.judge.reference), rel=1e-5)
    assert torch.equal(evaluator.judge.last_images, made[:64])
    assert evaluator(network, identity) == scores


def test_a_ruler_with_weights_of_its_own_needs_no_labels(config: Any) -> None:
    values = {"data.image_size": 16, "model.attention": [], "evaluation.images": 40}
    large = override(config, values | {"evaluation.extractor": "cifar10-resnet"})
    real = dataclasses.replace(images.load(large.data), labels=None, class_names=())
    scores = judge(large, real)(network, Diffusion(large.process, "cpu"))
    assert re.fullmatch(r"FD \(cifar10-resnet, \d+ %\)", scores["label"])
    assert 0 < scores["frechet"] < math.inf


def test_real_digits_score_better_than_noise(digits: Images, config: Any, identity: Any) -> None:
    class Copy(type(identity)):
        def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
            return digits.pixels[: len(noise)].float() / 127.5 - 1

    evaluator = judge(override(config, {"evaluation.batch_size": 130}), digits)
    copied, noise = evaluator(network, Copy()), evaluator(network, identity)
    assert copied["frechet"] < noise["frechet"] / 20
    assert copied["kid"] is not None
    assert noise["kid"] is not None
    assert copied["kid"] < noise["kid"] / 20


def test_validation_is_part_of_the_scores_unless_switched_off(digits: Images, config: Any, identity: Any) -> None:
    scores = judge(config, digits)(network, identity)
    pixels, split = held_out(config.data, digits, config.evaluation.validation_images)
    losses = {**Validation(pixels, identity, CPU, 1000)(network), "validation_split": split}
    assert set(losses) == {"validation_loss", "validation_mse", "validation_log_snr", "validation_split"}
    assert {name: scores[name] for name in losses} == losses
    without = judge(override(config, {"evaluation.validation_images": 0}), digits)(network, identity)
    assert set(without) == set(scores) - set(losses)
    assert without["frechet"] == scores["frechet"]


# ---------------------------------------------------------------------------------------------------------- precision
class Rough:
    """A network whose bfloat16 outputs are larger than they should be, by this share."""

    def __init__(self, error: float) -> None:
        self.error = error

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return x * 0.3 * (1 + self.error * torch.is_autocast_enabled("cpu"))


class OneStep(Identity):
    """Images are what the network makes of noise."""

    def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
        made: Tensor = predict(noise, torch.zeros(len(noise), dtype=torch.int64))
        return made


def automatic(config: Any, count: int = 260) -> Any:
    return override(config, {"evaluation.images": count, "evaluation.validation_images": 20})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a CPU have a GPU's choice of formats, of which each takes so many seconds a pass."""
    now, seconds = [0.0], {"fp32": 1.0, "bf16": 0.25}

    class Timed(Rough):
        def __call__(self, x: Tensor, t: Tensor) -> Tensor:
            now[0] += seconds["bf16" if torch.is_autocast_enabled("cpu") else "fp32"]
            return super().__call__(x, t)

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    for owner, name, replaced in ((number_formats, "formats", lambda _: ("bf16", "fp32")), (evaluator, "time", clock)):
        monkeypatch.setattr(owner, name, replaced)
    return Timed, seconds


@pytest.mark.parametrize(
    ("error", "bf16_s", "expected"), [(1e-5, 0.25, "bf16"), (0.3, 0.25, "fp32"), (1e-5, 2, "fp32")]
)
def test_auto_is_the_fastest_format_whose_scores_differ_by_less_than_a_tenth_of_their_noise(
    digits: Images, config: Any, gpu: Any, error: float, bf16_s: float, expected: str
) -> None:
    timed, seconds = gpu
    seconds["bf16"] = bf16_s
    judged = judge(automatic(config), digits)
    choice = judged.decide(timed(error), OneStep())
    scores = judged(timed(error), OneStep())
    named = override(automatic(config), {"evaluation.precision": expected})
    assert scores == judge(named, digits)(Rough(error), OneStep())
    assert choice is not None
    assert choice["precision"] == expected
    assert (choice["shifts"]["bf16"] < judging.SHARE) == (error < 0.1)
    assert judged.decide(timed(0.3), OneStep()) is None, "decided once"
    assert expected in number_formats.sentence(choice)


def test_a_format_that_overflows_is_left_out(digits: Images, config: Any, gpu: Any) -> None:
    judged = judge(automatic(config), digits)
    choice = judged.decide(gpu[0](1e39), OneStep())
    assert choice is not None
    assert (choice["precision"], [*choice["shifts"]]) == ("fp32", ["fp32"])
    assert math.isfinite(judged(gpu[0](1e39), OneStep())["frechet"])


def test_the_noise_of_a_distance_is_what_other_images_change(digits: Images, config: Any) -> None:
    """The jackknife of 128 images against 60 draws of other images."""
    reference = judge(config, digits).judge.reference
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Any:
        features = torch.randn(128, 64, generator=generator) * reference.cov.diagonal().sqrt().float() * 1.2
        return judging.Drawn(features + reference.mean.float(), torch.empty(0), 1.0)

    draws = [drawn() for _ in range(60)]
    distances = torch.tensor([judging.scores_of(draw, reference)[0] for draw in draws])
    noises = torch.tensor([judging.noise_of(draw, reference, 128)[0] for draw in draws])
    assert noises.mean().item() == pytest.approx(distances.std().item(), rel=0.5)
    quarter = judging.noise_of(draws[0], reference, 4 * 128)[0]
    assert quarter == pytest.approx(noises[0].item() / 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have it")
def test_tf32_without_a_gpu_is_refused(digits: Images, config: Any) -> None:
    with pytest.raises(
        ConfigError, match="evaluation.precision: 'tf32' needs a GPU, and this is a CPU; allowed: auto, fp32"
    ):
        judge(override(config, {"evaluation.precision": "tf32"}), digits)


# ------------------------------------------------------------------------------------------------------ what goes wrong
def test_diverged_model(digits: Images, config: Any, identity: Any) -> None:
    with pytest.raises(NonFiniteError, match="non-finite"):
        judge(config, digits)(lambda x, t: x * float("nan"), identity)


def _judged(world: World) -> tuple[Any, Any, list[str]]:
    conf = override(baseline("digits"), {"evaluation.images": 130, "evaluation.batch_size": 50})
    real = images.load(conf.data)
    evaluator = judge(conf, real, world)
    scores = evaluator(network, Identity())
    pixels, _ = held_out(conf.data, real, conf.evaluation.validation_images)
    validation = Validation(pixels, Identity(), world, 50)

    def diverges_on_rank_1(x: Tensor, t: Tensor) -> Tensor:
        return x * float("nan") if world.rank == 1 else x

    failures = []
    for measure in (lambda network: evaluator(network, Identity()), validation):
        try:
            measure(diverges_on_rank_1)
        except NonFiniteError as error:
            failures.append(str(error))
    return scores, evaluator.judge.last_images.numpy(), failures


@pytest.mark.nightly
def test_two_ranks_agree_with_one(digits: Images, config: Any, identity: Any, tmp_path: Path) -> None:
    alone = judge(config, digits)
    expected = alone(network, identity)
    results = ranks(_judged, tmp_path)
    for scores, first, failures in results:
        assert scores == results[0][0], "every rank has the very same numbers"
        assert scores["frechet"] == pytest.approx(expected["frechet"], rel=1e-4)
        assert scores["kid"] == pytest.approx(expected["kid"], rel=1e-3)
        assert (first == alone.judge.last_images.numpy()).all()
        assert scores["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-6)
        assert scores["validation_mse"] == pytest.approx(expected["validation_mse"], rel=1e-6)
        assert len(failures) == 2, "the healthy rank leaves together with the other"
        assert all("non-finite" in failure for failure in failures)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_scores_are_those_of_the_cpu(digits: Images, config: Any) -> None:
    class Half(Diffusion):
        def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
            return noise / 2

    on_cpu, on_gpu = (
        judge(config, digits, alone(device))(network, Half(config.process, device)) for device in ("cpu", "cuda")
    )
    assert on_gpu["frechet"] == pytest.approx(on_cpu["frechet"], rel=1e-3)
    assert on_gpu["validation_loss"] == pytest.approx(on_cpu["validation_loss"], rel=1e-4)
    assert on_gpu["kid"] == pytest.approx(on_cpu["kid"], rel=1e-2)


# ------------------------------------------------------------------------------------------------- the validation loss
def process(prediction: str = "epsilon", schedule: str = "linear", steps: int = 1000) -> Diffusion:
    return Diffusion(Process(prediction=prediction, schedule=schedule, steps=steps))


def taken(config: Any, images: Images) -> tuple[Tensor, str]:
    return held_out(config.data, images, config.evaluation.validation_images)


def measured(images: Images, predict: Any, diffusion: Diffusion, **knobs: Any) -> dict[str, Any]:
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
    found, split = taken(config, images.load(config.data))
    assert (split, len(found)) == ("test", 6)
    assert found.min() >= 200
    learned = override(config, {"data.split": "test"})
    assert taken(learned, images.load(learned.data))[1] == "test"
    both = override(config, {"data.split": "all", "data.max_images": None})
    assert taken(both, images.load(both.data))[1] == "all", "the test images are learned as well"
    single = override(config, {"evaluation.validation_images": 1})
    assert len(taken(single, images.load(config.data))[0]) == 1


def test_pixels_are_scaled_as_in_training(tmp_path: Path) -> None:
    config = folder(tmp_path, train=10, test=245)  # the test images have 245…254, which is 0.92…0.99
    cleanest: list[float] = []

    def watching(x: Tensor, t: Tensor) -> Tensor:
        cleanest.extend(x[t < 5].mean((1, 2, 3)).tolist())
        return x

    pixels, _ = taken(config, images.load(config.data))
    Validation(pixels, process(), alone("cpu"), 256)(watching)
    assert len(cleanest) >= 4
    assert all(0.9 < value < 1.01 for value in cleanest)
