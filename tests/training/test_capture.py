"""A captured step learns what the loop's steps learn, or says why it is not captured: on a CPU, by a recording that has
the semantics of a CUDA graph."""

import collections
import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import CPU, Dies, KilledError, Told, assert_equal, tiny, toy, train, weights
from tests.recorded_step import RecordedStep
from tests.toy.train import INPUTS, TARGETS, begin, error, network
from tunediff import config as cfg
from tunediff import steps
from tunediff.core.journal import Journal
from tunediff.core.trial_record import read_trial
from tunediff.report import sentences
from tunediff.training.capture.captured_call import CapturedCall
from tunediff.training.capture.comparison import difference
from tunediff.training.observer import Recorder
from tunediff.training.outcome import run_trial
from tunediff.training.precision import cast_weights_together
from tunediff.workloads.diffusion.timesteps import KINDS

EXACT = {"optimizer__implementation": "fused", "optimizer__lr": 2**-10, "optimizer__warmup": 0.0, "loader__workers": 0}
"""A learning rate that float32, in which a captured step reads it, holds exactly."""


FEW = 16 * 6


def both(config, samples=FEW):
    """The outcomes of a training with and without capture, and what the first one told."""
    told = Told()
    captured = train(config, samples=samples, make_graph=RecordedStep, observer=told)
    return captured, train(config, samples=samples), told


