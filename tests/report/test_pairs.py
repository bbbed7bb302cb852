"""What pairs of runs say: the verdict with its exit code, the words, the page. No cluster."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from tests import searches
from tests.comparisons import BETTER, CLOSE, PLAIN, made, told
from tests.json_schemas import validate
from tests.report.pages import Elements, rows, words
from tunediff import compare
from tunediff.analysis import pairs
from tunediff.api import compare_run
from tunediff.api.comparison import PairedComparison
from tunediff.core import text
from tunediff.report import pairs as report


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Where results and users' files lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


# ------------------------------------------------------------------------------------------------------------- verdict
UP = {"a": "digits_classifier", "b": ("digits_classifier", "loader.batch_size=64")}
CASES = {
    "falls, better": (BETTER, {}, "better", 0, "decided"),
    "falls, worse": ({"A": BETTER["B"], "B": BETTER["A"]}, {}, "worse", 11, "decided"),
    "falls, not": (CLOSE, {}, "no significant difference", 10, "hopeless"),
    "falls below 0": ({"A": [0.1, -0.1, 0.0], "B": [-9.0, -9.1, -9.05]}, {}, "better", 0, "decided"),
    "rises, better": ({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, UP, "better", 0, "decided"),
    "rises, worse": ({"A": [0.9, 0.915, 0.888], "B": [0.8, 0.81, 0.79]}, UP, "worse", 11, "decided"),
    "equal": ({"A": [2.0, 2.2, 1.9], "B": [2.001, 2.202, 1.9015]}, {"within": 0.02}, "no significant difference", 10, "equal"),
    "spent": (
        {"A": [2.0, 2.0, 2.0, 2.0], "B": [1.7, 2.0, 1.6, 1.9]}, {"pairs": 4}, "no significant difference", 10, "spent",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "options", "verdict", "code", "state"), CASES.values(), ids=CASES)
def test_the_verdict_and_its_exit_code(capsys, values, options, verdict, code, state):
    made(values, **options)
    assert told(capsys, "--json")[0] == code
    found = pairs.read(Path("ray_results/x").absolute())
    assert (found.verdict, found.look.state) == (verdict, state)
    assert found.over


@pytest.mark.parametrize(("options", "others"), [({}, ["B", "A"]), (UP, ["A", "B"])], ids=["falls", "rises"])
def test_nobody_is_ahead_in_a_pair_of_equal_values(options, others):
    found = pairs.read(made({"A": [0.9, 0.9, 0.8], "B": [0.9, 0.8, 0.9]}, **options))
    ahead = [row[3] for row in report._rows(found, report.frame(found))]
    assert ahead == ["ahead", "–", *others]


@pytest.mark.parametrize(("side", "name"), [("A", "A (digits)"), ("B", "B (digits loader.batch_size=64)")])
def test_a_run_that_failed(capsys, side, name):
    made({"A": [2.0, 2.1], "B": [1.0, 1.1]}, statuses={(side, 2): "oom"})
    code, out = told(capsys)
    assert code == 12
    assert "verdict: failed" in out
    assert f"{name} failed: oom: needs 9 GiB" in out
    assert json.loads(told(capsys, "--json")[1])["failure"] == f"{name} failed: oom: needs 9 GiB"
    page = words(Path("ray_results/x/report.html").read_text())
    assert f"{name} failed: oom: needs 9 GiB" in page
    assert "oom" in page[page.index("ahead") :]  # in the place of its value


def test_runs_during_which_others_used_the_machine(capsys):
    folder = made(BETTER)
    assert "others used the machine" not in told(capsys)[1]
    journal = folder / "trials" / "t0001" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"index": 4,', '"index": 4, "disturbed": true,'))
    sentence = "During 1 of 6 runs others used the machine: their speed, and so their results within the budget, may"
    assert sentence in told(capsys)[1]
    assert json.loads(told(capsys, "--json")[1])["disturbed_runs"] == 1


@pytest.mark.parametrize(
    ("b_s", "options", "told_so"), [(1.0, {}, True), (0.7, {}, False), (9.0, {"setup": "charged"}, False)]
)
def test_setup_seconds_of_both_sides_and_a_sentence_where_they_differ(capsys, b_s, options, told_so):
    """By over 2 % of the budget of 20 s, if it does not count them."""
    folder = made(BETTER, **options)
    for number in range(6):
        journal = folder / "trials" / f"t{number:04}" / "journal.jsonl"
        setup_s = 0.4 if number % 2 == 0 else b_s
        journal.write_text(
            journal.read_text().replace('"index": 4,', f'"index": 4, "before_first_batch_s": {setup_s},')
        )
    said = json.loads(told(capsys, "--json")[1])
    assert (said["a_setup_s"], said["b_setup_s"]) == (0.4, b_s)
    assert ("--setup charged" in told(capsys)[1]) == told_so
    assert [(row["a_setup_s"], row["b_setup_s"]) for row in rows(folder / "report/pairs.csv")] == [
        ("0.4", str(b_s))
    ] * 3
    assert "A: setup (s)" in words((folder / "report.html").read_text())


def test_a_share_of_what_falls_below_0(capsys):
    """2 % of about 5 is 0.1 there, in units."""
    values = {"A": [-5.0, -5.2, -4.9], "B": [-5.001, -5.199, -4.9005]}
    assert pairs.read(made(values, within=0.02)).look.state == "equal"
    assert pairs.read(made(values, within=2e-4)).look.state != "equal"


# -------------------------------------------------------------------------------------------------------------- output
def test_the_result_as_json(capsys):
    made(BETTER)
    code, out = told(capsys, "--json")
    said = json.loads(out)
    ratio = scipy.stats.gmean(np.array(BETTER["B"]) / np.array(BETTER["A"]))
    assert (code, said["verdict"], said["pairs"], said["runs"]) == (0, "better", 3, 6)
    assert said["ratio"] == pytest.approx(ratio)
    assert said["ratio_low"] < ratio < said["ratio_high"]
    assert (said["a"], said["b"]) == ("digits", "digits loader.batch_size=64")
    assert (said["metric"], said["objective"], said["direction"]) == ("FD (classifier)", "frechet", "min")
    assert said["a_values"] == BETTER["A"]
    assert (said["a_value"], said["a_sd"]) == (
        pytest.approx(np.mean(BETTER["A"])),
        pytest.approx(np.std(BETTER["A"], ddof=1)),
    )
    assert (said["changed"], said["failure"], said["difference"]) == ({"loader.batch_size": 64}, None, None)
    assert (said["pairs_at_most"], said["rough"]) == (12, True)
    assert said["training_s"] == 120
    assert said["stopped"] == "decided"
    assert Path(said["report"]).is_file()
    assert said["one_run_each_tells"] is None


def test_the_result_in_words(capsys):
    made(BETTER)
    out = told(capsys)[1].replace("\N{NO-BREAK SPACE}", " ")
    assert "verdict: better" in out
    said = out.splitlines()[-2:]
    assert said[0].startswith(
        "B (digits loader.batch_size=64) is better than A (digits) by more than the noise of 3 pairs of runs: "
        "FD (classifier) 0.499 ("
    )
    assert said[1] == "B was ahead in 3 of 3 pairs."


def test_the_words_of_a_difference_that_is_not_told(capsys):
    made(CLOSE)
    said = told(capsys)[1].replace("\N{NO-BREAK SPACE}", " ").splitlines()[-3:]
    assert said[0].startswith(
        "B (digits loader.batch_size=64) shows no significant difference from A (digits) by 4 pairs of runs: "
    )
    assert said[1].endswith("; up to 12 pairs would most likely show no significant difference either.")
    assert said[2].endswith("B was ahead in 1 of 4 pairs.")


def test_an_interval_over_orders_of_magnitude_is_no_result(capsys):
    made({"A": [2.0, 2.2, 1.9, 2.1], "B": [0.1, 30.0, 0.2, 9.0]}, pairs=4)
    out = told(capsys)[1]
    assert "4 pairs of runs: the difference in FD (classifier) is not determined." in out
    assert "ratio" not in out
    found = json.loads(told(capsys, "--json")[1])
    assert [found[name] for name in ("ratio", "ratio_low", "ratio_high")] == [None] * 3


def test_differences_of_an_accuracy_are_in_its_units(capsys):
    made(CASES["rises, better"][0], **UP)
    out = told(capsys)[1]
    assert "difference: 0.101" in out
    assert "accuracy +0.101 (" in out
    assert "compared with A's" in out


@pytest.mark.parametrize("name", CASES)
def test_compare_json_has_the_documented_keys_and_types_for_every_outcome(capsys, name):
    values, options, *_ = CASES[name]
    made(values, **options)
    validate(json.loads(told(capsys, "--json")[1]), "compare-output")


def test_compare_json_of_a_failure_has_all_keys(capsys):
    made({"A": [2.0], "B": [1.0]}, statuses={("B", 1): "oom"})
    block = json.loads(told(capsys, "--json")[1])
    validate(block, "compare-output")
    assert (block["verdict"], block["b_value"], block["b_values"], block["resolution"]) == ("failed", None, [], None)


def test_compare_calls_what_few_pairs_tell_rough(capsys):
    """With 4 pairs the noise is known to a factor of two or three; with 12 it is not called rough."""
    made(CLOSE)
    out = told(capsys)[1].replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"^resolution: [\d.]+ \(a rough estimate\)$", out, re.M)
    assert "one_run_each_tells" not in out
    assert "one run each" not in out
    assert re.search(r"They can detect differences of about [\d.]+ % \(a rough estimate, from 4 pairs\); ", out)
    noise = np.random.default_rng(0).normal(size=(2, 12)) / 50
    many = pairs.read(made({"A": list(2 + noise[0]), "B": list(2 + noise[1])}, folder=Path("ray_results/y")))
    assert (many.look.rounds, many.rough) == (12, False)
    assert "rough" not in " ".join(report.sentences(many))


@pytest.mark.parametrize("most", [12, 100])
@pytest.mark.parametrize("rounds", range(1, 13))
def test_one_run_each_never_tells_more_than_several_pairs(most, rounds):
    """Student's t with the deviation of a single pair, as soon as that is known."""
    noise = np.random.default_rng(1).normal(size=(2, rounds)) / 50
    a, b = 2 + noise
    found = pairs.read(made({"A": list(a), "B": list(b)}, pairs=most))
    assert found.rough == (rounds < 9)
    assert (found.one_run_tells is None) == found.rough or most == 100
    if found.one_run_tells is not None:
        assert found.look.differences[0].resolution < found.one_run_tells
        sd = np.log(b / a).std(ddof=1)
        assert found.one_run_tells == pytest.approx(math.expm1(scipy.stats.t.ppf(0.975, rounds - 1) * sd))
        single = f"With one run each, only differences above {report._size(found, found.one_run_tells)} are significant"
        assert not found.over or report.sentences(found)[-1].startswith(f"{single}; B was ahead in ")
        printed = "\n".join(compare_run.lines(found.folder))
        assert f"one_run_each_tells: {text.number(found.one_run_tells)}\n" in printed


