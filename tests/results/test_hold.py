"""Forecast and truth of longer runs, side by side."""

import math

import pytest

from tests import searches
from tunediff import results
from tunediff.report.files import Files
from tunediff.report.sections import hold as section
from tunediff.results.hold import Finalist, hold

FRACTIONS = (0.25, 0.5, 0.75, 1.0)


def curve(end, exponent, budget_s):
    return tuple((budget_s * at, int(1000 * budget_s * at), end * at**-exponent) for at in FRACTIONS)


@pytest.fixture
def finalists(tmp_path):
    """Of exponents 0.45 … 0.55; with four times the budget two go on as they should, one falls to a tenth."""
    found = []
    for folder, budget_s, ends in (("night", 20.0, (4.0, 3.0, 2.0)), ("long", 80.0, (2.3, 1.6, 0.2))):
        wanted = searches.make(tmp_path / folder)
        for number, (end, exponent, batch) in enumerate(zip(ends, (0.45, 0.55, 0.5), (128, 64, 32), strict=True)):
            point = {"loader.batch_size": batch}
            searches.write(tmp_path / folder, wanted, number, point, curve(end, exponent, budget_s))
        found.append(results.read(tmp_path / folder))
    short, long = found
    names = ("baseline", "loader.batch_size=64", "loader.batch_size=32")
    pairs = zip(names, short.trials, long.trials, strict=True)
    return short, [Finalist(name, [one], [other]) for name, one, other in pairs]


def test_a_measured_mean_lies_within_its_forecast_or_not(finalists):
    told = hold(*finalists, 80.0)
    table = told.table().set_index("configuration")
    assert list(table["inside"]) == [True, True, False]
    assert list(table["mean"]) == pytest.approx([2.3, 1.6, 0.2])
    assert table.loc["baseline", "low"] < table.loc["baseline", "forecast"] < table.loc["baseline", "high"]
    assert table.loc["baseline", "forecast"] == pytest.approx(4.0 * 4**-0.5, rel=0.01)
    header, *rows = section.hold_table(told)
    assert header[0] == "configuration"
    assert [row[-1] for row in rows] == ["yes", "yes", "no"]
    words = section.sentences(told)[0].replace("\xa0", " ")
    sentences = [words.replace("\xa0", " ") for words in section.sentences(told)]
    assert sentences[1].startswith(
        "loader.batch_size=32 has the best mean with 20 s. Whether loader.batch_size=64 stays behind it"
    )
    assert sentences[2].startswith("Whether the baseline stays behind it is open from ")
    assert sentences[-1] == "Measured, no mean has passed another."
    assert words == (
        "2 of 3 measured means after 1 min 20 s lie within the 80 % interval that was forecast from runs of 20 s."
    )


def test_before_the_longer_runs_there_are_forecasts_only(finalists):
    found, all_of_them = finalists
    told = hold(found, [Finalist(one.name, one.short) for one in all_of_them], 80.0)
    assert list(told.table()["inside"]) == [None] * 3
    assert all(row.forecast.budget_s == 80.0 for row in told.rows)
    assert "3 of 3 configurations" in section.sentences(told)[0]
    assert hold(found, [], 80.0) is None


def test_a_finalist_without_a_curve_says_so(tmp_path, finalists):
    found, (first, *others) = finalists
    wanted = searches.make(tmp_path / "odd")
    searches.write(tmp_path / "odd", wanted, 0, curve=((10.0, 10, 3.0), (20.0, 20, 2.0)))
    searches.write(tmp_path / "odd", wanted, 1, status="oom", curve=())
    two, none = results.read(tmp_path / "odd").trials
    told = hold(found, [first, *others, Finalist("two points", [two]), Finalist("failed", [none])], 80.0)
    assert [row.why[:9] for row in told.rows[3:]] == ["its curve", "none of i"]
    assert section.hold_table(told)[4][2] == "none"


def test_the_section_has_a_figure_a_table_and_a_sentence(tmp_path, finalists):
    files = Files(tmp_path / "report")
    html = section.hold(hold(*finalists, 80.0), files)
    assert sorted(files.written) == ["hold.csv", "hold.png"]
    assert "loader.batch_size=64" in html
    assert "2 of 3 measured means" in html


def test_configurations_that_change_places_do_so_at_a_budget(finalists):
    """3 and 2 after 20 s, 1.6 and 0.2 after 80 s: the order stays; the other way round their means cross."""
    found, (first, second, third) = finalists
    assert not hold(found, [first, second, third], 80.0).crossed
    swapped = Finalist(second.name, second.short, third.long), Finalist(third.name, third.short, second.long)
    told = hold(found, [first, *swapped], 80.0)
    ((ahead, later, seconds),) = told.crossed
    assert (ahead.finalist.name, later.finalist.name) == ("loader.batch_size=32", "loader.batch_size=64")
    # Lines through log 3 and log 0.2, log 2 and log 1.6: equal where their difference is nothing.
    share = (seconds / 20.0, 80.0 / 20.0)
    along = math.log(share[0]) / math.log(share[1])
    assert 3.0 * (0.2 / 3.0) ** along == pytest.approx(2.0 * (1.6 / 2.0) ** along)
    words = [words.replace("\xa0", " ") for words in section.sentences(told)]
    assert any(
        "Measured, the mean of loader.batch_size=64 has passed that of loader.batch_size=32: equal" in line
        for line in words
    )
