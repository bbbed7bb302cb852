"""A training that takes a second: few digits, a tiny network."""

import pytest
import torch

from tunediff import config as cfg
from tunediff.data import images as data

TINY = {
    "model.channels": 8, "model.norm_groups": 4, "model.multipliers": [1, 2], "model.attention": [],
    "loader.batch_size": 16, "data.max_images": 64, "optimizer.warmup": 0.2, "evaluation.points": 2,
    "process.steps": 50, "evaluation.steps": 5,
}  # fmt: skip


def tiny(**values):
    return cfg.override(cfg.workload("digits"), TINY | {name.replace("__", "."): v for name, v in values.items()})


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def images():
    return data.load(tiny().data)
