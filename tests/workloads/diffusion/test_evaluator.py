from __future__ import annotations

import dataclasses
import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from tests.evaluation.conftest import Identity
from tunediff.config import Config, override, workload
from tunediff.data import images
from tunediff.data.images import Images
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.evaluation import features, reference
from tunediff.evaluation.distance import FeatureStatistics, NonFiniteError, frechet
from tunediff.workloads.diffusion.evaluator import Evaluator, Scores, image_grid
from tunediff.workloads.diffusion.sampling import generate
from tunediff.workloads.diffusion.validation import Validation


def network(x: Tensor, t: Tensor) -> Tensor:
    return x


# ---------------------------------------------------------------------------------------------------------- reference
@pytest.fixture
def extractor(digits: Images) -> features.Extractor:
    return features.Classifier(digits, "cpu")


def test_reference_is_that_of_all_images(digits: Images, config: Config, extractor: features.Extractor) -> None:
    found = reference.reference(config, digits, extractor, "cpu")
    values = extractor(digits.pixels).double().numpy()
    assert found.count == 1797
    assert found.mean.numpy() == pytest.approx(values.mean(0), rel=1e-5)
    assert found.cov.numpy() == pytest.approx(np.cov(values, rowvar=False), rel=1e-4, abs=1e-6)
    assert found.features.shape == (1797, 64)
    assert torch.allclose(found.root @ found.root, found.cov, atol=1e-10)


