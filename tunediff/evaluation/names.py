"""What the metrics of `quality` are called. Imports no torch, so that an unknown one is refused at once."""

from __future__ import annotations

KINDS: dict[str, tuple[str, ...]] = {
    "fd": ("frechet", "frechet_half", "frechet_quarter", "frechet_infinite"),
    "kid": ("kid",),
    "is": ("inception_score",),
    "pr": ("precision", "recall"),
}
"""What can be asked for, and the values it gives."""


def name_of(value: str, label: str) -> str:
    """What a value may be called in a table, given what the Fréchet distance of the same features may be called.

    FID, KID and IS stand for Inception with its reference weights; everything else names its extractor. Precision and
    recall always do, for the published ones use yet another network (VGG16).
    """
    head, _, extractor = label.partition(" ")
    return {
        "frechet": label,
        "frechet_half": f"{label} at N/2",
        "frechet_quarter": f"{label} at N/4",
        "frechet_infinite": f"{head}∞ {extractor}".rstrip(),
        "kid": f"KID {extractor}".rstrip(),
        "inception_score": f"IS {extractor}".rstrip(),
        "precision": f"precision {extractor or '(inception)'}",
        "recall": f"recall {extractor or '(inception)'}",
    }[value]
