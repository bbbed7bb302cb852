"""The evaluate command: what it measures, what it leaves behind, what it refuses."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.helpers import pair, tiny
from tests.test_models import network, run_folder
from tunediff import config as cfg
from tunediff import evaluate, sample
from tunediff.core import environment, progress
from tunediff.data import images as data
from tunediff.evaluation import features
from tunediff.evaluation.generation import ImageNoise
from tunediff.evaluation.judge import Quality, Real
from tunediff.evaluation.knobs import KINDS
from tunediff.workloads import drawing
from tunediff.workloads.classification import train as classification
from tunediff.workloads.diffusion.evaluator import generate
from tunediff.workloads.diffusion.process import Diffusion

CONFIG = tiny()  # T = 50, 8×8 grey
NAMES = [name for names in KINDS.values() for name in names]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache folder for this file; classifiers need not be good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "STEPS", 30)
        patch.setenv("TUNEDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture
def model(tmp_path, at_tmp_path):
    """Weights with their configuration, in the current folder."""
    save_file(network(CONFIG).state_dict(), tmp_path / "small.safetensors")
    (tmp_path / "small.yaml").write_text(cfg.dump(CONFIG))
    return "small.yaml"


def measured(capsys, *words):
    """What a successful command printed, and the JSON it points to."""
    assert evaluate.main(["small.yaml", *words]) == 0
    out = capsys.readouterr().out
    path = out.splitlines()[-1].removeprefix("json: ")
    return out, json.loads(open(path).read())


def refused(capsys, *words):
    assert evaluate.main(list(words)) == 2
    return capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- measured
def test_full_protocol(model, tmp_path, capsys):
    out, found = measured(capsys, "--images", "150", "--batch-size", "40", "--out", "kept")

    # The same by hand: all ancestral steps, the seed of the evaluations, the learned images.
    images = data.load(CONFIG.data)
    evaluation = cfg.override(CONFIG, {"evaluation.sampler": "ddpm", "evaluation.batch_size": 40}).evaluation
    drawn = list(generate(network(CONFIG), Diffusion(CONFIG.process), evaluation, (1, 8, 8), 150, "cpu"))
    extractor = features.Classifier(images, "cpu")
    quality = Quality(extractor, 150, "cpu")
    for start, batch in drawn:
        quality.update(start, batch)
    expected = quality.values(Real.of(images, extractor, "cpu", 40, set(KINDS)))
    assert list(found["metrics"]) == NAMES
    for name in NAMES:
        assert found["metrics"][name]["value"] == pytest.approx(expected[name].value, rel=1e-5)
        assert found["metrics"][name]["images"] == expected[name].images

    # What is kept is what was measured.
    assert out.endswith("json: kept/evaluation.json\n")
    files = sorted((tmp_path / "kept").glob("*.png"))
    assert [file.name for file in files] == [f"{i:04d}.png" for i in range(150)]
    assert np.array_equal(
        np.stack([np.asarray(Image.open(file)) for file in files]), torch.cat([b for _, b in drawn])[:, 0]
    )

    # What the numbers depend on.
    assert found["sampler"] == {"name": "ddpm", "steps": 50}
    assert (found["images"], found["seed"], found["processes"], found["batch_size"]) == (150, 0, 1, 40)
    assert found["reference"] == {"name": "digits", "split": "all", "images": 64, "digest": images.digest}
    assert found["extractor"] == {"name": "classifier", "label": "FD (classifier)", "digest": extractor.digest}
    assert found["weights_sha256"] == hashlib.sha256((tmp_path / "small.safetensors").read_bytes()).hexdigest()
    assert found["fingerprint"] == cfg.fingerprint(CONFIG)
    assert found["command"] == "tunediff evaluate small.yaml --images 150 --batch-size 40 --out kept"
    assert found["images_per_s"] == pytest.approx(150 / found["sampling_s"])
    assert found["environment"] == environment.describe()
    assert found["metrics"]["kid"]["within_sd"] == pytest.approx(expected["kid"].within_sd, rel=1e-5)

    # What is read.
    assert "sampler: ddpm, 50 steps\n" in out
    assert "reference: digits, all, 64 images\n" in out
    assert re.search(rf"^FD \(classifier\) +{expected['frechet'].value:.4g}  150$", out, re.M)
    assert "FID" not in out
    assert "\nIS (classifier) " in out


def test_ddim_and_names_of_the_numbers(model, tmp_path, capsys):
    words = "--images 264 --sampler ddim --steps 5 --skip quadratic --eta 0.5 --metrics is,fd".split()
    out, found = measured(capsys, *words)
    assert "sampler: ddim, 5 steps, quadratic, eta 0.5\n" in out
    assert found["sampler"] == {"name": "ddim", "steps": 5, "skip": "quadratic", "eta": 0.5}
    assert list(found["metrics"]) == [*KINDS["fd"], *KINDS["is"]]
    assert out.endswith("json: evaluation-ddim-264.json\n")
    again, alone = measured(capsys, *words, "--batch-size", "10")
    assert again.endswith("json: evaluation-ddim-264-2.json\n")
    assert alone["metrics"]["frechet"]["value"] == pytest.approx(found["metrics"]["frechet"]["value"], rel=1e-3)
    assert measured(capsys, *words, "--out", "out/own.json")[0].endswith("json: out/own.json\n")
    assert not list(tmp_path.rglob("*.png")), "numbers alone"


def digits_folder(root, count, split):
    """Files in class folders; `split` names the part that an image's number belongs to."""
    digits = data.load(cfg.baseline("digits").data)
    for number, (pixels, label) in enumerate(zip(digits.pixels[:count], digits.labels[:count], strict=True)):
        folder = root / split(number) / str(label.item())
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(folder / f"{number}.png")


