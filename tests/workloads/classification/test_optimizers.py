"""The schedules are torch's own, over fractions of a budget instead of steps."""

import pytest
import torch

from tunediff import config as cfg
from tunediff.config import ConfigError
from tunediff.workloads.classification import optimizers
from tunediff.workloads.classification.knobs import AdamW, Sgd

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
    return [optimizers.learning_rate(Sgd(lr=0.1, **values), step / STEPS) for step in range(STEPS + 1)]


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


def test_both_optimizers_get_their_knobs():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    sgd = optimizers.build(Sgd(momentum=0.8, nesterov=False, implementation="foreach"), weights).param_groups[0]
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"], sgd["foreach"], sgd["fused"]) == (0.1, 0.8, False, True, False)
    adamw = optimizers.build(AdamW(beta2=0.99), weights).param_groups[0]
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"], adamw["fused"]) == (1e-3, (0.9, 0.99), 0.05, True)


def test_nesterov_needs_momentum():
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov: True is not allowed"):
        cfg.override(cfg.baseline("cifar10_classifier"), {"optimizer.momentum": 0.0})
