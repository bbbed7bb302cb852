"""The map of what each noise level is worth: what it draws, and what it makes of its measurements."""

import math

import pandas as pd
import pytest
import torch

from benchmarks import map as chart
from tunediff.distributed import alone
from tunediff.workloads.diffusion import knobs
from tunediff.workloads.diffusion.process import Diffusion

BANDS = [f"{low:g} … {high:g}" for low, high in zip(chart.EDGES, chart.EDGES[1:], strict=False)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_half_of_a_bands_draws_lie_evenly_over_its_log_snrs(schedule):
    process = Diffusion(knobs.Process(schedule=schedule))
    p, log_snr = chart.Band(0.0, 1.0, process, 3, alone("cpu")).probabilities(), process.snr_table.log()
    inside = (log_snr >= 0) & (log_snr < 1)
    uniform = inside.double().mean() * chart.REST
    assert float(p[inside].sum()) == pytest.approx(1 - chart.REST + uniform)
    assert torch.allclose(p[~inside], torch.full_like(p[~inside], chart.REST / len(p)))
    lower = inside & (log_snr < 0.5)
    assert float(p[lower].sum()) == pytest.approx(float(p[inside].sum()) / 2, abs=0.02), "even over log-SNR, not over t"


def table(distances, share):
    """One moment: by seed, uniform's distance and those of the bands; and where a sampler draws."""
    rows = [
        {"seed": seed, "draws": draws, "frechet": value, "share": share["uniform"]}
        for seed, values in enumerate(distances)
        for draws, value in zip(["uniform", *BANDS], values, strict=True)
    ]
    rows += [{"seed": 0, "draws": name, "frechet": math.nan, "share": share[name]} for name in chart.SAMPLERS[1:]]
    return pd.DataFrame(rows)


def test_a_band_is_worth_what_it_is_below_uniform():
    share = dict.fromkeys(chart.SAMPLERS, ";".join(["0.125"] * 8)) | {"wiener": "0;0;0;0.25;0.75;0;0;0"}
    rows = table([[2, 4, 3, 2, 1.5, 1, 2, 3, 4], [4, 8, 6, 4, 3.4, 2.4, 4, 6, 8]], share)
    found = chart.worth(rows)
    assert list(found.index) == BANDS
    assert found.loc["-1 … 0", "gain"] == pytest.approx((0.25 + 0.15) / 2)
    assert found.loc["0 … 1", ["gain", "low", "high"]].tolist() == pytest.approx([0.45, 0.4, 0.5])
    assert found.loc["-7 … -4", "gain"] == -1
    assert found["oracle"].tolist() == pytest.approx([0, 0, 0, 0.2 / 0.65, 0.45 / 0.65, 0, 0, 0])
    away = chart.distances(rows, list(found["oracle"]))
    assert away["uniform"] == pytest.approx(0.75)
    assert away["wiener"] == pytest.approx(0.2 / 0.65 - 0.25)


def test_errors_are_compared_level_by_level_and_seed_by_seed():
    values = {"uniform": ["2;4;", "1;8;"], BANDS[0]: ["1;4;", "0.75;4;"], BANDS[1]: ["3;4;", "1;8;"]}
    rows = pd.DataFrame(
        {"seed": seed, "draws": draws, "frechet": 1.0, "validation_mse": one, "validation_log_snr": "-9;0;3;9"}
        for draws, ones in values.items()
        for seed, one in enumerate(ones)
    )
    edges, found = chart.gains_by_level(rows)
    assert edges == [-9, 0, 3, 9]
    assert found[0][:2] == [(0.5 + 0.25) / 2, (0 + 0.5) / 2]
    assert found[1][:2] == [-0.25, 0]
    assert math.isnan(found[0][2]), "a level without a timestep"


def test_what_is_kept_can_be_shown_again(tmp_path, rendered):
    kept = chart.Path("ray_results/reference/map-cpu")
    chart.show([kept / f"{name}.csv" for name in ("digits", "cifar10-16", "cifar10-32")], tmp_path)
    assert (tmp_path / "map.md").read_text() == (kept / "map.md").read_text()
    assert (tmp_path / "map.png").stat().st_size > 20_000
