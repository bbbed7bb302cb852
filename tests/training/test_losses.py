"""Several losses and optimizers in one step, as adversarial trainings have them."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import CPU, Told, assert_equal, ranks, toy, train, weights
from tests.toy.train import IMAGES, INPUTS, STEPS, TARGETS, begin, loss_of
from tunediff import config as cfg
from tunediff.config.code import WorkloadError
from tunediff.training import check


class Adversaries(nn.Module):
    """Two networks in one module, the second of which judges what the first makes."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, real):
        return self.critic(real), self.critic(self.generator(real.flip(1)))


def losses_of(net, real):
    """Of generator and critic; they share a graph, and each reaches the parameters of both."""
    real, fake = net(real)
    return F.softplus(-fake).mean(), (F.softplus(-real) + F.softplus(fake)).mean()


def prepared(trial, kind=torch.optim.AdamW, lr=0.05):
    """The prepared module and the optimizers of generator and critic."""
    plain = Adversaries()
    net = trial.prepare(plain)
    optimizers = kind(plain.generator.parameters(), lr), kind(plain.critic.parameters(), lr)
    trial.keep(net=net, generator=optimizers[0], critic=optimizers[1])
    trial.evaluate_with(lambda: {"error": losses_of(net, INPUTS)[0]})
    return net, *optimizers


def adversarial(trial, **step):
    net, generator, critic = prepared(trial)
    for real, _ in trial.batches((INPUTS, TARGETS)):
        with trial.autocast():
            g_loss, d_loss = losses_of(net, real)
        trial.step({generator: g_loss, critic: d_loss}, **step)


def test_several_losses_are_one_step_and_each_reaches_its_own_parameters():
    expected, batches = [], []

    def body(trial):
        net, generator, critic = prepared(trial, torch.optim.SGD)
        for real, _ in trial.batches((INPUTS, TARGETS)):
            g_loss, d_loss = losses_of(net, real)
            parts = [
                (parameter, torch.autograd.grad(loss, parameter, retain_graph=True)[0])
                for part, loss in ((net.generator, g_loss), (net.critic, d_loss))
                for parameter in part.parameters()
            ]
            aim = [parameter.detach() - 0.05 * gradient for parameter, gradient in parts]
            trial.step({generator: g_loss, critic: d_loss})
            assert_equal([parameter.detach() for parameter, _ in parts], aim, rtol=1e-6, atol=1e-7)
            assert all(parameter.grad is None for parameter in net.parameters())
            if not trial.warming_up:
                batches.append(real)
                expected.append((g_loss + d_loss).item())

    told = Told()
    outcome = train(toy(), samples=IMAGES, observer=told, body=body)
    assert (outcome.steps, outcome.samples, len(batches)) == (STEPS, IMAGES, STEPS)
    halves = expected[: STEPS // 2], expected[STEPS // 2 :]
    assert [point.loss for point in told.points] == pytest.approx([sum(half) / len(half) for half in halves], rel=1e-5)


def test_several_losses_accumulate_to_those_of_the_whole_batch():
    whole, divided = (train(toy(loader__accumulation=count), samples=IMAGES, body=adversarial) for count in (1, 2))
    assert (divided.steps, divided.samples) == (STEPS, IMAGES)
    assert_equal(weights(whole), weights(divided), rtol=1e-3, atol=1e-4)


def test_several_losses_train_under_loss_scaling():
    """An optimizer sees gradients without the scale; a step whose gradients overflow is left out."""
    expected, taken = {}, []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            own = self.param_groups[0]["params"]
            assert_equal([one.grad for one in own], [expected[one] for one in own], rtol=2e-2, atol=2e-3)
            taken.append(self)
            return super().step()

    def body(trial):
        net, generator, critic = prepared(trial, Watched)
        for real, _ in trial.batches((INPUTS, TARGETS)):
            with trial.autocast():
                g_loss, d_loss = losses_of(net, real)
            for part, loss in ((net.generator, g_loss), (net.critic, d_loss)):
                own = list(part.parameters())
                expected.update(zip(own, torch.autograd.grad(loss, own, retain_graph=True), strict=True))
            trial.step({generator: g_loss, critic: d_loss})
        assert taken.count(generator) > STEPS // 2
        assert taken.count(critic) > STEPS // 2

    assert train(toy(precision__amp="fp16"), samples=IMAGES, body=body).steps == STEPS


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_several_losses_are_clipped_for_each_optimizer_by_itself(amp):
    norms = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            norms.append(torch.cat([one.grad.flatten() for one in self.param_groups[0]["params"]]).norm().item())
            return super().step()

    def body(trial):
        net, generator, critic = prepared(trial, Watched)
        for real, _ in trial.batches((INPUTS, TARGETS)):
            g_loss, d_loss = losses_of(net, real)
            trial.step({generator: 100 * g_loss, critic: 100 * d_loss}, clip_norm=0.5)

    train(toy(precision__amp=amp), samples=IMAGES, body=body)
    assert norms == pytest.approx([0.5] * 2 * (STEPS + 1), rel=1e-3)


def twice(trial):
    net, generator, critic = prepared(trial)
    for real, _ in trial.batches((INPUTS, TARGETS)):
        trial.step(losses_of(net, real)[0], generator)
        trial.step(losses_of(net, real)[1], critic)


def updated_twice(trial):
    net, generator, critic = prepared(trial)
    for real, _ in trial.batches((INPUTS, TARGETS)):
        trial.backward(sum(losses_of(net, real)))
        trial.update(generator)
        trial.update(critic)


def counted_twice(trial):
    net, _ = begin(trial)
    for batch in trial.batches((INPUTS, TARGETS)):
        trial.record_step(loss_of(net, batch))
        trial.record_step(loss_of(net, batch))


ONE_CALL = "several losses and optimizers go into one call: trial.step({g_optimizer: g_loss, d_optimizer: d_loss})"


@pytest.mark.parametrize(
    ("body", "call", "knobs"),
    [(twice, "step", {}), (twice, "step", {"loader__accumulation": 2}), (updated_twice, "update", {}),
     (counted_twice, "record_step", {})],
    ids=["step", "accumulation", "update", "record_step"],
)  # fmt: skip
def test_second_step_for_one_batch_is_refused(body, call, knobs):
    message = f"toy: trial.{call} was called twice for one batch; {ONE_CALL}"
    with pytest.raises(WorkloadError, match=re.escape(message)):
        train(toy(**knobs), samples=IMAGES, body=body)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda net, g, d, *losses: [{}], "trial.step got no loss"),
        (lambda net, g, d, g_loss, d_loss: [g_loss], "trial.step(loss, optimizer) needs the optimizer"),
        (lambda net, g, d, g_loss, d_loss: [{g: g_loss, d: d_loss}, g], "has the optimizers as its keys"),
        (lambda net, g, d, g_loss, d_loss: [{"g": g_loss}], "takes optimizers as keys, not str"),
        (lambda net, g, d, g_loss, d_loss: [{g: g_loss.expand(3)}], "not a tensor of shape [3]"),
        (
            lambda net, g, d, g_loss, d_loss: [{g: g_loss, torch.optim.SGD(net.generator.parameters(), 0.1): d_loss}],
            "two of its optimizers have a parameter in common",
        ),
        (lambda net, g, d, g_loss, d_loss: [{g: net.critic(INPUTS).mean(), d: d_loss}], "a loss reaches no parameter"),
    ],
)
def test_mistakes_with_several_losses_are_refused(given, message):
    def body(trial):
        net, generator, critic = prepared(trial)
        for real, _ in trial.batches((INPUTS, TARGETS)):
            losses, *more = given(net, generator, critic, *losses_of(net, real))
            trial.step(losses, *more)

    with pytest.raises(WorkloadError, match=re.escape(message)):
        train(toy(), samples=IMAGES, body=body)


