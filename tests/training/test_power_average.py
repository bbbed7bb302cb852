"""Averages that are made after a training from those that it wrote, against averages that were kept all the time."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers import CPU, assert_equal, ranks, tiny, toy, train
from tests.json_schemas import validate
from tests.test_models import network, search_folder
from tests.toy.train import INPUTS, TARGETS, begin, loss_of
from tunediff import config as cfg
from tunediff import evaluate, export, models, sample
from tunediff.config import ConfigError
from tunediff.training import knobs, weights
from tunediff.training.ema import ExponentialAverage
from tunediff.training.power_average import FOLDER, HALF_LIVES, PowerAverages, combination, gamma, reconstruct
from tunediff.workloads.diffusion import diffusers_export

WANTED = (0.03, 0.06, 0.15)


def relative(found, expected):
    """Norm of the difference over that of what is expected, of all parameters together."""
    vectors = [torch.cat([state[name].flatten().double() for name in sorted(expected)]) for state in (found, expected)]
    return float((vectors[0] - vectors[1]).norm() / vectors[1].norm())


def averaged(found):
    """Averages of these half-lives, kept all the time beside those that are written at every point."""

    def body(trial):
        net, optimizer = begin(trial)
        plain = net.module if hasattr(net, "module") else net
        powers = PowerAverages(plain)
        kept = [ExponentialAverage(knobs.Ema(half_life=half_life, max_decay=0.9999999), plain) for half_life in WANTED]
        trial.write_at_points(FOLDER, powers.parameters_by_name)
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer)
            if not trial.warming_up:
                for average in (powers, *kept):
                    average.update(plain, trial.progress, trial.stride)
        found.update(zip(WANTED, (dict(one.model.named_parameters()) for one in kept), strict=True))

    return body


def written(folder, points, steps=20, world=CPU, **values):
    """Train with `points` evaluations; returns the averages that were kept all the time."""
    found = {}
    config = toy(evaluation__points=points, norm=False, **values)
    train(config, samples=8 * steps, folder=folder, world=world, body=averaged(found))
    return found


def test_averages_of_any_half_life_are_reconstructed(tmp_path):
    found = written(tmp_path, points=8, steps=200)
    for half_life, expected in found.items():
        assert relative(reconstruct(tmp_path / FOLDER, half_life), expected) < 2e-3
    assert relative(found[0.06], found[0.15]) > 0.02, "they are not alike anyway"


def test_profiles_are_those_of_edm2():
    """Exponents as its public code converts them from σ_rel = 0.05 and 0.10."""
    assert [gamma(h) for h in HALF_LIVES] == pytest.approx([16.97, 6.94], rel=2e-3)


def test_a_kept_average_is_reconstructed_from_itself_alone():
    ends, gammas = np.repeat([0.25, 0.5, 0.75, 1.0], 2), np.tile([gamma(h) for h in HALF_LIVES], 4)
    factors, missed = combination(ends, gammas, 1.0, gamma(HALF_LIVES[1]))
    assert factors == pytest.approx([0, 0, 0, 0, 0, 0, 0, 1], abs=1e-6)
    assert missed < 1e-6


def test_a_profile_that_few_points_miss_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no averages.*ema.snapshots=true"):
        reconstruct(tmp_path, 0.1)
    snapshot(tmp_path, {"weight": torch.ones(2)}, points=2)
    with pytest.raises(ConfigError, match=r"--ema: 0.2 is not allowed: 2 points are too few.*evaluation.points"):
        reconstruct(tmp_path, 0.2)


def snapshot(folder, parameters, points=2):
    """Averages of weights that never changed: so are all others."""
    content = {f"{h}/{name}": tensor for h in HALF_LIVES for name, tensor in parameters.items()}
    for index in range(1, points + 1):
        (folder / FOLDER).mkdir(exist_ok=True)
        weights.save(content, folder / FOLDER / f"{index:04}.safetensors", {"progress": repr(index / points)})
        weights.save(content, folder / f"{index:04}.safetensors", {"progress": repr(index / points)})


# ------------------------------------------------------------------------------------------------------- what is written
def names(folder):
    return [path.name for path in sorted((folder / FOLDER).iterdir())]


def test_averages_are_written_at_sixteen_points_at_most_and_replace_those_of_an_earlier_training(tmp_path):
    written(tmp_path, points=20, steps=40)
    assert names(tmp_path) == [f"{index:04}.safetensors" for index in range(2, 21, 2)]
    with safe_open(tmp_path / FOLDER / "0010.safetensors", framework="pt") as file:
        assert float(file.metadata()["progress"]) == pytest.approx(0.5)
    (tmp_path / "checkpoint.pt").unlink()
    written(tmp_path, points=2)
    assert names(tmp_path) == ["0001.safetensors", "0002.safetensors"]


def on_a_rank(world, folder):
    written(folder, points=2, world=world, parallel__workers=2, parallel__strategy="fsdp")


def test_divided_weights_are_written_complete(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ranks(on_a_rank, tmp_path, tmp_path / "two")
    written(tmp_path / "one", points=2)
    last = [load_file(tmp_path / part / FOLDER / "0002.safetensors") for part in ("one", "two")]
    assert_equal(*last, rtol=1e-3, atol=1e-4)


def test_snapshots_are_refused_with_a_pipeline():
    with pytest.raises(ConfigError, match=r"ema.snapshots: True is not allowed: parallel.strat"):
        tiny(ema__snapshots=True, parallel__strategy="pipeline", parallel__workers=2)


# ------------------------------------------------------------------------------------------------------------- commands
@pytest.fixture
def storage(tmp_path, monkeypatch):
    """A search whose best trial's averages are another network's weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path / "cache"))
    search_folder(tmp_path / "ray_results" / "night")
    best = tmp_path / "ray_results" / "night" / "trials" / "t0001"
    snapshot(best, dict(network(tiny(model__blocks=2), seed=9).named_parameters()))
    return tmp_path / "ray_results"


