"""Runs that have ended elsewhere are read from their logs."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import tunediff
from benchmarks import public_records
from tunediff import judging, verify
from tunediff.config import ConfigError
from tunediff.core.target import Target
from tunediff.finished import statistics
from tunediff.finished.runs import FinishedRun, RunReader

LOG = """import torch  # val_loss: not yet
step:0/20 val_loss:10.8258 train_time:0ms
step:10/20 train_loss:4.1
step:10/20 val_loss:3.5 train_time:1500ms
step:20/20 val_loss:3.2791 train_time:3010ms step_avg:150ms
"""


@pytest.fixture
def logs(tmp_path):
    for side, last in (("a", "3.2791"), ("b", "nan")):
        for seed in (1, 2):
            file = tmp_path / side / f"seed_{seed}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(LOG.replace("3.2791", last))
    return tmp_path


def test_a_folder_holds_a_log_a_run(logs):
    reader = RunReader(objective="val_loss", time=r"train_time:(\d+)ms")
    run = FinishedRun("seed_1.txt", 3.2791, 3.01, 3, 20.0)
    assert reader.read(str(logs / "a")) == [run, run._replace(name="seed_2.txt")]
    assert [one.name for one in reader.read(str(logs / "*" / "seed_1.txt"))] == [
        "a/seed_1.txt",
        "b/seed_1.txt",
    ]


def test_seconds_end_at_the_first_evaluation_that_meets_the_target(logs):
    until = Target.of("val_loss<=4", "--target")
    reader = RunReader(objective="val_loss", time=r"train_time:(\d+)ms", until=until)
    assert [run.seconds for run in reader.read(str(logs / "a"))] == [1.5, 1.5]
    missed = RunReader(objective="val_loss", time=r"train_time:(\d+)ms", until=Target("val_loss", "<", 1))
    assert missed.read(str(logs / "a"))[0].seconds is None


def test_seconds_may_stand_in_lines_of_their_own(tmp_path):
    for name in ("1.log", "2.log"):
        (tmp_path / name).write_text("elapsed 2.5 min\nloss: 0.4\nelapsed 5 min\nloss: 0.3\n")
    run = RunReader(objective="loss", time=r"elapsed ([\d.]+)").read(str(tmp_path))[0]
    assert (run.value, run.seconds, run.evaluations) == (0.3, 300.0, 2)


def test_a_table_has_a_row_a_run(tmp_path):
    (tmp_path / "runs.csv").write_text("Name,State,Runtime,val/loss\none,finished,60,0.31\ntwo,crashed,9,\n")
    reader = RunReader(objective="val/loss", time="Runtime")
    assert reader.read(str(tmp_path / "runs.csv")) == [FinishedRun("one", 0.31, 60.0, 1, None), FinishedRun("two")]
    rows = [{"run": "x", "eval": {"loss": 0.2}, "step": 5}, {"run": "y", "eval": {"loss": 0.3}}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_key = RunReader(objective="eval.loss").read(str(tmp_path / "runs.jsonl"))
    assert [(run.name, run.value, run.length) for run in by_key] == [("x", 0.2, 5.0), ("y", 0.3, None)]


def test_a_chart_of_wandb_has_a_column_a_run(tmp_path):
    head = '"Step","warm-1 - loss","warm-1 - loss__MIN","cold-2 - loss"\n'
    (tmp_path / "chart.csv").write_text(head + '"1","0.5","0.5","0.7"\n"2","0.4","0.4",""\n')
    found = RunReader(objective="loss").read(str(tmp_path / "chart.csv"))
    assert found == [FinishedRun("warm-1", 0.4, None, 2, 2.0), FinishedRun("cold-2", 0.7, None, 1, 1.0)]


def test_a_csv_in_a_folder_is_the_curve_of_a_run(tmp_path):
    for seed in (1, 2):
        (tmp_path / f"{seed}").mkdir()
        (tmp_path / f"{seed}" / "m.csv").write_text(f"time,global_step,acc\n1,10,0.5\n2,20,0.{seed}\n")
    found = RunReader(objective="acc", time="time", reduce="max").read(str(tmp_path))
    assert [(run.name, run.value, run.seconds, run.length) for run in found] == [
        ("1/m.csv", 0.5, 2.0, 20.0),
        ("2/m.csv", 0.5, 2.0, 20.0),
    ]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing: has no logs"):
        RunReader(objective="acc").read(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("1.log", "loss: 0,31\n", "1.log: loss: '0,31' is not allowed; allowed: a clear number"),
        ("1.csv", "run;loss\na;0,21\n", "1.csv: row 1: .* allowed: as many cells as there are columns"),
        ("run.log", "epoch 1\nacc: 0.3\n", r"run.log: has no value of loss.*acc[\s\S]*\| epoch 1"),
        ("2.log", "loss: 9 MB\nloss: 1 GB\n", "2.log: loss: 'MB and GB' is not allowed; allowed: one unit"),
    ],
)
def test_a_log_that_is_not_understood_is_refused(tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=why):
        RunReader(objective="loss").read(str(tmp_path))


def test_a_run_without_seconds_among_others_is_named(tmp_path):
    """It would count as longer than any."""
    (tmp_path / "1.log").write_text("loss: 0.4 in 9 s\n")
    (tmp_path / "2.jsonl").write_text('{"loss": 0.4, "in": 8}\n{"loss": 0.3, "in": "n/a"}\n')
    with pytest.raises(ConfigError, match="2.jsonl: row 2 has no seconds"):
        RunReader(objective="loss", time="in").read(str(tmp_path / "2*"))
    (tmp_path / "3.log").write_text("loss: 0.4\nloss: 0.3 in 9 s\n")
    until = Target.of("loss<=0.5", "--target")
    with pytest.raises(ConfigError, match="3.log has no seconds"):
        RunReader(objective="loss", time=r"in (\d+)", until=until).read(str(tmp_path / "*.log"))


# ---------------------------------------- tests of finished runs have the values of scipy, and err as often as they say
A = np.array([3.2821, 3.2802, 3.2799, 3.2811, 3.2805])
B = np.array([3.2790, 3.2815, 3.2771, 3.2802, 3.2786, 3.2795, 3.2799])
LEVEL, SERIES = 0.05, 3000
REST = [(5, 1.0), (8, 1.0), (8, 3.0), (15, 1.0), (15, 3.0)]


def test_welch_is_that_of_scipy():
    expected = stats.ttest_ind(B, A, equal_var=False)
    found = statistics.compare(A, B, LEVEL)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95))
    ratios, logs = statistics.compare(A, B, LEVEL, ratios=True), np.log
    expected = stats.ttest_ind(logs(B), logs(A), equal_var=False)
    assert ratios.p == pytest.approx(expected.pvalue)
    assert (ratios.low, ratios.high) == pytest.approx(np.exp(expected.confidence_interval(0.95)))


def test_pairs_are_tested_by_their_differences():
    expected = stats.ttest_rel(B[:5], A)
    found = statistics.compare(A, B[:5], LEVEL, paired=True)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95))


def test_a_margin_is_tested_as_shifted_values_are():
    expected = stats.ttest_ind(B - 0.001, A, equal_var=False, alternative="less")
    assert statistics.compare(A, B, 0.05, True, bound=0.001).p == pytest.approx(expected.pvalue)


def test_against_a_number_by_t_and_by_z():
    expected = stats.ttest_1samp(B, 3.28, alternative="less")
    assert statistics.against(B, 3.28, LEVEL).p == pytest.approx(expected.pvalue)
    z = (B.mean() - 3.28) / 0.0013 * math.sqrt(len(B))
    found = statistics.against(B, 3.28, LEVEL, sd=0.0013)
    assert (found.method, found.p) == ("z", pytest.approx(stats.norm.cdf(z)))


def test_misses_count_as_longer_than_any():
    b = np.array([5.0, 6.0, math.inf, math.inf])
    a = np.array([7.0, 8.0, 9.0, math.inf])
    assert statistics.compare(a, b, LEVEL).p == pytest.approx(32 / 35), "of all 70 ways to part them"
    assert statistics.compare(np.arange(1.0, 5.0), np.full(3, math.inf), LEVEL).p == pytest.approx(2 / 35)
    b[2] = 8.5
    assert statistics.compare(a, b, LEVEL, paired=True).p == pytest.approx(0.25)  # 3 of 3 signs
    assert statistics.against(b, 7.0, LEVEL).p == 1.0


def test_ranks_say_who_is_ahead_where_most_runs_of_both_sides_miss():
    a, b = np.array([5.0, 6.0, 7.0] + [math.inf] * 5), np.full(8, math.inf)
    assert not statistics.compare(a, b, LEVEL).ahead
    assert statistics.compare(b, a, LEVEL).ahead


def test_values_that_repeat_have_the_noise_of_their_rounding():
    a, b = np.full(3, 0.94), np.full(3, 0.95)
    assert statistics.compare(a, b, LEVEL).p > 0.01
    assert statistics.compare(a, a, LEVEL).p == 1.0


@pytest.mark.parametrize(
    ("count", "noise"),
    [(5, 3.0), *(pytest.param(*row, marks=pytest.mark.nightly) for row in REST)],
)
def test_equal_sets_differ_as_often_as_the_level_says(count, noise):
    draw = np.random.default_rng(count)
    found = [
        statistics.compare(
            draw.normal(10, 1, count), draw.normal(10, noise, count), LEVEL
        ).p < LEVEL
        for _ in range(SERIES)
    ]  # fmt: skip
    # plus 0.5 %, and what chance makes of 3,000 series
    assert np.mean(found) <= LEVEL + 0.005 + 2 * math.sqrt(LEVEL / SERIES)


def test_a_margin_that_is_not_met_is_shown_in_at_most_the_level():
    draw = np.random.default_rng(1)
    found = [
        statistics.compare(
            draw.normal(10, 1, 8), draw.normal(10.5, 1, 8), LEVEL, True, bound=0.5
        ).p < LEVEL
        for _ in range(SERIES)
    ]  # fmt: skip
    assert np.mean(found) <= LEVEL + 0.005 + 2 * math.sqrt(LEVEL / SERIES)


def test_power_is_that_of_the_noncentral_t():
    # a mean 0.0015 below a target at sd 0.0013, tested at 1 %: simulated in public, 29, 62, 91 %
    for count, power in ((5, 0.29), (8, 0.62), (13, 0.91)):
        found = statistics.power_of(0.0015, 0.0013 / math.sqrt(count), count - 1, 0.01, True)
        assert found == pytest.approx(power, abs=0.005)
    assert statistics.runs_needed(0.0015, 0.0013, 0.01, True, sets=1) == 11
    assert statistics.runs_needed(1e-9, 1.0, 0.05, False) is None
    least = statistics.detectable(1.0, 14.0, 0.05, False)
    assert statistics.power_of(least, 1.0, 14.0, 0.05, False) == pytest.approx(0.8)


def test_tests_after_each_run_reach_a_p_value_more_often():
    assert statistics.p_if_repeated(0.01, [3], True) == pytest.approx(0.01, abs=0.002)
    found = [statistics.p_if_repeated(0.01, [count], True) for count in (10, 20, 40)]
    assert found == pytest.approx([0.039, 0.056, 0.073], abs=0.004)
    assert statistics.p_if_repeated(0.05, [12, 12], False) > 0.1
    by_blocks = statistics.p_if_repeated(0.01, [400], True)  # as many series as fit into memory
    assert 0.1 < by_blocks < 0.2


def test_ranks_have_intervals():
    draw = np.random.default_rng(0)
    sets = [draw.normal(mean, 1, 20) for mean in (0.0, 0.1, 9.0)]
    places, ahead = zip(*statistics.ranks(sets, np.mean), strict=True)
    assert [place[1:] for place in places] == [[1, 2], [1, 2], [3, 3]]
    assert (places[2][0], ahead[2]) == (3, None)


# ------------------ `tunediff judge`: sets of finished runs, from their logs to a verdict that others can check
@pytest.fixture
def sets_of_logs(tmp_path, at_tmp_path):
    """Runs that are a tenth faster and equally good, and some that are worse."""
    draw = random.Random(0)
    for side, loss, seconds in (("base", 3.277, 100.0), ("new", 3.277, 90.0), ("bad", 3.4, 90.0)):
        for seed in range(8):
            file = tmp_path / side / f"seed{seed}.log"
            file.parent.mkdir(exist_ok=True)
            last, took_s = loss + draw.gauss(0, 0.001), seconds + draw.gauss(0, 0.2)
            file.write_text(
                f"step:5/10 val_loss:3.5 train_time:9ms\nstep:10/10 val_loss:{last:.4f} train_time:{took_s * 1000:.0f}ms\n"
            )
    return ["--objective", "val_loss", "--time", r"train_time:(\d+)ms"]


def printed(capsys, *words):
    code = judging.main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_faster_runs_that_are_good_enough_are_better(sets_of_logs, capsys):
    rules = ["--better", "time", "--target", "val_loss<=3.28", "--margin", "0.003", "--out", "proof"]
    code, found = printed(capsys, "base", "new", *sets_of_logs, *rules)
    assert (code, found["verdict"], found["kind"]) == (0, "better", "finished")
    new = found["finished"]["sets"][1]
    assert {"no_worse", "meets_target"} <= {name for name, test in new["tests"].items() if test["shown"]}
    assert found["candidates"][1]["name"] == "new"
    assert found["candidates"][1]["effect"]["value"] == pytest.approx(0.9, abs=0.01)

    assert verify.main(["proof"]) == 0
    file = Path("proof/runs/1.jsonl")
    file.write_text(file.read_text().replace('"seconds": 9', '"seconds": 8', 1))
    assert verify.main(["proof"]) == 1


def test_faster_runs_that_are_not_shown_to_be_good_enough_are_not_better(sets_of_logs, capsys):
    code, found = printed(capsys, "base", "bad", *sets_of_logs, "--better", "time", "--margin", "0.003")
    assert (code, found["verdict"]) == (10, "quality_not_shown")
    assert "not shown to be no worse by more than 0.003: seconds" in found["summary"][0]


def test_several_sets_are_ranked_and_corrected(sets_of_logs, capsys):
    code, found = printed(capsys, "base", "new", "bad", *sets_of_logs)
    verdicts = [one["verdict"] for one in found["candidates"]]
    assert (code, verdicts) == (10, ["baseline", "no_difference", "worse"])
    assert found["finished"]["sets"][2]["rank"] == [3, 3, 3]
    effects = [one["effect"] for one in found["candidates"][1:]]
    assert effects[1]["p_holm"] == pytest.approx(2 * effects[1]["p"])


def test_runs_are_paired_by_their_names(sets_of_logs, capsys):
    _, found = printed(capsys, "base", "new", *sets_of_logs, "--paired-by", r"seed(\d+)")
    new = found["finished"]["sets"][1]
    assert (new["tests"]["difference"]["method"], new["counted"]) == ("paired_t", 8)


def test_a_run_that_diverged_to_a_number_is_named_and_worse_than_any(sets_of_logs, capsys):
    Path("new/seed3.log").write_text("step:10/10 val_loss:3000 train_time:9ms\n")
    _, found = printed(capsys, "base", "new", *sets_of_logs)
    new = found["finished"]["sets"][1]
    assert (new["irregular"], new["tests"]["difference"]["method"]) == ({"diverged": ["seed3.log"]}, "rank_sum")


def test_misses_of_the_target_are_counted_and_ranked(sets_of_logs, capsys):
    words = [*sets_of_logs, "--outcome", "time", "--better", "time", "--target", "val_loss<=3.3"]
    code, found = printed(capsys, "base", "bad", *words)
    assert (code, found["verdict"]) == (11, "worse")
    bad = found["finished"]["sets"][1]
    assert (len(bad["irregular"]["missed"]), bad["tests"]["time"]["method"]) == (8, "rank_sum")
    assert "8 and 8 runs" in found["summary"][0]
    assert "8 runs missed the target: seed0.log, seed1.log, seed2.log and 5 more" in "".join(found["summary"])


def test_one_set_is_judged_against_a_number(sets_of_logs, capsys):
    code, found = printed(capsys, "new", *sets_of_logs, "--target", "val_loss<=3.2", "--sd", "0.0013")
    assert (code, found["verdict"]) == (10, "quality_not_shown")
    _, found = printed(capsys, "new", *sets_of_logs, "--target", "val_loss<=3.28", "--sd", "0.0013")
    target = found["finished"]["sets"][0]["tests"]["meets_target"]
    assert (target["method"], target["shown"]) == ("z", True)
    # of a z-test: (z of 95 % + z of 80 %) standard errors
    assert target["resolution"] == pytest.approx((1.6449 + 0.8416) * 0.0013 / 8**0.5, rel=1e-4)
    assert found["finished"]["sets"][0]["p_if_repeated"] is not None


def test_the_call_has_the_result_of_the_command(sets_of_logs, capsys):
    Path("bad/seed3.log").write_text("step:5/10 val_loss:3.5 train_time:9ms\n")  # is cut
    _, found = printed(capsys, "base", "bad", *sets_of_logs)
    assert "bad: 1 run ended earlier than most, as a cut log does: seed3.log." in found["summary"]
    result = tunediff.judge("base", "bad", objective="val_loss", time=sets_of_logs[3])
    assert (str(result.verdict), result.candidates[1].values) == ("worse", found["candidates"][1]["values"])


@pytest.mark.parametrize("words", [
    ["base", "--objective", "val_loss"],
    ["base", "new", "--objective", "accuracy"],
    ["base", "new", "--objective", "val_loss", "--better", "time"],
    ["base", "new", "--objective", "val_loss", "--sd", "1"],
    ["base", "new", "--objective", "val_loss", "--better", "time", "--time", r"train_time:(\d+)ms"],
    ["base", "new", "--objective", "val_loss", "--time", r"seconds:(\d+)"],
    ["nothing", "new", "--objective", "val_loss"],
    ["base", "new", "--objective", "val_loss", "--paired-by", "("],
])  # fmt: skip
def test_what_cannot_be_judged_is_refused(sets_of_logs, capsys, words):
    assert judging.main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


# ----------- the page of public records says what its commands print, and its proof folders are what their numbers give
PAGE = (Path(__file__).parents[2] / "docs" / "results" / "2026-12-public-records.md").read_text().splitlines()


@pytest.mark.parametrize("command", ["track1", "rule", "track3", "algoperf"])
def test_each_line_that_a_command_prints_stands_on_the_page(capsys, command):
    public_records.main([command])
    assert [line for line in capsys.readouterr().out.splitlines() if line not in PAGE] == []


def test_its_proof_folders_are_verified(capsys):
    folders = sorted(map(str, (public_records.PARSED / "proofs").iterdir()))
    assert len(folders) == len(public_records.TRACK_1) + 1
    assert verify.main([*folders, "--json"]) == 0
    for record in public_records.TRACK_1:
        result = public_records.PARSED / "proofs" / record / "result.json"
        effect = json.loads(result.read_text())["candidates"][1]["effect"]
        row = next(line for line in PAGE if line.startswith(f"| {record} "))
        assert f"| {effect['value']:.4f} (" in row
