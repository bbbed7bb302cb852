"""How near drawn images are to real ones, and what is kept of the real ones."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric

from tunediff.data.images import Images
from tunediff.distributed import alone
from tunediff.evaluation import distance, features, judge
from tunediff.evaluation.distance import (
    FeatureStatistics,
    NonFiniteError,
    Reference,
    frechet,
    kernel_distance,
    kid,
    symmetric_root,
)
from tunediff.evaluation.features import Extractor
from tunediff.evaluation.judge import Quality, Real, inception_score, precision_recall
from tunediff.evaluation.knobs import KINDS, name_of


class Pixels:
    """Features are pixels; the first of them decide the class."""

    name, label, digest, dim, classes = "pixels", "FD (pixels)", "0" * 64, 16, 5

    def __call__(self, images: Tensor) -> Tensor:
        return images.flatten(1).float() / 64

    def with_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self(images)
        return found, found[:, :5] * 3


def pictures(count: int, seed: int, low: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)


def statistics(values: Tensor) -> FeatureStatistics:
    found = FeatureStatistics(values.shape[1])
    found.update(values)
    return found


@pytest.fixture(scope="module")
def real() -> Real:
    values = Pixels()(pictures(5000, 1, low=40))
    return Real(Reference.of(statistics(values), values[:100]), values[:400])


def judged(images: Tensor, real: Real, sizes: list[int], kinds: Any = tuple(KINDS), seed: int = 0) -> Any:
    """The values of `images` that come in batches of these sizes, in a random order."""
    collected = Quality(Pixels(), len(images), "cpu", kinds)
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    batches = list(zip(starts, images.split(sizes), strict=True))
    random.Random(seed).shuffle(batches)
    for start, batch in batches:
        collected.update(start, batch)
    collected.merge(alone("cpu"))  # without a process group: nothing
    return collected.values(real)


# ------------------------------------------------------------------------------------------------------ one by one
def test_too_few_images_have_no_inception_score() -> None:
    assert inception_score(torch.zeros(9, 4)) is None
    assert inception_score(torch.zeros(10, 0)) is None
    assert inception_score(torch.zeros(10, 4)) == pytest.approx((1.0, 0.0))


def test_precision_and_recall_by_their_definition() -> None:
    """Against all distances written out, in numpy; precision is of the first set."""
    generator = torch.Generator().manual_seed(0)
    generated = torch.randn(90, 4, generator=generator) * 0.5
    real = torch.randn(120, 4, generator=generator)

    def inside(points: Tensor, manifold: Tensor) -> float:
        around = np.linalg.norm(manifold.numpy()[:, None] - manifold.numpy()[None], axis=2)
        radius = np.sort(around, axis=1)[:, 3]  # the nearest is the point itself
        to = np.linalg.norm(points.numpy()[:, None] - manifold.numpy()[None], axis=2)
        return float((to <= radius).any(1).mean())

    found = precision_recall(generated, real)
    assert found == pytest.approx((inside(generated, real), inside(real, generated)), abs=1e-6)
    assert found[0] > found[1] + 0.1, "a narrow model is precise and recalls little"
    assert precision_recall(generated[:3], real) is None


# ---------------------------------------------------------------------------------------------------------- together
def test_values_do_not_depend_on_batches_and_their_order(real: Real) -> None:
    images = pictures(300, 3)
    whole = judged(images, real, [300])
    assert list(whole) == [name for names in KINDS.values() for name in names]
    for sizes in ([7] * 42 + [6], [74, 1, 75, 150], [290, 10]):
        parts = judged(images, real, sizes)
        for name, value in whole.items():
            assert parts[name].value == pytest.approx(value.value, rel=1e-9)
            assert parts[name].images == value.images


def test_values_are_those_of_their_parts(real: Real) -> None:
    images = pictures(302, 3)
    values = Pixels()(images)
    found = judged(images, real, [100, 202])
    assert found["frechet"].images == 302
    assert found["frechet"].value == pytest.approx(frechet(statistics(values), real.reference), rel=1e-9)
    mean, spread = kid(values, real.features, subset_size=151)
    assert (found["kid"].value, found["kid"].within_sd) == pytest.approx((mean, spread), rel=1e-9)
    expected = isc_features_to_metric(values[:, :5] * 3, splits=10, shuffle=False)
    score = (found["inception_score"].value, found["inception_score"].within_sd)
    assert score == pytest.approx((expected["inception_score_mean"], expected["inception_score_std"]), rel=1e-9)
    pair = (found["precision"].value, found["recall"].value)
    assert pair == precision_recall(values, real.features)


def test_only_so_many_features_are_kept(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FEATURES", 100)
    images = pictures(302, 3)
    found = judged(images, real, [90, 20, 192])
    assert (found["kid"].images, found["recall"].images, found["frechet"].images) == (100, 100, 302)
    pair = (found["precision"].value, found["recall"].value)
    assert pair == precision_recall(Pixels()(images)[:100], real.features)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_asked_for(kind: str, real: Real) -> None:
    missing = Real(real.reference if kind == "fd" else None, real.features if kind in ("kid", "pr") else None)
    alone = judged(pictures(80, 3), missing, [80], {kind})
    assert tuple(alone) == KINDS[kind]
    assert alone == {name: value for name, value in judged(pictures(80, 3), real, [80]).items() if name in alone}


def test_a_handful_of_images_says_little(real: Real) -> None:
    found = judged(pictures(8, 3), Real(real.reference, real.features[:3] if real.features is not None else None), [8])
    unknown = {name for name, value in found.items() if value.value is None}
    assert unknown == {"kid", "inception_score", "precision", "recall"}


def test_non_finite_features_are_refused() -> None:
    class Broken(Pixels):
        def __call__(self, images: Tensor) -> Tensor:
            return super().__call__(images) * float("nan")

    with pytest.raises(NonFiniteError):
        Quality(Broken(), 80, "cpu").update(0, pictures(80, 3))


def test_real_images_are_perfect(digits: Images) -> None:
    """With the real extractor: the very images that are compared with."""
    extractor = features.Classifier(digits, "cpu")
    kinds = tuple(KINDS)
    real = Real.of(digits, extractor, "cpu", 50, kinds)
    collected = Quality(extractor, len(digits), "cpu", kinds)
    collected.update(0, digits.pixels)
    found = {name: value.value for name, value in collected.values(real).items()}
    assert found["frechet"] == pytest.approx(0, abs=1e-4)
    assert (found["precision"], found["recall"]) == (1, 1)
    assert found["inception_score"] is not None
    assert 5 < found["inception_score"] <= 10, "ten classes, distinguished by a network that learned to be 90 % sure"
    nothing = Real.of(digits, extractor, "cpu", 50, {"is"})
    assert (nothing.reference, nothing.features) == (None, None)


def test_only_inception_has_the_published_names() -> None:
    def names(label: str) -> list[str]:
        return [name_of(name, label) for names in KINDS.values() for name in names]

    assert names("FID") == ["FID", "KID", "IS", "precision (inception)", "recall (inception)"]
    assert all("(classifier)" in name for name in names("FD (classifier)"))
    assert name_of("inception_score", "FD (classifier)") == "IS (classifier)"
    of_resnet = names("FD (cifar10-resnet, 88 %)")
    assert of_resnet[1:3] == ["KID (cifar10-resnet, 88 %)", "IS (cifar10-resnet, 88 %)"]
    assert not any(name in ("FID", "KID", "IS") for name in names("FD (inception, own weights)"))


# ----------------------------------------------------------------------------------------------- distances of features
def features_of(count: int, dim: int, seed: int, shift: float = 0.0) -> Tensor:
    """Correlated, non-negative features, as a network's are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dim, dim, generator=torch.Generator().manual_seed(99), dtype=torch.float64) / dim**0.5
    return (torch.randn(count, dim, generator=generator, dtype=torch.float64) @ mixing + shift).relu()


