"""What the sections of a report say, and that it is so."""

import dataclasses
import logging
import math
import re
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from tests.report.pages import rows, words, written
from tests.searches import FILE, again, make, noisy, random_points, write
from tests.searches import night as night_of
from tunediff import analysis, export, search_space
from tunediff.analysis import effects, evidence, journals, noise, pareto, speed
from tunediff.analysis.effects import ABOVE, WITHIN
from tunediff.analysis.importance import Importance
from tunediff.analysis.why import Why
from tunediff.report import context, html, outputs, summary
from tunediff.report.files import Figures, Files
from tunediff.report.sections import curves, knobs, reproduce, why
from tunediff.report.sections import speed as speed_section
from tunediff.report.sections.why import explain
from tunediff.report.style import Highlights
from tunediff.tuning import confirming

# ---------------------------------------------------------------------------------------------------- with several runs
CONFIRM = FILE | {"confirm": {"of": 1, "seeds": 3}}


@pytest.mark.parametrize(
    ("worth", "ended", "said"),
    [
        (0.5, 6, "precision.amp=bf16 wins: better than the baseline by more than the noise on 3 new seeds."),
        (1.0, 6, "No finalist is better than the baseline by more than the noise on 3 new seeds"),
        (0.5, 5, "The confirming runs are not complete: 5 runs have ended."),
    ],
)
def test_confirming_runs_lead(tmp_path, plain, worth, ended, said):
    folder = tmp_path / "night"
    wanted = make(folder, CONFIRM | {"budget": {"per_trial": "20s", "trials": 2}})
    write(folder, wanted, 0)
    write(folder, wanted, 1, {"precision.amp": "bf16"}, curve=((20.0, 4000, 0.5),))
    place, again = confirming.prepare(journals.read(folder)[0])
    for number, point in enumerate(again.candidates[:ended]):
        mine = point["precision.amp"] == "bf16"
        value = 2.0 * (worth if mine else 1.0) * (1 + 0.02 * ((number * 7) % 5 - 2))
        write(place, again, number, drawn=point, curve=((10.0, 2000, 2 * value), (20.0, 4000, value)))
    page = written(folder)
    text = words(page[page.index("<main>") :])
    assert text.index(said) < text.index("FD (classifier) against training seconds")
    assert "On new seeds" in text
    verdicts = {row["configuration"]: row["verdict"] for row in rows(folder / "report" / "won.csv")}
    assert ("finished · 2 of 2" in text) == (ended == 6)
    assert ("Not decided yet: no finalist is better than the baseline" in text) == (ended == 5)
    assert ("trials finished, confirming runs not complete · " in text) == (ended == 5)
    if ended == 6:
        assert verdicts["precision.amp=bf16"] == ("better" if worth < 1 else "no difference larger than the noise")
        assert ("Why it wins" in text) == (worth < 1)
        assert verdicts["precision.amp=bf16"] in text
        assert "One run each" not in text


def test_a_baseline_that_is_best_is_still_marked_as_the_baseline(tmp_path, plain):
    content = {
        "workload": "digits",
        "budget": {"per_trial": "20s"},
        "seeds": 2,
        "grid": {"precision.amp": ["none", "bf16"]},
    }
    wanted = make(tmp_path / "night", content)
    for number, point in enumerate(wanted.candidates):
        value = 2.0 if point["precision.amp"] == "bf16" else 1.0 + 0.1 * number
        write(tmp_path / "night", wanted, number, drawn=point, curve=((20.0, 4000, value),))
    page = written(tmp_path / "night")
    table = page[page.index('id="seeds"') : page.index('id="trials"')]
    assert re.findall(r'<tr class="(\w+)"><td[^>]*>(\w+)', table) == [("baseline", "baseline")]


