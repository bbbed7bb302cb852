"""What the adapters share."""

import pytest
import torch

from tunediff.config import ConfigError
from tunediff.integrations import require
from tunediff.integrations.loaders import BudgetScheduler


def test_a_missing_package_names_the_extra():
    with pytest.raises(ConfigError, match=r"no_such_package is not installed; pip install '.*\[lightning\]'"):
        require("lightning", "torch", "no_such_package")


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.LinearLR, torch.optim.lr_scheduler.OneCycleLR])
def test_the_budget_stands_for_the_length_of_a_schedule(kind):
    class Trial:
        progress = 0.0

    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        options = (
            {"total_steps": 101, "max_lr": 1.0} if kind is torch.optim.lr_scheduler.OneCycleLR else {"total_iters": 100}
        )
        scheduler = kind(optimizer, **options)
        optimizer.step()  # or torch warns that it comes later
        return optimizer, scheduler

    optimizer, scheduler = made()
    stretched = BudgetScheduler(scheduler, 100, Trial)
    reference, alone = made()
    for thirds in range(1, 4):
        Trial.progress = thirds * 0.29
        stretched.step()
        stretched.follow()
        while alone.last_epoch < 29 * thirds:
            alone.step()
        assert stretched.last_epoch == 29 * thirds
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
