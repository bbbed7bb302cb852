"""What a training leaves as it was, what it saves, and what goes on from there."""

import contextlib
import errno
import functools
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import CPU, Dies, Hands, KilledError, Told, assert_equal, shipped_toy, timed, toy, train, weights
from tests.toy.train import IMAGES, INPUTS, STEPS, TARGETS, Average, begin, error, loss_of, network, plain
from tunediff import epochs, steps
from tunediff.core.clock import Budget
from tunediff.core.trial_record import NotFiniteError
from tunediff.distributed import alone
from tunediff.training import knobs, state, trial
from tunediff.training import optimizer as optimizers
from tunediff.training.ema import ExponentialAverage
from tunediff.training.engine import Engine
from tunediff.training.outcome import run_trial


# --------------------------------------------------------------------------------------------------- the warm-up step
def everything(trial):
    """What a training can change, all of it."""
    return state.copied(trial.engine.state.take()) | {"scaler": dict(trial.engine.amp.scaler.state_dict())}


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_the_warm_up_leaves_everything_as_it_was(amp):
    """Weights, buffers, the optimizer, what a workload keeps of its own, what is drawn."""
    found = {}

    def body(trial):
        average = Average()
        net, optimizer = begin(trial, average=average)
        for index, batch in enumerate(trial.batches((INPUTS, TARGETS))):
            if index < 2:
                found["before" if index == 0 else "after"] = everything(trial)
            draws.append((torch.rand(1, generator=trial.rng).item(), torch.rand(1).item()))
            with trial.autocast():
                loss = loss_of(net, batch)
            average.add(loss)
            trial.step(loss * (math.inf if amp == "fp16" and index == 0 else 1.0), optimizer)
            if index == 0:
                found["warm"] = everything(trial)

    draws = []
    outcome = train(toy(dropout=0.2, precision__amp=amp), samples=IMAGES, body=body)
    assert_equal(found["before"], found["after"])
    changed = {"average", "net"} | ({"optimizer"} if amp == "none" else set())  # an infinite loss is no update
    for name in changed:
        with pytest.raises(AssertionError):
            assert_equal(found["before"]["kept"][name], found["warm"]["kept"][name])
    for name in ("rng", "shared_rng", *(["scaler"] if amp == "fp16" else [])):
        with pytest.raises(AssertionError):
            assert_equal(found["before"][name], found["warm"][name])
    assert draws[0] == draws[1]
    assert (len(draws), outcome.steps) == (STEPS + 1, STEPS)
    assert outcome.weights["1.num_batches_tracked"] == STEPS


# ---------------------------------------------------------------------------------------------- checkpoints and resume
class KilledAt(Told):
    """Ends a training after so many steps of its process: by a kill, or by a request to stop, which is saved first."""

    def __init__(self, step, asked):
        super().__init__(stop=lambda told: asked and told.steps >= step)
        self.step, self.asked = step, asked

    def after_step(self):
        super().after_step()
        if self.steps == self.step and not self.asked:
            raise KilledError


def final(folder):
    """The last checkpoint, without what was measured in seconds."""
    found = state.load(folder)
    names = ("index", "steps", "samples", "loss", "error")
    points = [{name: point[name] for name in names} for point in found["points"]]
    seconds = ("clock", "meter", "points", "before_first_batch_s")
    return {name: value for name, value in found.items() if name not in seconds} | {"points": points}


def over_epochs(make_loader, ends=lambda trial: False):
    """A loop by epochs that makes its own steps and ends passes early."""

    def body(trial):
        net = network(trial.knobs)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        net = trial.prepare(net, optimizer=optimizer, scheduler=scheduler)
        trial.evaluate_with(lambda: error(net))
        for _, loader in epochs(trial, make_loader()):
            for batch in loader:
                optimizer.zero_grad()
                (loss := loss_of(net, batch)).backward()
                optimizer.step()
                trial.record_step(loss, optimizer)
                if ends(trial):
                    break
            scheduler.step()

    return body


