"""One notion of best, and no speed-up that is none: the same in every table, figure and export."""

import csv
import json
import re
from unittest import mock

import numpy as np
import pytest

from tests import searches
from tests.comparisons import PLAIN
from tests.report.pages import rows, words, written
from tests.searches import FILE, make, write
from tunediff import analysis, export, search, search_space
from tunediff.analysis import comparison, confirmation, evidence
from tunediff.report import context, headline, outputs, verdicts
from tunediff.report.style import Highlights
from tunediff.report.words import duration
from tunediff.tuning import confirming, sessions

SEARCH = {
    "workload": "digits",
    "search": {"loader.batch_size": [32, 64, 128], "optimizer.lr": [0.001, 0.002]},
}
GRID = {"workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 3, "grid": {"loader.batch_size": [64, 128]}}


def curve(*values):
    return tuple((5.0 * place, 1000 * place, float(value)) for place, value in enumerate(values, 1))


def searched(folder, others, confirm=None, repeats=(2.1,)):
    """The baseline ends at 2.0 and at `repeats` on further seeds; the others differ from it in their batch size."""
    budget = {"per_trial": "20s", "trials": 1 + len(repeats) + len(others)}  # a search that is over starts no Ray
    wanted = make(folder, SEARCH | {"budget": budget} | ({"confirm": {"of": 1, "seeds": 6}} if confirm else {}))
    write(folder, wanted, 0, curve=curve(4, 2.6, 2.3, 2.0))
    for number, end in enumerate(repeats, 1):
        drawn = {**wanted.candidates[0], "seed": number}
        write(folder, wanted, number, drawn=drawn, curve=curve(4, 2.6, 2.3, end))
    for number, (size, values) in enumerate(others.items(), 1 + len(repeats)):
        write(folder, wanted, number, {"loader.batch_size": size}, curve(*values))
    found = analysis.read(folder)
    if confirm is not None:
        place, again = confirming.prepare(found)
        for number, point in enumerate(again.candidates):
            size, seed = point["loader.batch_size"], point["seed"]
            scatter = np.exp(0.02 * np.random.default_rng(seed * 7 + size).normal(size=4))
            values = (4, 2.6, 2.3, 2.0) if size == 128 else confirm(seed)
            write(place, again, number, drawn=point, curve=curve(*(np.array(values) * scatter)))
    return found


def told(found, capsys):
    """What a finished search says: in its terminal and as JSON."""
    assert confirming.complete(found.folder, found.space)
    command = ["--resume", found.folder.name, "--storage", str(found.folder.parent)]
    assert search.main(command) == 0
    text = capsys.readouterr().out
    with mock.patch("tunediff.report.listener._of_search"):  # they are written
        assert search.main([*command, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def exported(found, capsys):
    """The trial that `export` takes, and the lines above its configuration."""
    assert export.main([found.folder.name, "--storage", str(found.folder.parent)]) == 0
    name = capsys.readouterr().out.splitlines()[0].removeprefix("trial: ")
    lines = (found.folder / "best.yaml").read_text().splitlines()
    return name, "\n".join(line for line in lines if line.startswith("#"))


def column(path, name):
    return [row[name] for row in csv.DictReader(path.open())]


def test_a_finalist_that_is_not_told_apart_is_neither_best_nor_faster(tmp_path, capsys, plain):
    """It is as good as the baseline once, after 10 s, by luck; at its end it is worse, and on new seeds the same."""
    late = searched(
        tmp_path / "night", {64: (3.9, 1.95, 2.2, 2.4)}, lambda seed: (4, (1.9, 2.5, 0.5)[seed % 3], 2.3, 2.05)
    )
    text, block = told(late, capsys)
    assert (block["best_trial"], block["best_configuration"], block["confirmed"]) == ("t0000", {}, False)
    assert (block["winner"], block["finalist"]) == (None, {"loader.batch_size": 64})
    assert (block["speedup"], block["speedup_unknown"]) == (None, "it is the baseline itself")
    assert "speedup_unknown: it is the baseline itself\n" in text
    assert "No finalist is better than the baseline by more than the noise on 6 new seeds: the baseline stays." in text
    row = next(line for line in text.splitlines() if line.startswith("loader.batch_size=64  no significant difference"))
    assert row.endswith("not determined")
    page = words(written(late.folder))
    assert "Why it" not in page
    assert "The ring" not in page
    assert "times faster" not in page
    assert "saved in" not in page
    assert set(column(late.folder / "report" / "trials.csv", "speedup")) == {""}
    assert set(column(late.folder / "trials.csv", "speedup")) == {""}
    assert set(column(late.folder / "confirm.csv", "speedup")) == {""}
    assert (late.folder / "confirm.md").read_text().startswith("# night: not confirmed\n")
    known = evidence.read(late)
    assert [what for _, _, what in Highlights.of(known).pairs()] == ["baseline"], "curves.png has one star"
    name, above = exported(late, capsys)
    assert name == "t0000"
    assert "the baseline stays" in above


def test_a_confirmed_winner_is_the_same_everywhere_and_has_one_speedup(tmp_path, capsys, plain):
    fast = searched(
        tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0), 32: (2.6, 1.5, 1.1, 0.97)}, lambda seed: (2.6, 1.5, 1.1, 1.0)
    )
    text, block = told(fast, capsys)
    winner = block["best_trial"]
    assert block["winner"] == block["best_configuration"]
    low, middle, high = (float(block[name]) for name in ("speedup_low", "speedup", "speedup_high"))
    assert 1 < low < middle < high < 10
    assert f"speedup: {middle:.3g}" in text
    assert "confirmed_speedup" not in text
    page = words(written(fast.folder))
    assert "Why it wins" in page
    assert f"winner ({winner})" in page
    assert (fast.folder / "confirm.md").read_text().startswith("# night: confirmed\n")
    assert exported(fast, capsys)[0] == winner == evidence.read(fast).best.name


SESSION = '{"event": "begin", "time": 0, "monotonic_s": 0}\n{"event": "end", "time": %d, "monotonic_s": %d}\n'


def test_totals_of_the_page_are_those_of_the_json(tmp_path, capsys, plain, monkeypatch):
    """The search took 100 s and its confirming runs 75; each training takes 20 s of one device."""
    monkeypatch.setattr(sessions.CommandTime, "charge", lambda _: None)  # the seconds of the commands that read it
    fast = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (2.6, 1.5, 1.1, 1.0))
    for folder, wall_s in ((fast.folder, 100), (fast.folder / "confirm", 75)):
        (folder / "sessions.jsonl").write_text(SESSION % (wall_s, wall_s))
    _, block = told(fast, capsys)
    runs = len(fast.trials) + len(analysis.read(fast.folder / "confirm").trials)
    assert (block["wall_s"], block["confirm_wall_s"], block["device_s"]) == (175, 75, 20 * runs)
    page = words(written(fast.folder))
    assert "wall-clock of the search 2 min 55 s of that, the confirming runs 1 min 15 s 43 %" in page
    assert f"training seconds × devices {duration(block['device_s'])} ".replace("\N{NO-BREAK SPACE}", " ") in page
    parts = {row["part"]: float(row["seconds"]) for row in rows(fast.folder / "report" / "seconds.csv")}
    assert parts["train"] + parts["data_wait"] == block["training_s"] == 20 * runs
    assert all(parts[name] == block[f"{name}_s"] for name in ("setup", "evaluation", "data_wait"))