def test_one_pair_tells_nothing():
    found = pairs.read(made({"A": [2.0], "B": [1.0]}))
    assert report.sentences(found) == ["1 pair so far: too few for a test."]
    assert report.so_far(found) == "after 1 pair: FD (classifier) 0.500 times A's: too few for a test"
    assert (found.over, found.verdict, found.one_run_tells) == (False, None, None)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_open_comparison_has_no_verdict(monkeypatch, count):
    """Neither in Python nor in the JSON that `result` of the MCP server returns, nor on the page."""
    values = {"A": [2.0, 2.4, 1.9][:count], "B": [1.7, 1.8, 1.85][:count]}
    folder = made(values)
    comparison = PairedComparison(folder)
    block = comparison.json()
    validate(block, "compare-output")
    assert (comparison.verdict.verdict, block["verdict"], block["stopped"]) == (None, None, "open")
    assert "significant" not in words(comparison.report().read_text())


def test_the_page(capsys):
    folder = made(BETTER)
    told(capsys)
    text = (folder / "report.html").read_text()
    page = words(text)
    assert "B (digits loader.batch_size=64) is better than A (digits)" in page
    assert "loader.batch_size 128 64" in page
    assert "20s of training per run, judged by FD (classifier); slow one" in page
    for tag, given in Elements(text).found:
        if tag == "a" and not given["href"].startswith("#"):
            assert (folder / given["href"]).is_file(), given["href"]
    table = rows(folder / "report" / "pairs.csv")
    assert [(row["pair"], row["a_seed"], row["b_seed"], float(row["b_frechet"])) for row in table] == [
        ("1", "500", "500", 1.0), ("2", "501", "501", 1.08), ("3", "502", "502", 0.96),
    ]  # fmt: skip


