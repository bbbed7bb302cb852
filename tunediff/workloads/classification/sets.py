"""What is learned and what is held out: the test split where there is one, otherwise a fixed fifth.

How many classes and images there are is known without decoding an image.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from tunediff.config import ConfigError
from tunediff.data import sources
from tunediff.data.images import Images, load
from tunediff.data.knobs import Data


def classes(data: Data) -> int:
    """The number of classes. Raises `ConfigError` if images have none, or the test split others."""
    found = sources.find(data)
    if not isinstance(found, sources.Listing):
        return 10  # digits and CIFAR-10
    if found.labels is None:
        why = "a classifier needs labels; allowed: two class folders or more, with every image in one of them"
        sources.refuse("path", data.path, why)
    test = _test_split(data)
    if test is not None and isinstance(other := sources.find(test), sources.Listing):
        if other.labels is None:
            sources.refuse("path", data.path, "test/ has not two class folders or more, with every image in one")
        if unknown := set(other.class_names) - set(found.class_names):
            sources.refuse("path", data.path, f"test/ has classes that train/ has not: {', '.join(sorted(unknown))}")
    return len(found.class_names)


def learned(data: Data) -> Images:
    """The images that are learned, with labels. Raises `ConfigError` as `load` does, and for images without classes."""
    classes(data)
    return load(data) if _test_split(data) is not None else _fifth_and_rest(load(data))[1]


def held_out(data: Data, count: int | None) -> Images:
    """The images that are never learned; of a test split the first `count` of a fixed shuffle. Raises `ConfigError`."""
    classes(data)
    test = _test_split(data)
    if test is None:
        images = _fifth_and_rest(load(data))[0]
        assert images.labels is not None
        return dataclasses.replace(images, pixels=images.pixels[:count], labels=images.labels[:count])
    images = load(dataclasses.replace(test, max_images=count))
    if not isinstance(found := sources.find(data), sources.Listing):
        return images
    numbers = torch.tensor([found.class_names.index(name) for name in images.class_names])  # a split may lack classes
    assert images.labels is not None
    return dataclasses.replace(images, labels=numbers[images.labels], class_names=found.class_names)


def held_out_count(data: Data, count: int | None) -> int:
    """How many images `held_out` has, those included that turn out to be unreadable. Raises `ConfigError`."""
    test = _test_split(data)
    total = sources.count(test) if test is not None else _fifth(sources.count(data))
    return min(total, count or total)


def _test_split(data: Data) -> Data | None:
    """The test split, if it is there and not learned."""
    if data.split != "train":
        return None
    test = dataclasses.replace(data, split="test", max_images=None)
    try:
        sources.find(test)
    except ConfigError:  # a folder with train/ only
        return None
    return test


@functools.lru_cache(maxsize=2)
def _fifth_and_rest(images: Images) -> tuple[Images, Images]:
    """The same division for all trainings, shuffled since files are sorted by class. Made once, as `load` loads once:
    loader processes share what they are given."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held, rest = order[: _fifth(len(images))], order[_fifth(len(images)) :]
    return _rows(images, held, "a fifth"), _rows(images, rest, "without a fifth")


def _rows(images: Images, chosen: torch.Tensor, part: str) -> Images:
    assert images.labels is not None
    digest = f"{images.digest} {part}"
    return dataclasses.replace(images, pixels=images.pixels[chosen], labels=images.labels[chosen], digest=digest)


def _fifth(count: int) -> int:
    return max(1, count // 5)