class Noisy(torch.utils.data.Dataset):
    """Items are drawn."""

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return INPUTS[index] + torch.randn(4), TARGETS[index]


def scheduled(trial):
    """Schedulers in sequence, and a rate that numpy computes."""
    net, optimizer = begin(trial)
    of = torch.optim.lr_scheduler
    parts = [of.LinearLR(optimizer, 0.1, 1.0, 2), of.MultiStepLR(optimizer, [2, 4], 0.1)]
    trial.keep(scheduler=(scheduler := of.SequentialLR(optimizer, parts, [2])))
    trial.evaluate_with(lambda: error(net))
    for batch in trial.batches((INPUTS, TARGETS)):
        trial.step(loss_of(net, batch), optimizer)
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = np.float64(0.05) * (1 + np.cos(np.pi * trial.progress))


def counting(trial):
    """A count takes the place of a loader; each step has two backward passes."""
    net, optimizer = begin(trial)
    trial.evaluate_with(lambda: error(net))
    for number in steps(trial, itertools.count(), samples=8):
        for first in (number % 40, number % 40 + 2):
            loss = loss_of(net, (INPUTS[first : first + 2], TARGETS[first : first + 2]))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trial.record_step(loss, optimizer)


def adversaries(trial):
    """Two optimizers that the loop steps by itself, and an average of what they learn."""
    parts = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 1)})
    net = trial.prepare(parts)
    a, b = (torch.optim.AdamW(net[name].parameters(), 0.05) for name in ("a", "b"))
    average = ExponentialAverage(knobs.Ema(), parts)
    trial.keep(net=net, a=a, b=b, average=average)
    trial.evaluate_with(lambda: {"error": net["b"](net["a"](INPUTS)).mean().item()})
    for inputs, _ in trial.batches((INPUTS, TARGETS)):
        output = net["b"](net["a"](inputs))
        loss = output.square().mean()
        loss.backward()
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
        trial.record_step(loss, a)
        average.update(parts, trial.schedule, trial.stride)


def by_optimizer(section):
    def body(trial):
        net = trial.prepare(network(trial.knobs))
        optimizer = optimizers.build(section, 8, net)
        trial.keep(net=net, optimizer=optimizer)
        trial.evaluate_with(lambda: error(net))
        for batch in trial.batches((INPUTS, TARGETS)):
            optimizers.set_learning_rate(optimizer, section, 8, trial.progress)
            trial.step(loss_of(net, batch), optimizer)

    return body


DATA = TensorDataset(INPUTS, TARGETS)
TRAININGS = {
    "plain": (None, {}),
    "dropout and noise": (None, {"dropout": 0.3}),
    "accumulation": (None, {"loader__accumulation": 2, "dropout": 0.2}),
    "fp16": (None, {"precision__amp": "fp16"}),
    "on the device": (None, {"loader__resident": True}),
    "schedules": (scheduled, {}),
    "a count": (counting, {}),
    "two optimizers and an average": (adversaries, {}),
    "adam": (by_optimizer(knobs.Adam(decay="cosine")), {}),
    "muon": (by_optimizer(knobs.Muon()), {}),
    "sgd": (by_optimizer(knobs.Sgd(decay="one_cycle")), {}),
    "epochs": (over_epochs(lambda: DataLoader(DATA, 8, shuffle=True)), {"dropout": 0.2}),
    "drawn items": (over_epochs(lambda: DataLoader(Noisy(), 8, shuffle=True)), {}),
    "a sampler's generator": (
        over_epochs(lambda: DataLoader(DATA, 8, shuffle=True, generator=torch.Generator().manual_seed(5))), {}
    ),
    "passes left early": (
        over_epochs(lambda: DataLoader(DATA, 8, shuffle=True), ends=lambda trial: trial.step_count % 4 == 3), {}
    ),
    "a stream": (over_epochs(lambda: Stream()), {}),
}  # fmt: skip