def test_the_figure_has_plain_numbers(capsys, rendered):
    folder = made(BETTER)
    told(capsys)
    image = next(given["src"] for tag, given in Elements((folder / "report.html").read_text()).found if tag == "img")
    drawn = base64.b64decode(image.partition(",")[2]).decode()
    assert "FD (classifier), lower is better" in drawn
    assert "mathdefault" not in drawn


def test_two_files_are_named_as_one_names_them(capsys):
    Path("mine.py").write_text(PLAIN)
    Path("new.py").write_text(PLAIN.replace("AdamW", "SGD"))
    folder = made({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, a="mine.py", b=("new.py", "lr=0.05"))
    told(capsys)
    assert "workload mine.py new.py lr 0.01 0.05" in words((folder / "report.html").read_text())


def test_the_page_shows_changed_lines_and_nothing_that_is_markup(capsys):
    for name, source in (("old", PLAIN), ("new", PLAIN.replace("AdamW", "SGD") + "# <b>bold</b>\n")):
        Path(name).mkdir()
        Path(name, "mine.py").write_text(source)
    folder = made({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, a="old/mine.py", b=("new/mine.py", "lr=0.05"))
    told(capsys)
    page = (folder / "report.html").read_text()
    assert "<b>bold" not in page
    said = words(page)
    assert "+ optimizer = torch.optim.SGD(" in said
    assert "lr 0.01 0.05" in said


def test_searches_and_comparisons_share_a_folder(capsys):
    searches.night(Path("ray_results/night").absolute())
    made(BETTER)
    assert compare.main(["--resume", "night"]) == 2
    assert "night: no such comparison in" in (error := capsys.readouterr().err)
    assert error.endswith("there are: x\n")


# ------------------------------------------------------------------------------------------------------------- comment
def test_a_comment_has_verdict_reason_and_every_pair(capsys):
    made(BETTER)
    assert told(capsys, "--comment", "comment.md")[0] == 0
    comment = Path("comment.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    first, *_ = comment.splitlines()
    assert first.startswith("**tunediff: better.** B (digits loader.batch_size=64) is better than A (digits) by more")
    assert "| 1    | 2                  | 1                  | B     |" in comment
    assert comment.count("\n| ") == 4
    assert comment.endswith("20s of training per run, judged by FD (classifier); slow one")


def test_a_comment_that_cannot_be_written_is_refused_first(capsys):
    made(BETTER)
    Path("taken").write_text("")
    assert compare.main(["--resume", "x", "--comment", "taken/comment.md"]) == 2
    assert capsys.readouterr().err.startswith("error: --comment: taken/comment.md cannot be written")
