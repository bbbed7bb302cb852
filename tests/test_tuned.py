"""Samplers tuned alike and compared by images: what is run, what is not run twice, and what is made of it."""

import argparse
import math

import pandas as pd
import pytest

from benchmarks import tuned

HEAD = ",".join(tuned.COLUMNS) + "\n"
SMALL = (
    "model.channels=8 model.multipliers=[1] model.attention=[] model.norm_groups=4 process.steps=20 evaluation.steps=2 "
    "evaluation.images=16 evaluation.validation_images=8 evaluation.batch_size=16"
).split()


def test_a_method_is_tuned_its_best_runs_again_and_nothing_twice(tmp_path, monkeypatch, capsys):
    ran = []
    train = tuned.train

    def counted(wanted, values, images, seed, points, device):
        ran.append((wanted.baseline.timesteps.name, images, seed, points, values["optimizer.lr"]))
        return train(wanted, values, images, seed, points, device)

    monkeypatch.setattr(tuned, "train", counted)
    table = tmp_path / "t.csv"
    args = argparse.Namespace(
        measure="digits_tune", out=table, methods="uniform,wiener", images=128, trials=2, seeds=1, times=[1, 2],
        first_seed=0, device="cpu", words=SMALL, points=3,
    )  # fmt: skip
    tuned.measure(args)
    assert [(name, images, seed, points) for name, images, seed, points, _ in ran] == [
        *[("uniform", 128, 0, 1)] * 2, *[("wiener", 128, 0, 1)] * 2,
        *[(name, times * 128, 1000, 3) for times in (1, 2) for name in ("uniform", "wiener")],
    ]  # fmt: skip
    lines = table.read_text().splitlines()
    for method, place in (("uniform", 4), ("wiener", 5)):
        trials = [line.split(",") for line in lines if f",{method},0," in line]
        best = min(range(2), key=lambda number: float(trials[number][-1]))
        assert ran[place][-1] == ran[2 * (method == "wiener") + best][-1], "the best trial's learning rate"
    table.write_text("\n".join(lines[:-1]) + "\n")
    ran.clear()
    tuned.measure(args)
    assert [run[:2] for run in ran] == [("wiener", 256)]
    assert [line.split(",")[:4] for line in table.read_text().splitlines()] == [line.split(",")[:4] for line in lines]


@pytest.mark.parametrize(
    ("curve", "value", "expected"),
    [
        ([(100, 8.0), (400, 2.0)], 4.0, 200.0),
        ([(100, 8.0), (400, 2.0), (800, 1.0)], 1.0, 800.0),
        ([(100, 8.0), (400, 2.0)], 9.0, 100.0),
        ([(100, 8.0), (400, 2.0)], 1.0, math.nan),
        ([(100, 8.0), (200, 9.0), (400, 2.0)], 9.0, 100.0),
    ],
)
def test_when_a_curve_is_at_a_value(curve, value, expected):
    assert tuned.crossing(curve, value) == pytest.approx(expected, nan_ok=True)


def test_what_is_measured_becomes_a_table(tmp_path):
    """Halved by 400 images of 800 on every seed: half as far, and twice as fast."""
    rows, chosen = ["f,uniform,0,0,{},800,3", "f,wiener,0,0,{},800,5"], '"{""optimizer.lr"": 0.0012345}"'
    for seed, scale in enumerate((1.0, 1.2, 0.9)):
        rows.append(f"f,uniform,1,{seed},{{}},200;800,{8 * scale};{4 * scale}")
        rows.append(f"f,wiener,1,{seed},{chosen},200;400;800,{8 * scale};{4 * scale};{2 * scale}")
    (tmp_path / "t.csv").write_text(HEAD + "\n".join(rows) + "\n")
    text = tuned.show(tmp_path / "t.csv")
    assert text.startswith("f: 1 trials each")
    ours = next(line for line in text.splitlines() if "`wiener`" in line)
    cells = [cell.strip() for cell in ours.strip("|").split("|")]
    assert cells[1:3] == ["1×", "2.07 ± 0.31 (3)"]
    assert cells[3] == "**0.50 (0.50 … 0.50)**"
    assert cells[4].startswith("2.00 (2.00")
    assert cells[5] == "optimizer.lr 0.00123"


def test_who_was_there_at_the_first_look_was_there_before():
    curves = {"uniform": [(200, 8.0), (800, 4.0)], "wiener": [(200, 3.9), (800, 2.0)]}
    rows = [{"method": name, "seed": seed, "curve": curve} for seed in (0, 1) for name, curve in curves.items()]
    assert tuned.faster(pd.DataFrame(rows), "wiener") == "≥ 4.00 (4.00 …)"
