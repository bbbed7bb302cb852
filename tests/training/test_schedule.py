"""The schedules are torch's own, over fractions of a budget instead of steps."""

import pytest
import torch

from tunediff.training import optimizer as optimizers
from tunediff.workloads.classification.knobs import ClassifierSgd

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