def test_several_seeds_are_compared(tmp_path):
    content = {
        "workload": "digits",
        "budget": {"per_trial": "20s"},
        "seeds": 3,
        "grid": {"precision.amp": ["none", "bf16"]},
    }
    wanted = make(tmp_path / "night", content)
    for number, point in enumerate(wanted.candidates):
        value = (1.0 if point["precision.amp"] == "bf16" else 2.0) * (1 + 0.02 * number)
        write(tmp_path / "night", wanted, number, drawn=point, curve=((5.0, 1000, 3 * value), (20.0, 4000, value)))
    text = words(written(tmp_path / "night"))
    assert "precision.amp=bf16 is best: FD (classifier) 1.060 ± 0.040 over 3 seeds" in text
    assert "The difference from the baseline is significant at 5 %, corrected for all comparisons." in text
    assert "Some differences from the baseline are significant (3 seeds, 1 comparison" in text
    assert (tmp_path / "night" / "report" / "comparison.png").exists()


@pytest.mark.parametrize("form", ["grid", "ladder"])
def test_studies_of_throughput_have_no_frechet_distance(tmp_path, form):
    points = {"grid": {"precision.amp": ["none", "bf16"], "loader.batch_size": [64, 128]},
              "ladder": {"bf16": {"precision.amp": "bf16"}, "small": {"loader.batch_size": 64}}}  # fmt: skip
    content = {
        "workload": "digits", "objective": "samples_per_s", "budget": {"per_trial": "5s"}, form: points[form],
        "study": {"title": "What is $fast$", "columns": ["configuration", "samples_per_s"], "y": "samples_per_s"},
    }  # fmt: skip
    wanted = make(tmp_path / "fast", content)
    for number, point in enumerate(wanted.candidates):
        rate = 100.0 * (2 if point["precision.amp"] == "bf16" else 1) + number
        write(tmp_path / "fast", wanted, number, drawn=point, curve=((5.0, 500, None),), rate=rate)
    page = written(tmp_path / "fast")
    text = words(page)
    assert "FD" not in text
    assert "FID" not in text
    assert "Fréchet" not in text
    assert re.search(r"t000\d is ahead: 20\d images/s beside the 100 of the baseline", text)
    assert "What is $fast$" in text
    assert "Samples" not in re.findall(r"<h2>(.*?)</h2>", page)
    assert ("Knob effects" in text) == (form == "grid"), "a ladder changes several knobs at once"
    assert (tmp_path / "fast" / "report" / "study.png").exists()


@pytest.mark.parametrize("label", ["FID", "FD (classifier)"])
def test_the_distance_is_called_what_its_journals_call_it(night, plain, label):
    for path in night.glob("trials/*/journal.jsonl"):
        path.write_text(path.read_text().replace("FD (classifier)", label))
    text = words(written(night))
    assert f"its {label} is 0.8" in text
    assert ("FID" in text) == (label == "FID")


# ------------------------------------------------------------------------------------------------------------------ why
@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Why(20, (2.0, 1.0), (100, 200), 100, (2.0, 1.5)), "Of the gain, FD 1 instead of 2 at 20 training seconds, 42 % is"),
        (Why(20, (2.0, 1.0), (200, 100), 100, (2.5, 1.0)), "All of the gain, FD 1 instead of 2 at 20 training seconds, is learning"),
        (Why(20, (2.0, 1.0), (100, 400), 100, (2.0, 2.2)), "is speed (4 times as many images in the same seconds); from each"),
        (Why(20, (2.0, 1.0), (100, 100), 100, (2.0, 1.0)), "Practically all of the gain"),
        (Why(20, (2.0, 1.0), (100, 300), 100, (2.0, 2.0)), "from each image both learn as much"),
        (Why(20, (1.0, 2.0), (100, 100), 100, (1.0, 2.0)), "In these two runs it is not ahead: FD 2 instead of 1"),
        (Why(20, (2.0, 1.0), (100, 900), 100, None), "how much of that is speed is unknown, because at 100 images"),
    ],
)  # fmt: skip
def test_the_sentence_says_which_of_the_two_it_is(told, said):
    sentence = explain(told, "FD", "one run each", "images").replace("\N{NO-BREAK SPACE}", " ")
    assert said in sentence
    assert sentence.endswith("; one run each.")
    assert sentence.count(".") == 1 + len(re.findall(r"\d\.\d", sentence)), "one sentence"


