"""Lightning's Trainer under the clock of a trial learns what it learns alone."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import Told, adapted_toy, assert_equal, check_here, ranks, shipped_toy, train, weights
from tests.toy.train import INPUTS, TARGETS, network
from tunediff import config as cfg
from tunediff.config.code import WorkloadError

pl = pytest.importorskip("pytorch_lightning")

from tunediff.integrations.lightning import fit  # noqa: E402

STEPS = 15
DATA = TensorDataset(INPUTS, TARGETS)


class Module(pl.LightningModule):
    """Dropout, a scheduler by steps, one by epochs, logging in both loops."""

    def __init__(self, knobs):
        super().__init__()
        self.net, self.losses, self.rates, self.epochs = network(knobs), [], [], []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = F.mse_loss(self.net(inputs + 0.1 * torch.randn_like(inputs)), targets)
        self.log("train_error", loss)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, index):
        self.log("error", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self):
        self.epochs.append((self.current_epoch, self.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Decay(Module):
    """A schedule that steps with every so many batches or epochs."""

    interval, frequency = "step", 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        how = {"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": how}


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(DATA, 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(DATA, 44)


def alone(kind=Module, **length):
    """Losses and rates by Lightning's Trainer without anything else, with the seed of `adapted_toy`."""
    pl.seed_everything(0)
    module = kind(adapted_toy().knobs)
    trainer = pl.Trainer(
        **length or {"max_steps": STEPS}, accumulate_grad_batches=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, Data())
    return module


def trained(modules, steps=STEPS, given=None, kind=Module, options=None, **how):
    def body(trial):
        modules.append(kind(trial.knobs))
        fit(trial, modules[-1], Data(), **options or {"max_steps": STEPS})

    return train(given or adapted_toy(), samples=8 * steps, body=body, evaluates=True, **how)


def checked(kind=Module, callback=None):
    """The report of the check before a search."""

    def body(trial):
        fit(trial, kind(trial.knobs), Data(), max_steps=STEPS, callbacks=[callback()] if callback else [])

    with shipped_toy(), mock.patch.object(cfg.of(adapted_toy()).code, "train", body):
        return check_here(adapted_toy())


def test_losses_rates_and_epochs_are_those_of_lightning_alone():
    reference, modules = alone(), []
    outcome = trained(modules)
    (module,) = modules
    assert module.losses[2:] == reference.losses, "the first two are of the warm-up, which is undone"
    assert module.rates[2:] == reference.rates
    assert module.epochs[:2] == reference.epochs[:2] == [(0, 6), (1, 12)], "11 batches of 4: the last step has one"
    assert_equal(module.state_dict(), reference.state_dict())
    assert [point.steps for point in outcome.points] == [5, 10, 15]
    assert all(set(point.metrics) >= {"error"} for point in outcome.points)
    assert outcome.points[-1].metrics["error"] == pytest.approx(
        F.mse_loss(module.eval().net(INPUTS), TARGETS).item(), rel=1e-5
    )


@pytest.mark.parametrize(
    ("interval", "options", "steps"),
    [
        ("epoch", {"max_epochs": 100, "max_steps": 15}, 15),
        ("epoch", {"max_steps": 15}, 15),
        ("step", {"max_epochs": 2, "max_steps": 1000}, 12),
    ],
)
def test_a_schedule_is_as_long_as_lightning_alone_would_train(interval, options, steps):
    kind = type("Kind", (Decay,), {"interval": interval})
    reference, modules = alone(kind, **options), []
    trained(modules, steps, kind=kind, options=options)
    assert len(set(reference.rates)) > 1
    assert modules[0].rates[2:] == reference.rates


def test_a_module_that_optimizes_by_itself_makes_the_steps_of_its_schedulers():
    class Manual(Decay):
        automatic_optimization = False

        def training_step(self, batch, index):
            loss, optimizer = super().training_step(batch, index), self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if index % 5 == 0:
                self.lr_schedulers().step()

    modules = []
    trained(modules, given=adapted_toy(**{"loader.accumulation": 1}), kind=Manual)
    assert modules[0].rates[1:16] == [0.1, *[0.05] * 5, *[0.025] * 5, 0.0125, *[0.00625] * 3]


def test_resume_is_exact_within_an_epoch(tmp_path):
    modules = []
    whole = weights(trained(modules))
    trained(modules, folder=tmp_path, observer=Told(stop=lambda told: told.steps >= 8))
    assert len(modules[-1].losses) < len(modules[0].losses)
    outcome = trained(modules, folder=tmp_path)
    assert_equal(weights(outcome), whole)
    assert modules[-1].epochs[-1] == modules[0].epochs[-1]


