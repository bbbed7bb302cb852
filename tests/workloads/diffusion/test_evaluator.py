from __future__ import annotations

import dataclasses
import itertools
import math
import re
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
from tunediff.evaluation.distance import FeatureStatistics, NonFiniteError, frechet
from tunediff.workloads.diffusion.evaluator import LIMIT, Evaluator, Scores
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.sampling import generate
from tunediff.workloads.diffusion.validation import Validation

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


def test_evaluators_that_sample_differently_share_what_is_on_the_device(digits: Images, config: Any) -> None:
    """A second extractor, of the final evaluation, would be in the peak memory of the trials after the first."""
    final = override(config, {"evaluation.images": 200, "evaluation.sampler": "ddpm", "evaluation.seed": 1})
    assert judge(final, digits).judge is judge(config, digits).judge
    others = override(config, {"evaluation.extractor": "random"})
    assert judge(others, digits).judge.extractor.name == "random"


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


def test_too_few_images_have_no_kernel_distance(digits: Images, config: Any, identity: Any) -> None:
    scores = judge(override(config, {"evaluation.images": 40}), digits)(network, identity)
    assert scores["kid"] is None
    assert math.isfinite(scores["frechet"])


def test_validation_is_part_of_the_scores_unless_switched_off(digits: Images, config: Any, identity: Any) -> None:
    scores = judge(config, digits)(network, identity)
    losses = Validation(config.data, config.evaluation, digits, CPU)(network, identity)
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


def in_bf16(config: Any, count: int) -> Any:
    changes = {
        "evaluation.precision": "bf16",
        "evaluation.extractor": "random",
        "evaluation.images": count,
        "evaluation.validation_images": 20,
    }
    return override(config, changes)


@pytest.mark.parametrize("count", [100, 1000])
def test_the_shift_by_a_lower_precision_is_recorded(digits: Images, config: Any, count: int, capsys: Any) -> None:
    lower, diffusion = in_bf16(config, count), OneStep()
    found = judge(lower, digits)(Rough(0.002), diffusion)
    exact = judge(override(lower, {"evaluation.precision": "fp32"}), digits)(Rough(0.002), diffusion)
    alone = judge(override(lower, {"evaluation.precision": "fp32"}), digits)(Rough(0.0), diffusion)
    change = abs(exact["frechet"] - found["frechet"]) / found["frechet"]
    assert 0 < change < LIMIT
    # Exact where all images are compared, else from the first 128.
    assert found["precision_shift"] == pytest.approx(change, rel=1e-3 if count == 100 else 0.7)
    assert "precision_shift" not in exact
    assert exact == alone
    assert found["validation_loss"] == pytest.approx(exact["validation_loss"], rel=LIMIT), "in bf16, too"
    assert not capsys.readouterr().err


def test_a_precision_that_shifts_the_distance_too_far_is_not_used(
    digits: Images, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lower, diffusion = in_bf16(config, 260), OneStep()
    found: Any = judge(lower, digits)(Rough(0.3), diffusion)
    exact = judge(override(lower, {"evaluation.precision": "fp32"}), digits)(Rough(0.3), diffusion)
    assert found.pop("precision_shift") > LIMIT
    assert found == exact
    said = r"WARNING: evaluation.precision: bf16 shifts this distance by \d+\.\d%, more than 2%: all images are drawn again"
    assert re.search(said, capsys.readouterr().err)


class Counting(Rough):
    """Counts its calls in float32."""

    exact = 0

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.exact += not torch.is_autocast_enabled("cpu")
        return super().__call__(x, t)


@pytest.mark.parametrize("error", [0.002, 0.3])
def test_the_precision_is_checked_for_the_first_and_the_last_scores_of_a_network(
    digits: Images, config: Any, error: float
) -> None:
    lower = override(in_bf16(config, 260), {"evaluation.validation_images": 0})
    evaluator, net, diffusion = judge(lower, digits), Counting(error), OneStep()
    calls, scores = [0], []
    for last in (False, False, True):
        scores.append(evaluator(net, diffusion, last=last))
        calls.append(net.exact)
    first, second, third = (after - before for before, after in itertools.pairwise(calls))
    assert scores[0] == scores[1] == scores[2]
    if error < LIMIT:
        assert first == third > 0
        assert second == 0
    else:
        assert 0 < second < first, "all are drawn in float32, without drawing them in bf16 first"
    other = Counting(error)
    evaluator(other, diffusion, last=False)
    assert other.exact == first, "of another network nothing is known"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have it")
def test_tf32_without_a_gpu_is_refused(digits: Images, config: Any) -> None:
    with pytest.raises(ConfigError, match="evaluation.precision: 'tf32' needs a GPU, and this is a CPU; allowed: fp32"):
        judge(override(config, {"evaluation.precision": "tf32"}), digits)


# ------------------------------------------------------------------------------------------------------ what goes wrong
def test_diverged_model(digits: Images, config: Any, identity: Any) -> None:
    with pytest.raises(NonFiniteError, match="non-finite"):
        judge(config, digits)(lambda x, t: x * float("nan"), identity)


def test_deadline(digits: Images, config: Any, identity: Any) -> None:
    answers = iter([False, True])
    with pytest.raises(EvaluationStoppedError, match="stopped after 44 of 130 images"):
        judge(config, digits)(network, identity, should_stop=lambda: next(answers))


def _judged(world: World) -> tuple[Any, Any, list[str], Any]:
    conf = override(baseline("digits"), {"evaluation.images": 130, "evaluation.batch_size": 50})
    real = images.load(conf.data)
    evaluator = judge(conf, real, world)
    scores = evaluator(network, Identity())
    validation = Validation(conf.data, conf.evaluation, real, world)

    def diverges_on_rank_1(x: Tensor, t: Tensor) -> Tensor:
        return x * float("nan") if world.rank == 1 else x

    failures = []
    for measure in (evaluator, validation):
        try:
            measure(diverges_on_rank_1, Identity())
        except NonFiniteError as error:
            failures.append(str(error))
    shifted = judge(in_bf16(conf, 260), real, world)(Rough(0.002), OneStep())
    return scores, evaluator.judge.last_images.numpy(), failures, shifted


@pytest.mark.nightly
def test_two_ranks_agree_with_one(digits: Images, config: Any, identity: Any, tmp_path: Path) -> None:
    alone = judge(config, digits)
    expected: Scores = alone(network, identity)
    lower: Any = judge(in_bf16(config, 260), digits)(Rough(0.002), OneStep())
    assert 0 < lower["precision_shift"] < LIMIT
    results = ranks(_judged, tmp_path)
    for scores, first, failures, shifted in results:
        assert scores == results[0][0], "every rank has the very same numbers"
        assert shifted == results[0][3]
        assert shifted["precision_shift"] == pytest.approx(lower["precision_shift"], rel=1e-2)
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