@pytest.mark.parametrize("confirmed", [True, False])
def test_every_trial_has_no_speedup_that_new_seeds_did_not_confirm(tmp_path, plain, confirmed):
    """Both sizes are ahead in the search; one of them ran again, and was as good, or no better than the baseline."""
    ahead = {64: (2.6, 1.5, 1.1, 1.0), 32: (2.6, 1.6, 1.2, 1.1)}
    again = (2.6, 1.5, 1.1, 1.0) if confirmed else (4, 2.6, 2.3, 2.0)
    found = searched(tmp_path / "night", ahead, lambda seed: again)
    page = written(found.folder)
    table = page[page.index('id="trials-table"') :].partition("</table>")[0]
    head = re.findall(r"<th[^>]*>(.*?)</th>", table)
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr")[2:]]
    shown = {cells[0]: cells[head.index("speed-up")] for cells in lines if cells}
    assert {name for name, value in shown.items() if value} == ({"t0002"} if confirmed else set())
    values = {row["trial"]: row["speedup"] for row in rows(found.folder / "report" / "trials.csv")}
    assert {name for name, value in values.items() if value} == ({"t0002"} if confirmed else set())


def test_the_folder_of_confirming_runs_tells_what_the_search_tells_of_them(tmp_path, capsys, plain):
    """Equal ones, whose 6 seeds were looked at four times: the p-value of a single look is below 5 %."""
    near = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (4, 2.6, 2.3, 2.0))
    told(near, capsys)
    runs = analysis.read(near.folder / "confirm")
    assert comparison.compare(runs).others[0].difference.verdict == "better"
    for table in (near.folder / "confirm.csv", near.folder / "confirm" / "comparison.csv"):
        assert column(table, "verdict") == ["baseline", "no difference larger than the noise"]
    assert set(column(near.folder / "confirm" / "trials.csv", "speedup")) == {""}
    page = words(written(near.folder / "confirm"))
    assert "No configuration is shown to be better than the baseline: FD (classifier)" in page
    assert "No significant difference from the baseline: loader.batch_size=64." in page
    ends = [column(place / "comparison.csv", "ratio_low")[1] for place in (runs.folder, runs.folder / "report")]
    assert ends[0] == ends[1] != ""