class LateAverage(pl.Callback):
    """Makes its state when the fit begins."""

    average = None

    def on_fit_start(self, trainer, module):
        self.average = [weight.detach().clone() for weight in module.parameters()]

    def on_train_batch_end(self, trainer, module, *_):
        for average, weight in zip(self.average, module.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.1)

    def state_dict(self):
        return {} if self.average is None else {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class ByHook(LateAverage):
    """Has its state in Lightning's checkpoint, and what it takes the place of there."""

    state_dict, load_state_dict = pl.Callback.state_dict, pl.Callback.load_state_dict

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["by_hook"], checkpoint["state_dict"] = self.average, {}

    def on_load_checkpoint(self, trainer, module, checkpoint):
        assert checkpoint["state_dict"] == {}
        self.average = checkpoint["by_hook"]


class Counting(Module):
    """Counts its batches and keeps the number by hooks."""

    count = 0

    def training_step(self, batch, index):
        self.count += 1
        return super().training_step(batch, index)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count + 0 * len(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]


def test_what_callbacks_and_modules_keep_for_themselves_is_resumed(tmp_path):
    modules, callbacks = [], []

    def run(**how):
        callbacks.append([LateAverage(), ByHook()])
        trained(modules, kind=Counting, options={"max_steps": STEPS, "callbacks": callbacks[-1]}, **how)

    run()
    run(folder=tmp_path, observer=Told(stop=lambda told: told.steps >= 8))
    run(folder=tmp_path)
    assert [module.count for module in modules] == [28, 15, 28], "without those of the warm-up"
    whole, _, resumed = callbacks
    expected = [weight.clone() for weight in whole[0].average]
    for callback in (*whole, *resumed):
        assert_equal(callback.average, expected)


def test_a_module_of_another_package_is_refused():
    with pytest.raises(WorkloadError, match="Linear is no LightningModule"):
        train(adapted_toy(), body=lambda trial: fit(trial, torch.nn.Linear(1, 1), Data()))


def test_a_callback_that_ends_the_training_is_an_error():
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = True

    with pytest.raises(WorkloadError, match="ended its training after .* before the budget: a callback such as"):
        train(adapted_toy(), body=lambda trial: fit(trial, Module(trial.knobs), Data(), max_steps=9, callbacks=Stop()))


class Target(Module):
    """A target network that is updated with every epoch."""

    def __init__(self, knobs):
        super().__init__(knobs)
        self.target = network(knobs).requires_grad_(False)

    def on_train_epoch_end(self):
        self.target.load_state_dict(self.net.state_dict())


def test_a_target_network_that_an_epoch_updates_is_saved_and_checked_without_a_warning():
    outcome = trained([], kind=Target)
    assert (outcome.points[-1].steps, outcome.reason) == (STEPS, "")
    assert checked(Target)["warnings"] == []


def test_the_saved_weights_are_the_average_that_a_callback_has_judged():
    modules, callback = [], pl.callbacks.EMAWeightAveraging(decay=0.9)
    outcome = trained(modules, options={"max_steps": STEPS, "callbacks": callback})
    judged = Module(adapted_toy().knobs)
    judged.load_state_dict(outcome.weights)
    error = F.mse_loss(judged.eval().net(INPUTS), TARGETS).item()
    assert outcome.points[-1].metrics["error"] == pytest.approx(error, rel=1e-5)


def test_amp_is_for_training_alone():
    modules, kinds = [], []

    class Typed(Module):
        def training_step(self, batch, index):
            kinds.append(("train", self.net(batch[0]).dtype))
            return super().training_step(batch, index)

        def validation_step(self, batch, index):
            kinds.append(("judge", self.net(batch[0]).dtype))
            super().validation_step(batch, index)

    body = lambda trial: fit(trial, Typed(trial.knobs), Data(), max_steps=STEPS)  # noqa: E731
    train(adapted_toy(**{"precision.amp": "bf16"}), samples=8 * 3, body=body, evaluates=True)
    assert set(kinds) == {("train", torch.bfloat16), ("judge", torch.float32)}, modules


def of_a_rank(world):
    modules = []
    outcome = trained(modules, world=world, given=adapted_toy(**{"parallel.workers": 2, "loader.accumulation": 1}))
    return weights(outcome), modules[0].losses, [point.metrics["error"] for point in outcome.points]


@pytest.mark.nightly
def test_two_ranks_learn_one_model_from_parts_of_the_data(tmp_path):
    first, second = ranks(of_a_rank, tmp_path)
    assert_equal(first[0], second[0])
    assert first[1] != second[1]
    assert first[2] == second[2]


def test_a_loader_without_a_length_is_refused():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(DATA)

    def body(trial):
        fit(trial, Module(trial.knobs), DataLoader(Endless(), 4))

    with pytest.raises(WorkloadError, match="train_dataloader: a loader without a length is not allowed"):
        train(adapted_toy(), samples=16, body=body)


def test_checkpoints_of_a_callback_lie_in_the_folder_of_its_run(tmp_path, at_tmp_path):
    callback = pl.callbacks.ModelCheckpoint(dirpath="out", every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": STEPS, "callbacks": [callback], "default_root_dir": "root"}
    trained([], steps=2, options=options, folder=tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert any((tmp_path / "run/files/out").glob("*.ckpt"))
