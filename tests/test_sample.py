"""The sample command: which images, in what files, and what it refuses."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers import tiny
from tests.test_models import network, run_folder
from tunediff import sample
from tunediff.evaluation.generation import ImageNoise
from tunediff.workloads.diffusion.process import Diffusion

CONFIG = tiny()  # T = 50, 8×8 grey


@pytest.fixture
def run(tmp_path, at_tmp_path):
    return run_folder(tmp_path / "ray_results" / "small", CONFIG)


def drawn(capsys, *words):
    """The result lines of a successful command."""
    assert sample.main(["small", *words]) == 0
    return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())


def array(capsys, *words):
    drawn(capsys, "--out", "drawn", *words)
    images = in_folder("drawn")
    shutil.rmtree("drawn")
    return images


def in_folder(folder):
    """The images of a folder by name, uint8 [n, H, W, C]."""
    return np.stack([np.asarray(Image.open(file))[..., None] for file in sorted(Path(folder).iterdir())])


def expected(n, seed=0, **how):
    """Images 0…n−1 straight from the process, uint8 [n, H, W, C]."""
    noise = ImageNoise(seed, (1, 8, 8), "cpu")
    x0 = Diffusion(CONFIG.process).sample(
        network(CONFIG),
        noise.initial(0, n),
        step_noise=lambda k: noise.step(k, 0, n),
        **({"sampler": "ddpm", "steps": 50} | how),
    )
    return ((x0 + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def assert_same(images, others):
    """A sum in another order may turn a rounding, not more."""
    assert images.shape == others.shape
    assert np.abs(images.astype(int) - others).max() <= 1
    assert np.mean(images != others) < 0.01


def test_images_do_not_depend_on_the_batch_size(run, capsys, tmp_path):
    images = array(capsys, "--images", "10")
    assert images.dtype == np.uint8
    assert images.std() > 30
    assert_same(images, expected(10))
    assert_same(images, array(capsys, "--images", "10", "--batch-size", "3"))
    assert_same(expected(10, seed=5), array(capsys, "--images", "10", "--seed", "5"))
    assert np.mean(images != expected(10, seed=5)) > 0.9

    assert drawn(capsys, "--images", "10", "--out", "new/folder", "--batch-size", "4")["path"] == "new/folder"
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [file.name for file in files] == [f"{i:04d}.png" for i in range(10)]
    assert_same(images, in_folder(tmp_path / "new" / "folder"))


@pytest.mark.parametrize(
    ("words", "how", "text"),
    [
        ([], {"steps": 5}, "ddim, 5 steps, linear, eta 0"),  # as in the evaluations of the model
        (["--steps", "7", "--skip", "quadratic", "--eta", "0.5"], {"steps": 7, "skip": "quadratic", "eta": 0.5}, ""),
        (["--sampler", "dpmpp_2m", "--steps", "7"], {"sampler": "dpmpp_2m", "steps": 7}, "dpmpp_2m, 7 steps"),
        (["--sampler", "euler", "--steps", "7"], {"sampler": "euler", "steps": 7}, "euler, 7 steps"),
        (["--sampler", "heun", "--steps", "7"], {"sampler": "heun", "steps": 7}, "heun, 7 steps"),
    ],
)
def test_other_samplers(run, capsys, words, how, text):
    result = drawn(capsys, "--sampler", "ddim", *words, "--images", "4", "--out", "drawn")
    assert result["sampler"] == (text or "ddim, 7 steps, quadratic, eta 0.5")
    assert_same(in_folder("drawn"), expected(4, **({"sampler": "ddim"} | how)))


def test_sheets_are_numbered_and_nothing_is_overwritten(run, capsys):
    first, second = drawn(capsys), drawn(capsys, "--images", "100")
    assert first["path"] == "ray_results/small/samples-small-ddpm.png"
    assert second["path"] == "ray_results/small/samples-small-ddpm-2.png"
    assert (first["images"], first["sampler"], first["seed"]) == ("64", "ddpm, 50 steps", "0")
    assert float(first["images_per_s"]) == pytest.approx(64 / float(first["seconds"]), rel=0.02)
    sheet = np.asarray(Image.open(first["path"]))
    assert sheet.shape == (8 * 34 + 2, 8 * 34 + 2)
    cell = sheet[2 + 34 : 34 + 34, 2 : 2 + 32]  # second row, first column: image 8, each pixel four times
    assert_same(cell[::4, ::4, None], expected(9)[8])
    assert np.asarray(Image.open(second["path"])).shape == (10 * 34 + 2, 10 * 34 + 2)


def test_a_first_sheet_of_few_steps_comes_before_one_of_many(run, capsys, monkeypatch):
    monkeypatch.setattr(sample, "MANY_STEPS", 49)
    assert sample.main(["small"]) == 0
    out, err = capsys.readouterr()
    first, full = run / "samples-small-ddim.png", run / "samples-small-ddpm.png"
    assert (f"16 images by ddim, 10 steps, linear, eta 0: {first.relative_to(Path.cwd())}" in err, "ddim" in out) == (
        True,
        False,
    )
    assert (Image.open(first).size, Image.open(full).size) == ((8 * 34 + 2, 2 * 34 + 2), (8 * 34 + 2, 8 * 34 + 2))
    cell = np.asarray(Image.open(first))[2 + 34 : 34 + 34, 2 : 2 + 32]
    assert_same(cell[::4, ::4, None], expected(9, sampler="ddim", steps=10)[8])
    drawn(capsys, "--out", "drawn", "--images", "2")
    assert (len(list(Path("drawn").iterdir())), len(list(run.glob("*.png")))) == (2, 2), "files need no first sheet"