@pytest.mark.parametrize(("at_samples", "within"), [((2.0, 1.9), True), ((1.9, 2.0), True), ((2.0, 1.5), False)])
def test_a_gap_at_equal_samples_within_the_noise_has_no_share(at_samples, within):
    """Two runs differ by up to 3.08·√2·5 % = 22 % by chance."""
    scatter = noise.Noise(0.05, 1, 2, 1, ratios=True, falls=True)
    found = Why(20, (2.0, 1.0), (100, 200), 100, at_samples)
    sentence = explain(found, "FD", "one run each", "images", scatter=scatter).replace("\N{NO-BREAK SPACE}", " ")
    assert ("the difference at equal images is within the noise of one run" in sentence) == within
    assert ("%" in sentence) == (not within)
    assert sentence.endswith("; one run each.")


def test_shares_are_explained_only_where_there_are_some(tmp_path, plain):
    """At 4,000 images the baseline is at 2.0, the other at 1.6 after 10 s; the baseline's runs differ by 2 or 30 %."""
    for share, within in ((1.02, False), (1.3, True)):
        text = words(written(again(night_of(tmp_path / str(share)), share)))
        assert ("the difference at equal images is within the noise of one run" in text) == within
        assert ("Shares are of the ratio's logarithm" in text) == (not within)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0001, "most is saved in backward"), (0.9, "most is lost in backward")],
)
def test_the_part_of_a_step_that_makes_the_difference_is_named(night, plain, seconds, said):
    """All parts of both last as long, but for one of the winner."""
    for name, backward in (("t0000", 0.08), ("t0001", seconds)):
        path = night / "trials" / name / "journal.jsonl"
        text = re.sub(r'"step_(\w+)_s": [0-9.]+', r'"step_\1_s": 0.04', path.read_text())
        path.write_text(text.replace('"step_backward_s": 0.04', f'"step_backward_s": {backward}'))
    assert "most is" not in words(written(night)), "whether that is more than noise is not known"
    assert said in words(written(again(night)))


def test_samples_per_step_are_counted_whatever_the_batch_size_says(night, plain):
    """A loop over a loader of its own may never read `loader.batch_size`."""
    for path in night.glob("trials/*/journal.jsonl"):
        path.write_text(re.sub(r'"steps": \d+', '"steps": 250', path.read_text()))
    written(night)
    (row,) = [row for row in rows(night / "report" / "why.csv") if row["quantity"] == "images per step"]
    assert float(row["baseline"]) == 4000 / 250


@pytest.mark.parametrize(("rate", "unit"), [(100.0, "seconds"), (1000.0, "milliseconds")])
def test_the_parts_of_a_step_are_drawn_in_a_handy_unit(tmp_path, labels, rate, unit):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, rate=rate)
    write(tmp_path / "night", wanted, 1, {"precision.amp": "bf16"}, curve=((20.0, 4000, 1.0),), rate=rate)
    written(tmp_path / "night")
    assert f"{unit} per 1,000 images" in labels


# ---------------------------------------------------------------------------------------------------------------- knobs
@pytest.mark.parametrize(
    ("fit", "said"),
    [
        (-0.1, "the shares are noise."),
        (0.1, "rather a guess."),
        (0.6, "fair."),
        (0.9, "good."),
        (None, "is unknown."),
    ],
)
def test_how_far_shares_can_be_trusted_is_said(night, plain, tmp_path, fit, said):
    quality = Importance({"precision.amp": 0.6, "optimizer.lr": 0.2}, fit, 40, [])
    about = dataclasses.replace(context.read(night), quality=quality, throughput=None)
    assert said in words(knobs.importance(about, Files(tmp_path / "files")))


def test_knobs_with_an_effect_are_drawn_before_the_others(night, labels, tmp_path):
    about = context.read(night)
    one = about.effects[0]
    found = [
        dataclasses.replace(one, knob="loader.batch_size", verdict=WITHIN),
        dataclasses.replace(one, knob="precision.amp", verdict=ABOVE),
    ]
    knobs.effects(dataclasses.replace(about, effects=found), Files(tmp_path / "files"))
    assert labels.index("precision.amp") < labels.index("loader.batch_size")


