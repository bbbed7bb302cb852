"""Two processes that train as one: what is learned, what differs between them, who decides."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import CPU, Told, assert_equal, ranks, toy, train, weights
from tests.toy.train import IMAGES, INPUTS, TARGETS, begin, error, plain
from tunediff.config import ConfigError
from tunediff.config.code import WorkloadError
from tunediff.core.trial_record import NotFiniteError
from tunediff.training import state

PLAIN = {"norm": False, "parallel__workers": 2}
FSDP = {"parallel__strategy": "fsdp"}
SAME = [
    {}, {"loader__accumulation": 2}, {"parallel__static_graph": True, "parallel__bucket_mib": 0.01},
    {"loader__resident": True}, {"precision__amp": "bf16"}, {"parallel__gradients": "bf16"},
    FSDP, FSDP | {"loader__accumulation": 2}, FSDP | {"precision__amp": "bf16"},
    FSDP | {"parallel__gradients": "bf16", "parallel__reshard": False},
]  # fmt: skip
STRATEGIES = ["ddp", "fsdp", "pipeline"]
PIPELINE = {"parallel__strategy": "pipeline"}
PASSES = [
    PIPELINE | {"parallel__schedule": "gpipe", "parallel__microbatches": 1, "loader__accumulation": 2},
    PIPELINE | {"precision__amp": "bf16", "parallel__microbatches": 2},
]
FEW = 8 * 4
EXACT, HALF = {"rtol": 1e-4, "atol": 1e-5}, {"rtol": 2e-2, "atol": 2e-2}
"""How near ten steps on two ranks come to those of one: other sums, and other roundings to eight bits."""


def told_and_learned(world=CPU, **how):
    told = Told()
    outcome = train(world=world, observer=told, **how)
    return {"weights": weights(outcome), "points": told.points, "steps": outcome.steps, "finished": outcome.finished}


def draws(trial):
    """Each rank's initial weights, what it draws for itself and what all draw together; gradients beside the model."""
    found["outside"] = torch.rand(3)  # as parts outside the prepared model are made; its own are sent by rank 0
    beside = torch.nn.Parameter(torch.zeros(1))
    net, optimizer = begin(trial)
    optimizer.add_param_group({"params": [beside]})
    found["first"] = net.module[0].weight.detach().clone() if trial.world.size > 1 else net[0].weight.detach().clone()
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        found.setdefault("own", torch.rand(4))
        found.setdefault("shared", torch.rand(4, generator=trial.rng))
        trial.backward(F.mse_loss(net(inputs), targets))
        trial.backward_beside((trial.world.rank + 1.0) * beside.sum())
        trial.update(optimizer, beside=[beside])
    found["beside"] = beside.detach().clone()


def sgd(trial):
    """Plain gradient steps on what lies beside the model: their size is the gradient's."""
    own = torch.nn.ParameterList([torch.zeros(1)])
    net = trial.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD([*net.parameters(), *own], 1.0)
    trial.keep(own=own)
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        trial.backward(0.0 * F.mse_loss(net(inputs), targets))
        trial.backward_beside((trial.world.rank + 1.0) * own[0].sum())
        trial.update(optimizer, beside=own)
    found["beside"] = own[0].item()


found: dict = {}


def diverges_on_one(trial):
    net, optimizer = begin(trial)
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        bad = trial.world.rank == 1 and trial.step_count == 3
        loss = F.mse_loss(net(inputs), targets)
        trial.backward(torch.where(torch.tensor(bad), math.nan * loss.detach(), loss))
        trial.update(optimizer)


def by_passes(trial):
    """A training that leaves both passes to the strategy; rank 0 judges it alone."""
    net, optimizer = begin(trial)
    trial.evaluate_with(lambda: trial.world.tell(error(net) if trial.world.main else None))
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        losses = trial.forward_backward((inputs,), (targets,), squares)
        assert len(losses) == trial.shard.count == len(inputs)
        if trial.sync_gradients:
            trial.update(optimizer, clip_norm=0.5)


def squares(output, target):
    return (output.float() - target).square().mean(1)


def refused(world, body):
    try:
        train(toy(**PLAIN, **PIPELINE), samples=IMAGES, world=world, body=body)
    except (ConfigError, WorkloadError) as error:
        return str(error)