def test_reference_of_another_split(tmp_path, model, capsys):
    """The classifier is that of the learned images, whatever is compared with."""
    digits_folder(tmp_path / "set", 200, lambda number: "test" if number % 2 else "train")
    changes = {"data.name": "images", "data.path": "moved", "data.split": "train", "data.max_images": 60}
    (tmp_path / "small.yaml").write_text(cfg.dump(cfg.override(CONFIG, changes)))
    words = ["--images", "64", "--sampler", "ddim", "--steps", "2", "--metrics", "fd", "--data-path", "set"]
    found = [measured(capsys, *words, *more)[1] for more in ([], ["--split", "test"], ["--split", "all"])]
    splits = [(f["reference"]["split"], f["reference"]["images"]) for f in found]
    assert splits == [("train", 60), ("test", 100), ("all", 200)]
    assert len({f["extractor"]["digest"] for f in found}) == 1
    assert len({f["metrics"]["frechet"]["value"] for f in found}) == 3
    assert "data.path" in refused(capsys, "small.yaml")  # it is not where the training found it


GENERATOR = """
from dataclasses import dataclass, field
from typing import Annotated

import torch

from tunediff import Fixed, Metric
from tunediff.data.knobs import Data
from tunediff.evaluation.knobs import Evaluation


@dataclass(frozen=True)
class Knobs:
    data: Data = field(default_factory=Data)
    evaluation: Annotated[Evaluation, Fixed()] = field(default_factory=Evaluation)


OBJECTIVE = Metric("frechet", "min")
PRESETS = {"digits": {
    "data.name": "digits", "data.image_size": 8, "data.channels": 1, "data.horizontal_flip": False,
    "data.split": "all", "evaluation.extractor": "classifier",
}}


def train(trial):
    raise NotImplementedError


def network(knobs):
    return torch.nn.Conv2d(1, 1, 1)


def sample_images(network, config, request):
    for start, stop in request.batches():
        yield start, (128 + 50 * network(request.noise(start, stop, (1, 8, 8)))).clamp(0, 255).byte()
"""


def test_a_generator_of_a_users_file_is_judged_at_full_protocol(tmp_path, capsys, imports_as_before, at_tmp_path):
    (tmp_path / "mine.py").write_text(GENERATOR)
    (tmp_path / "small.yaml").write_text(cfg.dump(cfg.baseline("mine.py:digits")))
    conv = torch.nn.Conv2d(1, 1, 1)
    save_file(conv.state_dict(), tmp_path / "small.safetensors")
    out, found = measured(capsys, "--images", "150", "--batch-size", "40", "--out", "kept")
    assert "sampler: mine\n" in out
    assert "reference: digits, all, 1797 images\n" in out
    assert list(found["metrics"]) == NAMES
    assert (found["sampler"], found["seed"], found["images"]) == ({"name": "mine"}, 0, 150)
    noise = ImageNoise(0, (1, 8, 8), "cpu").initial(0, 150)
    expected = (128 + 50 * conv(noise)).clamp(0, 255).byte()[:, 0]
    kept = np.stack([np.asarray(Image.open(file)) for file in sorted((tmp_path / "kept").glob("*.png"))])
    assert np.abs(kept.astype(int) - expected.numpy()).max() <= 1
    assert "--sampler: 'ddim'" in refused(capsys, "small.yaml", "--sampler", "ddim", "--steps", "5")