def test_importance_tells_quality_from_throughput(tmp_path, plain, monkeypatch):
    content = FILE | {
        "search": FILE["search"] | {
            "weighting.name": ["constant", "min_snr"],
            "weighting.gamma": {"low": 1.0, "high": 20.0, "log": True, "when": {"weighting.name": "min_snr"}},
            "memory.channels_last": [False],
        }
    }  # fmt: skip
    wanted = make(tmp_path / "night", content)
    rng = np.random.default_rng(0)
    for number, point in enumerate([{}, *random_points(wanted, 59)]):
        rate = (400.0 if point.get("precision.amp") == "bf16" else 200.0) * math.exp(rng.normal(0, 0.02))
        gamma = point.get("weighting.gamma", 1.0)
        value = math.exp(math.log(point.get("optimizer.lr", 1e-3)) ** 2 / 10 + 0.5 * math.log(gamma))
        write(tmp_path / "night", wanted, number, point, curve=((20.0, 4000, value),), rate=rate)
    import optuna  # noqa: F401 - its first import sets the level

    monkeypatch.setattr(log := logging.getLogger("optuna"), "level", logging.DEBUG)
    about = context.read(tmp_path / "night")
    assert log.level == logging.DEBUG
    assert next(iter(about.quality.shares)) == "optimizer.lr"
    assert about.quality.shares["weighting.gamma"] > 0.02, "judged among the trials that have it"
    assert next(iter(about.throughput.shares)) == "precision.amp"
    assert about.throughput.shares["precision.amp"] > 0.9
    assert about.throughput.fit > 0.9
    assert about.quality.unvaried == ["memory.channels_last"]
    text = words(written(tmp_path / "night"))
    assert "Differences in images/s come most from precision.amp (" in text
    assert rows(tmp_path / "night" / "report" / "importance.csv")[0]["knob"] == "optimizer.lr"


def test_a_quantity_that_no_trial_has_leaves_its_front_empty(tmp_path, plain):
    wanted = make(tmp_path / "night")
    for number, value in enumerate((4.0, 2.0)):
        journal = write(tmp_path / "night", wanted, number, curve=((20.0, 4000, value),)) / "journal.jsonl"
        journal.write_text(re.sub(r'"peak_memory_mib": [0-9.]+, ', "", journal.read_text()))
    assert not pareto.trade_offs(journals.read(tmp_path / "night")[0])["on_front_peak_memory_mib"].any()
    assert "Result" in written(tmp_path / "night")


def test_a_second_objective_has_its_front(tmp_path):
    """More workers are better and cost more: both ends are on the front, what is worse and dearer is not."""
    content = FILE | {"objective": ["frechet", "device_s"]}
    wanted = make(tmp_path / "night", content)
    for number, (point, value, cost) in enumerate(
        (({}, 4.0, 20.0), ({"precision.amp": "bf16"}, 2.0, 40.0), ({"loader.batch_size": 256}, 3.0, 60.0))
    ):
        place = write(tmp_path / "night", wanted, number, point, ((20.0, 4000, value),))
        journal = place / "journal.jsonl"
        journal.write_text(journal.read_text().replace('"train_s": 20.0', f'"train_s": 20.0, "device_s": {cost}'))
    frame = pareto.trade_offs(journals.read(tmp_path / "night")[0])
    assert list(frame["trial"][frame["on_front_device_s"]]) == ["t0001", "t0000"]
    assert "2 in FD (classifier) and device-seconds" in written(tmp_path / "night")


def test_a_front_without_a_baseline_leaves_the_comparison_empty(tmp_path):
    wanted = make(tmp_path / "night", FILE | {"objective": ["frechet", "device_s"]})
    place = write(tmp_path / "night", wanted, 1, {"precision.amp": "bf16"}, ((20.0, 4000, 2.0),))
    journal = place / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"train_s": 20.0', '"train_s": 20.0, "device_s": 20.0'))
    printed = summary.lines(evidence.read(analysis.read(tmp_path / "night")))
    front = next(line for line in printed if "Pareto front" in line)
    assert "t0001" in front
    assert "nan" not in front.lower()
    assert "None" not in front