@pytest.mark.parametrize(
    "knobs",
    [
        {"timesteps__name": "loss_second_moment", "weighting__name": "min_snr"},
        {"timesteps__name": "wiener"},
        {
            "timesteps__name": "info_noise",
            "weighting__name": "uncertainty",
            "optimizer__name": "adam",
            "optimizer__implementation": "fused",
        },
        {"timesteps__name": "stratified", "loader__accumulation": 2, "loader__resident": True},
        {"precision__amp": "bf16", "memory__channels_last": True, "loader__workers": 1},
        {
            "timesteps__name": "speed",
            "weighting__name": "p2",
            "optimizer__name": "sgd",
            "optimizer__implementation": "fused",
            "model__dropout": 0.1,
        },
    ],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_captured_training_equals_the_eager_one_with(knobs):
    captured, eager, told = both(tiny(**EXACT | knobs))
    assert told.facts["capture"] == "captured"
    assert_equal(weights(captured), weights(eager))


def test_weights_of_a_captured_step_in_bf16_are_cast_together():
    """Forwards and backwards; else each weight is cast by a kernel of its own, and each gradient back."""

    class InFloat32(nn.Module):
        """A layer of one's own that leaves autocast."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.inner(x.float())

    counts = {}
    for together in (True, False):
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(144, 8), nn.SiLU(), nn.Linear(8, 1), InFloat32()
        )
        net.load_state_dict({name: torch.full_like(one, 0.01) for name, one in net.state_dict().items()})
        if together:
            cast_weights_together(net, torch.bfloat16)
            net = copy.deepcopy(net)
        step = RecordedStep()
        with step.capturing():
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.ones(2, 1, 8, 8)).float().mean()
            loss.backward()
        names = [str(call[0].overloadpacket) for call in step.calls]
        gradients = [one.grad for one in net.parameters()]
        counts[together] = sum(name in ("aten._to_copy", "aten._foreach_copy_") for name in names), gradients
        assert all(isinstance(one, nn.Parameter) for one in net.parameters())
    assert_equal(counts[True][1], counts[False][1])
    assert (counts[True][0], counts[False][0]) == (5, 15), "two for the weights, three of the input and the loss"


@pytest.mark.nightly
@pytest.mark.parametrize("sampler", sorted({kind().name for kind in KINDS} - {"beta_policy"}))
def test_captured_training_equals_the_eager_one_with_the_sampler(sampler):
    """`beta_policy` is refused by the configuration: it learns on the host in its steps."""
    test_captured_training_equals_the_eager_one_with({"timesteps__name": sampler})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_learning_rates_that_follow_the_budget_reach_a_captured_step(optimizer):
    knobs = {"optimizer__name": optimizer, "optimizer__warmup": 0.5, "optimizer__decay": "cosine"}
    config = tiny(optimizer__implementation="fused", loader__workers=0, **knobs)
    captured, eager, told = both(config, 16 * 20)
    assert told.facts["capture"] == "captured"
    assert_equal(weights(captured), weights(eager), rtol=1e-4, atol=1e-6)
    rates = [values["learning_rate"] for values in told.values]
    assert max(rates) > 2 * rates[-1] > 0, "the host knows each one"


@pytest.mark.parametrize("make_graph", [RecordedStep, None])
def test_resume_of_a_captured_training_equals_the_uninterrupted_one(tmp_path, make_graph):
    """Captured again, or in the loop: the checkpoint knows nothing of it."""
    config = tiny(**EXACT, evaluation__points=2)
    whole = train(config, samples=FEW, make_graph=RecordedStep)
    with pytest.raises(KilledError):
        train(config, samples=FEW, make_graph=RecordedStep, folder=tmp_path, observer=Dies())
    told = Told()
    resumed = train(config, samples=FEW, make_graph=make_graph, folder=tmp_path, observer=told)
    assert told.facts.get("capture") == ("captured" if make_graph else None)
    assert_equal(weights(resumed), weights(whole))


def test_capture_is_charged_as_compiling():
    for make_graph, charged in ((RecordedStep, True), (None, False)):
        told = Told()
        train(tiny(**EXACT, evaluation__points=1), samples=FEW, make_graph=make_graph, observer=told)
        assert (told.points[-1].seconds["compile"] > 0) == charged
        assert told.points[-1].steps == 6


# ---- a user's own loop
def fused(trial, lr=2**-8, **kept):
    net = trial.prepare(network(trial.knobs))
    optimizer = torch.optim.AdamW(net.parameters(), lr, fused=True)
    trial.keep(net=net, optimizer=optimizer, **kept)
    return net, optimizer


def told_of(body, steps=12, evaluates=False, **knobs):
    """What a captured training of this loop told, and how its weights differ from the eager one's."""
    config, told = toy(**{"evaluation.points": 1} | knobs), Told()
    how = {"samples": steps * config.loader.batch_size, "body": body, "evaluates": evaluates}
    captured = train(config, make_graph=RecordedStep, observer=told, **how)
    assert_equal(weights(captured), weights(train(config, **how)), rtol=1e-5, atol=1e-7)
    return told


def test_plain_loop_with_a_schedule_of_learning_rates_is_captured():
    def body(trial):
        net, optimizer = fused(trial)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # float32 holds it exactly
        trial.keep(schedule=schedule)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            trial.record_step(loss, optimizer)

    assert told_of(body).facts["capture"] == "captured"


def test_numbers_that_the_loop_sets_before_each_step_reach_a_captured_one():
    rates = {}

    def body(trial):
        net, optimizer = fused(trial)
        seen = rates.setdefault(len(rates), [])

        def halve():
            optimizer.param_groups[0]["lr"] = 2**-6 if trial.progress < 0.5 else 2**-7
            seen.append(optimizer.param_groups[0]["lr"])

        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.before_step(halve)
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    assert told_of(body).facts["capture"] == "captured"
    assert rates[0][-10:] == rates[1][-10:] == 4 * [2**-6] + 6 * [2**-7]


def test_loss_scaling_of_a_captured_step():
    def body(trial):
        net, optimizer = fused(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            with trial.autocast():
                loss = F.mse_loss(net(inputs), targets)
            trial.step(loss, optimizer, clip_norm=1.0)

    assert told_of(body, precision__amp="fp16").facts["capture"] == "captured"


def test_batch_of_another_shape_is_trained_in_the_loop():
    sizes = collections.deque()

    def body(trial):
        net, optimizer = fused(trial)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, TARGETS), 8)  # 44 = 5 × 8 + 4
        for inputs, targets in steps(trial, loader):
            sizes.append(len(inputs))
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    assert told_of(body, steps=18).facts["capture"] == "captured"
    assert list(sizes)[:13] == [8] * 10 + [4] * 3, "captured; then the three short ones of 18 steps"


class Running:
    """A mean that takes a new tensor in every step, and when it is put back."""

    def __init__(self):
        self.mean = torch.zeros(())

    def add(self, loss):
        self.mean = self.mean * 0.9 + loss.detach() * 0.1

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"].clone()


def with_item(trial, net, optimizer, inputs, targets):
    loss = F.mse_loss(net(inputs), targets)
    trial.step(loss * (1.0 if loss.item() > -1 else 2.0), optimizer)


