"""Hugging Face's Trainer under the clock of a trial learns what it learns alone."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import Told, adapted_toy, assert_equal, ranks, shipped_toy, train, weights
from tests.toy.train import INPUTS, TARGETS, network
from tunediff import config as cfg
from tunediff.config import Metric
from tunediff.config.code import WorkloadError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tunediff.integrations.transformers import fit  # noqa: E402

STEPS = 15
DATA = [{"inputs": x, "targets": y} for x, y in zip(INPUTS, TARGETS, strict=True)]


class Model(torch.nn.Module):
    """As a Trainer wants it: its forward pass gives the loss."""

    def __init__(self):
        super().__init__()
        self.net, self.losses, self.kinds = network(adapted_toy().knobs), [], set()

    def forward(self, inputs, targets):
        outputs = self.net(inputs)
        loss = F.mse_loss(outputs.float(), targets)
        self.kinds.add((self.training, outputs.dtype))
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "outputs": outputs}


class Rates(transformers.TrainerCallback):
    def __init__(self):
        self.rates, self.epochs, self.fractions, self.logs = [], [], [], {}

    def on_step_begin(self, args, state, control, optimizer, **_):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **_):
        self.fractions.append(state.epoch)

    def on_log(self, args, state, control, logs, **_):
        self.logs.update(logs)

    def on_epoch_end(self, args, state, control, **_):
        self.epochs.append(state.global_step)


def alone(folder):
    rates = Rates()
    args = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, seed=0, use_cpu=True,
        save_strategy="no", disable_tqdm=True, learning_rate=0.01, warmup_steps=3,
    )  # fmt: skip
    trainer = transformers.Trainer(model_init=Model, args=args, train_dataset=DATA, callbacks=[rates])
    trainer.train()
    return trainer.model, rates


@pytest.fixture(autouse=True)
def judged_by_the_trainer():
    with shipped_toy(), mock.patch.object(cfg.of(adapted_toy()).declared, "OBJECTIVE", Metric("eval_loss", "min")):
        yield


def trained(models, steps=STEPS, given=None, rates=None, arguments=None, **how):
    def make():
        models.append(Model())
        return models[-1]

    def body(trial):
        values = {
            "max_steps": STEPS,
            "learning_rate": 0.01,
            "warmup_steps": 3,
            "label_names": ["targets"],
            **(arguments or {}),
        }
        args = transformers.TrainingArguments("out", **values)
        callbacks = [rates] if rates is not None else []
        fit(trial, args, model_init=make, train_dataset=DATA, eval_dataset=DATA, callbacks=callbacks)

    return train(given or adapted_toy(), samples=8 * steps, body=body, evaluates=True, **how)


def test_losses_and_rates_are_those_of_the_trainer_alone(tmp_path):
    (reference, expected), models, rates = alone(tmp_path), [], Rates()
    outcome = trained(models, rates=rates)
    assert models[0].losses[2:] == reference.losses, "the first two are of the warm-up, which is undone"
    assert rates.rates[1:] == expected.rates
    assert rates.epochs[:2] == expected.epochs[:2] == [6, 12], "11 batches of 4: the last step has one"
    assert rates.fractions[1:] == expected.fractions
    assert_equal(models[0].state_dict(), reference.state_dict())
    assert [point.steps for point in outcome.points] == [5, 10, 15]
    expected_loss = F.mse_loss(reference.eval().net(INPUTS), TARGETS).item()
    assert outcome.points[-1].metrics["eval_loss"] == pytest.approx(expected_loss, rel=1e-5)


def test_resume_is_exact_within_an_epoch(tmp_path):
    models, rates = [], Rates()
    whole = weights(trained(models))
    trained(models, folder=tmp_path, observer=Told(stop=lambda told: told.steps >= 8))
    outcome = trained(models, folder=tmp_path, rates=rates)
    assert_equal(weights(outcome), whole)
    assert rates.epochs[0] == 12
    assert rates.fractions[-1] == pytest.approx(2 + 6 / 11), "of 11 batches in a pass"


def test_amp_is_for_training_alone():
    models = []
    trained(models, 3, adapted_toy(**{"precision.amp": "bf16"}))
    assert models[0].kinds == {(True, torch.bfloat16), (False, torch.float32)}


def test_knobs_win_over_the_arguments_with_one_warning(caplog):
    assert trained([], 3, arguments={"per_device_train_batch_size": 16, "seed": 5}).steps == 3
    (told,) = (line for line in caplog.messages if line.startswith("TrainingArguments: "))
    assert "per_device_train_batch_size=16 (loader.batch_size), seed=5 (seed)" in told


def test_sharding_is_refused():
    with pytest.raises(WorkloadError, match="TrainingArguments: fsdp is not allowed"):
        trained([], arguments={"fsdp": "full_shard"})
    with pytest.raises(WorkloadError, match="parallel.strategy: fsdp is not allowed with transformers; allowed: ddp"):
        trained([], given=adapted_toy(**{"parallel.workers": 2, "parallel.strategy": "fsdp", "loader.accumulation": 1}))


class OwnConfig(transformers.TrainingArguments):
    """As trl's SFTConfig: computes in bf16 unless it is told otherwise."""

    def __init__(self, *args, bf16=True, **more):
        super().__init__(*args, bf16=bf16, **more)


