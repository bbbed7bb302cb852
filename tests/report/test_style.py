"""How figures look, as far as it can be told without eyes: colours, digits, room, and the page on a telephone."""

import html
import itertools
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib import colors as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tests import searches
from tests.report.pages import written
from tests.report.test_study import FIGURES, by_grid, by_rung, finished
from tests.searches import FILE, noisy, write
from tunediff import search_space
from tunediff.core import colors
from tunediff.report import style
from tunediff.report.sections import knobs
from tunediff.report.style import Digits

MEANINGS = {name: getattr(colors, name) for name in ("BASELINE", "WINNER", "OTHER", "FAILED", "PRUNED")}
NEUTRAL = {style.INK, style.SOFT, style.RULE, knobs.STRONG, colors.PLAIN, "#ffffff"}

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


# ---------------------------------------------------------------------------------------------------------------- ticks
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([9.6, 9.625, 9.65], ["9.600", "9.625", "9.650"]),
        ([0.0, 2.5, 5.0], ["0.0", "2.5", "5.0"]),
        ([0, 10_000, 20_000], ["0", "10,000", "20,000"]),
        ([-0.5, 0.0, 0.5], ["−0.5", "0.0", "0.5"]),
        ([1.0, 1.5, 2.0, 10.0], ["1.0", "1.5", "2.0", "10.0"]),
        ([0.05, 0.2, 1.0, 20.0], ["0.05", "0.2", "1", "20"]),
        ([], []),
    ],
)
def test_ticks_of_an_axis_have_equally_many_decimals(values, said):
    assert Digits().format_ticks(values) == said


# -------------------------------------------------------------------------------------------------------------- figures
LONG = "precision.amp", "loader.batch_size"


def ordinary(folder, **more):
    """With a failed, a stopped and a running trial."""
    noisy(folder, others=(1.2, 1.0, 1.3), **more)
    wanted, curve = search_space.load(folder / "search.yaml"), ((5.0, 1000, 9.6), (10.0, 2000, 5.0))
    for number, status in enumerate(("oom", "pruned", None), 5):
        write(folder, wanted, number, {"optimizer.lr": 1e-3 * number}, curve, status=status)


def seeds(folder):
    content = {key: FILE[key] for key in ("workload", "budget")} | {"seeds": 2}
    wanted = searches.make(folder, content | {"grid": dict(zip(LONG, (["none", "bf16"], [64, 128, 256]), strict=True))})
    for number, point in enumerate(wanted.candidates):
        value = 9.6 * (1 + 0.002 * number - 0.02 * (point["precision.amp"] == "bf16"))
        write(folder, wanted, number, drawn=point, curve=((10.0, 2000, value + 0.2), (20.0, 4000, value)))