def with_mask(trial, net, optimizer, inputs, targets):
    keep = inputs[:, 0] > -10
    trial.step(F.mse_loss(net(inputs[keep]), targets[keep]), optimizer)


def with_progress(trial, net, optimizer, inputs, targets):
    trial.step(F.mse_loss(net(inputs), targets) * (1 - 0.5 * trial.progress), optimizer)


def with_rate(trial, net, optimizer, inputs, targets):
    optimizer.param_groups[0]["lr"] = 2**-7
    trial.step(F.mse_loss(net(inputs), targets), optimizer)


def with_python_random(trial, net, optimizer, inputs, targets):
    trial.step(F.mse_loss(net(inputs), targets) * (1 + 0 * random.random()), optimizer)


def with_hidden(trial, net, optimizer, inputs, targets):
    net.hidden = [getattr(net, "hidden", [1.0])[0] + 0.125]
    trial.step(F.mse_loss(net(inputs), targets) * net.hidden[0], optimizer)


MADE = []


def with_counter(trial, net, optimizer, inputs, targets):
    MADE.append(trial)
    trial.step(F.mse_loss(net(inputs), targets) * (1 + 1e-5 * len(MADE)), optimizer)  # too little to tell steps apart


REASONS = {
    with_item: "a value is read on the host, as by .item(), bool() or a mask (test_capture.py:",
    with_mask: "a value is read on the host, as by .item(), bool() or a mask (test_capture.py:",
    with_progress: "trial.progress is read, which trial.before_step may (test_capture.py:",
    with_rate: "a learning rate is set, which trial.before_step may",
    with_python_random: "replays are not the steps: library_rng",
    with_counter: "MADE changes on the host in every step (test_capture.py:",
    with_hidden: "the same steps made twice differ: ",
}