def other():
    return dict(network(tiny(model__blocks=2), seed=9).state_dict())


def test_export_writes_another_average(storage, capsys):
    assert export.main(["night", "--ema", "0.06", "--out", "best.yaml"]) == 0
    assert "weights: best.safetensors" in capsys.readouterr().out
    assert_equal(load_file("best.safetensors"), other(), rtol=1e-5, atol=1e-6)
    assert models.find("best.yaml").config.ema.half_life == 0.06
    with safe_open("best.safetensors", framework="pt") as file:
        assert (file.metadata()["ema_half_life"], "result" in file.metadata()) == ("0.06", False)
    (storage.parent / "best.yaml").write_text(cfg.dump(tiny(model__blocks=2)))
    with pytest.raises(ConfigError, match=r"best.safetensors was trained with ema.half_life=0.06; export"):
        models.find("best.yaml")
    assert export.main(["night", "--ema", "0.06", "--diffusers", "--out", "pipeline"]) == 0
    assert_equal(diffusers_export.read_unet(Path("pipeline"))[1], other(), rtol=1e-5, atol=1e-6)


def test_exported_average_does_not_claim_the_distance_of_another(storage):
    assert export.main(["night", "--ema", "0.06", "--out", "best.yaml"]) == 0
    header = [line for line in Path("best.yaml").read_text().splitlines() if line.startswith("#")]
    assert "# weights averaged with half-life 0.06, not evaluated; with 0.05: FD 2" in header
    assert not [line for line in header if "training seconds" in line or "speed-up" in line]


def test_sample_and_evaluate_take_another_average(storage, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(models.Saved, "network", lambda self, device: asked.append(self.half_life) or 1 / 0)
    for command in (sample, evaluate):
        with pytest.raises(ZeroDivisionError):
            command.main(["night", "--ema", "0.06", "--images", "8"])
    assert asked == [0.06, 0.06]


@pytest.mark.nightly
def test_evaluation_of_another_average_is_of_other_weights(storage, capsys):
    short, found = ["night", "--images", "8", "--sampler", "ddim", "--steps", "2", "--metrics", "is", "--json"], {}
    for half_life in (None, 0.06):
        assert evaluate.main([*short, *([] if half_life is None else ["--ema", str(half_life)])]) == 0
        result = json.loads(capsys.readouterr().out)
        validate(result, "evaluate-output")
        assert result["ema_half_life"] == half_life
        found[half_life] = result["weights_sha256"]
    assert len(set(found.values())) == 2
    assert found[None] == hashlib.sha256(Path(result["weights"]).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["night/t0000", "--ema", "0.1"], "--ema: is not allowed for night-t0000: its training kept no averages"),
        (["night", "--ema", "0.7"], "--ema: 0.7 is not allowed; allowed: a number above 0 and at most 0.5"),
        (["night", "--ema", "0.2"], "--ema: 0.2 is not allowed: 2 points are too few"),
    ],
)
def test_averages_that_cannot_be_made_are_refused(storage, capsys, words, message):
    assert export.main([words[0], "--diffusers", "--out", "pipeline", *words[1:]]) == 2
    assert message in capsys.readouterr().err