class Stream:
    """Has no length."""

    def __iter__(self):
        return iter([(INPUTS[first : first + 8], TARGETS[first : first + 8]) for first in (0, 8, 16)])


@functools.cache
def uninterrupted(name):
    body, values = TRAININGS[name]
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(toy(**values), samples=IMAGES, folder=Path(folder), evaluates=True, body=body)
        return weights(outcome), final(Path(folder))


@pytest.mark.parametrize("name", TRAININGS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    ends=st.lists(st.tuples(st.integers(0, STEPS), st.booleans()), min_size=1, max_size=2),
    every_s=st.sampled_from([0.0, 300.0]),
)
def test_a_training_killed_at_any_step_ends_where_an_uninterrupted_one_does(name, ends, every_s):
    """Bit for bit, in all that it has learned and drawn, however often, and whether its last step was saved or not."""
    body, values = TRAININGS[name]
    expected, content = uninterrupted(name)
    with tempfile.TemporaryDirectory() as folder:
        how = {
            "samples": IMAGES,
            "folder": Path(folder),
            "evaluates": True,
            "body": body,
            "checkpoint_every_s": every_s,
        }
        for step, asked in ends:
            with contextlib.suppress(KilledError):
                train(toy(**values), observer=KilledAt(step, asked), **how)
        told = Told()
        outcome = train(toy(**values), observer=told, **how)
        assert_equal(expected, weights(outcome))
        assert_equal(content, final(Path(folder)))
    assert (outcome.steps, outcome.samples, outcome.finished) == (STEPS, IMAGES, True)
    assert [point.index for point in told.points] == [1, 2], "points before a kill are reported again, not lost"


def test_a_finished_training_is_not_trained_again(tmp_path):
    first = train(toy(), samples=IMAGES, folder=tmp_path)
    told = Told()
    again = train(toy(), samples=IMAGES, folder=tmp_path, observer=told)
    assert_equal(weights(first), weights(again))
    assert (told.steps, [point.index for point in told.points], again.finished) == (0, [1, 2], True)


def changed(folder, **parts):
    found = state.load(folder)
    state.save(found | {name: found[name] | values for name, values in parts.items()}, folder)


def test_what_a_training_used_before_it_was_killed_counts(tmp_path):
    """An hour on a device before; a device-hour costs 7."""
    with pytest.raises(KilledError):
        train(toy(), samples=IMAGES, folder=tmp_path, observer=Dies())
    point = state.load(tmp_path)["points"][0]
    before = state.load(tmp_path)["meter"]
    assert before["device_s"] == point["train_s"]
    changed(tmp_path, meter={"device_s": 3600.0})
    with shipped_toy():
        budget = Budget(samples=IMAGES, price_per_device_hour=7.0)
        again = trial.run(Engine(toy(), budget, CPU, Told(), folder=tmp_path, evaluates=False))
    last = again.points[-1]
    assert last.device_s == pytest.approx(3600 + last.train_s - point["train_s"])
    assert last.price == pytest.approx(7.0 * last.device_s / 3600)


def test_what_a_resumed_training_restores_beside_what_is_kept(tmp_path):
    """Scale of the losses, where the schedule began, seconds of every part: each seen in what goes on from it."""
    with pytest.raises(KilledError):
        train(toy(precision__amp="fp16"), samples=IMAGES, folder=tmp_path, observer=Dies())
    scaler = state.load(tmp_path)["scaler"]
    seconds = {
        "train": 50.0,
        "evaluation": 7000.0,
        "checkpoint": 300.0,
        "data_wait": 10.0,
        "setup": 0.0,
        "compile": 0.0,
    }
    changed(tmp_path, scaler={"scale": 1024.0}, pace={"start": 0.25}, clock={"seconds": seconds})
    seen = []

    def body(trial):
        net, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            if not trial.warming_up:
                seen.append((trial.progress, trial.engine.amp.scaler.get_scale()))
            with trial.autocast():
                loss = F.mse_loss(net(inputs).float(), targets)
            trial.step(loss, optimizer)

    changed_kept = state.load(tmp_path)
    changed_kept["kept"].pop("average")
    state.save(changed_kept, tmp_path)
    outcome = train(toy(precision__amp="fp16"), samples=IMAGES, folder=tmp_path, body=body)
    assert scaler["scale"] != 1024.0
    assert seen[0] == (pytest.approx((0.5 - 0.25) / 0.75), 1024.0)
    assert outcome.steps == STEPS
    assert outcome.points[-1].train_s >= 60.0
    assert outcome.seconds["evaluation"] >= 7000.0
    assert outcome.seconds["checkpoint"] >= 300.0


