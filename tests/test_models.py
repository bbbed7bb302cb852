"""Models found by what a user calls them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests import searches
from tests.helpers import point as made
from tests.helpers import tiny, train
from tunediff import config as cfg
from tunediff import export, models, search_space
from tunediff.core import trial_record as record
from tunediff.core.journal import Journal
from tunediff.training import weights as saved_weights
from tunediff.workloads.diffusion import unet

SPACE = {
    "workload": "digits", "budget": {"per_trial": "3s", "trials": 3},
    "fixed": {name: value for name, value in cfg.flat(tiny()).items() if value != cfg.flat(cfg.baseline("digits"))[name]},
    "search": {"model.blocks": [1, 2, 3]},
}  # fmt: skip


def network(config, seed=0):
    """A network whose output depends on its seed; a new one returns zero."""
    torch.manual_seed(seed)
    net = unet.network(config.knobs)
    torch.nn.init.normal_(net.output.weight, std=0.05)
    return net.eval().requires_grad_(False)


def run_folder(folder, config, seed=0, **point):
    """A finished training as it lies on disk."""
    journal = Journal(folder)
    journal.start(*cfg.identity(config), {"model.blocks": cfg.flat(config)["model.blocks"]} if point else {}, 3.0)
    if point:
        journal.point(made(train_s=3.0, label="FD", **point))
    journal.end(record.End("ok", seconds={"train": 3.0}, steps=3))
    save_file(network(config, seed).state_dict(), folder / "weights.safetensors")
    return folder


def search_folder(folder):
    """A search of three trials, the second of which is the best."""
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(SPACE))
    for number, value in enumerate([5.0, 2.0, 3.0]):
        run_folder(folder / "trials" / f"t{number:04d}", tiny(model__blocks=number + 1), number, frechet=value)
    return folder


def same(found, state):
    """Whether the network that was found has these weights and can only be used."""
    net = found.network("cpu")
    assert not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())
    return all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


@pytest.fixture
def trained(tmp_path):
    """A training folder with a true checkpoint."""
    folder, config = tmp_path / "run", tiny()
    run_folder(folder, config)
    outcome = train(config, folder=folder)
    save_file(outcome.weights, folder / "weights.safetensors")
    return folder, config


def test_a_training_finished_or_not(trained, tmp_path):
    folder, config = trained
    found = models.find(str(folder))
    assert (found.name, found.folder) == ("run", folder)
    assert (found.weights, found.config) == (folder / "weights.safetensors", config)
    averaged = load_file(folder / "weights.safetensors")
    assert same(found, averaged)
    assert models.find("run", folder.parent) == found

    shutil.copytree(folder, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "weights.safetensors").unlink()
    found = models.find("unfinished", tmp_path)
    assert found.weights.name == "checkpoint.pt"
    assert same(found, averaged), "the average, not the weights that are trained"


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_network_has_the_memory_format_of_its_configuration_where_gradients_are_off(tmp_path, wanted, without):
    found = models.find(str(run_folder(tmp_path / "run", tiny(memory__channels_last=wanted))))
    with without():
        weight = found.network("cpu").get_parameter("middle.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) == wanted


def test_a_search_its_trials_and_what_was_exported_from_it(tmp_path):
    folder = search_folder(tmp_path / "night")
    weights = [network(tiny(model__blocks=n + 1), n).state_dict() for n in range(3)]
    best = models.find("night", tmp_path)
    assert (best.name, best.folder) == ("night-t0001", folder / "trials" / "t0001")
    assert best.config.model.blocks == 2
    assert same(best, weights[1])
    assert models.find(str(folder)) == best
    for what in ("night/t0002", str(folder / "t0002"), str(folder / "trials" / "t0002")):
        assert (found := models.find(what, tmp_path)).name == "night-t0002"
    assert same(found, weights[2])

    (folder / "best.yaml").write_text(cfg.dump(best.config, ["trial t0001"]))
    shutil.copy(best.weights, folder / "best.safetensors")
    found = models.find(str(folder / "best.yaml"))
    assert (found.name, found.folder, found.config) == ("best", folder, best.config)
    assert same(found, weights[1])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nigth", "nigth: .*did you mean night"),
        ("night/t0009", "night/t0002"),
        ("zzz", "allowed: night, night/t0000, night/t0001, night/t0002, train-digits"),
        ("notes", "notes: "),
        ("notes/a.txt", "notes/a.txt: "),
        ("other.safetensors", "other.safetensors: "),
        ("alone.yaml", "alone.yaml: "),
        ("night", "night: no trial has a result yet"),
        ("night/t0000", "t0000: no weights .status: unfinished"),
        ("night/t0001", "t0001: no weights .status: pruned"),
    ],
)
def test_what_is_no_model_is_refused_with_what_is_near(tmp_path, what, message):
    folder = search_folder(tmp_path / "night")
    run_folder(tmp_path / "train-digits", tiny())
    for trial in folder.glob("trials/*"):
        lines = (trial / "journal.jsonl").read_text().splitlines()
        (trial / "journal.jsonl").write_text("\n".join(line for line in lines if '"end"' not in line) + "\n")
        (trial / "weights.safetensors").unlink()
    Journal(folder / "trials" / "t0001").end(record.End("pruned"))
    (tmp_path / "notes").mkdir()
    for name in ("notes/a.txt", "other.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "alone.yaml").write_text(cfg.dump(tiny()))
    with pytest.raises(cfg.ConfigError, match=message):
        models.find(what, tmp_path)


def test_weights_of_another_model_are_refused(tmp_path):
    folder = run_folder(tmp_path / "run", tiny())
    file = folder / "weights.safetensors"
    save_file(network(tiny(model__channels=16)).state_dict(), file)
    with pytest.raises(cfg.ConfigError, match=f"{file}: .* size mismatch for time.linear1.weight"):
        models.find("run", tmp_path).network("cpu")
    file.write_bytes(b"torn")
    with pytest.raises(cfg.ConfigError, match=f"{file}: is damaged"):
        models.find("run", tmp_path).network("cpu")


@pytest.mark.training  # in a process of its own
def test_finding_needs_no_torch(tmp_path):
    search_folder(tmp_path / "night")
    program = (
        "import sys; from pathlib import Path; from tunediff import models\n"
        "print([models.find(name, Path(sys.argv[1])).name for name in ('night', 'night/t0002')])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['night-t0001', 'night-t0002']\n"


def test_weights_that_are_tied_are_saved_both(tmp_path):
    """An embedding and the layer that predicts words share one tensor; a safetensors file cannot say so."""
    tensor = torch.arange(6.0).reshape(2, 3)
    saved_weights.save({"embedding": tensor, "output": tensor}, tmp_path / "weights.safetensors", {})
    saved = saved_weights.read(tmp_path / "weights.safetensors")
    assert torch.equal(saved["embedding"], tensor)
    assert torch.equal(saved["output"], tensor)


# --------------------- models handed to diffusers by the export command; its configurations are tested in test_commands
PLAIN = Path(__file__).parent / "users" / "plain.py"
OF_A_FILE = {**searches.FILE, "workload": "mine.py", "search": {"lr": [0.01, 0.1]}}


@pytest.fixture
def storage(tmp_path, at_tmp_path):
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


def test_an_exported_configuration_names_files_as_they_were_given(tmp_path, monkeypatch, at_tmp_path):
    """It may be taken to another machine, where the same folders lie elsewhere; paths outside stay what they are."""
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