def statistics_of(values: Tensor, batch: int = 37) -> FeatureStatistics:
    collected = FeatureStatistics(values.shape[1])
    for part in values.split(batch):
        collected.update(part)
    return collected


def reference(values: Tensor) -> Reference:
    return Reference.of(statistics_of(values), values[:100].float())


def library_frechet(a: Tensor, b: Tensor) -> float:
    found = fid_statistics_to_metric(fid_features_to_statistics(a), fid_features_to_statistics(b), verbose=False)
    return float(found["frechet_inception_distance"])


def test_statistics_are_those_of_numpy() -> None:
    values = features_of(200, 16, 1) + 5
    collected = statistics_of(values)
    assert collected.count == 200
    assert collected.mean.numpy() == pytest.approx(values.numpy().mean(0), rel=1e-13)
    assert collected.cov.numpy() == pytest.approx(np.cov(values.numpy(), rowvar=False), rel=1e-10, abs=1e-13)


# Rank-deficient on neither side, on one, on the other, on both.
@pytest.mark.parametrize(("n", "m"), [(500, 700), (40, 700), (700, 40), (40, 50)])
@pytest.mark.parametrize("dim", [8, 64, 200])
def test_frechet_is_that_of_torch_fidelity(n: int, m: int, dim: int) -> None:
    a, b = features_of(n, dim, 1), features_of(m, dim, 2, shift=0.3)
    assert frechet(statistics_of(a), reference(b)) == pytest.approx(library_frechet(a, b), rel=1e-6)
    a, b = a.float(), b.float()
    assert frechet(statistics_of(a), reference(b)) == pytest.approx(library_frechet(a.double(), b.double()), rel=1e-6)


