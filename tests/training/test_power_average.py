"""Averages that are made after a training from those that it wrote, against averages that were kept all the time."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers import Dies, KilledError, assert_equal, ranks, tiny, train
from tests.json_schemas import validate
from tests.test_models import network, search_folder
from tunediff import config as cfg
from tunediff import evaluate, export, models, sample
from tunediff.config import ConfigError
from tunediff.training import state, weights
from tunediff.training.power_average import FOLDER, HALF_LIVES, combination, gamma, reconstruct, relative_std
from tunediff.workloads.diffusion import diffusers_export

WANTED = (0.03, 0.06, 0.15)


def relative(found, expected):
    """Norm of the difference over that of what is expected, of all parameters together."""
    vectors = [torch.cat([state[name].flatten().double() for name in sorted(expected)]) for state in (found, expected)]
    return float((vectors[0] - vectors[1]).norm() / vectors[1].norm())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training that writes its averages at eight points, beside one of that half-life."""
    folder, found = tmp_path_factory.mktemp("averages"), {}
    for half_life in WANTED:
        config = tiny(evaluation__points=8, ema__snapshots=True, ema__half_life=half_life, ema__max_decay=0.9999999)
        place = folder / f"{half_life}"
        place.mkdir()
        found[half_life] = train(config, samples=16 * 200, folder=place).weights
    return folder, found


@pytest.mark.parametrize("half_life", WANTED)
def test_a_training_reconstructs_an_average_that_another_one_kept(trained, half_life):
    folder, found = trained
    expected = found[half_life]
    assert relative(reconstruct(folder / "0.06" / "averages", half_life), expected) < 1e-3


def test_profiles_are_those_of_edm2():
    """Exponents and σ_rel as its public code converts them."""
    assert [relative_std(h) for h in HALF_LIVES] == pytest.approx([0.05, 0.10], rel=2e-3)
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
def snapshotted(points=2, **values):
    return tiny(evaluation__points=points, ema__snapshots=True, **values)


def names(folder):
    return [path.name for path in sorted((folder / FOLDER).iterdir())]


def test_averages_are_written_at_sixteen_points_at_most(tmp_path):
    train(snapshotted(20), samples=16 * 40, folder=tmp_path)
    assert names(tmp_path) == [f"{index:04}.safetensors" for index in range(2, 21, 2)]
    with safe_open(tmp_path / FOLDER / "0010.safetensors", framework="pt") as file:
        assert float(file.metadata()["progress"]) == pytest.approx(0.5)


def test_averages_of_an_earlier_training_are_removed(tmp_path):
    train(snapshotted(4), folder=tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    train(snapshotted(2), folder=tmp_path)
    assert names(tmp_path) == ["0001.safetensors", "0002.safetensors"]


def test_resume_restores_averages_exactly(tmp_path):
    train(snapshotted(), folder=tmp_path / "whole")
    with pytest.raises(KilledError):
        train(snapshotted(), folder=tmp_path / "killed", observer=Dies())
    train(snapshotted(), folder=tmp_path / "killed")
    for name in names(tmp_path / "whole"):
        assert_equal(*(load_file(tmp_path / part / FOLDER / name) for part in ("whole", "killed")))
    assert_equal(*(state.load(tmp_path / part)["kept"] for part in ("whole", "killed")))


def written(world, folder):
    train(snapshotted(parallel__workers=2, parallel__strategy="fsdp"), samples=16 * 10, world=world, folder=folder)
    return names(folder)


def test_divided_weights_are_written_whole(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    ranks(written, tmp_path, tmp_path / "two")
    train(snapshotted(), samples=16 * 10, folder=tmp_path / "one")
    last = [load_file(tmp_path / part / FOLDER / "0002.safetensors") for part in ("one", "two")]
    assert_equal(*last, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"parallel__strategy": "pipeline", "parallel__workers": 2},
            "ema.snapshots: True is not allowed: parallel.strat",
        ),
    ],
)
def test_snapshots_are_refused_where_they_mean_nothing(values, message):
    with pytest.raises(ConfigError) as error:
        snapshotted(**values)
    assert message in str(error.value)


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


def test_evaluation_of_another_average_is_of_other_weights(storage, capsys):
    short, found = ["night", "--images", "8", "--sampler", "ddim", "--steps", "2", "--metrics", "is", "--json"], {}
    for half_life in (None, 0.05, 0.06):
        assert evaluate.main([*short, *([] if half_life is None else ["--ema", str(half_life)])]) == 0
        result = json.loads(capsys.readouterr().out)
        validate(result, "evaluate-output")
        assert result["ema_half_life"] == half_life
        found[half_life] = result["weights_sha256"]
    assert len(set(found.values())) == 3
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
