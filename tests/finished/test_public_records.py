"""The page of public records says what its commands print, and its proof folders are what their numbers give."""

import json
from pathlib import Path

import pytest

from benchmarks import public_records
from tunediff import verify

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


def test_the_official_order_of_algoperf_is_found():
    official = [
        "shampoo_submission", "schedule_free_adamw", "generalized_adam", "cyclic_lr", "nadamp", "baseline", "amos",
        "caspr_adaptive", "lawa_queue", "lawa_ema", "schedule_free_prodigy",
    ]  # fmt: skip
    scores = public_records.scores(public_records.study_times())
    assert sorted(scores, key=lambda name: -scores[name]) == official
    assert round(scores["shampoo_submission"], 3) == 0.778
