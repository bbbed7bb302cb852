"""The real images as they are compared with: computed once, kept, checked when they are read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from tunediff.data.images import Images
from tunediff.evaluation import features, judge
from tunediff.evaluation.features import Extractor


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
