from __future__ import annotations

import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import ranks
from tests.workloads.diffusion.conftest import Identity
from tunediff.config import ConfigError, baseline, override
from tunediff.core.errors import EvaluationStoppedError
from tunediff.data import images
from tunediff.data.images import Images
from tunediff.distributed import World, alone
from tunediff.evaluation import number_format
from tunediff.evaluation.distance import FeatureStatistics, NonFiniteError, frechet
from tunediff.training import number_formats
from tunediff.workloads.diffusion import evaluator
from tunediff.workloads.diffusion.evaluator import Evaluator, Scores, Validation, generate, held_out
from tunediff.workloads.diffusion.process import Diffusion

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
    assert (choice["shifts"]["bf16"] < number_format.SHARE) == (error < 0.1)
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
        return number_format.Drawn(features + reference.mean.float(), torch.empty(0), 1.0)

    draws = [drawn() for _ in range(60)]
    distances = torch.tensor([number_format.scores_of(draw, reference)[0] for draw in draws])
    noises = torch.tensor([number_format.noise_of(draw, reference, 128)[0] for draw in draws])
    assert noises.mean().item() == pytest.approx(distances.std().item(), rel=0.5)
    quarter = number_format.noise_of(draws[0], reference, 4 * 128)[0]
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


def test_deadline(digits: Images, config: Any, identity: Any) -> None:
    answers = iter([False, True])
    with pytest.raises(EvaluationStoppedError, match="stopped after 44 of 130 images"):
        judge(config, digits)(network, identity, should_stop=lambda: next(answers))


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
    expected: Scores = alone(network, identity)
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