def test_checkpoints_are_written_between_evaluations(tmp_path, monkeypatch):
    """After so many training seconds: a kill costs no more than that."""
    saved, hands, save = [], Hands(), state.save
    monkeypatch.setattr(
        state, "save", lambda content, folder: saved.append(content["pace"]["steps"]) or save(content, folder)
    )

    def each(trial, net):
        if not trial.warming_up:
            hands.s += 1.0
        if trial.step_count == dies_at:
            raise KilledError

    config = toy(evaluation__points=2)
    how = {"seconds": 20.0, "folder": tmp_path, "checkpoint_every_s": 3.0, "body": plain(each=each)}
    dies_at = 16
    with pytest.raises(KilledError):
        train(config, clock=timed(20.0, hands), **how)
    assert saved == [4, 8, 10, 14], "that of the evaluation counts"
    saved.clear()
    dies_at, told = None, Told()
    outcome = train(config, clock=timed(20.0, hands), observer=told, **how)
    assert (told.steps, outcome.steps) == (6, 20)
    assert saved == [18, 20], "none twice at the end"


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_set_aside(tmp_path, monkeypatch):
    state.save({"steps": 3}, tmp_path)
    path, opened = tmp_path / state.CHECKPOINT, open

    def fails(file, *args, **options):
        if str(file) == str(path):
            raise OSError(errno.EMFILE, "Too many open files", str(file))
        return opened(file, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fails)
        result = run_trial(lambda: state.load(tmp_path, pytest.fail), alone(), tmp_path)
    assert (result.end, result.error.errno) == (None, errno.EMFILE), "an end would remove it"
    assert state.load(tmp_path) == {"steps": 3}


def test_a_checkpoint_runs_no_code(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    torch.save({"kept": Evil()}, tmp_path / state.CHECKPOINT)
    assert state.load(tmp_path) is None
    assert "checkpoint.pt cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ({"count": 3}, TypeError, r"keep\(count=…\): int has no state_dict and load_state_dict"),
        ({"half": torch.zeros(1)}, TypeError, r"keep\(half=…\): Tensor has no"),
        ({"net": Average()}, ValueError, r"keep\(net=…\): the name is taken"),
    ],
    ids=["a number", "a tensor", "a name twice"],
)
def test_what_cannot_be_kept_is_refused(kept, error, message):
    def body(trial):
        begin(trial)
        trial.keep(**kept)

    with pytest.raises(error, match=message):
        train(toy(), samples=8, body=body)


