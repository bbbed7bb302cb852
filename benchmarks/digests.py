"""Whether trainings are bit for bit what they were: `python benchmarks/digests.py [FILE]`.

28 reference trainings of the embedded digits, one for each kind of step, sampler, weighting and system that two CPU
cores can train in seconds, with one thread. Prints a line for each: name, digest of the saved weights, digest of the
curve (samples and metrics of every point, no seconds). With FILE, the lines of an earlier version, says which differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch

import tunediff
from tunediff import config as cfg

BASELINE, *SAMPLERS = cfg.find("diffusion").schema.knobs["timesteps.name"].choices or ()
DIFFUSION = {
    "baseline": [],
    **{f"timesteps.{name}": [f"timesteps.name={name}"] for name in SAMPLERS},
    "weighting.min_snr": ["weighting.name=min_snr"],
    "weighting.p2": ["weighting.name=p2"],
    "v-flow": ["process.prediction=v", "process.path=flow"],
    "x0-cosine": ["process.prediction=x0", "process.schedule=cosine"],
    "edm": ["process.schedule=edm", "process.prediction=v"],
    "muon": ["optimizer.name=muon"],
    "sgd": ["optimizer.name=sgd"],
    "cosine-decay": ["optimizer.decay=cosine"],
    "accumulation": ["loader.accumulation=2"],
    "bf16": ["precision.amp=bf16"],
    "channels-last": ["memory.channels_last=true"],
    "checkpointing": ["model.checkpoint_levels=[0]"],
    "resident": ["loader.resident=true"],
    "workers": ["loader.workers=2"],
    "dropout": ["model.dropout=0.2"],
}
CLASSIFIER = {"classifier": [], "classifier-bf16": ["precision.amp=bf16"]}


def digest(parts: list[bytes]) -> str:
    """Return a short digest of some bytes."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def trained(workload: str, knobs: list[str], folder: Path) -> str:
    """Train 3,200 samples; return the digests of the weights and of the curve, or why there are none."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            training = tunediff.run_training(
                workload, *knobs, "evaluation.images=64" if workload == "digits" else "seed=0", samples=3200,
                out=folder, progress=False,
            )  # fmt: skip
    except tunediff.TunediffError as error:
        return f"refused: {str(error).splitlines()[0]}"
    tensors = safetensors.torch.load_file(training.weights)
    weights = [
        name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name in sorted(tensors)
    ]
    points = training.points()
    kept = [
        name
        for name in points
        if name in ("samples", "frechet", "loss", "accuracy", "validation_loss", "kid")
    ]
    return f"{digest(weights)} {digest([json.dumps(points[kept].to_dict('list')).encode()])}"


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # the trainings run in processes of their own
    earlier = (
        dict(line.split(maxsplit=1) for line in Path(sys.argv[1]).read_text().splitlines())
        if sys.argv[1:]
        else {}
    )
    with tempfile.TemporaryDirectory() as place:
        for workload, cases in (("digits", DIFFUSION), ("digits_classifier", CLASSIFIER)):
            for name, knobs in cases.items():
                found = trained(workload, knobs, Path(place) / name)
                note = (
                    ""
                    if name not in earlier
                    else "  equal"
                    if earlier[name] == found
                    else "  DIFFERS"
                )
                print(f"{name} {found}{note}", flush=True)


if __name__ == "__main__":
    main()
