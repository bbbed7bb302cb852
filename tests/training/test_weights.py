"""The digest of weights."""

import pytest
import torch

from tunediff.training import optimizer as optimizers
from tunediff.training.weights import digest
from tunediff.workloads.classification.knobs import ClassifierSgd


def weights():
    return {
        "a": torch.arange(6000.0).view(10, 20, 5, 6),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(1),
    }


def test_digest_takes_empty_weights():
    assert digest({"a": torch.empty(0), "b": torch.empty(0, 5)}) != digest({"a": torch.empty(0)})


def test_digest_does_not_depend_on_how_weights_lie_in_memory():
    other = weights()
    other["a"] = other["a"].to(memory_format=torch.channels_last)
    other["b"] = torch.ones(8, dtype=torch.bfloat16)[1:4]
    assert digest(other) == digest(weights())


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_digest_notices_a_change_of_one_element(name):
    other = weights()
    other[name].view(-1)[-1] += 1
    assert digest(other) != digest(weights())


@pytest.mark.parametrize(
    "change",
    [lambda a: a.flip(0), lambda a: a.roll(1, 1), lambda a: a.view(20, 10, 5, 6), lambda a: a.double()],
    ids=["order of rows", "order of columns", "shape", "type"],
)
def test_digest_notices_what_is_moved_or_converted(change):
    assert digest(weights() | {"a": change(weights()["a"])}) != digest(weights())


def test_digest_notices_names_that_are_exchanged():
    one, other = {"a": torch.zeros(4), "b": torch.ones(4)}, {"b": torch.zeros(4), "a": torch.ones(4)}
    assert digest(one) != digest(other)


# ------------------------------------------- the schedules are torch's own, over fractions of a budget instead of steps
STEPS = 40


def torchs(schedule, **how):
    """What a scheduler of torch sets at steps 0 … STEPS."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    scheduler, rates = schedule(optimizer, **how), []
    for _ in range(STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(rates) <= STEPS:
            scheduler.step()
    return rates


def ours(**values):
    return [optimizers.learning_rate(ClassifierSgd(lr=0.1, **values), 128, step / STEPS) for step in range(STEPS + 1)]


def test_cosine_is_torchs():
    assert ours(warmup=0.0) == pytest.approx(torchs(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS))


def test_one_cycle_is_torchs():
    how = {
        "max_lr": 0.1,
        "total_steps": STEPS + 1,
        "pct_start": (0.3 * STEPS + 1) / (STEPS + 1),
        "cycle_momentum": False,
    }
    assert ours(decay="one_cycle", warmup=0.3) == pytest.approx(torchs(torch.optim.lr_scheduler.OneCycleLR, **how))


@pytest.mark.parametrize(
    ("decay", "start", "end"), [("constant", 0.0, 0.1), ("cosine", 0.0, 0.0), ("one_cycle", 0.004, 4e-7)]
)
def test_endpoints(decay, start, end):
    rates = ours(decay=decay, warmup=0.25)
    assert (rates[0], rates[STEPS // 4], rates[-1]) == pytest.approx((start, 0.1, end))