def test_compiling_pays_from_where_it_has_caught_up(tmp_path):
    content = FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}}
    wanted = make(tmp_path / "night", content)
    write(tmp_path / "night", wanted, 0, rate=200.0)
    write(tmp_path / "night", wanted, 1, {"compile.mode": "default"}, rate=300.0, compile_s=6.0)
    write(
        tmp_path / "night", wanted, 2, {"compile.mode": "default", "loader.batch_size": 64}, rate=350.0, compile_s=7.0
    )
    frame = pd.DataFrame(speed.compiled(journals.read(tmp_path / "night")[0])).set_index("trial")
    # 200 t = 300 (t − 6) at t = 18, after 3,600 images
    assert frame.loc["t0001", "break_even_s"] == pytest.approx(18)
    assert frame.loc["t0001", "samples_to_break_even"] == pytest.approx(3600)
    assert frame.loc["t0001", "uncompiled"] == "t0000"
    assert math.isnan(frame.loc["t0002", "break_even_s"])
    text = words(written(tmp_path / "night"))
    assert (
        "1 configuration ran with and without torch.compile: within the budget it pays in 1 of them; compiling took 6 to"
        in text
    )
    assert (tmp_path / "night" / "report" / "compile.png").exists()
    assert "different call" not in text


def test_rates_with_and_without_compilation_are_means_over_runs(tmp_path):
    wanted = make(tmp_path / "night", FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}})
    write(tmp_path / "night", wanted, 0, rate=200.0)
    write(tmp_path / "night", wanted, 1, drawn=wanted.candidates[0] | {"seed": 1}, rate=220.0)
    write(tmp_path / "night", wanted, 2, {"compile.mode": "default"}, rate=315.0, compile_s=6.0)
    (row,) = speed.compiled(journals.read(tmp_path / "night")[0])
    assert (row.uncompiled_samples_per_s, row.samples_per_s, row.versus_uncompiled) == (210.0, 315.0, 1.5)


def test_graphs_that_are_missing_are_told(tmp_path, plain):
    content = FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}}
    wanted = make(tmp_path / "night", content)
    for number, made in enumerate((8, 11, 12)):
        point = {"compile.mode": "default", "loader.batch_size": 64 * 2**number}
        journal = write(tmp_path / "night", wanted, number, point, compile_s=6.0) / "journal.jsonl"
        counted = f'"train_s": 20.0, "compiled_graphs": {made}, "expected_graphs": 11'
        journal.write_text(journal.read_text().replace('"train_s": 20.0', counted))
    text = words(written(tmp_path / "night"))
    assert "t0000 made 8 graphs for 11 different calls: the rest ran uncompiled; t0002 made 12 graphs" in text
    assert "t0001 made" not in text


def test_compiling_may_pay_after_the_budget_only(tmp_path, plain):
    """What gains most comes first."""
    content = FILE | {"search": FILE["search"] | {"compile.mode": ["none", "default"]}}
    wanted = make(tmp_path / "night", content)
    for number, size, compiled in ((0, 128, 210.0), (2, 64, 300.0)):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": size}, rate=200.0)
        point = {"loader.batch_size": size, "compile.mode": "default"}
        write(tmp_path / "night", wanted, number + 1, point, rate=compiled, compile_s=6.0)
    page = written(tmp_path / "night")
    text = words(page[page.index('id="compile"') : page.index('id="failures"')])
    # 200 t = 210 (t − 6) at t = 126, 200 t = 300 (t − 6) at t = 18: of 20 s
    assert "2 configurations ran with and without torch.compile: within the budget it pays in 1 of them" in text
    assert re.findall(r"(t\d{4}) default", text) == ["t0003", "t0001"]


def test_compiling_pays_within_the_budget_of_its_own_trial(tmp_path):
    """Four devices share 400 device-seconds: 100 s each, and compiling pays after 150 s."""
    content = {
        "workload": "digits", "budget": {"per_trial": "400s", "unit": "device"},
        "trials": [{}, {"parallel.workers": 4}, {"parallel.workers": 4, "compile.mode": "default"}],
    }  # fmt: skip
    wanted = make(tmp_path / "night", content)
    for number, (rate, spent) in enumerate(((100.0, 0.0), (400.0, 0.0), (600.0, 50.0))):
        write(tmp_path / "night", wanted, number, drawn=wanted.candidates[number], rate=rate, compile_s=spent)
    figures = Figures()
    text = words(speed_section.compiling(context.read(tmp_path / "night"), figures))
    assert "within the budget it pays in 0 of them; compiling took 50 s of a budget of 1 min 40 s." in text
    (axes,) = figures.by_name["compile"]().axes
    assert [list(line.get_xdata()) for line in axes.lines].count([100.0, 100.0]) == 1, "the line «budget of a trial»"