def everything(world, folder):
    """One start of two processes for all that is asked of them."""
    answers = {"same": [told_and_learned(world, config=toy(**PLAIN, **knobs), samples=IMAGES) for knobs in SAME]}
    answers["seconds"] = told_and_learned(world, config=toy(**PLAIN), seconds=0.5)

    # ---- what differs between ranks
    found.clear()
    train(toy(**PLAIN), samples=8, world=world, body=draws)
    answers["draws"] = dict(found)
    train(toy(**PLAIN), samples=8 * 3, world=world, body=sgd)
    answers["beside"] = found["beside"]

    # ---- an end on one rank is one on all
    try:
        train(toy(**PLAIN), samples=IMAGES, world=world, body=diverges_on_one)
    except NotFiniteError as error:
        answers["diverged"] = str(error)
    asked = Told(stop=lambda told: world.rank == 1 and told.steps >= 3)  # the others were not asked
    stopped = train(toy(**PLAIN), samples=IMAGES, world=world, folder=folder / "asked", observer=asked)
    answers["asked"] = {"steps": stopped.steps, "finished": stopped.finished}

    # ---- from one number of ranks to another, and evaluations that rank 0 makes alone
    how = {"samples": FEW, "world": world, "body": by_passes}
    for strategy in STRATEGIES:
        config = toy(**PLAIN, parallel__strategy=strategy, parallel__microbatches=2)
        told = Told()
        grown = train(config, **how, folder=folder / f"grows {strategy}", evaluates=True, observer=told)
        stop = Told(stop=lambda told: told.steps >= 2)
        train(config, **how, folder=folder / f"shrinks {strategy}", observer=stop)
        answers[strategy] = {"grown": weights(grown), "steps": (told.steps, grown.steps, stop.steps)}
        answers[strategy]["judged"] = [point["error"] for point in grown.points[-1:]]
    answers["passes"] = [told_and_learned(config=toy(**PLAIN, **knobs), **how) for knobs in PASSES]
    answers["refused"] = [refused(world, body) for body in (None, plain())]
    for strategy in ("ddp", "fsdp"):
        fp16 = toy(**PLAIN, parallel__strategy=strategy, precision__amp="fp16")
        answers[strategy]["fp16"] = weights(train(fp16, samples=IMAGES, world=world))

    # ---- resumed, also where only rank 0 can read the checkpoint
    config, own = toy(**PLAIN, dropout=0.3), folder / f"own-{world.rank}"
    answers["whole"] = weights(train(config, samples=IMAGES, world=world, folder=folder / "whole"))
    for place in (folder / "shared", own):
        stop = Told(stop=lambda told: told.steps >= 5)
        train(config, samples=IMAGES, world=world, folder=place, observer=stop)
        answers[place.name.partition("-")[0] + " stopped"] = stop.steps
    if world.rank == 1:
        own.mkdir(exist_ok=True)
        (own / state.CHECKPOINT).write_bytes(b"damaged")
    for place in (folder / "shared", own, folder / "none" if world.rank else folder / "shared"):
        goes_on = Told()
        again = train(config, samples=IMAGES, world=world, folder=place, observer=goes_on)
        answers.setdefault("resumed", []).append({"weights": weights(again), "steps": goes_on.steps})
    return answers


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    how = {"config": toy(norm=False), "samples": FEW, "body": by_passes}
    for strategy in STRATEGIES:
        train(**how, folder=folder / f"grows {strategy}", observer=Told(stop=lambda told: told.steps >= 2))
    answers = ranks(everything, folder, folder)
    for strategy in STRATEGIES:
        answers[0][strategy]["shrunk"] = train(**how, folder=folder / f"shrinks {strategy}")
    return answers


@pytest.mark.parametrize("number", range(len(SAME)), ids=[str(knobs) for knobs in SAME])
def test_two_ranks_learn_what_one_learns(two, number):
    one = told_and_learned(CPU, config=toy(norm=False, **SAME[number]), samples=IMAGES)
    first, second = (answers["same"][number] for answers in two)
    assert_equal(first["weights"], second["weights"])
    near = HALF if "bf16" in SAME[number].values() else EXACT
    assert_equal(one["weights"], first["weights"], **near)
    assert [len(rank["points"]) for rank in (first, second)] == [2, 0], "rank 0 is told"
    for point, alone in zip(first["points"], one["points"], strict=True):
        assert (point.steps, point.samples, point.device_s) == (alone.steps, alone.samples, 2 * point.train_s)
        assert point.loss == pytest.approx(alone.loss, rel=near["rtol"]), "the mean over ranks"


def test_all_ranks_stop_at_the_same_step(two):
    first, second = (answers["seconds"] for answers in two)
    assert first["steps"] == second["steps"] > 0
    assert first["finished"]
    point = first["points"][-1]
    assert point.samples == 8 * point.steps
    assert point.step_s * point.samples_per_s == pytest.approx(8)


def test_ranks_begin_alike_and_drop_units_of_their_own(two):
    first, second = (answers["draws"] for answers in two)
    assert torch.equal(first["first"], second["first"])
    assert torch.equal(first["outside"], second["outside"])
    assert torch.equal(first["shared"], second["shared"])
    assert not torch.equal(first["own"], second["own"]), "dropout of one rank is not that of another"
    for rank, one in enumerate((first, second)):
        assert torch.equal(one["own"], torch.rand(4, generator=torch.Generator().manual_seed(0 + 1 + rank)))


def test_gradients_beside_the_model_are_averaged(two):
    assert [answers["beside"] for answers in two] == [-1.5 * 3] * 2
    assert torch.equal(two[0]["draws"]["beside"], two[1]["draws"]["beside"])


def test_a_loss_that_is_not_finite_on_one_rank_ends_all(two):
    assert two[0]["diverged"].partition(" (")[0] == "the loss is not finite after 4 steps"
    assert two[1]["diverged"].partition(" (")[0] == "the loss is not finite after 4 steps"