MAKES = {
    "ordinary": ordinary,
    "seeds": seeds,
    "lines": lambda folder: finished(folder, FIGURES["panels"], by_grid),
    "bars": lambda folder: finished(folder, FIGURES["stacked"], by_grid),
    "ladder": lambda folder: finished(folder, FIGURES["ladder"], by_rung, {3: ("oom", "full")}),
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """All figures of a report by the kind of the search."""
    known = {}

    def of(kind):
        if kind not in known:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(style, "draw", lambda build, kind_of_file: kept(build, known.setdefault(kind, [])))
                folder = tmp_path_factory.mktemp("style") / "night"
                MAKES[kind](folder)
                written(folder)
        return known[kind]

    def kept(build, found):
        with style.drawing():
            if (figure := build()) is not None:
                figure.draw_without_rendering()
                found.append(figure)
                return b"<svg></svg>"

    return of


def boxes(figure):
    """Extents of what must not cover each other: the title, panels with all that is written at them, the legend."""
    title = [text for text in figure.texts if text.get_text() == figure.get_suptitle() != ""]
    parts = [*title, *figure.legends, *figure.axes]
    return [part.get_tightbbox() for part in parts]


@pytest.mark.parametrize("kind", MAKES)
def test_nothing_covers_another_or_is_cut_off(drawn, kind):
    for figure in drawn(kind):
        assert isinstance(figure, Figure)
        for one, other in itertools.combinations(boxes(figure), 2):
            covered = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(covered) < 2, figure.get_suptitle() or [axes.get_xlabel() for axes in figure.axes]
        for box in boxes(figure):
            assert box.x0 > -2, "cut off at the left"
            assert box.x1 < figure.bbox.width + 2, "cut off at the right"
        for axes in figure.axes:
            assert axes.get_legend() is None, "a legend inside covers what is drawn"
            ends = [tick.get_window_extent() for tick in axes.get_xticklabels() if tick.get_text()]
            near = itertools.pairwise(sorted(ends, key=lambda box: box.x0))
            assert all(left.x1 < right.x0 for left, right in near), (axes.get_xlabel(), list(axes.get_xticklabels()))
            assert all(text.get_fontsize() >= 8 for text in axes.texts)


def hues(figure):
    """Every colour of a figure, as `#rrggbb`, without its transparency."""
    for axes in figure.axes:
        for line in axes.lines:
            yield from (line.get_color(), line.get_markerfacecolor(), line.get_markeredgecolor())
        yield from (text.get_color() for text in axes.texts)
        yield from (patch.get_facecolor() for patch in axes.patches if patch.get_facecolor()[3])
        for many in axes.collections:
            yield from (*many.get_facecolor(), *many.get_edgecolor())


@pytest.mark.parametrize("kind", MAKES)
def test_every_colour_is_one_of_ours_and_means_one_thing(drawn, kind):
    known = {*MEANINGS.values(), *colors.SERIES, *NEUTRAL}
    for figure in drawn(kind):
        used = {mpl.to_hex(color) for color in hues(figure) if not isinstance(color, str) or color != "none"}
        assert used <= known
        for legend in figure.legends:
            for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
                color = mpl.to_hex(handle.get_color() if isinstance(handle, Line2D) else handle.get_facecolor())
                means = re.search("base|best|winner|failed|stopped early|other trials", text.get_text())
                names = {"base": "BASELINE", "best": "WINNER", "stopped early": "PRUNED", "other trials": "OTHER"}
                if means:
                    assert color == MEANINGS[names.get(means[0], means[0].upper())] or color == style.INK, text
                else:
                    assert color not in (colors.BASELINE, colors.WINNER), text


def test_no_line_joins_a_front_of_noise(drawn):
    panels = [axes for figure in drawn("ordinary") for axes in figure.axes if "→" in axes.get_xlabel()]
    assert len(panels) == 2
    assert all(line.get_linestyle() == "None" for axes in panels for line in axes.lines)


# ----------------------------------------------------------------------------------------------------------- telephones
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURE = """<title></title><iframe width="{width}" height="900" style="border: 0" srcdoc="{page}"></iframe><script>
var frame = document.querySelector("iframe");
frame.onload = function () {{
  var whole = frame.contentDocument.documentElement, pictures = frame.contentDocument.querySelectorAll("figure img");
  document.title = [whole.scrollWidth, Math.max(...Array.from(pictures, (one) => one.width)), pictures.length].join(" ");
}};
</script>"""


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_telephone_scrolls_in_no_direction_but_down(tmp_path, rendered):
    """400 pixels wide, in an iframe; what runs there is our own page without its policy, which forbids to be measured."""
    folder = tmp_path / "a_search_with_quite_a_long_name_that_has_no_space_in_it_and_does_not_end_soon"
    ordinary(folder)
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", written(folder))
    (tmp_path / "outer.html").write_text(MEASURE.format(width=400, page=html.escape(text)))
    switches = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --hide-scrollbars "
        f"--disable-component-update --user-data-dir={tmp_path / 'profile'} --dump-dom"
    ).split()
    run = [CHROMIUM, *switches, f"file://{tmp_path / 'outer.html'}"]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    page, widest, pictures = map(float, re.search("<title>(.*?)</title>", out)[1].split())
    assert page == 400
    assert pictures > 4
    assert 340 < widest < 400
