"""The sample command: which images, in what files, and what it refuses."""

import contextlib
import dataclasses
import json
import os
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.helpers import CPU, pair, tiny
from tests.test_models import network, run_folder
from tunediff import config as cfg
from tunediff import evaluate, export, sample
from tunediff.core import progress
from tunediff.evaluation.generation import ImageNoise
from tunediff.workloads import drawing
from tunediff.workloads.diffusion.process import Diffusion

CONFIG = tiny()  # T = 50, 8×8 grey


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return run_folder(tmp_path / "ray_results" / "small", CONFIG)


def drawn(capsys, *words):
    """The result lines of a successful command."""
    assert sample.main(["small", *words]) == 0
    return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())


def array(capsys, *words):
    path = drawn(capsys, "--out", "images.npz", *words)["path"]
    images = np.load(path)["arr_0"]
    Path(path).unlink()
    return images


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


def test_images_do_not_depend_on_the_batch_size_or_the_kind_of_file(run, capsys, tmp_path):
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
    assert_same(images, np.stack([np.asarray(Image.open(file))[..., None] for file in files]))


@pytest.mark.nightly
def test_ranks_share_the_images(run, tmp_path):
    pair(_rank, "two.npz")
    pair(_rank, "two")
    spoken = [(tmp_path / f"out{rank}").read_text().count("images: 10") for rank in range(2)]
    assert spoken == [2, 0], "one rank speaks, once per command"
    assert_same(expected(10), np.load("two.npz")["arr_0"])
    files = [tmp_path / "two" / f"{number:04d}.png" for number in range(10)]
    assert_same(expected(10), np.stack([np.asarray(Image.open(file))[..., None] for file in files]))


