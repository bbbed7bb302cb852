"""The machine in the verdict: what it is, how it is between the pairs, and that a drift makes blocks."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.comparisons import made
from tests.json_schemas import validate
from tunediff.analysis import drift, pairs
from tunediff.analysis.sequential import Rules, look
from tunediff.judge import machine_watch
from tunediff.judge.machine_watch import MachineWatch
from tunediff.report import pair_summary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return made({"A": [2.0, 2.2, 1.9, 2.1, 2.0, 2.1], "B": [1.0, 1.15, 0.9, 1.2, 1.1, 1.25]})


def test_machine_is_read_between_the_pairs_and_once_for_each(folder):
    watch = MachineWatch(folder)
    for count in (0, 1, 1, 2):
        watch.note(count)
    readings = drift.read(folder).readings
    assert [reading["pairs"] for reading in readings] == [0, 1, 2]
    assert all(reading[part] > 0 for reading in readings for part in drift.PARTS)
    assert readings[0]["facts"]["model"]
    assert "facts" not in readings[1]
    over = MachineWatch(folder, 2)
    over.note(2)
    assert len(drift.read(folder).readings) == 3, "a comparison that is over is only shown again"


def test_what_a_machine_does_not_tell_is_null(folder, tmp_path):
    facts = machine_watch.facts(dmi=tmp_path / "nothing")
    assert {"model", "serial_digest", "driver", "kernel"} <= facts.keys()
    (tmp_path / "product_serial").write_text("SN-1234\n")
    named = machine_watch.facts(dmi=tmp_path)["serial_digest"]
    assert named != facts["serial_digest"]
    assert "1234" not in named


def test_a_drift_is_named_and_its_pairs_are_blocks(folder):
    lines = [{"pairs": pairs, "product_s": 0.01 * (1.1 if pairs > 2 else 1), "copy_s": 0.002, "loader_s": 0.003}
             for pairs in range(7)]  # fmt: skip
    Path(folder / drift.FILE).write_text("\n".join(map(json.dumps, lines)))
    result = pair_summary.as_json(folder)
    validate(result, "compare-output")
    assert (result["machine"]["blocks"], result["machine"]["drift"]) == ([3, 3], pytest.approx(0.1))
    assert result["machine"]["clock_mhz"] == []
    text = "\n".join(pair_summary.lines(folder))
    assert "The machine drifted: its reference became 10% slower; the pairs before and after are blocks" in text
    assert pairs.read(folder).look.differences[0].sd < 0.2


def test_noisy_readings_are_no_drift():
    """Those of short runs take 50 ms."""
    noisy = [{"pairs": pairs, "product_s": seconds, "copy_s": 0.002, "loader_s": 0.003}
             for pairs, seconds in enumerate([0.010, 0.012, 0.013, 0.009, 0.0095, 0.0125, 0.0128])]  # fmt: skip
    assert drift.of(noisy) == (noisy, [0] * 6, 0.0)
    later = [{**reading, "pairs": 6 + n, "product_s": 0.03} for n, reading in enumerate(noisy[:3], 1)]
    assert drift.of([*noisy, *later]).blocks == [0] * 7 + [1] * 2


def test_blocks_are_a_two_way_layout():
    """Interval by statsmodels' formula `difference ~ 1 + C(block)`, sum-coded: residuals within blocks, n − 2 degrees."""
    off = np.array([0.30, 0.33, 0.28, -0.10, -0.06, -0.09])  # the machine's drift favours one side by 0.4
    blocks = [0, 0, 0, 1, 1, 1]
    fixed = Rules(0.05, fixed=True)
    with_blocks = look(np.stack([np.zeros(6), off]), 6, ratios=False, rules=fixed, blocks=blocks).differences[0]
    residuals = np.concatenate([off[:3] - off[:3].mean(), off[3:] - off[3:].mean()])
    error = np.sqrt((residuals**2).sum() / 4 / 6)
    half = stats.t.ppf(0.975, 4) * error
    assert (with_blocks.low, with_blocks.high) == pytest.approx((off.mean() - half, off.mean() + half))
    without = look(np.stack([np.zeros(6), off]), 6, ratios=False, rules=fixed).differences[0]
    assert with_blocks.resolution < 0.2 * without.resolution


def test_neighbours_are_named_where_they_disturb():
    said = drift.neighbours_sentence({"product_s": 0.01, "copy_s": 0.41, "loader_s": 0.08})
    assert said.startswith("Runs at the same time slow each other: copy 41%, loader 8%. ")
    assert drift.neighbours_sentence({"product_s": 0.05, "copy_s": 0.3, "loader_s": -0.1}) == ""
    assert drift.neighbours_sentence(None) == ""
