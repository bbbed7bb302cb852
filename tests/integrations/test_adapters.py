"""An adapter (LoRA of peft) is what is kept, judged again and exported; its frozen base is built again by the file."""

import importlib.util
import json
import warnings as python_warnings

import pytest
import torch

from tests import searches
from tests.helpers import CPU, Dies, KilledError, assert_equal, check_here, ranks, train, weights
from tunediff import config as cfg
from tunediff import export, models, search_space
from tunediff.config import ConfigError
from tunediff.config.code import WorkloadError
from tunediff.training.judging import judged
from tunediff.training.weights import FROZEN_BASE, read, save

MISSING = [name for name in ("peft", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")

FILE = """
from dataclasses import dataclass
import peft, torch, transformers
from tunediff import Metric, Trial

@dataclass(frozen=True)
class Knobs:
    rank: int = 2

OBJECTIVE = Metric("held_out", "min")
BASELINE = {"loader.batch_size": 8, "loader.workers": 0}
TOKENS = torch.randint(0, 1000, (64, 12), generator=torch.Generator().manual_seed(0))
SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)

def base():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8192, **SIZES))

def train(trial: Trial) -> None:
    lora = peft.LoraConfig(r=trial.knobs.rank, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    net = trial.prepare(peft.get_peft_model(base(), lora))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.05)
    trial.keep(net=net, optimizer=optimizer)
    held_out = TOKENS[-8:]
    trial.evaluate_with(lambda: {"held_out": net(input_ids=held_out, labels=held_out).loss})
    for tokens in trial.batches(TOKENS[:-8]):
        trial.step(net(input_ids=tokens, labels=tokens).loss, optimizer)
"""


@pytest.fixture
def tuned(tmp_path, at_tmp_path):
    """The configuration of a file in this folder."""
    (tmp_path / "tuned.py").write_text(FILE)
    return cfg.override(cfg.baseline("tuned.py"), {"evaluation.points": 2})


def logits(model):
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def base_of(config):
    """What the user has: the base model of the file, of the seed that the training had."""
    torch.manual_seed(config.seed)
    return cfg.of(config).code.base()


def test_files_hold_the_adapter_and_a_killed_training_goes_on_exactly(tuned, tmp_path):
    whole = train(tuned, samples=64, folder=tmp_path / "whole", evaluates=True)
    with pytest.raises(KilledError):
        train(tuned, samples=64, folder=tmp_path / "killed", evaluates=True, observer=Dies())
    again = train(tuned, samples=64, folder=tmp_path / "killed", evaluates=True)
    assert_equal(weights(again), weights(whole))
    assert again.points[-1]["held_out"] == whole.points[-1]["held_out"]
    names = set(whole.weights) - {FROZEN_BASE}
    assert len(names) == 4
    assert all("lora" in name for name in names)
    base_bytes = 4 * sum(parameter.numel() for parameter in base_of(tuned).parameters())
    assert (tmp_path / "whole" / "checkpoint.pt").stat().st_size < base_bytes / 20
    report = check_here(tuned)
    assert 4 * report["saved_parameters"] < base_bytes / 20 < report["parameters"]


def of_a_rank(world, folder):
    values = {"evaluation.points": 1, "parallel.workers": 2}
    config = cfg.override(cfg.baseline(str(folder / "tuned.py")), values)
    outcome = train(config, samples=32, folder=folder / "run", evaluates=True, world=world)
    again = judged(config, outcome.weights, world)["held_out"]
    return set(outcome.weights), again == outcome.points[-1]["held_out"]


@pytest.mark.nightly
def test_two_ranks_write_the_adapter_too(tuned, tmp_path):
    (names, equal), _ = ranks(of_a_rank, tmp_path, tmp_path)
    assert FROZEN_BASE in names
    assert len(names) == 5
    assert equal
    assert (tmp_path / "run" / "checkpoint.pt").stat().st_size < 2**18


def test_another_base_is_refused_and_an_older_file_with_the_base_in_it_still_fits(tuned, tmp_path):
    import peft

    outcome = train(tuned, samples=64, evaluates=True)
    found = judged(tuned, outcome.weights, CPU)["held_out"]
    assert found == outcome.points[-1]["held_out"]
    with pytest.raises(WorkloadError, match="the frozen base model is not the one that the adapter was trained on"):
        judged(cfg.override(tuned, {"seed": 5}), outcome.weights, CPU)
    complete = peft.get_peft_model(
        base_of(tuned), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    ).state_dict()
    complete |= {name: value for name, value in outcome.weights.items() if name != FROZEN_BASE}
    assert judged(cfg.override(tuned, {"seed": 5}), complete, CPU)["held_out"] == found


def test_a_base_that_changes_or_differs_from_run_to_run_is_not_lost_silently(tuned, tmp_path):
    changing = FILE.replace(
        "        trial.step(", "        net.get_base_model().lm_head.weight.data.mul_(1.5)\n        trial.step("
    )
    (tmp_path / "changing.py").write_text(changing)
    outcome = train(cfg.override(cfg.baseline("changing.py"), {"evaluation.points": 1}), samples=16, evaluates=True)
    assert FROZEN_BASE not in outcome.weights
    assert sum("lora" not in name for name in outcome.weights) > 5
    (tmp_path / "drifting.py").write_text(FILE.replace("net = trial", "torch.seed()\n    net = trial"))
    with pytest.raises(ConfigError, match="the file must build the same one in every run"):
        check_here(cfg.baseline("drifting.py"))


def test_the_exported_adapter_is_loaded_by_peft_and_by_load_model(tuned, tmp_path, capsys):
    folder = tmp_path / "ray_results" / "night"
    file = {**searches.FILE, "workload": "tuned.py", "search": {"rank": [2, 4]}}
    import peft

    searches.make(folder, file)
    place = searches.write(folder, search_space.load(folder / "experiment.yaml"), 0)
    outcome = train(tuned, samples=64, evaluates=True)
    save(outcome.weights, place / "weights.safetensors", {})

    assert export.main(["night", "--json"]) == 0
    network = models.find(json.loads(capsys.readouterr().out)["configuration"]).network("cpu")
    network.save_pretrained("adapter")
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error", UserWarning)  # peft warns of missing keys
        loaded = peft.PeftModel.from_pretrained(base_of(tuned), "adapter")
    assert loaded.peft_config["default"].r == 2
    state = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
    assert_equal(state, {name: value for name, value in outcome.weights.items() if name != FROZEN_BASE})
    assert torch.equal(logits(network), logits(loaded))
    assert not torch.equal(logits(network), logits(base_of(tuned)))
    assert read(folder / "best.safetensors").keys() == outcome.weights.keys()