def test_without_compiled_trials_there_is_no_word_about_it(night, plain):
    assert "torch.compile" not in words(written(night))


def test_values_at_equal_seconds_have_a_difference_where_the_objective_has_no_ratios(tmp_path):
    wanted = make(tmp_path / "night")
    again = {"drawn": {**wanted.candidates[0], "seed": wanted.baseline.seed + 1}}
    for number, (end, more) in enumerate([(0.5, {}), (0.51, again), (-0.5, {"point": {"loader.batch_size": 64}})]):
        write(tmp_path / "night", wanted, number, curve=((5.0, 1000, end + 2), (20.0, 4000, end)), **more)
    text = words(why.why(context.read(tmp_path / "night"), Figures()))
    assert "FD (classifier) at equal seconds (20 s) 0.5 -0.5 −1 " in text
    assert "ratio or difference" in text


@pytest.mark.parametrize(
    ("charging", "status", "budget"),
    [("free", "ok", "--samples 4000"), ("charged", "ok", "--budget 20s"), ("free", "pruned", "--budget 20s")],
)
def test_a_compiled_trial_is_repeated_with_as_much_training(tmp_path, charging, status, budget):
    """`train` counts compiling as training; a search may not. A trial stopped early did not train for its budget."""
    content = FILE | {"budget": FILE["budget"] | {"compile": charging}}
    wanted, point = make(tmp_path / "night", content), {"compile.mode": "default"}
    write(tmp_path / "night", wanted, 0, drawn=wanted.candidates[0] | point, compile_s=18.0, status=status)
    results = analysis.read(tmp_path / "night")
    (line,) = [
        line for line in export.provenance(results, results.trials[0], tmp_path / "best.yaml") if "train " in line
    ]
    assert f"best.yaml {budget} --storage" in line
    page = words(reproduce.reproduce(context.read(tmp_path / "night"), Figures()))
    assert f"t0000.yaml {budget}" in page or status == "pruned"


def test_an_objective_may_run_upwards(night, plain, monkeypatch):
    """What is larger is better: the words follow."""
    load = search_space.load_recorded
    monkeypatch.setattr(search_space, "load_recorded", lambda path: dataclasses.replace(load(path), mode="max"))
    text = words(written(again(night)))
    assert "t0002 is best: after 20 training seconds its FD (classifier) is 3, 1 above the 2 of the baseline" in text
    assert "1 of 2 other trials with a result ends above the baseline (mean of its 2 runs)." in text


def test_what_was_never_run_is_no_failure(tmp_path, plain):
    """It is said all the same."""
    wanted = make(tmp_path / "night")
    ends = [
        ("ok", ""),
        ("oom", "no memory left"),
        ("skipped", "not run: t0001 ran out"),
        ("skipped", "not run: t0001 ran out"),
    ]
    for number, (status, reason) in enumerate(ends):
        write(tmp_path / "night", wanted, number, {"loader.batch_size": 256} if number else {}, status=status,
              curve=((20.0, 4000, 2.0),) if status == "ok" else (), reason=reason)  # fmt: skip
    text = words(written(tmp_path / "night"))
    assert "1 of 4 trials that ended failed; 2 were not run, because other trials showed that they would fail." in text
    table = rows(tmp_path / "night" / "report" / "failures.csv")
    assert [(row["status"], row["trials"]) for row in table] == [("skipped", "2"), ("oom", "1")]