# ----------------------------------------------------------------------------------------------------------- stopping
def test_a_point_can_end_it_also_when_it_is_told_again(tmp_path):
    class Enough(Told):
        def point(self, point):
            return False

    for _ in range(2):
        outcome = train(toy(), samples=IMAGES, folder=tmp_path, observer=Enough())
        assert (outcome.finished, len(outcome.points), outcome.samples) == (False, 1, IMAGES // 2)


@pytest.mark.parametrize("step", [STEPS // 2, STEPS])
def test_stopped_where_a_point_is_due_its_point_says_what_was_measured_before(tmp_path, step):
    how = {"samples": IMAGES, "folder": tmp_path, "evaluates": True}
    first = train(toy(), observer=Told(stop=lambda told: told.steps >= step), **how)
    assert (first.finished, first.steps) == (False, step)
    again, whole = train(toy(), **how), train(toy(), samples=IMAGES, evaluates=True)
    assert again.finished
    assert [point.loss for point in again.points] == [point.loss for point in whole.points]
    assert min(point.samples_per_s for point in again.points) > 0


def test_open_ended_trains_past_its_budget_until_asked_and_goes_on(tmp_path):
    """The schedule of a budget, evaluations at its distance, and no end."""
    how = {"samples": IMAGES, "open_ended": True, "evaluates": True}
    told = Told(stop=lambda told: told.steps >= 23)
    first = train(toy(), folder=tmp_path, observer=told, **how)
    assert (first.finished, first.steps) == (False, 23)
    assert [point.samples for point in told.points] == [IMAGES // 2 * k for k in range(1, 5)]
    assert [point.fraction for point in told.points] == [0.5, 1.0, 1.5, 2.0]
    again = train(toy(), folder=tmp_path, observer=Told(stop=lambda told: told.steps >= 17), **how)
    whole = train(toy(), folder=tmp_path / "whole", observer=Told(stop=lambda told: told.steps >= 40), **how)
    assert again.steps == whole.steps == 40
    assert_equal(weights(whole), weights(again))
    assert [point.index for point in again.points] == list(range(1, 8))


def spoilt(value, bad):
    """A `train` whose loss is spoilt at these steps."""

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step((value if trial.step_count in bad else 1.0) * loss_of(net, batch), optimizer)

    return body


def test_a_loss_that_is_not_finite_ends_it():
    with pytest.raises(NotFiniteError, match="the loss is not finite after 4 steps"):
        train(toy(), samples=IMAGES, body=spoilt(math.nan, [3]))


def test_losses_that_the_scale_is_found_by_are_no_divergence():
    """fp16: a few infinite losses lower the scale; when none was finite up to a point, nothing can be said there."""
    outcome = train(toy(precision__amp="fp16"), samples=IMAGES, body=spoilt(math.inf, [1, 2]))
    assert all(math.isfinite(point.loss) for point in outcome.points)
    with pytest.raises(NotFiniteError, match=f"no loss was finite up to step {STEPS // 2}"):
        train(toy(precision__amp="fp16"), samples=IMAGES, body=spoilt(math.inf, range(STEPS)))


# ------------------------------------------------------------------------------------------- numpy, restarts, reasons


@pytest.mark.parametrize("fault", ["torn", "no checkpoint's content", "another net", "a part is missing"])
def test_a_checkpoint_that_cannot_be_used_restarts_the_training_with_the_reason(tmp_path, fault):
    """Damaged, of another version or of another model: nobody's configuration has failed."""
    whole = train(toy(), samples=IMAGES, evaluates=True)
    with pytest.raises(KilledError):
        train(toy(), samples=IMAGES, folder=tmp_path, evaluates=True, observer=Dies())
    saved = state.load(tmp_path)
    if fault == "torn":
        (tmp_path / state.CHECKPOINT).write_bytes(b"PK\x03\x04 torn")
    elif fault == "no checkpoint's content":
        torch.save([1], tmp_path / state.CHECKPOINT)
    elif fault == "another net":
        saved["kept"]["net"]["0.weight"] = torch.zeros(3, 3)
    else:
        del saved["kept"]["average"]
    if fault not in ("torn", "no checkpoint's content"):
        state.save(saved, tmp_path)
    told = Told()
    again = train(toy(), samples=IMAGES, folder=tmp_path, evaluates=True, observer=told)
    assert_equal(weights(whole), weights(again))
    assert told.steps == STEPS
    (reason,) = told.restarts
    assert {"torn": "cannot be read", "no checkpoint's content": "holds list", "another net": "0.weight",
            "a part is missing": "average"}[fault] in reason  # fmt: skip
    assert len(list(tmp_path.glob("*.damaged"))) == 1, "kept aside"


# ------------------------------------------------------------------------------------------------ schedules and counts
