"""Whether a ruler orders what is known to be worse: `python benchmarks/ruler.py data.path=cifar10-images.zip`.

Distances of degraded images to others of the same set, over that between two sets of real images: five steps each of
noise, blur, wrong hue, shuffled patches and missing classes, as Heusel et al. 2017 (arXiv 1706.08500, figure 3) did for
the FID with noise, blur, black boxes, swirls, salt and pepper, and foreign classes. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from tunediff import cli
from tunediff import config as cfg
from tunediff.data.images import Images, load
from tunediff.evaluation import features, weights
from tunediff.evaluation.distance import FeatureStatistics, Reference, frechet


def drawn(kind: str) -> torch.Generator:
    """The same noise for all steps of a kind, so that they differ in their strength alone."""
    return torch.Generator().manual_seed(sum(kind.encode()))


def noise(images: Tensor, sd: float) -> Tensor:
    """Gaussian, `sd` in steps of 1/255."""
    return images + sd * torch.randn(images.shape, generator=drawn("noise"))


def blur(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur; `sigma` in pixels."""
    blurred: Tensor = gaussian_blur(images, [9, 9], [sigma, sigma])
    return blurred


def hue(images: Tensor, share: float) -> Tensor:
    """In this share of the images red is green, green is blue and blue is red: the hue is turned by 120°."""
    return torch.where(some(images, share), images.roll(1, 1), images)


def shuffled(images: Tensor, share: float) -> Tensor:
    """In this share of the images the 16 patches of a 4×4 grid have changed places."""
    side = images.shape[-1] // 4
    patches = F.unfold(images, side, stride=side)  # [B, C·side², 16]
    order = torch.rand(len(images), 1, 16, generator=drawn("patches")).argsort(2).expand_as(patches)
    mixed = F.fold(patches.gather(2, order), images.shape[-2:], side, stride=side)
    return torch.where(some(images, share), mixed, images)


def some(images: Tensor, share: float) -> Tensor:
    return (torch.rand(len(images), generator=drawn("share")) < share)[:, None, None, None]


STEPS: dict[Callable[[Tensor, float], Tensor], tuple[float, ...]] = {
    noise: (2, 5, 10, 20, 40),
    blur: (0.35, 0.5, 0.7, 1.0, 1.5),
    hue: (0.1, 0.2, 0.4, 0.7, 1.0),
    shuffled: (0.1, 0.2, 0.4, 0.7, 1.0),
}
CLASSES = (9, 7, 5, 3, 1)


def sets(images: Images, count: int, draw: int) -> Iterator[tuple[str, float, Tensor]]:
    """(what was done, how much of it, images): two real sets first, then each step; `count` images of each."""
    assert images.labels is not None
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(draw))
    first, other, rest = order[:count], order[count : 2 * count], order[count:]
    yield "real", 0, images.pixels[first]
    yield "real", 1, images.pixels[other]
    for change, steps in STEPS.items():
        for step in steps:
            changed = change(images.pixels[other].float(), step)
            yield change.__name__, step, changed.round().clamp(0, 255).to(torch.uint8)
    for classes in CLASSES:
        yield "classes", classes, images.pixels[rest[images.labels[rest] < classes][:count]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="knob=value")
    parser.add_argument("--extractors", default="cifar10-resnet,classifier,random")
    parser.add_argument(
        "--images", type=int, default=2000, help="of each set (default: %(default)s)"
    )
    parser.add_argument(
        "--draws", type=int, default=4, help="of all sets, for the mean (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| worse by | ruler | step: distance | | | | | in order |\n|---|---|---|---|---|---|---|---|"
    )
    for name in args.extractors.split(","):
        config = cfg.named(Path("cifar10"), [f"evaluation.extractor={name}", *args.words])
        weights.check(config.data, config.evaluation)
        images = load(config.data)
        extractor = features.build(config.evaluation, images, "cpu")
        distances, seconds, passed = dict[tuple[str, float], list[float]](), 0.0, 0
        for draw in range(args.draws):
            for kind, step, pixels in sets(images, args.images, draw):
                image_statistics, started = FeatureStatistics(extractor.dim), time.monotonic()
                for part in torch.split(pixels, 250):
                    image_statistics.update(extractor(part))
                seconds, passed = (
                    seconds + time.monotonic() - started,
                    passed + image_statistics.count,
                )
                if (kind, step) == ("real", 0):
                    real = Reference.of(image_statistics, torch.zeros(0, extractor.dim))
                distances.setdefault((kind, step), []).append(frechet(image_statistics, real))
        halves = distances.pop(("real", 1))
        mean = statistics.fmean(halves)
        for kind, steps in itertools.groupby(list(distances)[1:], lambda one: one[0]):
            ratios = {step: statistics.fmean(distances[kind, step]) / mean for _, step in steps}
            values = [1.0, *ratios.values()]
            cells = [f"{step:g}: {ratio:.3g}" for step, ratio in ratios.items()]
            print(
                "|",
                " | ".join(
                    [kind, extractor.label, *cells, "yes" if values == sorted(values) else "no"]
                ),
                "|",
            )
        spread = 100 * statistics.stdev(halves) / mean if len(halves) > 1 else float("nan")
        print(
            f"{extractor.label}: ± {spread:.0f} % between draws, {passed / seconds:,.0f} images/s",
            file=sys.stderr,
        )
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