def test_figures_name_the_processor_and_what_it_can_do(tmp_path):
    """Two of one name may differ in it, and then in speed."""
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, machine={"cpu_features": ["avx2", "avx512f", "amx_tile", "amx_bf16"]})
    write(tmp_path / "night", wanted, 1, {"loader.batch_size": 256}, machine={"cpu_features": ["avx2"]})
    found = analysis.read(tmp_path / "night")
    said = "slow one (avx512f, amx_bf16), 2 CPU cores, torch 2.15, 20s training each"
    assert outputs.measured_on(found) == said
    titles = []
    with mock.patch.object(outputs, "png", lambda build: titles.append(build().get_suptitle())):
        outputs.write_all(found)
    assert titles[0].endswith("\nmeasured on slow one (avx512f, amx_bf16) and slow one (avx2)")


def test_device_seconds_are_called_so_and_priced(tmp_path):
    """20 device-seconds each, the other's on four devices: 0.2 of an hour's price of 36 for both."""
    budget = {"per_trial": "20s", "trials": 2, "unit": "device", "price_per_device_hour": 18}
    wanted = make(tmp_path / "night", {"workload": "digits", "budget": budget, "grid": {"parallel.workers": [1, 4]}})
    write(tmp_path / "night", wanted, 0, found={"price": 0.1})
    curve = ((1.25, 1000, 4.0), (2.5, 2000, 2.0), (5.0, 4000, 1.0))
    write(tmp_path / "night", wanted, 1, {"parallel.workers": 4}, curve, found={"price": 0.1})
    text = words(written(tmp_path / "night"))
    assert "20 s of device time per trial" in text
    assert "FD (classifier) against device-seconds" in text
    assert "after 20 device-seconds its FD (classifier) is 1" in text
    assert "Budget of a trial: 20 s of device time in the worker, shared by its devices" in text
    assert "training seconds × devices 40 s energy of training not measured price of training 0.2" in text
    assert "training seconds its" not in text


# ------------------------------------------------------------------------------------------- baseline on several seeds
def test_curves_count_trials_beside_the_mean_of_the_baselines_runs(tmp_path, plain):
    """The first run of the baseline ends at 2.0, the second at 2.6: 2.2 is below their mean, and above the first."""
    found = analysis.read(noisy(tmp_path / "night", repeats=(2.6,), others=(2.2, 2.4)))
    text = words(written(tmp_path / "night"))
    assert "1 of 2 other trials with a result ends below the baseline (mean of its 2 runs)." in text
    drawn = curves.of_trials(found, Highlights.of(evidence.read(found)))
    (legend,) = drawn.legends
    assert "baseline on other seeds" in [one.get_text() for one in legend.get_texts()]


def test_curves_count_configurations_by_the_means_of_their_reruns(tmp_path, plain):
    """t0002 ran at 1.9 and 2.9: its mean, as in the headline, is above the 2.1 of the baseline."""
    noisy(tmp_path / "night", repeats=(2.2,), others=(1.9,))
    found = analysis.read(tmp_path / "night")
    write(
        found.folder,
        found.space,
        3,
        drawn=found.trials[2].drawn | {"seed": 1},
        curve=((5.0, 1000, 4.0), (20.0, 4000, 2.9)),
    )
    text = words(written(tmp_path / "night"))
    assert "The baseline (t0000) itself is best" in text
    assert "0 of 1 other trial with a result end below the baseline (mean of its 2 runs)." in text


def test_effects_draw_rates_in_a_colour_that_claims_no_test(tmp_path, plain):
    """Two values of a knob with one trial each are too few; no dot of either panel is as dark as what was tested."""
    found = analysis.read(noisy(tmp_path / "night", others=(1.2, 1.0)))
    chosen = effects.effects(found)
    assert {one.verdict for one in chosen} == {effects.TOO_FEW}
    text = words(written(tmp_path / "night"))
    assert "Too few trials to tell whether a knob has an effect on FD (classifier)." in text
    assert "larger than the noise between" not in text
    figure = knobs._levels(found, chosen, Highlights.of(evidence.read(found)))
    drawn = {line.get_color() for axes in figure.axes for line in axes.lines if line.get_marker() == "o"}
    assert knobs.STRONG not in drawn
    assert "too few trials" in " ".join(one.get_text() for one in figure.legends[0].get_texts())