def test_one_rank_that_is_asked_to_stop_stops_all(two):
    assert [answers["asked"] for answers in two] == [{"steps": 3, "finished": False}] * 2


def test_rank_0_decides_what_is_restored(two):
    """The other one's file is damaged, or not there: both go on from rank 0's, dropout of each its own."""
    for answers in two:
        assert (answers["shared stopped"], answers["own stopped"]) == (5, 5)
        shared, own, finished = answers["resumed"]
        assert (shared["steps"], own["steps"], finished["steps"]) == (5, 5, 0)
        for resumed in answers["resumed"]:
            assert_equal(two[0]["whole"], resumed["weights"])


@pytest.mark.parametrize("number", range(len(PASSES)), ids=[str(knobs) for knobs in PASSES])
def test_two_ranks_whose_strategy_owns_both_passes_learn_what_one_learns(two, number):
    one = told_and_learned(CPU, config=toy(norm=False, **PASSES[number]), samples=FEW, body=by_passes)
    near = HALF if "bf16" in PASSES[number].values() else EXACT
    for answers in two:
        assert_equal(one["weights"], answers["passes"][number]["weights"], **near)
    for point, alone in zip(two[0]["passes"][number]["points"], one["points"], strict=True):
        assert (point.steps, point.samples) == (alone.steps, alone.samples)
        assert point.loss == pytest.approx(alone.loss, rel=near["rtol"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_goes_on_with_another_number_of_ranks(two, strategy):
    """Rank 0 judges it alone, while the others wait."""
    whole = train(toy(norm=False), samples=FEW, body=by_passes, evaluates=True)
    for answers in two:
        assert answers[strategy]["steps"] == (2, 4, 2)
        assert_equal(weights(whole), answers[strategy]["grown"], **EXACT)
        assert answers[strategy]["judged"] == [pytest.approx(whole.points[-1]["error"], rel=1e-4)]
    shrunk = two[0][strategy]["shrunk"]
    assert (shrunk.finished, shrunk.steps) == (True, 4)
    assert_equal(weights(whole), weights(shrunk), **EXACT)


def test_a_loop_that_calls_the_model_itself_cannot_be_piped(two):
    message = "parallel.strategy: pipeline needs trial.forward_backward(…) in place of net(…) and trial.step"
    for answers in two:
        assert answers["refused"] == [message, message]


def test_loss_scaling_passes_over_the_same_steps_whatever_the_strategy(two):
    """One process finds another scale: its mean loss is over more samples, so that what overflows is smaller."""
    for answers in two:
        assert_equal(answers["ddp"]["fp16"], answers["fsdp"]["fp16"], **HALF)


# ------------------------------------------------------------------------------------------------ parameters not used
class HalfUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


def half_used(trial):
    net = trial.prepare(HalfUsed())
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        trial.step(F.mse_loss(net(inputs), targets), optimizer)


def steps_of_half_used(world):
    found = []
    for knobs in ({}, {"parallel__static_graph": True}, FSDP):
        try:
            found.append(train(toy(**PLAIN, **knobs), samples=FEW, world=world, body=half_used).steps)
        except RuntimeError as error:
            found.append("not used in producing loss" in str(error))
    return found


def test_parameters_that_no_step_uses_need_a_static_graph(tmp_path):
    for answers in ranks(steps_of_half_used, tmp_path):
        assert answers == [True, 4, 4]


# ---------------------------------------------------------------------------------------------------------- compiled
COMPILED = [
    {"compile__scope": "model"}, FSDP | {"compile__scope": "model"}, FSDP | {"compile__scope": "blocks"},
    PIPELINE | {"compile__scope": "blocks", "parallel__microbatches": 2},
]  # fmt: skip


class Part(torch.nn.Module):
    """What torch.compile takes for a frame of a user's: it compiles no forward pass of torch's own layers."""

    def __init__(self, width, out):
        super().__init__()
        self.linear = torch.nn.Linear(width, out)

    def forward(self, x):
        return self.linear(F.silu(x))


def in_blocks(trial):
    net = trial.prepare(torch.nn.Sequential(Part(4, 8), Part(8, 1)), blocks=Part)
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    for inputs, targets in trial.batches((INPUTS, TARGETS)):
        trial.forward_backward((inputs,), (targets,), squares)
        trial.update(optimizer)


def compiled(world):
    found = []
    for knobs in COMPILED:
        torch.compiler.reset()  # as a search's worker does between trials
        config = toy(**PLAIN, **knobs, compile__mode="default")
        found.append(told_and_learned(config=config, samples=FEW, world=world, body=in_blocks))
    return found


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_ranks_learn_the_same(tmp_path):
    one = weights(train(toy(norm=False), samples=FEW, body=in_blocks))
    both = ranks(compiled, tmp_path)
    for found in (*both[0], *both[1]):
        assert_equal(one, found["weights"], **EXACT)
    assert 0 not in [found["points"][-1]["compiled_graphs"] for found in both[0]]