def test_reference_is_computed_once(
    digits: Images, config: Config, extractor: features.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reference.reference(config, digits, extractor, "cpu")
    monkeypatch.setattr(reference, "_compute", lambda *_: pytest.fail("computed again"))
    second = reference.reference(config, digits, extractor, "cpu")
    for field in ("mean", "cov", "root", "features"):
        assert torch.equal(getattr(first, field), getattr(second, field))


def test_reference_file_depends_on_all_that_matters(digits: Images, extractor: features.Extractor) -> None:
    class Other:
        name, digest, dim, label = extractor.name, "0" * 64, 64, "x"

        def __call__(self, images: Tensor) -> Tensor:
            return images.float()

    fewer = dataclasses.replace(digits, pixels=digits.pixels[:100])
    changed = dataclasses.replace(digits, digest="f" * 64)
    paths = {reference.cache_path(images, extractor) for images in (digits, fewer, changed)}
    assert len(paths | {reference.cache_path(digits, Other())}) == 4


@pytest.mark.parametrize("content", [b"", b"PK rubbish", "cut"])
def test_damaged_reference_is_computed_again(
    digits: Images, config: Config, extractor: features.Extractor, content: bytes | str
) -> None:
    first = reference.reference(config, digits, extractor, "cpu")
    path = reference.cache_path(digits, extractor)
    path.write_bytes(path.read_bytes()[:-40] if isinstance(content, str) else content)
    assert torch.equal(reference.reference(config, digits, extractor, "cpu").cov, first.cov)
    assert reference._read(path, 64) is not None
    assert reference._read(path, 65) is None


def test_kept_features_are_a_fixed_mixture(
    digits: Images, config: Config, extractor: features.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "KID_FEATURES", 100)
    kept = [reference._compute(config, digits, extractor, "cpu").features for _ in range(2)]
    assert kept[0].shape == (100, 64)
    assert torch.equal(kept[0], kept[1])


def test_real_features_are_those_of_a_fixed_mixture(
    digits: Images, config: Config, extractor: features.Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reference.real_features(config, digits, extractor, "cpu", 120)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(first, extractor(digits.pixels[order[:120]]), atol=1e-5)
    assert reference.real_features(config, digits, extractor, "cpu", 5000).shape == (1797, 64)

    # From the cache; a damaged one is computed again.
    path = reference.cache_path(digits, extractor, "features120")
    whole = path.read_bytes()
    monkeypatch.setattr(features.Classifier, "__call__", lambda *_: pytest.fail("computed again"))
    assert torch.equal(reference.real_features(config, digits, extractor, "cpu", 120), first)
    monkeypatch.undo()
    path.write_bytes(whole[:-40])
    assert torch.equal(reference.real_features(config, digits, extractor, "cpu", 120), first)
    assert path.read_bytes() == whole


# ---------------------------------------------------------------------------------------------------------- evaluator
def test_scores(digits: Images, config: Config, identity: Any) -> None:
    evaluator = Evaluator(config, digits, "cpu")
    state = torch.get_rng_state()
    scores = evaluator(network, identity)
    assert torch.equal(torch.get_rng_state(), state)
    assert (scores["evaluation_images"], scores["label"]) == (130, "FD (classifier)")
    assert scores["kid"] is not None
    assert scores["kid"] > 0
    made = torch.cat([part for _, part in generate(network, identity, config.evaluation, (1, 8, 8), 130, "cpu")])
    statistics = FeatureStatistics(64)
    statistics.update(evaluator.extractor(made))
    assert scores["frechet"] == pytest.approx(frechet(statistics, evaluator.reference), rel=1e-5)
    assert evaluator.last_images is not None
    assert torch.equal(evaluator.last_images, made[:64])
    assert evaluator(network, identity) == scores


def test_real_digits_score_better_than_noise(digits: Images, config: Config, identity: Any) -> None:
    class Copy(type(identity)):  # type: ignore[misc]
        def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
            return digits.pixels[: len(noise)].float() / 127.5 - 1

    evaluator = Evaluator(override(config, {"evaluation.batch_size": 130}), digits, "cpu")
    copied, noise = evaluator(network, Copy()), evaluator(network, identity)
    assert copied["frechet"] < noise["frechet"] / 20
    assert copied["kid"] is not None
    assert noise["kid"] is not None
    assert copied["kid"] < noise["kid"] / 20


def test_too_few_images_have_no_kernel_distance(digits: Images, config: Config, identity: Any) -> None:
    scores = Evaluator(override(config, {"evaluation.images": 40}), digits, "cpu")(network, identity)
    assert scores["kid"] is None
    assert math.isfinite(scores["frechet"])


def test_validation_is_part_of_the_scores_unless_switched_off(digits: Images, config: Config, identity: Any) -> None:
    scores = Evaluator(config, digits, "cpu")(network, identity)
    losses = Validation(config, digits, "cpu")(network, identity)
    assert set(losses) == {"validation_loss", "validation_mse", "validation_log_snr", "validation_split"}
    assert {name: scores[name] for name in losses} == losses  # type: ignore[literal-required]
    without = Evaluator(override(config, {"evaluation.validation_images": 0}), digits, "cpu")(network, identity)
    assert set(without) == set(scores) - set(losses)
    assert without["frechet"] == scores["frechet"]


def test_diverged_model(digits: Images, config: Config, identity: Any) -> None:
    with pytest.raises(NonFiniteError, match="non-finite"):
        Evaluator(config, digits, "cpu")(lambda x, t: x * float("nan"), identity)


def test_deadline(digits: Images, config: Config, identity: Any) -> None:
    answers = iter([False, True])
    with pytest.raises(TimeoutError, match="stopped after 44 of 130 images"):
        Evaluator(config, digits, "cpu")(network, identity, should_stop=lambda: next(answers))


def _rank(rank: int, folder: Path, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    conf = override(workload("digits"), {"evaluation.images": 130, "evaluation.batch_size": 50})
    evaluator = Evaluator(conf, images.load(conf.data), "cpu", rank, 2)
    scores = evaluator(network, Identity())
    validation = Validation(conf, images.load(conf.data), "cpu", rank, 2)

    def diverges_on_rank_1(x: Tensor, t: Tensor) -> Tensor:
        return x * float("nan") if rank == 1 else x

    failures = []
    for judge in (evaluator, validation):
        try:
            judge(diverges_on_rank_1, Identity())
        except NonFiniteError as error:
            failures.append(str(error))
    assert evaluator.last_images is not None
    queue.put((rank, scores, evaluator.last_images.numpy(), failures))
    dist.destroy_process_group()


def test_two_ranks_agree_with_one(digits: Images, config: Config, identity: Any, tmp_path: Path) -> None:
    alone = Evaluator(config, digits, "cpu")
    expected: Scores = alone(network, identity)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, tmp_path, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = sorted((queue.get(timeout=60) for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    for _, scores, first, failures in results:
        assert scores == results[0][1], "every rank has the very same numbers"
        assert scores["frechet"] == pytest.approx(expected["frechet"], rel=1e-4)
        assert scores["kid"] == pytest.approx(expected["kid"], rel=1e-3)
        assert alone.last_images is not None
        assert (first == alone.last_images.numpy()).all()
        assert scores["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-6)
        assert scores["validation_mse"] == pytest.approx(expected["validation_mse"], rel=1e-6)
        assert len(failures) == 2, "the healthy rank leaves together with the other"
        assert all("non-finite" in failure for failure in failures)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_scores_are_those_of_the_cpu(digits: Images, config: Config) -> None:
    class Half(Diffusion):
        def sample(self, predict: Any, noise: Tensor, **_: Any) -> Tensor:
            return noise / 2

    on_cpu, on_gpu = (
        Evaluator(config, digits, device)(network, Half(config.process, device)) for device in ("cpu", "cuda")
    )
    assert on_gpu["frechet"] == pytest.approx(on_cpu["frechet"], rel=1e-3)
    assert on_gpu["validation_loss"] == pytest.approx(on_cpu["validation_loss"], rel=1e-4)
    assert on_gpu["kid"] == pytest.approx(on_cpu["kid"], rel=1e-2)


# --------------------------------------------------------------------------------------------------------- image grid
def test_grid_is_large_enough_to_read(digits: Images, tmp_path: Path) -> None:
    image_grid(digits.pixels[:20], tmp_path / "new" / "grid.png")
    with Image.open(tmp_path / "new" / "grid.png") as sheet:
        assert sheet.size == (8 * 34 + 2, 3 * 34 + 2)
        assert sheet.mode == "L"
        cell = np.asarray(sheet)[2:34, 36:68]
    assert (cell[::4, ::4] == digits.pixels[1, 0].numpy()).all()
    assert (cell[3::4, 3::4] == digits.pixels[1, 0].numpy()).all()


def test_grid_of_colours_and_few_images(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    image_grid(pixels, tmp_path / "grid.png", scale=2)
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.size == (3 * 82 + 2, 84)
        assert sheet.getpixel((2, 2)) == tuple(pixels[0, :, 0, 0].tolist())


@pytest.mark.parametrize("bad", [torch.zeros(2, 1, 4, 4), torch.zeros(0, 1, 4, 4, dtype=torch.uint8)])
def test_grid_refuses_what_is_no_image(bad: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images must be uint8"):
        image_grid(bad, tmp_path / "grid.png")
    assert not list(tmp_path.iterdir())
