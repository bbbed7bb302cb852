"""Choose the number format that evaluations draw in: the fastest that scores as float32 does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tunediff.evaluation.distance import FeatureStatistics, NonFiniteError, Reference, frechet
from tunediff.training.number_formats import Format, FormatChoice

SHARE = 0.1
"""Part of a score's noise that a format may change it by."""
_PARTS = 8  # of the images, for the jackknife


class Drawn(NamedTuple):
    """What a network gives in one format, from the same noise as in the others."""

    features: Tensor
    """float32 [n, d] of generated images."""
    errors: Tensor
    """float64 [m]: the validation errors of a batch; m = 0 without a validation."""
    seconds: float


def choose(
    draw: Callable[[Format], Drawn], among: Sequence[Format], reference: Reference, images: int
) -> FormatChoice:
    """Return the fastest format whose scores differ from float32's by less than `SHARE` of their
    noise; `images`: N of the evaluations, which a score's noise falls with.

    The noise is that of the images drawn, which a training's seeds add to: of the Fréchet distance
    by a jackknife over parts of them (Efron & Stein 1981), of the validation loss its standard
    error. A format that gives numbers that are not finite is left out.
    """
    exact = draw("fp32")
    scores, noise = scores_of(exact, reference), noise_of(exact, reference, images)
    seconds: dict[str, float] = {"fp32": exact.seconds}
    shifts: dict[str, float] = {"fp32": 0.0}
    for name in among:
        if name == "fp32":
            continue
        try:
            drawn = draw(name)
            found = scores_of(drawn, reference)
        except NonFiniteError:
            continue
        differences = [abs(a - b) for a, b in zip(found, scores, strict=True)]
        relative = [a / max(b, 1e-12) for a, b in zip(differences, noise, strict=True)]
        seconds[name], shifts[name] = drawn.seconds, max(relative)
    allowed = [name for name in among if shifts.get(name, SHARE) < SHARE]
    fastest = min(allowed, key=seconds.__getitem__)
    return {"precision": fastest, "seconds": seconds, "shifts": shifts}


def scores_of(drawn: Drawn, reference: Reference) -> list[float]:
    """Return the Fréchet distance and, if there are errors, their mean. Raises NonFiniteError."""
    if not torch.isfinite(drawn.errors).all():
        raise NonFiniteError("non-finite errors on the validation images")
    statistics = FeatureStatistics(drawn.features.shape[1], drawn.features.device)
    statistics.update(drawn.features)
    means = [drawn.errors.mean().item()] if len(drawn.errors) else []
    return [frechet(statistics, reference), *means]


def noise_of(drawn: Drawn, reference: Reference, images: int) -> list[float]:
    """Return the standard deviation of each of the scores, of an evaluation of `images`."""
    parts, left_out = drawn.features.chunk(_PARTS), []
    for part in range(len(parts)):
        rest = torch.cat([*parts[:part], *parts[part + 1 :]])
        left_out.append(scores_of(drawn._replace(features=rest), reference)[0])
    spread = torch.tensor(left_out, dtype=torch.float64).std(correction=0).item()
    deviation = spread * math.sqrt(len(parts) - 1)
    of_distance = deviation * math.sqrt(len(drawn.features) / images)
    errors = drawn.errors
    of_means = [(errors.std() / math.sqrt(len(errors))).item()] if len(errors) else []
    return [of_distance, *of_means]
