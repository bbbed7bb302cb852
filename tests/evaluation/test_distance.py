from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric

from tunediff.distributed import alone
from tunediff.evaluation import distance
from tunediff.evaluation.distance import (
    FeatureStatistics,
    NonFiniteError,
    Reference,
    frechet,
    kernel_distance,
    kid,
    symmetric_root,
)


def features(count: int, dim: int, seed: int, shift: float = 0.0) -> Tensor:
    """Correlated, non-negative features, as a network's are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dim, dim, generator=torch.Generator().manual_seed(99), dtype=torch.float64) / dim**0.5
    return (torch.randn(count, dim, generator=generator, dtype=torch.float64) @ mixing + shift).relu()


def statistics(values: Tensor, batch: int = 37) -> FeatureStatistics:
    collected = FeatureStatistics(values.shape[1])
    for part in values.split(batch):
        collected.update(part)
    return collected


def reference(values: Tensor) -> Reference:
    return Reference.of(statistics(values), values[:100].float())


def library_frechet(a: Tensor, b: Tensor) -> float:
    found = fid_statistics_to_metric(fid_features_to_statistics(a), fid_features_to_statistics(b), verbose=False)
    return float(found["frechet_inception_distance"])


def test_statistics_are_those_of_numpy() -> None:
    values = features(200, 16, 1) + 5
    collected = statistics(values)
    assert collected.count == 200
    assert collected.mean.numpy() == pytest.approx(values.numpy().mean(0), rel=1e-13)
    assert collected.cov.numpy() == pytest.approx(np.cov(values.numpy(), rowvar=False), rel=1e-10, abs=1e-13)


# Rank-deficient on neither side, on one, on the other, on both.
@pytest.mark.parametrize(("n", "m"), [(500, 700), (40, 700), (700, 40), (40, 50)])
@pytest.mark.parametrize("dim", [8, 64, 200])
def test_frechet_is_that_of_torch_fidelity(n: int, m: int, dim: int) -> None:
    a, b = features(n, dim, 1), features(m, dim, 2, shift=0.3)
    assert frechet(statistics(a), reference(b)) == pytest.approx(library_frechet(a, b), rel=1e-6)


def test_frechet_of_float32_features() -> None:
    a, b = features(300, 64, 1).float(), features(400, 64, 2, shift=0.3).float()
    assert frechet(statistics(a), reference(b)) == pytest.approx(library_frechet(a.double(), b.double()), rel=1e-6)


def test_frechet_of_known_gaussians() -> None:
    # Two points each: mean 0 and 3, standard deviation √2·1 and √2·2, so (0−3)² + (√2−2√2)² = 11.
    a, b = torch.tensor([[-1.0], [1.0]]), torch.tensor([[1.0], [5.0]])
    assert frechet(statistics(a), reference(b)) == pytest.approx(11.0)
    assert frechet(statistics(a), reference(a)) == pytest.approx(0.0, abs=1e-12)


def test_symmetric_root_of_a_singular_matrix() -> None:
    values = features(10, 30, 1)
    matrix = values.T @ values
    root = symmetric_root(matrix)
    assert torch.allclose(root @ root, matrix, atol=1e-10)
    assert torch.allclose(root, root.T, atol=1e-12)


@pytest.mark.parametrize(("n", "m", "size"), [(150, 90, 50), (60, 60, 60)])
@pytest.mark.parametrize("rows", [2000, 40])
def test_kid_is_that_of_torch_fidelity(n: int, m: int, size: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "_ROWS", rows)
    a, b = features(n, 32, 1), features(m, 32, 2, shift=0.3)
    found = kid_features_to_metric(a, b, kid_subsets=20, kid_subset_size=size, rng_seed=7, verbose=False)
    mean, spread = kid(a, b, subsets=20, subset_size=size, seed=7)
    assert mean == pytest.approx(found["kernel_inception_distance_mean"], rel=1e-9)
    assert spread == pytest.approx(found["kernel_inception_distance_std"], rel=1e-6, abs=1e-12)


def test_kid_of_equal_distributions_is_near_zero() -> None:
    same, _ = kid(features(400, 32, 1), features(400, 32, 2), subset_size=100)
    other, _ = kid(features(400, 32, 1), features(400, 32, 2, shift=0.5), subset_size=100)
    assert abs(same) < other / 50


def test_kernel_distance_takes_half_of_the_smaller_set_or_nothing() -> None:
    a, b = features(100, 8, 1), features(71, 8, 2)
    assert kernel_distance(a, b) == kid(a, b, subset_size=35)
    assert kernel_distance(a, b[:63]) is None


@pytest.mark.parametrize("size", [0, 1, 51])
def test_kid_refuses_impossible_subsets(size: int) -> None:
    with pytest.raises(ValueError, match=f"subset_size must lie in 2…50, not {size}"):
        kid(features(50, 4, 1), features(80, 4, 1), subset_size=size)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_features_are_refused(bad: float) -> None:
    values = torch.ones(5, 3)
    values[2, 1] = bad
    with pytest.raises(NonFiniteError, match="non-finite"):
        FeatureStatistics(3).update(values)


def test_one_vector_has_no_covariance() -> None:
    with pytest.raises(ValueError, match="at least 2 feature vectors, not 1"):
        _ = statistics(torch.ones(1, 3)).cov


def test_merge_of_one_process_changes_nothing() -> None:
    collected = statistics(features(20, 4, 1))
    collected.merge(alone("cpu"))
    assert collected.count == 20