def test_the_report_of_confirming_runs_says_that_the_winner_is_corrected_for_looks(tmp_path):
    fast = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (2.6, 1.5, 1.1, 1.0))
    sentence = headline.headline(context.read(fast.folder / "confirm").evidence)
    assert sentence.endswith("significant at 5 %, corrected for all comparisons and looks.")


def test_speedup_is_a_lower_bound_everywhere_if_the_first_evaluation_reaches_the_target(tmp_path, capsys, plain):
    """At 5 s of 20 on most seeds, a little later on others: the mean is about 4, the low end of its interval is less."""
    early = searched(
        tmp_path / "night", {64: (1.2, 1.1, 1.0, 0.9)}, lambda seed: (1.2 if seed % 3 else 2.15, 1.1, 1.0, 0.9)
    )
    known = evidence.read(early)
    speedup = known.confirmation.compared.speedup(known.confirmation.leader)
    assert (speedup.at_least, speedup.high) == (True, None)
    assert 3 < speedup.bound < speedup.mean < 4
    text, block = told(early, capsys)
    page = words(written(early.folder))
    ends = ("speedup", "speedup_low", "speedup_high", "speedup_at_least")
    assert [block[key] for key in ends] == [None, None, None, pytest.approx(speedup.bound)]
    assert block["speedup_means"].startswith("lower bound: ")
    printed = f"at least {speedup.bound:.3g}"
    assert f"speedup_at_least: {speedup.bound:.3g}\n" in text
    assert "speedup_means: lower bound: " in text
    for place in (text, page, (early.folder / "confirm.md").read_text()):
        assert printed in place
        assert f"{speedup.mean:.3g}" not in place
    for file in ("confirm.csv", "trials.csv", "report/trials.csv"):
        values = column(early.folder / file, "speedup_at_least")
        assert set(column(early.folder / file, "speedup")) == {""}
        assert [float(value) for value in values if value] == pytest.approx([speedup.bound])


def test_speedup_of_one_pair_is_a_lower_bound_if_the_first_evaluation_reaches_the_target(tmp_path, capsys, plain):
    early = searched(tmp_path / "night", {64: (1.2, 1.1, 1.0, 0.9)})
    text, block = told(early, capsys)
    assert (block["speedup"], block["speedup_at_least"]) == (None, 4.0)
    assert "speedup_at_least: 4\n" in text
    page = words(written(early.folder))
    assert "before its first evaluation, at 5 s: at least 4 times faster" in page
    assert "≥ 4.00" in page
    assert "more than 4" not in page


def test_speedup_with_an_interval_says_so(tmp_path, capsys, plain):
    """Nothing is said of a bound that does not apply."""
    fast = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (2.6, 1.5, 1.1, 1.0))
    text, block = told(fast, capsys)
    assert block["speedup_low"] < block["speedup"] < block["speedup_high"]
    assert block["speedup_at_least"] is None
    assert block["speedup_means"].startswith("mean with 95 % interval: ")
    assert "at least" not in text


