"""How the images of baseline and winner look, at equal seconds."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from tunediff.report.files import Files
from tunediff.report.html import Html, el, join, picture
from tunediff.report.subject import Subject, lead, note, sampled
from tunediff.report.words import secs
from tunediff.results import last

LARGEST = 1024
"""Pixels per side of an image grid inside the page."""


def samples(subject: Subject, files: Files) -> Html | None:
    """The images of the last evaluation of both."""
    if subject.by_rate or not subject.stars.pairs():
        return None
    grids, missing = list[Html](), list[str]()
    for trial, _, what in subject.stars.pairs():
        who, kind = f"{what} ({trial.name})", subject.mark(trial)
        if (image := _grid(subject.found.folder / "trials" / trial.name / "samples.png")) is None:
            missing.append(who)
            continue
        files.keep(f"{kind}_samples.png", image)
        at = f" after {secs(trial.points[-1]['train_s'])} of training. " if trial.points else ". "
        caption = el("figcaption", el("span", who, class_=kind), at, files.links(f"{kind}_samples"))
        grids.append(el("figure", picture("png", image, f"images by the {what}"), caption))
    none = f"No images are kept of {' and '.join(missing)}." if missing else ""
    if not grids:
        return lead(none)
    ends = [last(trial, "train_s") for trial, _, _ in subject.stars.pairs() if trial.points]
    equal = ", after equal training seconds" if len(grids) == 2 and max(ends) < 1.05 * min(ends) else ""
    how = f"{sampled(subject.found, ' with ')}, averaged weights, the same noise in all trials. {none}"
    said = f"The first images of the last evaluation{equal}."
    return join(lead(said), el("div", *grids, class_="pair"), note(how))


def _grid(path: Path) -> bytes | None:
    """The image grid of a trial, written anew: a file from elsewhere is decoded as pixels and as nothing else."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if max(image.size) > 8192:
                return None
            pixels = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    pixels.thumbnail((LARGEST, LARGEST))
    written = io.BytesIO()
    pixels.save(written, format="PNG", optimize=True)
    return written.getvalue()
