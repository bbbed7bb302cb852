"""Split a set into learned and held-out images: the test split where there is one, otherwise a
fixed fifth.

The numbers of classes and images are counted without decoding an image.
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
    """Return the number of classes. Raises `ConfigError` if images have none, or the test split has
    others."""
    listing = sources.find(data)
    if not isinstance(listing, sources.Listing):
        return 10  # digits and CIFAR-10
    if listing.labels is None:
        why = (
            "a classifier needs labels; allowed: two class folders or more, with every image in one"
            " of them"
        )
        sources.refuse("path", data.path, why)
    test = _test_split(data)
    if test is not None and isinstance(test_listing := sources.find(test), sources.Listing):
        if test_listing.labels is None:
            sources.refuse(
                "path",
                data.path,
                "test/ has not two class folders or more, with every image in one",
            )
        if unknown := set(test_listing.class_names) - set(listing.class_names):
            sources.refuse(
                "path",
                data.path,
                f"test/ has classes that train/ has not: {', '.join(sorted(unknown))}",
            )
    return len(listing.class_names)


def learned(data: Data) -> Images:
    """Return the learned images, with labels. Raises `ConfigError` as `load` does, and for images
    without classes."""
    classes(data)
    return load(data) if _test_split(data) is not None else _fifth_and_rest(load(data))[1]


def held_out(data: Data, count: int | None) -> Images:
    """Return the images that are never learned; of a test split the first `count` of a fixed
    shuffle.

    Raises `ConfigError` as `learned` does.
    """
    classes(data)
    test = _test_split(data)
    if test is None:
        images = _fifth_and_rest(load(data))[0]
        assert images.labels is not None
        return dataclasses.replace(
            images, pixels=images.pixels[:count], labels=images.labels[:count]
        )
    images = load(dataclasses.replace(test, max_images=count))
    if not isinstance(listing := sources.find(data), sources.Listing):
        return images
    # The test split may lack classes: its class numbers become those of the learned split.
    numbers = torch.tensor([listing.class_names.index(name) for name in images.class_names])
    assert images.labels is not None
    return dataclasses.replace(
        images, labels=numbers[images.labels], class_names=listing.class_names
    )


def held_out_count(data: Data, count: int | None) -> int:
    """Return how many images `held_out` has, unreadable files included. Raises `ConfigError`."""
    test = _test_split(data)
    total = sources.count(test) if test is not None else _fifth(sources.count(data))
    return min(total, count or total)


def _test_split(data: Data) -> Data | None:
    """Return the test split, if there is one and it is not learned."""
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
    """Split off a fifth, the same for all trainings, shuffled since files are sorted by class.

    Cached, as `load` is, so that loader processes of all trainings share one copy.
    """
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    fifth, rest = order[: _fifth(len(images))], order[_fifth(len(images)) :]
    return _rows(images, fifth, "a fifth"), _rows(images, rest, "without a fifth")


def _rows(images: Images, rows: torch.Tensor, part: str) -> Images:
    """Return these rows of a set; `part` makes its digest another one."""
    assert images.labels is not None
    digest = f"{images.digest} {part}"
    return dataclasses.replace(
        images, pixels=images.pixels[rows], labels=images.labels[rows], digest=digest
    )


def _fifth(count: int) -> int:
    return max(1, count // 5)
