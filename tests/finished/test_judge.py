"""`tunediff judge`: sets of finished runs, from their logs to a verdict that others can check."""

import json
import random
from pathlib import Path

import pytest

import tunediff
from benchmarks import public_records
from tunediff import judging, verify


@pytest.fixture
def logs(tmp_path, at_tmp_path):
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


def test_faster_runs_that_are_good_enough_are_better(logs, capsys):
    rules = ["--better", "time", "--target", "val_loss<=3.28", "--margin", "0.003", "--out", "proof"]
    code, found = printed(capsys, "base", "new", *logs, *rules)
    assert (code, found["verdict"], found["kind"]) == (0, "better", "finished")
    new = found["finished"]["sets"][1]
    assert {"no_worse", "meets_target"} <= {name for name, test in new["tests"].items() if test["shown"]}
    assert found["candidates"][1]["name"] == "new"
    assert found["candidates"][1]["effect"]["value"] == pytest.approx(0.9, abs=0.01)

    assert verify.main(["proof"]) == 0
    file = Path("proof/runs/1.jsonl")
    file.write_text(file.read_text().replace('"seconds": 9', '"seconds": 8', 1))
    assert verify.main(["proof"]) == 1


def test_faster_runs_that_are_not_shown_to_be_good_enough_are_not_better(logs, capsys):
    code, found = printed(capsys, "base", "bad", *logs, "--better", "time", "--margin", "0.003")
    assert (code, found["verdict"]) == (10, "quality_not_shown")
    assert "not shown to be no worse by more than 0.003: seconds" in found["summary"][0]


def test_several_sets_are_ranked_and_corrected(logs, capsys):
    code, found = printed(capsys, "base", "new", "bad", *logs)
    verdicts = [one["verdict"] for one in found["candidates"]]
    assert (code, verdicts) == (10, ["baseline", "no_difference", "worse"])
    assert found["finished"]["sets"][2]["rank"] == [3, 3, 3]
    effects = [one["effect"] for one in found["candidates"][1:]]
    assert effects[1]["p_holm"] == pytest.approx(2 * effects[1]["p"])


def test_runs_are_paired_by_their_names(logs, capsys):
    _, found = printed(capsys, "base", "new", *logs, "--paired-by", r"seed(\d+)")
    new = found["finished"]["sets"][1]
    assert (new["tests"]["difference"]["method"], new["counted"]) == ("paired_t", 8)


def test_misses_of_the_target_are_counted_and_ranked(logs, capsys):
    words = [*logs, "--outcome", "time", "--better", "time", "--target", "val_loss<=3.3"]
    code, found = printed(capsys, "base", "bad", *words)
    assert (code, found["verdict"]) == (11, "worse")
    bad = found["finished"]["sets"][1]
    assert (len(bad["irregular"]["missed"]), bad["tests"]["time"]["method"]) == (8, "rank_sum")
    assert "8 and 8 runs" in found["summary"][0]
    assert "8 runs missed the target: seed0.log, seed1.log, seed2.log and 5 more" in "".join(found["summary"])


def test_one_set_is_judged_against_a_number(logs, capsys):
    _, found = printed(capsys, "new", *logs, "--target", "val_loss<=3.28", "--sd", "0.0013")
    target = found["finished"]["sets"][0]["tests"]["meets_target"]
    assert (target["method"], target["shown"]) == ("z", True)
    # of a z-test: (z of 95 % + z of 80 %) standard errors
    assert target["resolution"] == pytest.approx((1.6449 + 0.8416) * 0.0013 / 8**0.5, rel=1e-4)
    assert found["finished"]["sets"][0]["p_if_repeated"] is not None


def test_the_call_has_the_result_of_the_command(logs, capsys):
    Path("bad/seed3.log").write_text("step:5/10 val_loss:3.5 train_time:9ms\n")  # is cut
    _, found = printed(capsys, "base", "bad", *logs)
    assert "bad: 1 run ended earlier than most, as a cut log does: seed3.log." in found["summary"]
    result = tunediff.judge("base", "bad", objective="val_loss", time=logs[3])
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
def test_what_cannot_be_judged_is_refused(logs, capsys, words):
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
    assert verify.main(folders) == 0
    for record in public_records.TRACK_1:
        result = public_records.PARSED / "proofs" / record / "result.json"
        effect = json.loads(result.read_text())["candidates"][1]["effect"]
        row = next(line for line in PAGE if line.startswith(f"| {record} "))
        assert f"| {effect['value']:.4f} (" in row