@pytest.mark.parametrize("step", REASONS)
def test_loop_that_no_replay_can_repeat_is_refused_with_the_reason_and_trains_on(step):
    def body(trial):
        net, optimizer = fused(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            step(trial, net, optimizer, inputs, targets)

    config, told = toy(**{"evaluation.points": 1}), Told()
    train(config, samples=12 * 8, make_graph=RecordedStep, observer=told, body=body)
    assert told.facts["capture"].startswith(f"refused: {REASONS[step]}")
    assert told.points[-1].capture == told.facts["capture"]
    assert told.points[-1].steps == 12


def test_state_that_moves_when_it_is_put_back_is_named():
    def body(trial):
        net, optimizer = fused(trial, running=(running := Running()))
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            loss = F.mse_loss(net(inputs), targets)
            running.add(loss)
            trial.step(loss, optimizer)

    assert "kept.running.mean differs" in told_of(body).facts["capture"]


def test_host_work_after_each_step_sees_every_loss():
    seen = {}

    def body(trial):
        losses = seen.setdefault(len(seen), [])
        net, optimizer = fused(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            loss = F.mse_loss(net(inputs), targets)
            trial.step(loss, optimizer)
            trial.after_step(lambda one: losses.append(float(one)), loss.detach())

    assert told_of(body).facts["capture"] == "captured"
    assert seen[0][-9:] == pytest.approx(seen[1][-9:], rel=1e-5)


def test_optimizer_that_reads_its_step_on_the_host_is_refused():
    def body(trial):
        net, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    assert told_of(body).facts["capture"].startswith("refused: a value is read on the host")


def test_optimizer_whose_rate_is_a_constant_of_the_step_is_refused_when_it_moves():
    def body(trial):
        net = trial.prepare(network(trial.knobs))
        optimizer = torch.optim.SGD(net.parameters(), 2**-6, foreach=True)
        trial.keep(net=net, optimizer=optimizer)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.before_step(lambda: optimizer.param_groups[0].update(lr=2**-6 if trial.progress < 0.5 else 2**-7))
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    assert told_of(body).facts["capture"] == (
        "refused: lr of SGD (group 0) changes, and a captured step has it as a constant"
    )


def test_weights_that_an_evaluation_moves_end_the_replays():
    def body(trial):
        net, optimizer = fused(trial)

        def moves():
            net[0].weight.data = net[0].weight.data.clone()
            return error(net)

        trial.evaluate_with(moves)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.step(F.mse_loss(net(inputs), targets), optimizer)

    told = told_of(body, steps=24, evaluates=True, **{"evaluation.points": 2})
    assert told.points[0].capture == "captured"
    assert told.points[1].capture == "refused: weights or the optimizer's state were moved to another place"


class Best:
    """Keeps a number, as many do, that its `state_dict` reads from the device."""

    def __init__(self):
        self.value = torch.zeros(())

    def state_dict(self):
        return {"value": self.value.item()}

    def load_state_dict(self, state):
        self.value.fill_(state["value"])


@pytest.mark.parametrize("before", [None, lambda best: None, lambda best: best.value.item()])
def test_state_that_is_read_between_steps_is_no_read_of_the_step(before):
    def body(trial):
        best = Best()
        net, optimizer = fused(trial, best=best)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            if before is not None:
                trial.before_step(lambda: before(best))
            loss = F.mse_loss(net(inputs), targets)
            best.value.copy_(loss.detach())
            trial.step(loss, optimizer)

    assert told_of(body).facts["capture"] == "captured"


def fails_later():
    """A loop that is watched without a fault and reads on the host when it is captured."""
    steps = [0]

    def body(trial):
        net, optimizer = fused(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            steps[0] += 1
            loss = F.mse_loss(net(inputs), targets)
            trial.step(loss * (1 + 0 * loss.item()) if steps[0] > 5 else loss, optimizer)

    return body


@pytest.mark.parametrize("keeps", [True, False])
def test_capture_that_fails_ends_the_process_and_the_next_one_trains_eagerly(tmp_path, keeps):
    """Also in a run that keeps nothing but its journal, as those of a comparison."""
    config, body, folder = toy(**{"evaluation.points": 1}), fails_later(), tmp_path if keeps else None
    Journal(tmp_path).start(*cfg.identity(config), {}, 1.0)
    for attempt in ("fails", "trains"):
        told, reason = Recorder(tmp_path), read_trial(tmp_path).not_captured
        how = {"make_graph": RecordedStep, "observer": told, "body": body, "folder": folder, "not_captured": reason}
        result = run_trial(lambda how=how: train(config, samples=96, **how), CPU, tmp_path)
        assert (result.end is None) == (attempt == "fails"), "no end of the trial: it is tried again"
        assert reason.startswith("capture failed: operation not permitted") == (attempt == "trains")
    assert result.outcome.points[-1].steps == 12
    assert read_trial(tmp_path).points[-1].capture == f"refused: {reason}"
    assert f"not captured: {reason}" in sentences.of_trial(read_trial(tmp_path))


# ---- faults of a capture: what was captured is not what the loop does
class Ignores(RecordedStep):
    """A recording that leaves out all that `ignored` says of an operator and its arguments."""

    ignored = staticmethod(lambda func, args: False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        if self.ignored(func, args):
            del self.calls[-1]
        return outputs


class Averaged:
    """A slow average of the weights."""

    def __init__(self, net):
        self.net, self.mean = net, [one.detach().clone() for one in net.parameters()]

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.mean, list(self.net.parameters()), 2.0**-10)

    def state_dict(self):
        return dict(enumerate(self.mean))

    def load_state_dict(self, state):
        for mine, saved in zip(self.mean, state.values(), strict=True):
            mine.copy_(saved)


class BakedBatch(RecordedStep):
    """A recording that reads its first batch for ever."""

    batch: tuple[torch.Tensor, ...]

    def replay(self):
        if not hasattr(self, "baked"):
            self.baked = [one.clone() for one in self.batch]
        for one, baked in zip(self.batch, self.baked, strict=True):
            one.copy_(baked)
        super().replay()


class StoppedGenerator(RecordedStep):
    """A recording whose generators draw the same numbers again."""

    def __init__(self, generators=()):
        super().__init__()
        self.generators = [*generators, torch.default_generator]

    def replay(self):
        before = [one.get_state() for one in self.generators]
        super().replay()
        for one, state in zip(self.generators, before, strict=True):
            one.set_state(state)


class BakedRate(RecordedStep):
    """A recording whose scalars of the device, the learning rates, stay as they were."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("lr"), torch.Tensor):
            kwargs["lr"] = kwargs["lr"].detach().clone()
        return super().__torch_dispatch__(func, types, args, kwargs)


class StoppedAverage(Ignores):
    ignored = staticmethod(lambda func, args: "foreach_lerp" in str(func))


FAULTS = (BakedRate, BakedBatch, StoppedAverage, StoppedGenerator)


@pytest.mark.parametrize("rounding", [0.0, 1e-6], ids=["equal", "rounded"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_capture_with_a_fault_is_refused_though_rounding_is_allowed(fault, rounding):
    """Two eager runs are equal, or differ by rounding."""
    noise = torch.Generator().manual_seed(0)

    def body(trial):
        net, optimizer = fused(trial, lr=1e-3)
        mean = Averaged(net)
        trial.keep(mean=mean)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            BakedBatch.batch = inputs, targets
            loss = F.mse_loss(net(inputs) * (1 + 0.1 * torch.rand(1)), targets)
            trial.step(loss, optimizer)
            mean.update()
            if rounding:
                with torch.no_grad():
                    net[0].weight.mul_(1 + rounding * torch.rand((), generator=noise))

    told = Told()
    train(toy(**{"evaluation.points": 1}), samples=96, make_graph=fault or RecordedStep, observer=told, body=body)
    assert told.facts["capture"].startswith("refused: replays are not the steps: " if fault else "captured")


def test_rounding_that_two_eager_runs_lack_by_luck_is_allowed():
    """What an H200 said of a step that it had captured rightly: 2e-6 of a bias."""
    state = {"kept": {"bias": torch.tensor([0.5, -0.25]), "steps": torch.tensor([3])}}
    before = {"kept": {"bias": torch.tensor([0.4, -0.2]), "steps": torch.tensor([0])}}
    rounded = {"kept": {"bias": torch.tensor([0.5, -0.25]) + 1e-6, "steps": torch.tensor([3])}}
    assert not difference(state, state, rounded, before)
    assert "kept.bias" in difference(
        state, state, {"kept": state["kept"] | {"bias": state["kept"]["bias"] * 1.001}}, before
    )
    slow = {"kept": before["kept"] | {"bias": torch.tensor([0.5 - 1e-6, -0.25])}}
    assert "kept.bias" in difference(
        state, state, {"kept": state["kept"] | slow["kept"] | {"steps": torch.tensor([3])}}, slow
    )
    assert "kept.steps" in difference(state, state, {"kept": state["kept"] | {"steps": torch.tensor([2])}}, before)


# ------------------------------------------------------------------------------------------------------- evaluations
class Noted(nn.Sequential):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@torch.no_grad()
def test_a_network_of_an_evaluation_is_replayed_with_its_weights_of_now():
    net = Noted(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    predict, inputs = CapturedCall(net, RecordedStep), torch.randn(8, 5, 1, 8, 8)
    expected = [net[3](net[2](net[1](net[0](x)))) for x in inputs]
    for x, output in zip(inputs, expected, strict=True):
        assert_equal(predict(x), output)
    assert net.calls == 1 + 3, "the first call, and the second one twice and captured"
    net[3].bias.add_(1.0)
    assert torch.allclose(predict(inputs[0]), expected[0] + 1.0)
    assert net.calls == 4
    net[3].weight = nn.Parameter(torch.zeros(1, 4, 3, 3))  # elsewhere
    assert_equal(predict(inputs[0]), net[3].bias[:, None, None].expand(5, 1, 8, 8).clone())
    assert net.calls == 4 + 3
    assert predict(inputs[0, :2]).shape == (2, 1, 8, 8)
    assert not predict.refusal


@torch.no_grad()
def test_a_network_that_reads_on_the_host_is_called_as_it_is():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    net = Reads(3, 3)
    predict = CapturedCall(net, RecordedStep)
    for x in torch.randn(6, 2, 3):
        assert_equal(predict(x), net(x))
    assert "operation not permitted when a step is captured" in predict.refusal


@pytest.mark.parametrize("own_autocast", [False, True])
def test_an_evaluation_in_autocast_judges_the_weights_of_now_though_they_need_gradients(own_autocast):
    """Autocast keeps its casts of such weights while a context is on: a graph may not read them."""

    class Net(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=own_autocast or torch.is_autocast_enabled("cpu")):
                return super().forward(x)

    net, x = Net(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1)), torch.randn(3, 4)
    predict = CapturedCall(net, RecordedStep)
    for _ in range(3):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = [predict(x) for _ in range(4)]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = net(x)
        for one in found:
            assert_equal(one, expected)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(3.0)
    assert not predict.refusal
