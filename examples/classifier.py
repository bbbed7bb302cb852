"""Which digit is it? A small convolutional network on scikit-learn's 1,797 images of 8×8 pixels. Chance: 0.1."""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tunediff import Choice, Metric, Range, Trial


@dataclass(frozen=True)
class Knobs:
    width: Annotated[int, Choice(8, 16, 32)] = 16
    """Channels of the first convolution; the second has twice as many."""
    lr: Annotated[float, Range(1e-4, 1e-1, log=True)] = 1e-3
    dropout: Annotated[float, Range(0.0, 0.5)] = 0.0


OBJECTIVE = Metric("accuracy", "max")
BASELINE = {"loader.batch_size": 64, "loader.workers": 0}


def train(trial: Trial) -> None:
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images[:, None] / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    learned, held_out = (
        (images[:1400], labels[:1400]),
        (images[1400:].to(trial.device), labels[1400:].to(trial.device)),
    )

    net = trial.prepare(network(trial.knobs))
    optimizer = torch.optim.AdamW(net.parameters(), trial.knobs.lr)
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"accuracy": accuracy(net, *held_out)})
    for inputs, targets in trial.batches(learned):
        with trial.autocast():
            loss = F.cross_entropy(net(inputs), targets)
        trial.step(loss, optimizer)


def network(knobs: Knobs) -> nn.Module:
    first, second = (
        nn.Conv2d(1, knobs.width, 3, padding=1),
        nn.Conv2d(knobs.width, 2 * knobs.width, 3, 2, padding=1),
    )
    layers = [first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Dropout(knobs.dropout)]
    return nn.Sequential(*layers, nn.Linear(2 * knobs.width * 4 * 4, 10))


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return (net(images).argmax(1) == labels).float().mean()