def test_a_file_of_ones_own_is_confirmed_as_well(tmp_path, capsys):
    """Every folder has a copy of it: another path makes no other configuration."""
    (tmp_path / "mine.py").write_text(PLAIN)
    content = {"workload": str(tmp_path / "mine.py"), "budget": {"per_trial": "20s", "trials": 3},
               "search": {"width": [4, 8, 16]}, "confirm": {"of": 1, "seeds": 3}}  # fmt: skip
    make(tmp_path / "night", content)
    wanted = search_space.load_recorded(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, curve=curve(0.5, 0.7))
    write(tmp_path / "night", wanted, 1, {"width": 4}, curve=curve(0.5, 0.9))
    write(tmp_path / "night", wanted, 2, {"width": 16}, curve=curve(0.5, 0.6))
    found = analysis.read(tmp_path / "night")
    place, again = confirming.prepare(found)
    for number, point in enumerate(again.candidates):
        write(
            place, again, number, drawn=point, curve=curve(0.5, (0.6 if point["width"] == 4 else 0.7) + number / 1000)
        )
    known = evidence.read(analysis.read(tmp_path / "night"))
    assert known.confirmation.settled
    assert (known.best.name, known.better(found.trials[1])) == ("t0000", False)
    assert known.confirmation.bias(known.confirmation.leader)[0] == 0.9
    assert exported(found, capsys)[0] == "t0000"


def test_a_baseline_that_failed_once_is_best_where_no_finalist_is_confirmed(tmp_path):
    found = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (4, 3.6, 3.3, 3.0))
    journal = found.folder / "trials" / "t0000" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"status": "ok"', '"status": "nan"'))
    shown = evidence.read(analysis.read(found.folder))
    assert shown.confirmation.winner is None
    assert shown.is_baseline(shown.best)


def test_an_interval_over_orders_of_magnitude_is_no_result(tmp_path, capsys, plain):
    """Better at the end on every seed; when it was so is another question, to which six seeds give six answers."""
    wide = searched(
        tmp_path / "night", {64: (4, 3, 2, 1.5)},
        lambda seed: (0.3, 0.29, 0.28, 0.27) if seed % 2 else (30.0, 20.0, 10.0, 1.6),
    )  # fmt: skip
    text, block = told(wide, capsys)
    values = evidence.read(wide).confirmation.table()
    assert block["speedup"] is None
    assert f"speedup_unknown: {block['speedup_unknown']}\n" in text
    assert values["speedup"].isna().all()
    assert "not determined" in words(written(wide.folder))


def test_what_one_run_each_does_not_tell_apart_is_said_to_be_so(tmp_path, capsys, plain):
    """Half a per cent with a spread of several."""
    near = searched(tmp_path / "night", {64: (3.5, 2.5, 2.1, 1.99)}, repeats=(2.1,))
    outputs.write_all(near)
    _, block = told(near, capsys)
    assert block["best_trial"] == "t0002"
    assert block["speedup_unknown"] == "no significant difference from the baseline by one run each"
    page = words(written(near.folder))
    assert "t0002 is ahead: after 20 training seconds its FD (classifier) is 1.99 beside the 2 of the baseline" in page
    assert "no significant difference from the baseline by one run each." in page
    assert "The best trial beside the baseline Nothing to explain: no significant difference from the baseline" in page
    assert "% below" not in page
    assert "Why it" not in page
    assert "of the gain" not in page
    assert "saved in" not in page
    name, above = exported(near, capsys)
    assert name == "t0002"
    assert "# speed-up not determined: no significant difference from the baseline by one run each" in above


def test_without_a_known_noise_nothing_is_claimed(tmp_path, capsys, plain):
    one = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0), 32: (4, 3, 3, 3)}, repeats=())
    assert told(one, capsys)[1]["speedup_unknown"] == "one run each, and their noise is not known"
    page = words(written(one.folder))
    assert "t0001 is ahead" in page
    assert "Whether there is a difference to explain is not known: one run each" in page


