"""How figures look, as far as it can be told without eyes: colours, digits, room, and the page on a telephone."""

import itertools

import numpy as np
import pytest
from matplotlib import colors as mpl

from tunediff.core import colors
from tunediff.report import style

MEANINGS = {name: getattr(colors, name) for name in ("BASELINE", "WINNER", "OTHER", "FAILED", "PRUNED")}

# What eyes without one kind of cone see, on linear RGB: Machado, Oliveira and Fernandes (2009), table 1, severity 1.0.
EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(color, eyes):
    """CIE L*a*b* under D65."""
    rgb = np.array(mpl.to_rgb(color))
    seen = np.clip(EYES[eyes] @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    )
    x, y, z = np.cbrt(np.maximum(to_xyz @ seen / [0.95047, 1.0, 1.08883], 1e-9))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", EYES)
def test_colours_are_told_apart(eyes):
    """2.3 is a difference that is just seen."""
    pairs = itertools.combinations(
        {**MEANINGS, **{f"series {i}": one for i, one in enumerate(colors.SERIES)}}.items(), 2
    )
    near = {(a, b): np.linalg.norm(lab(one, eyes) - lab(other, eyes)) for (a, one), (b, other) in pairs}
    assert min(near.values()) > 15, min(near, key=near.get)


# -------------------------------------------------------------------------------------------------------------- figures


def test_a_logarithmic_axis_has_a_few_plain_ticks_and_a_legend_its_own_room():
    with style.drawing():
        figure, (axes,) = style.sheet(1, 3.0)
        axes.plot([1, 2], [0.5, 20.0], label="$\\frac{1$")
        axes.set_yscale("log")
        style.plain_logarithms(axes.yaxis)
        style.legend(figure)
        figure.draw_without_rendering()  # no mathematics: what a file says stays as it is
    ticks = [tick for tick in axes.yaxis.get_major_locator()() if 0.5 <= tick <= 20]
    assert ticks == [0.5, 1, 2, 5, 10, 20]
    assert figure.get_size_inches()[1] > 3.2