def test_a_generator_that_yields_too_few_images_is_refused(tmp_path, capsys, imports_as_before, at_tmp_path):
    (tmp_path / "few.py").write_text(GENERATOR + "        return\n")  # after the first batch
    (tmp_path / "small.yaml").write_text(cfg.dump(cfg.baseline("few.py:digits")))
    save_file(torch.nn.Conv2d(1, 1, 1).state_dict(), tmp_path / "small.safetensors")
    words = ["small.yaml", "--images", "80", "--batch-size", "40", "--extractor", "random", "--metrics", "fd"]
    assert "few.py: sample_images yielded 40 images instead of 80" in refused(capsys, *words)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.nightly
def test_two_processes_find_what_one_finds(model, tmp_path, capsys):
    words = ["--images", "261", "--batch-size", "40", "--sampler", "ddim", "--steps", "3"]
    _, one = measured(capsys, *words, "--out", "one")
    pair(_rank, [*words, "--out", "two"])
    spoken = [(tmp_path / f"out{rank}").read_text() for rank in range(2)]
    assert spoken[0].endswith("json: two/evaluation.json\n")
    assert spoken[1] == "", "one rank speaks"
    two = json.loads((tmp_path / "two" / "evaluation.json").read_text())
    assert two["processes"] == 2
    for name in NAMES:
        assert two["metrics"][name]["value"] == pytest.approx(one["metrics"][name]["value"], rel=1e-3, abs=0.011)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        *(f"{number:04d}.png" for number in range(261)), "evaluation.json",
    ]  # fmt: skip


def _rank(rank, port, words):
    """One of two processes as torchrun starts them."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    with open(f"out{rank}", "w") as out, contextlib.redirect_stdout(out):
        assert evaluate.main(["small.yaml", *words]) == 0


def test_a_diverged_model_is_a_failure_and_leaves_no_numbers(model, tmp_path, capsys):
    broken = {name: tensor * float("nan") for name, tensor in network(CONFIG).state_dict().items()}
    save_file(broken, tmp_path / "small.safetensors")
    assert evaluate.main(["small.yaml", "--images", "16"]) == 1
    assert "error: non-finite values in generated images 0…15" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("trained", [{"sampler": "ddim", "steps": 5}, {"sampler": "ddpm", "steps": 50}])
def test_chains_shorter_than_the_default_steps_are_sampled_with_all_of_theirs(trained):
    values = {f"evaluation.{name}": value for name, value in trained.items()} | {"process.steps": 25}
    words = drawing.SamplerOptions(sampler="ddim")
    config = drawing.with_sampler(cfg.override(CONFIG, values), words, {"steps": evaluate.STEPS})
    assert (config.evaluation.sampler, config.evaluation.steps) == ("ddim", 25)


# ----------------------------------------------------------------------------------------------------------- progress
def test_progress_is_shown_by_lines(capsys, clock):
    with progress.EventLines().work(), progress.Progress("sampling", 10, "steps") as bar:
        for k in range(10):
            clock.s += 16.0
            bar.step(k, 10, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["sampling: 1 of 10 steps, about 2m24s left", "sampling: 3 of 10 steps, about 1m52s left"]
    assert len(lines) == 5, "soon, and then every 30 s at most"
    with progress.EventLines().work(), progress.Progress("sampling", 4, visible=False) as bar:
        bar.step()
    assert capsys.readouterr().err == "", "of several ranks one speaks"


def test_every_evaluation_as_in_the_training_is_kept(tmp_path, capsys, at_tmp_path):
    config = cfg.baseline("digits_classifier")
    (tmp_path / "small.yaml").write_text(cfg.dump(config))
    torch.manual_seed(0)
    save_file(classification.network(config.knobs).state_dict(), "small.safetensors")
    for name in ("evaluation.json", "evaluation-2.json"):
        assert evaluate.main(["small.yaml"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(name)
        assert 0 <= json.loads(Path(name).read_text())["accuracy"] <= 1


# ------------------------------------------------- the sample command: which images, in what files, and what it refuses
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
