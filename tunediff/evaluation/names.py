"""Names of the metrics of `quality`. Imports no torch: unknown ones are refused at once."""

from __future__ import annotations

KINDS: dict[str, tuple[str, ...]] = {
    "fd": ("frechet",),
    "kid": ("kid",),
    "is": ("inception_score",),
    "pr": ("precision", "recall"),
}
"""Values of `--metrics`, and the metrics that each computes."""


STRAIGHT = 4
"""Images per feature above which a Fréchet distance's bias is about c/N."""


def caution(label: str, images: int, dim: int) -> str:
    """Return the caution for a Fréchet distance of so few images for `dim` features, or ''.

    An estimated covariance has at most N − 1 ranks: below `dim` + 1 images it is singular (Chong &
    Forsyth 2020, arXiv 1911.07023, on the bias that remains above).
    """
    if images >= STRAIGHT * dim:
        return ""
    singular = f", its covariance of {dim:,} features is singular" if images <= dim else ""
    return (
        f"{label} over {images:,} images: biased high{singular}; compare it only with others over"
        f" {images:,}"
    )


def name_of(value: str, label: str) -> str:
    """Return a metric's name in a table; `label`: that of the features' Fréchet distance.

    FID, KID and IS stand for Inception with its reference weights; everything else names its
    extractor. Precision and recall always do: published ones use another network (VGG16).
    """
    _, _, extractor = label.partition(" ")
    return {
        "frechet": label,
        "kid": f"KID {extractor}".rstrip(),
        "inception_score": f"IS {extractor}".rstrip(),
        "precision": f"precision {extractor or '(inception)'}",
        "recall": f"recall {extractor or '(inception)'}",
    }[value]
