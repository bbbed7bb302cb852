"""A toy that prints lines as modded-nanogpt's `train_gpt.py` does; nothing is trained, and its
seconds are made up."""

import argparse
import random

MS_PER_STEP, EVERY = 80.0, 125
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1750)
steps = parser.parse_args().steps

ms = 0.0
for step in range(steps + 1):
    if step % EVERY == 0 or step == steps:
        loss = 3.27 + 7.5 * 0.995**step + 0.001 * random.gauss(0, 1)
        average = ms / max(step, 1)
        print(
            f"step:{step}/{steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:{average:.2f}ms"
        )
    if step < steps:
        ms += MS_PER_STEP * random.uniform(0.98, 1.02)
        average = ms / (step + 1)
        print(f"step:{step + 1}/{steps} train_time:{ms:.0f}ms step_avg:{average:.2f}ms")
