"""Distances between sets of features, in float64: Fréchet and kernel distance (KID)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from tunediff.core.trial_record import NotFiniteError
from tunediff.distributed import World

_SMALLEST_SUBSET = 32  # a kernel distance of fewer images is noise
_ROWS = 2000  # of a kernel matrix at once: 160 MB where it has 10,000 columns


class NonFiniteError(NotFiniteError):
    """Images or features hold an infinity or a NaN: the model has diverged."""


class FeatureStatistics:
    """Count, mean and covariance of features added in batches, by one process or several."""

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        # One tensor, so that one collective merges it: the count, the sums [d], the sums of outer
        # products [d, d].
        self._sums = torch.zeros(1 + dim + dim * dim, dtype=torch.float64, device=device)
        self._dim = dim

    def update(self, features: Tensor) -> None:
        """Add features [B, d] of any float type. Raises `NonFiniteError`."""
        features = features.to(self._sums.device, torch.float64)
        if not torch.isfinite(features).all():
            raise NonFiniteError("non-finite features")
        self._sums[0] += len(features)
        self._sums[1 : 1 + self._dim] += features.sum(0)
        self._sums[1 + self._dim :] += (features.T @ features).flatten()

    def include(self, other: FeatureStatistics) -> None:
        """Add the statistics of other vectors, of the same length and on the same device."""
        self._sums += other._sums

    def exchanged(self, features: Tensor, others: Tensor) -> FeatureStatistics:
        """Return these statistics with some of the features exchanged for `others`."""
        statistics = FeatureStatistics(self._dim, self._sums.device)
        statistics.update(features)
        statistics._sums.neg_()
        statistics.include(self)
        statistics.update(others)
        return statistics

    def merge(self, world: World) -> None:
        """Add up the statistics of all ranks; every rank must call it."""
        world.sum(self._sums)

    @property
    def count(self) -> int:
        return int(self._sums[0].item())

    @property
    def mean(self) -> Tensor:
        """Return the mean, float64 [d]."""
        return self._sums[1 : 1 + self._dim] / self._sums[0]

    @property
    def cov(self) -> Tensor:
        """Return the covariance, float64 [d, d], unbiased (divided by N − 1).

        Raises ValueError for fewer than two vectors.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 feature vectors, not {self.count}")
        mean, products = self.mean, self._sums[1 + self._dim :].view(self._dim, self._dim)
        return (products - self._sums[0] * torch.outer(mean, mean)) / (self._sums[0] - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """Statistics and features of the real images that a distance to them needs."""

    mean: Tensor
    """float64 [d]."""
    cov: Tensor
    """float64 [d, d]."""
    root: Tensor
    """float64 [d, d], the square root of `cov`: half of a Fréchet distance, computed once."""
    count: int
    """Images behind mean and covariance."""
    features: Tensor
    """float32 [≤ 2000, d], features of a fixed choice of these images, for the kernel distance."""

    @classmethod
    def of(cls, statistics: FeatureStatistics, features: Tensor) -> Reference:
        """Build it from the statistics of all real images and the features of some."""
        cov = statistics.cov
        return cls(statistics.mean, cov, symmetric_root(cov), statistics.count, features)

    def to(self, device: torch.device | str) -> Reference:
        """Return the same reference on another device."""
        tensors = (self.mean, self.cov, self.root, self.features)
        mean, cov, root, features = (tensor.to(device) for tensor in tensors)
        return Reference(mean, cov, root, self.count, features)


def symmetric_root(matrix: Tensor) -> Tensor:
    """Return S with S·S = matrix, positive semidefinite; negative eigenvalues count as 0."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def frechet(statistics: FeatureStatistics, reference: Reference) -> float:
    """Return the squared Fréchet distance of two Gaussians: |μ₁−μ₂|² + tr(C₁ + C₂ − 2·(C₁C₂)^½)
    (Dowson & Landau 1982; Heusel et al. 2017, arXiv 1706.08500).

    C₁C₂ has the eigenvalues of R·C₁·R with R = C₂^½, which is symmetric: that makes the trace of
    the root faster and more exact than through the product itself. Both covariances may be
    rank-deficient (N < d).
    """
    mean, cov = statistics.mean.to(reference.mean.device), statistics.cov.to(reference.mean.device)
    inner = reference.root @ cov @ reference.root
    eigenvalues = torch.linalg.eigvalsh((inner + inner.T) / 2)
    between = (mean - reference.mean).square().sum()
    spread = cov.trace() + reference.cov.trace() - 2 * eigenvalues.clamp(min=0).sqrt().sum()
    return float(between + spread)


def kid(
    a: Tensor, b: Tensor, *, subsets: int = 100, subset_size: int = 1000, seed: int = 2020
) -> tuple[float, float]:
    """Return (mean, standard deviation) over random subsets of the unbiased squared MMD with kernel
    (x·y/d + 1)³ (Bińkowski et al. 2018, arXiv 1801.01401, §3 and appendix D).

    Features are [n, d] and [m, d]; subsets are drawn as torch-fidelity draws them, so that the same
    seed gives its number. Raises ValueError if a subset is larger than a set, or smaller than 2.
    """
    if not 2 <= subset_size <= min(len(a), len(b)):
        raise ValueError(f"subset_size must lie in 2…{min(len(a), len(b))}, not {subset_size}")
    a, b = a.double(), b.double().to(a.device)
    random = np.random.RandomState(seed)
    chosen_a, chosen_b = a.new_zeros(subsets, len(a)), a.new_zeros(subsets, len(b))
    for row in range(subsets):
        for chosen in (chosen_a, chosen_b):
            drawn = random.choice(chosen.shape[1], subset_size, replace=False)
            chosen[row, torch.from_numpy(drawn)] = 1

    # Every subset's sum over its kernel matrix is a quadratic form in the 0/1 rows above: each
    # matrix is built once. Unbiased: without the kernel of each vector with itself.
    within_a = _kernel_sums(a, chosen_a, a, chosen_a) - chosen_a @ _diagonal(a)
    within_b = _kernel_sums(b, chosen_b, b, chosen_b) - chosen_b @ _diagonal(b)
    between = _kernel_sums(a, chosen_a, b, chosen_b)
    n = subset_size
    squared = (within_a + within_b) / (n * (n - 1)) - 2 * between / n**2
    return float(squared.mean()), float(squared.std(correction=0))


def kernel_distance(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """Return `kid` with subsets of 1,000 vectors, or of half of the smaller set where that is less.

    None where the subsets would have fewer than 32 vectors: that would be noise.
    """
    subset_size = min(1000, len(a) // 2, len(b) // 2)
    return None if subset_size < _SMALLEST_SUBSET else kid(a, b, subset_size=subset_size)


def _kernel_sums(a: Tensor, chosen_a: Tensor, b: Tensor, chosen_b: Tensor) -> Tensor:
    """Return the kernel summed over pairs of a subset of `a` and one of `b`, [subsets]."""
    sums = a.new_zeros(len(chosen_a))
    parts = zip(torch.split(a, _ROWS), torch.split(chosen_a, _ROWS, dim=1), strict=True)
    for rows, chosen in parts:
        kernel = (rows @ b.T / a.shape[1] + 1).pow_(3)
        sums += (chosen @ kernel * chosen_b).sum(1)
    return sums


def _diagonal(a: Tensor) -> Tensor:
    return (a.square().sum(1) / a.shape[1] + 1).pow(3)