def test_frechet_of_known_gaussians() -> None:
    # Two points each: mean 0 and 3, standard deviation √2·1 and √2·2, so (0−3)² + (√2−2√2)² = 11.
    a, b = torch.tensor([[-1.0], [1.0]]), torch.tensor([[1.0], [5.0]])
    assert frechet(statistics_of(a), reference(b)) == pytest.approx(11.0)
    assert frechet(statistics_of(a), reference(a)) == pytest.approx(0.0, abs=1e-12)


def test_symmetric_root_of_a_singular_matrix() -> None:
    values = features_of(10, 30, 1)
    matrix = values.T @ values
    root = symmetric_root(matrix)
    assert torch.allclose(root @ root, matrix, atol=1e-10)
    assert torch.allclose(root, root.T, atol=1e-12)


@pytest.mark.parametrize(("n", "m", "size"), [(150, 90, 50), (60, 60, 60)])
@pytest.mark.parametrize("rows", [2000, 40])
def test_kid_is_that_of_torch_fidelity(n: int, m: int, size: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "_ROWS", rows)
    a, b = features_of(n, 32, 1), features_of(m, 32, 2, shift=0.3)
    found = kid_features_to_metric(a, b, kid_subsets=20, kid_subset_size=size, rng_seed=7, verbose=False)
    mean, spread = kid(a, b, subsets=20, subset_size=size, seed=7)
    assert mean == pytest.approx(found["kernel_inception_distance_mean"], rel=1e-9)
    assert spread == pytest.approx(found["kernel_inception_distance_std"], rel=1e-6, abs=1e-12)


def test_kid_of_equal_distributions_is_near_zero() -> None:
    same, _ = kid(features_of(400, 32, 1), features_of(400, 32, 2), subset_size=100)
    other, _ = kid(features_of(400, 32, 1), features_of(400, 32, 2, shift=0.5), subset_size=100)
    assert abs(same) < other / 50