def test_curves_over_seeds_have_a_band_of_one_standard_deviation(tmp_path):
    """Three seeds of the baseline end at 2.0, 2.2 and 2.4: mean 2.2, standard deviation 0.2."""
    content = {
        "workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"precision.amp": ["none", "bf16"]},
    }  # fmt: skip
    wanted = make(tmp_path / "night", content)
    seeds = sorted({point["seed"] for point in wanted.candidates})
    for number, point in enumerate(wanted.candidates):
        value = 2.0 + 0.2 * seeds.index(point["seed"])
        write(tmp_path / "night", wanted, number, drawn=point, curve=((5.0, 1000, 3 * value), (20.0, 4000, value)))
    compared = evidence.read(analysis.read(tmp_path / "night")).compared
    figure = curves.of_means(compared, None)
    bands = [area.get_paths()[0].vertices for axes in figure.axes for area in axes.collections]
    assert len(bands) == 2
    for band in bands:
        at_end = band[band[:, 0] == 20.0][:, 1]
        assert (at_end.min(), at_end.max()) == pytest.approx((2.0, 2.4))


def test_curves_over_seeds_have_a_panel_for_each_value_of_a_knob(tmp_path):
    """Also for values that are equal in their first three digits."""
    content = {
        "workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 2,
        "grid": {"ema.max_decay": [0.9995, 0.9999], "optimizer.beta2": [0.99, 0.9985, 0.999]},
    }  # fmt: skip
    wanted = make(tmp_path / "night", content)
    for number, point in enumerate(wanted.candidates):
        write(tmp_path / "night", wanted, number, drawn=point)
    figure = curves.of_means(evidence.read(analysis.read(tmp_path / "night")).compared, None)
    assert [axes.get_title() for axes in figure.axes] == ["ema.max_decay = 0.9999", "ema.max_decay = 0.9995"]
    names = [words.get_text() for words in figure.legends[0].get_texts()]
    assert names == ["baseline (0.999, 0.9999)", "0.99", "0.9985", "0.999"]


@pytest.mark.parametrize(
    ("value", "names"),
    [(1.99, ["baseline", "precision.amp=bf16"]), (1.0, ["baseline", "winner (precision.amp=bf16)"])],
)
def test_only_a_significantly_better_curve_is_called_winner(tmp_path, value, names):
    content = {
        "workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"precision.amp": ["none", "bf16"]},
    }  # fmt: skip
    wanted, noise = make(tmp_path / "night", content), iter([0.99, 1.01, 1.02, 1.01, 1.02, 0.98])
    for number, point in enumerate(wanted.candidates):
        end = next(noise) * (value if point["precision.amp"] == "bf16" else 2.0)
        write(tmp_path / "night", wanted, number, drawn=point, curve=((5.0, 1000, 3 * end), (20.0, 4000, end)))
    facts = evidence.read(analysis.read(tmp_path / "night"))
    figure = curves.of_means(facts.compared, facts.compared.of(facts.best))
    assert [words.get_text() for words in figure.legends[0].get_texts()] == names


# ------------------------------------------------------------------------------------------------------------ telephone
def test_tables_that_decide_stack_on_a_telephone():
    told = html.table(["what", "speed-up"], [["loader.batch_size=64", "at least 4"]], words=1, stacks=True)
    assert 'class="stacks"' in told
    assert 'data-label="speed-up">at least 4</td>' in told
    assert "loader.<wbr>batch_<wbr>size=<wbr>64" in told


def test_names_break_after_dots_and_underscores_only():
    assert html.breakable("memory.channels_last=true") == "memory.<wbr>channels_<wbr>last=<wbr>true"
    assert html.breakable("1.") == "1."
    assert html.breakable("lr=0.003") == "lr=<wbr>0.003"
    assert html.breakable("<a.b>") == "&lt;a.<wbr>b&gt;"


def test_numbers_of_a_table_are_aligned_and_words_are_not():
    cells = str(html.table(["knob", "value"], [["lr", "1"]], words=1))
    assert "<td>lr</td>" in cells
    assert '<td class="n">1</td>' in cells


def test_one_result_has_no_front(tmp_path, plain):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0)
    written(tmp_path / "night")
    assert not (tmp_path / "night" / "report" / "trade_offs.csv").exists()