def test_more_than_the_noise_is_told_with_its_reasons(tmp_path, capsys, plain):
    ahead = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)})
    block = evidence.read(ahead)
    assert block.speedup(block.best).mean == pytest.approx(20 / (5 + 5 * 0.6 / 1.1))
    page = words(written(ahead.folder))
    assert "t0002 is best" in page
    assert "50 % below the 2 of the baseline" in page
    assert "Why it is better" in page
    assert "saved in" not in page, "both have one rate"
    assert [row for row in column(ahead.folder / "report" / "trials.csv", "speedup") if row] == [
        str(block.speedup(block.best).mean)
    ]


def test_the_best_of_several_seeds_is_no_lucky_run_of_the_baseline(tmp_path, capsys, plain):
    wanted = make(tmp_path / "night", GRID)
    for number, point in enumerate(wanted.candidates):
        end = (2.1 if point["loader.batch_size"] == 64 else 2.0) * (1.1, 1.0, 0.9)[point["seed"]]
        write(tmp_path / "night", wanted, number, point, curve(4, 0.95 * end, 2.3, end))
    seeds = analysis.read(tmp_path / "night")
    _, block = told(seeds, capsys)
    assert (block["best_trial"], block["best_configuration"]) == ("t0000", {})
    assert block["speedup_unknown"] == "it is the baseline itself"
    assert [row["speedup"] for row in block["configurations"]] == [None, None]
    assert set(column(seeds.folder / "comparison.csv", "speedup")) == {""}
    assert "× " not in (seeds.folder / "comparison.md").read_text().replace("1.00×", "")
    page = words(written(seeds.folder))
    assert "No configuration is shown to be better than the baseline: FD (classifier) 2.00 ± 0.20 over 3 seeds." in page
    assert exported(seeds, capsys)[0] == "t0000"


def test_while_finalists_still_run_the_search_is_what_is_known(tmp_path):
    some = searched(tmp_path / "night", {64: (2.6, 1.5, 1.1, 1.0)}, lambda seed: (4, 2.6, 2.3, 2.0))
    for place in (some.folder / "confirm" / "trials").iterdir():
        if int(place.name[1:]) > 3:
            (place / "journal.jsonl").unlink()
    known = evidence.Evidence(some, confirmation.read(some))
    assert (known.confirmation.settled, known.best.name) == (False, "t0002")


def test_one_pair_of_runs_tells_what_its_noise_allows(night):
    known = evidence.read(analysis.read(searches.again(night)))
    assert known.best.name == "t0001"
    assert known.speedup(known.best).mean == pytest.approx(20 / (5 + 5 / 1.2))
    assert known.seconds_to_baseline(known.best) == pytest.approx(5 + 5 / 1.2)


def test_disturbed_results_may_be_worse_in_either_direction(tmp_path):
    wanted = make(tmp_path / "night")
    write(tmp_path / "night", wanted, 0, found={"disturbed": True})
    sentence = verdicts.disturbed_words(evidence.read(analysis.read(tmp_path / "night")))
    assert sentence.endswith("their speed, and so their results within the budget, may be worse for it.")


def test_first_sentence_of_a_search_without_a_result(tmp_path):
    wanted = make(tmp_path / "night", FILE | {"budget": {"per_trial": "2m", "trials": 8}})
    write(tmp_path / "night", wanted, 0, curve=((75.0, 1000, 4.0),), status=None)
    sentence = headline.headline(evidence.read(analysis.read(tmp_path / "night"))).replace("\N{NO-BREAK SPACE}", " ")
    assert sentence.endswith("t0000 farthest, at 1 min 15 s of 2 min.")
    write(tmp_path / "night", wanted, 0, curve=(), status="oom")
    sentence = headline.headline(evidence.read(analysis.read(tmp_path / "night")))
    assert sentence.endswith("the reasons are under Failures in the report.")


def test_the_smallest_difference_of_two_seeds_is_in_percent(tmp_path):
    content = {"workload": "digits", "budget": {"per_trial": "20s"}, "seeds": 2, "trials": [{"loader.batch_size": 64}]}
    wanted = make(tmp_path / "night", content)
    for number, (point, end) in enumerate(zip(wanted.candidates, (2.0, 2.2, 2.6, 1.9), strict=True)):
        write(tmp_path / "night", wanted, number, curve=((20.0, 4000, end),), drawn=point)
    last = verdicts.conclusions(comparison.compare(analysis.read(tmp_path / "night")))[-1].replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert re.fullmatch(r"A single difference would have to be about \d+ % to be significant.", last)