def on_two_ranks(world):
    """What two ranks learn by each way, or why they refuse it."""
    answers = []
    for knobs in RANKS:
        try:
            config = toy(parallel__workers=2, **knobs)
            answers.append(weights(train(config, samples=IMAGES, world=world, body=adversarial)))
        except WorkloadError as error:
            answers.append(str(error))
    return answers


RANKS = [
    {}, {"loader__accumulation": 2}, {"parallel__static_graph": True}, {"parallel__gradients": "bf16"},
    {"parallel__strategy": "fsdp"},
]  # fmt: skip


def test_several_losses_on_two_ranks_learn_what_one_learns(tmp_path):
    first, second = ranks(on_two_ranks, tmp_path)
    one = weights(train(toy(), samples=IMAGES, body=adversarial))
    for knobs, mine, other in zip(RANKS, first, second, strict=True):
        assert_equal(mine, other)
        if "parallel__strategy" in knobs:
            assert mine.startswith("toy: parallel.strategy: fsdp is not allowed with several losses: it averages")
        else:
            near = {"rtol": 5e-2, "atol": 5e-2} if "parallel__gradients" in knobs else {"rtol": 1e-3, "atol": 1e-4}
            assert_equal(one, mine, **near)


HEAD = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from tunediff import Metric

data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Knobs:
    width: int = 8
    lr: float = 1e-3


OBJECTIVE = Metric("distance", "min")
BASELINE = {"loader.batch_size": 16, "loader.workers": 0}


def make_generator(width):
    return nn.Linear(4, 4)


def make_critic(width):
    return nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, 1))


def distance(generator):
    return (generator(data).mean(0) - data.mean(0)).norm()


"""


def test_gan_of_the_documentation_passes_the_check(tmp_path, imports_as_before):
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "several-losses.md").read_text()
    snippet = text[text.index("class Gan(") :].partition("```")[0]
    path = tmp_path / "documented_gan.py"
    path.write_text(HEAD + snippet)
    report = check.check(cfg.baseline(str(path)), CPU)
    assert report["unread"] == report["warnings"] == []
