"""A toy that prints tables as airbench's programs for CIFAR-10 do: several runs in one process,
after one that compiles. Nothing is trained, and its seconds are made up."""

import argparse
import random
import statistics

COLUMNS = ("run   ", "epoch", "train_acc", "val_acc", "tta_val_acc", "time_seconds")
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--runs", type=int, default=20)
options = parser.parse_args()


def print_row(*cells: object) -> None:
    """Print a row of the table; numbers with four decimals, None as nothing."""
    texts = [f"{cell:.4f}" if isinstance(cell, float) else str(cell or "") for cell in cells]
    padded = (text.rjust(len(name)) for text, name in zip(texts, COLUMNS, strict=True))
    print("".join(f"|  {cell}  " for cell in padded) + "|")


def train(run: str, chance: bool = False) -> float:
    """Print the epochs of a run; return its accuracy. chance: of labels that mean nothing."""
    seconds, accuracy = 0.0, 0.0
    for epoch in range(1, options.epochs + 1):
        seconds += random.uniform(0.31, 0.33)
        accuracy = 0.1 if chance else 0.945 - 0.3 * 0.5**epoch + 0.001 * random.gauss(0, 1)
        print_row(run if epoch == 1 else None, str(epoch), accuracy + 0.01, accuracy, None, seconds)
    print_row(None, "eval", accuracy + 0.01, accuracy, accuracy + 0.005, seconds + 0.1)
    return accuracy + 0.005


print_row(*COLUMNS)
train("warmup", chance=True)
accuracies = [train(str(run)) for run in range(options.runs)]
mean, sd = statistics.mean(accuracies), statistics.stdev(accuracies)
print(f"Mean: {mean:.4f}    Std: {sd:.4f}")
