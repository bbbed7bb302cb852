"""The number format of a search's evaluations: which there are, which was chosen. Imports no torch.

`tunediff.evaluation.judge` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from tunediff import config as cfg
from tunediff.config import Systems

Format = Literal["fp32", "tf32", "bf16"]
CHECKED = 128
"""Images that are drawn in every format, to choose one."""


class FormatChoice(TypedDict):
    """What was measured of each format, and the one that is used."""

    precision: Format
    seconds: dict[str, float]
    """Of drawing and judging `CHECKED` images, by format."""
    shifts: dict[str, float]
    """Largest difference of a score from float32's, in its standard errors, by format."""


def formats(device: str) -> Sequence[Format]:
    """Return the formats that a device may gain from; a CPU gains from none."""
    return ("bf16", "tf32", "fp32") if device == "cuda" else ("fp32",)


def sentence(choice: FormatChoice) -> str:
    """Return the choice in one line, with what it was made from."""
    exact_s = choice["seconds"]["fp32"]
    tried = ", ".join(
        f"{name} {exact_s / choice['seconds'][name]:.2g} times as fast, shift"
        f" {choice['shifts'][name]:.2g} of a score's standard error"
        for name in choice["shifts"]
        if name != "fp32"
    )
    return f"evaluation.precision: auto is {choice['precision']} (than fp32: {tried or 'none'})"


def is_open(config: Systems, device: str) -> bool:
    """Return whether a number format of evaluations is to be chosen on this device."""
    return getattr(config.evaluation, "precision", "") == "auto" and len(formats(device)) > 1


def pinned(config: Systems, choice: FormatChoice | None) -> Systems:
    """Return the configuration whose evaluations draw in the format that was chosen, in float32
    where none was: the same in all runs that are compared."""
    if getattr(config.evaluation, "precision", "") != "auto":
        return config
    precision = "fp32" if choice is None else choice["precision"]
    return cfg.override(config, {"evaluation.precision": precision}, check=False)