def _rank(rank, port, out):
    """One of two processes as torchrun starts them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one GPU is no place for two ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(f"out{rank}", "a") as said, contextlib.redirect_stdout(said):
        assert sample.main(["small", "--images", "10", "--batch-size", "2", "--out", out]) == 0


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
    result = drawn(capsys, "--sampler", "ddim", *words, "--images", "4", "--out", "images.npz")
    assert result["sampler"] == (text or "ddim, 7 steps, quadratic, eta 0.5")
    assert_same(np.load("images.npz")["arr_0"], expected(4, **({"sampler": "ddim"} | how)))


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


def test_the_strip_shows_noise_becoming_the_image(run, capsys):
    path = drawn(capsys, "--strip")["path"]
    assert path == "ray_results/small/strip-small-ddpm.png"
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (8 * 34 + 2, 10 * 34 + 2)

    def cell(row, column):
        return sheet[2 + 34 * row : 34 + 34 * row, 2 + 34 * column : 34 + 34 * column][::4, ::4]

    noise = (ImageNoise(0, (1, 8, 8), "cpu").initial(0, 8) + 1) * 127.5
    assert_same(cell(5, 0), noise[5, 0].round().clamp(0, 255).numpy().astype(np.uint8))
    for row, image in enumerate(expected(8)):
        assert_same(cell(row, 9), image[..., 0])
    # Fewer steps than columns: every state once; batches do not matter.
    path = drawn(capsys, "--strip", "--images", "3", "--sampler", "ddim", "--batch-size", "2", "--out", "s.png")["path"]
    assert np.asarray(Image.open(path)).shape == (3 * 34 + 2, 6 * 34 + 2)


def test_a_model_that_gives_no_images_fails(run, capsys):
    state = network(CONFIG).state_dict()
    state["output.bias"].fill_(torch.nan)
    save_file(state, run / "weights.safetensors")
    assert sample.main(["small", "--images", "2"]) == 1
    assert "error: non-finite values in generated images 0…1" in capsys.readouterr().err
    assert not list(run.glob("*.png"))


def test_what_would_take_a_day_says_so_before_it_begins(capsys, monkeypatch):
    """2 ms a pass: 100,000 images × 1,000 steps are 200,000 s, by 50 steps of DDIM 10,000 s."""
    config = cfg.override(cfg.baseline("digits"), {"evaluation.sampler": "ddpm", "process.steps": 1000})
    now = [0.0]

    def network(x, t):
        now[0] += 0.002 * len(x)

    waited = set()
    for owner, name, replaced in (
        (drawing, "time", types.SimpleNamespace(perf_counter=lambda: now[0])),
        (type(CPU), "synchronize", lambda world: waited.add(world.device.type)),
    ):
        monkeypatch.setattr(owner, name, replaced)
    drawing.announce(network, config, 100_000, CPU)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"sampling 100,000 images × 1,000 steps: about 55h33m", first)
    assert re.match(r"WARNING: that is long: --sampler ddim --steps 50 takes about 2h46m; fewer images", second)
    drawing.announce(lambda x, t: x, config, 10, CPU)
    waited.clear()
    other = dataclasses.replace(CPU, device=torch.device("meta"))
    drawing.announce(lambda x, t: x, config, 10, other, CPU.device)
    assert waited == {"cpu"}, "timed by the device that draws, not by another"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("soon", [1000.0, 0.0])
def test_progress_is_told_of_what_takes_long(run, capsys, monkeypatch, soon):
    for name in ("FIRST_S", "EVERY_S"):
        monkeypatch.setattr(progress, name, soon)
    sample.main(["small", "--images", "4", "--batch-size", "2"])
    if soon:
        assert capsys.readouterr().err == "", "nothing to say of what is quick"
        return
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sampling 4 images × 50 steps: about ")
    assert lines[-1].startswith("sampling: 99 of 100 steps, about 0s left")


def stored(folder, kind):
    """A file of weights, training or search whose workload is a file beside it that leaves a trace; and its name."""
    program = folder / "workload" / "mine.py"
    program.parent.mkdir(parents=True)
    program.write_text(f"# {folder}\nKnobs = None\nfrom pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    (folder / "weights.safetensors").touch()
    if kind == "weights":
        (folder / "config.yaml").write_text("workload: workload/mine.py\n")
        return folder / "weights.safetensors"
    if kind == "checkpoint":
        torch.save({"config": {"workload": str(program)}, "result": {}}, folder / "checkpoint.pt")
        return folder / "checkpoint.pt"
    if kind == "training":
        start = {
            "event": "start",
            "time": 1.0,
            "role": "draw",
            "name": "t0000",
            "number": 0,
            "config": {"workload": str(program)},
        }
        start |= {"drawn": {}, "fingerprint": "", "budget_s": 1.0}
        (folder / "journal.jsonl").write_text(f"{json.dumps(start)}\n")
    else:
        text = "budget: {trials: 2, per_trial: 1s}\nsearch: {lr: [1, 2]}\n"
        (folder / "search.yaml").write_text(f"workload: workload/mine.py\n{text}")
    return folder


@pytest.mark.parametrize("kind", ["weights", "checkpoint", "training", "search"])
@pytest.mark.parametrize("command", ["sample", "export"])
def test_weights_of_another_workload_are_refused_before_its_file_is_run(tmp_path, capsys, kind, command):
    """Whoever looks at weights that somebody sent runs no program of theirs."""
    name = str(stored(tmp_path / "sent", kind))
    if command == "sample":
        code, what = sample.main([name]), "sample"
    else:
        code, what = export.main([name, "--diffusers", "--out", str(tmp_path / "out")]), "--diffusers"
    error = capsys.readouterr().err
    assert (code, (tmp_path / "sent" / "workload" / "ran").exists()) == (2, False)
    assert f"mine.py is not allowed: {what} is for diffusion; allowed: diffusion" in error
    assert "runs " not in error


@pytest.mark.parametrize("inside", ["workload", "workload/parts"])
def test_a_command_that_runs_a_stored_file_says_which(tmp_path, capsys, imports_as_before, inside):
    name = stored(tmp_path / "sent", "weights")
    (tmp_path / "sent" / inside).mkdir(exist_ok=True)
    program = (tmp_path / "sent/workload/mine.py").rename(tmp_path / "sent" / inside / "mine.py")
    (tmp_path / "sent" / "config.yaml").write_text(f"workload: {inside}/mine.py\n")
    assert evaluate.main([str(name)]) == 2
    assert f"runs {program}\n" in capsys.readouterr().err
    assert program.with_name("ran").exists()