def test_kernel_distance_takes_half_of_the_smaller_set_or_nothing() -> None:
    a, b = features_of(100, 8, 1), features_of(71, 8, 2)
    assert kernel_distance(a, b) == kid(a, b, subset_size=35)
    assert kernel_distance(a, b[:63]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(bad: float) -> None:
    values = torch.ones(5, 3)
    values[2, 1] = bad
    with pytest.raises(NonFiniteError, match="non-finite"):
        FeatureStatistics(3).update(values)


def test_merge_of_one_process_changes_nothing() -> None:
    collected = statistics_of(features_of(20, 4, 1))
    collected.merge(alone("cpu"))
    assert collected.count == 20


# --------------------------- the real images as they are compared with: computed once, kept, checked when they are read
@pytest.fixture
def extractor(digits: Images) -> Extractor:
    return features.Classifier(digits, "cpu")


def test_reference_is_that_of_all_images(digits: Images, extractor: Extractor) -> None:
    found = judge.reference(digits, extractor, "cpu", 50)
    values = extractor(digits.pixels).double().numpy()
    assert found.count == 1797
    assert found.mean.numpy() == pytest.approx(values.mean(0), rel=1e-5)
    assert found.cov.numpy() == pytest.approx(np.cov(values, rowvar=False), rel=1e-4, abs=1e-6)
    assert found.features.shape == (1797, 64)
    assert torch.allclose(found.root @ found.root, found.cov, atol=1e-10)


class Known:
    """Has the names of an extractor, whose features are in the cache: it is not asked for them again."""

    def __init__(self, extractor: Extractor) -> None:
        self.name, self.digest, self.dim, self.label = extractor.name, extractor.digest, extractor.dim, extractor.label

    def __call__(self, images: Tensor) -> Tensor:
        raise AssertionError("computed again")


def test_reference_is_computed_once(digits: Images, extractor: Extractor) -> None:
    first = judge.reference(digits, extractor, "cpu", 50)
    second = judge.reference(digits, Known(extractor), "cpu", 50)
    for field in ("mean", "cov", "root", "features"):
        assert torch.equal(getattr(first, field), getattr(second, field))


def test_reference_file_depends_on_all_that_matters(digits: Images, extractor: Extractor) -> None:
    class Other:
        name, digest, dim, label = extractor.name, "0" * 64, 64, "x"

        def __call__(self, images: Tensor) -> Tensor:
            return images.float()

    fewer = dataclasses.replace(digits, pixels=digits.pixels[:100])
    changed = dataclasses.replace(digits, digest="f" * 64)
    paths = {judge.cache_path(images, extractor) for images in (digits, fewer, changed)}
    assert len(paths | {judge.cache_path(digits, Other())}) == 4


@pytest.mark.parametrize("damage", ["empty", "rubbish", "cut", "another length"])
def test_damaged_reference_is_computed_again(digits: Images, extractor: Extractor, damage: str) -> None:
    path = judge.cache_path(digits, extractor)
    path.unlink(missing_ok=True)  # another test may have computed it with another number of threads
    first = judge.reference(digits, extractor, "cpu", 50)
    good = path.read_bytes()
    if damage == "another length":
        np.savez(
            path, **{name: getattr(first, name) for name in ("mean", "cov", "root")}, features=np.zeros((1797, 65))
        )
    else:
        path.write_bytes({"empty": b"", "rubbish": b"PK rubbish", "cut": good[:-40]}[damage])
    assert torch.equal(judge.reference(digits, extractor, "cpu", 50).cov, first.cov)
    assert len(path.read_bytes()) == len(good)


def test_real_features_are_those_of_a_fixed_mixture(digits: Images, extractor: Extractor) -> None:
    first = judge.real_features(digits, extractor, "cpu", 50, 120)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(first, extractor(digits.pixels[order[:120]]), atol=1e-5)
    assert judge.real_features(digits, extractor, "cpu", 50, 5000).shape == (1797, 64)

    # From the cache; a damaged one is computed again.
    path = judge.cache_path(digits, extractor, "features120")
    whole = path.read_bytes()
    assert torch.equal(judge.real_features(digits, Known(extractor), "cpu", 50, 120), first)
    path.write_bytes(whole[:-40])
    assert torch.equal(judge.real_features(digits, extractor, "cpu", 50, 120), first)
    assert path.read_bytes() == whole
