"""A speedrun: learn which digit an image of 8×8 pixels shows, to an accuracy of 95 % on 500 images not seen, in the
fewest seconds. Plain NumPy on one core, so that a run takes seconds and anybody can check its records.

    python train.py --seed 0 --change momentum

prints the accuracy and the CPU seconds of the training so far (`train_time:0.52s`) after each epoch. `--change` is one
of three published improvements:

- `momentum`: Nesterov's momentum of 0.9 (Y. Nesterov 1983; I. Sutskever et al., ICML 2013).
- `he`: initial weights with a variance of 2/inputs (K. He et al., ICCV 2015) in the place of 1/(100 inputs).
- `smoothing`: targets of 0.9 in the place of 1 (C. Szegedy et al., CVPR 2016).

Which of them are worth their lines is for the judge to say: README.md.
"""

import argparse
import os
import time

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from sklearn.datasets import load_digits

TEST, HIDDEN, BATCH, RATE, EPOCHS = 500, 256, 32, 0.05, 200

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--change", choices=["none", "momentum", "he", "smoothing"], default="none")
options = parser.parse_args()
change, rng = options.change, np.random.default_rng(options.seed)

# The images that judge are the same in all runs; the seed decides weights and order
images, labels = load_digits(return_X_y=True)
shuffled = np.random.default_rng(0).permutation(len(images))
images, labels = (images[shuffled] / 16).astype(np.float32), labels[shuffled]
x, y, x_test, y_test = images[TEST:], labels[TEST:], images[:TEST], labels[:TEST]
sure = 0.9 if change == "smoothing" else 1.0
targets = np.full((len(y), 10), (1 - sure) / 9, np.float32)
targets[np.arange(len(y)), y] = sure


def initial(inputs, outputs):
    scale = np.sqrt(2 / inputs) if change == "he" else np.sqrt(0.01 / inputs)
    return (scale * rng.standard_normal((inputs, outputs))).astype(np.float32)


weights = [
    initial(64, HIDDEN),
    np.zeros(HIDDEN, np.float32),
    initial(HIDDEN, 10),
    np.zeros(10, np.float32),
]
speeds = [np.zeros_like(weight) for weight in weights]
momentum = 0.9 if change == "momentum" else 0.0
trained_s = 0.0

for epoch in range(EPOCHS):
    begun = time.process_time()
    order = rng.permutation(len(x))
    for first in range(0, len(x) - BATCH + 1, BATCH):
        batch = order[first : first + BATCH]
        w1, b1, w2, b2 = (
            weight + momentum * speed for weight, speed in zip(weights, speeds, strict=True)
        )
        hidden = np.maximum(x[batch] @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = (exponents / exponents.sum(axis=1, keepdims=True) - targets[batch]) / BATCH
        back = (error @ w2.T) * (hidden > 0)
        gradients = [x[batch].T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
            speed *= momentum
            speed -= RATE * gradient
            weight += speed
    trained_s += time.process_time() - begun
    predicted = (np.maximum(x_test @ weights[0] + weights[1], 0) @ weights[2] + weights[3]).argmax(
        axis=1
    )
    print(f"epoch {epoch + 1} train_time:{trained_s:.4f}s", flush=True)
    print(f"accuracy: {(predicted == y_test).mean():.4f}", flush=True)