def test_what_a_class_sets_by_itself_and_what_the_budget_replaces_is_off(caplog):
    def body(trial):
        args = OwnConfig(
            "out",
            max_steps=STEPS,
            label_names=["targets"],
            use_cpu=True,
            auto_find_batch_size=True,
            metric_for_best_model="eval_loss",
        )
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=1)
        fit(trial, args, model_init=Model, train_dataset=DATA, eval_dataset=DATA, callbacks=[stopping])

    outcome = train(adapted_toy(), samples=8 * 4, body=body, evaluates=True)
    assert (outcome.finished, outcome.steps) == (True, 4)
    said = "\n".join(caplog.messages)
    assert "bf16=True (precision.amp)" in said
    assert "auto_find_batch_size=True (loader.batch_size)" in said
    assert "EarlyStoppingCallback is off" in said


def of_a_rank(world):
    with shipped_toy(), mock.patch.object(cfg.of(adapted_toy()).declared, "OBJECTIVE", Metric("eval_loss", "min")):
        models = []
        outcome = trained(models, world=world, given=adapted_toy(**{"parallel.workers": 2, "loader.accumulation": 1}))
    return weights(outcome), models[0].losses, [point.metrics["eval_loss"] for point in outcome.points]


@pytest.mark.nightly
def test_two_ranks_learn_one_model_from_parts_of_the_data(tmp_path):
    first, second = ranks(of_a_rank, tmp_path)
    assert_equal(first[0], second[0])
    assert first[1] != second[1]
    assert first[2] == second[2]


def test_a_schedule_that_follows_evaluations_is_refused(tmp_path):
    args = transformers.TrainingArguments(
        str(tmp_path), lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
    )
    with pytest.raises(WorkloadError, match="lr_scheduler_type: .* is not allowed: it follows evaluations"):
        train(adapted_toy(), samples=16, body=lambda trial: fit(trial, args, model_init=Model, train_dataset=DATA))


def test_what_a_script_saves_lies_in_the_folder_of_its_run(tmp_path, at_tmp_path):

    def body(trial):
        args = transformers.TrainingArguments("out", max_steps=STEPS, label_names=["targets"])
        trainer = fit(trial, args, model_init=Model, train_dataset=DATA, eval_dataset=DATA)
        trainer.save_model()
        trainer.save_model(f"{args.output_dir}/last")

    train(adapted_toy(), samples=8, body=body, evaluates=True, folder=tmp_path / "run")
    assert not (tmp_path / "out").exists()
    assert any((tmp_path / "run/files/out").glob("*.safetensors"))
    assert (tmp_path / "run/files/out/last").is_dir()
