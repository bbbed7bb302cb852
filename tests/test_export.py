"""Models handed to diffusers by the export command; its configurations are tested in test_commands."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import searches
from tests.helpers import tiny
from tests.test_models import network, run_folder, search_folder
from tunediff import config as cfg
from tunediff import export, search_space

PLAIN = Path(__file__).parent / "users" / "plain.py"
OF_A_FILE = {**searches.FILE, "workload": "mine.py", "search": {"lr": [0.01, 0.1]}}


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search_folder(tmp_path / "ray_results" / "night")
    run_folder(tmp_path / "ray_results" / "train-digits", tiny(process__prediction="v"), seed=7)
    return tmp_path / "ray_results"


def refused(capsys, *words):
    assert export.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert not out, "nothing is announced before the refusal"
    return err


@pytest.mark.parametrize(
    ("words", "model", "config", "seed"),
    [
        (["night"], "night-t0001", tiny(model__blocks=2), 1),
        (["night", "--trial", "t0002"], "night-t0002", tiny(model__blocks=3), 2),
        (["night/t0000"], "night-t0000", tiny(model__blocks=1), 0),
        (["train-digits"], "train-digits", tiny(process__prediction="v"), 7),
    ],
)
def test_a_model_becomes_a_pipeline(storage, capsys, words, model, config, seed):
    assert export.main([*words, "--diffusers", "--out", "out/pipeline"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["model"], lines["pipeline"]) == (model, "out/pipeline")
    assert "num_inference_steps=50" in lines["sample"]
    pipeline = storage.parent / "out" / "pipeline"
    tensors = load_file(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(tensors["conv_in.weight"], network(config, seed).state_dict()["input.weight"])
    assert not (storage / "night" / "best.yaml").exists()


def test_a_refused_export_keeps_the_files_of_an_earlier_one(storage, capsys):
    for name, learned in (("first", 1.0), ("second", 2.0)):
        Path("helper.py").write_text("WIDTH = 8\n")
        Path("mine.py").write_text(f"from helper import WIDTH\n{PLAIN.read_text()}# {name}\n")
        searches.make(storage / name, OF_A_FILE)
        searches.write(storage / name, search_space.load(storage / name / "experiment.yaml"), 0)
        save_file({"weight": torch.tensor([learned])}, storage / name / "trials" / "t0000" / "weights.safetensors")
    assert export.main(["first", "--out", "out/best.yaml"]) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert "is of another workload already" in refused(capsys, "second", "--out", "out/best.yaml")
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_an_exported_configuration_names_files_as_they_were_given(tmp_path, monkeypatch):
    """It may be taken to another machine, where the same folders lie elsewhere; paths outside stay what they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    content = searches.FILE | {
        "workload": "images",
        "fixed": {"data.path": "images", "evaluation.extractor": "classifier"},
    }
    for name, fixed in (("inside", {}), ("outside", {"data.path": "/data/images"})):
        wanted = searches.make(tmp_path / "ray_results" / name, content | {"fixed": content["fixed"] | fixed})
        searches.write(tmp_path / "ray_results" / name, wanted, 0)
        assert export.main([name, "--out", f"{name}.yaml"]) == 0
    text = (tmp_path / "inside.yaml").read_text()
    assert str(tmp_path) not in text
    assert cfg.read_yaml(tmp_path / "inside.yaml")["data"]["path"] == "images"
    assert cfg.load(tmp_path / "outside.yaml").data.path == "/data/images"
    (tmp_path / "elsewhere" / "images").mkdir(parents=True)
    shutil.move(tmp_path / "inside.yaml", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cfg.load(Path("inside.yaml")).data.path == str(tmp_path / "elsewhere" / "images")


def test_weights_of_an_earlier_export_do_not_stay_beside_a_trial_without_weights(storage, capsys):
    (storage / "night" / "trials" / "t0002" / "weights.safetensors").unlink()
    assert export.main(["night", "--out", "mine.yaml"]) == 0
    assert export.main(["night", "--trial", "t0002", "--out", "mine.yaml"]) == 0
    assert capsys.readouterr().out.count("weights: mine.safetensors") == 1
    assert not Path("mine.safetensors").exists()


def test_json_has_the_same_keys_whatever_was_written(storage, capsys):
    assert export.main(["train-digits", "--diffusers", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["pipeline"].endswith("train-digits/diffusers")
    assert {key: printed[key] for key in ("trial", "configuration", "weights", "train")} == dict.fromkeys(
        ("trial", "configuration", "weights", "train")
    )
