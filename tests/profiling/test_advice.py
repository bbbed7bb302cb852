"""Advice, rule by rule."""

import pytest

from tests.helpers import tiny
from tests.profiling.conftest import PHASES
from tunediff import config as cfg
from tunediff.profiling.advice import RULES, advise

QUIET = {"loader.workers": 2, "precision.amp": "bf16", "memory.channels_last": True, "precision.cudnn_benchmark": True}
"""Knobs about which nothing is said."""
PLAIN = {"loader.workers": 2, "precision.cudnn_benchmark": True}
CPU = {"type": "cpu", "cores": 8, "gpus": 0, "memory_mib": 16000.0, "memory_limit_mib": 10000.0}
GPU = {"type": "cuda", "cores": 16, "gpus": 1, "memory_mib": 80000.0, "memory_limit_mib": 80000.0}
FUSED = {"optimizer.implementation": "fused"}


def profile(parts=None, step=None, **values):
    """A profile in which nothing stands out, with changes on top."""
    shares = dict.fromkeys((*PHASES, "other"), 0.0) | (parts or {"forward": 0.3, "backward": 0.6})
    return {
        "device": CPU, "samples": {"mib": 100.0}, "format_gains": {}, "unit": "images", "workers": 1,
        "convolution_share": 0.0,
        "step": {"step_s": 0.1, "peak_memory_mib": 6000.0, "parts_s": {name: 0.1 * share for name, share in shares.items()}}
        | (step or {}),
        **values,
    }  # fmt: skip


WAITING = {"data_wait": 0.22, "forward": 0.2, "backward": 0.5}
COPYING = {"host_to_device": 0.2, "forward": 0.7}
SLOW_COPY = QUIET | {"loader.transfer": "float32", "loader.pin_memory": False}
UNFUSED = QUIET | {"optimizer.implementation": "foreach"}
SCALED = UNFUSED | {"precision.amp": "fp16"}
GAINS = {"format_gains": {"bf16": 8.0, "fp16": 8.1, "tf32": 4.0}, "device": GPU}
CONVOLUTIONS = {"convolution_share": 0.8}
BF16 = {"precision.amp": "bf16"}
LAYOUT = {"memory.channels_last": True}
CASES = {
    "nothing": [
        ({}, QUIET, []),
        ({"device": GPU}, QUIET, []),
    ],
    "waiting_for_data": [
        ({"parts": WAITING, "device": GPU}, QUIET, [{"loader.resident": True}, {"loader.workers": 4}]),
        ({"parts": WAITING, "device": GPU, "samples": {"mib": 9000.0}}, QUIET, [{"loader.workers": 4}]),
        ({"parts": WAITING, "device": GPU, "samples": {"mib": 0.0}}, QUIET, [{"loader.workers": 4}]),
        ({"parts": WAITING}, {"loader.workers": 0}, [{"loader.resident": True}]),
        ({"parts": WAITING, "device": GPU}, QUIET | {"loader.workers": 16}, [{"loader.resident": True}]),
        ({"parts": WAITING}, {"loader.resident": True}, []),
        ({"parts": {"data_wait": 0.04}}, QUIET, []),
    ],
    "copying": [
        ({"parts": COPYING, "device": GPU}, SLOW_COPY,
         [{"loader.transfer": "uint8"}, {"loader.pin_memory": True, "loader.non_blocking": True}]),
        ({"parts": COPYING, "device": GPU}, QUIET, []),
        ({"parts": COPYING}, SLOW_COPY, []),
    ],
    "fused_optimizer": [
        ({"parts": {"optimizer": 0.2}}, UNFUSED, [FUSED]),
        ({"parts": {"optimizer": 0.2}}, QUIET, []),
        ({"device": GPU}, SCALED, [FUSED]),  # loss scaling waits at each step
        ({}, SCALED, []),
        ({"device": GPU}, SCALED | {"optimizer.name": "muon"}, []),
        ({"device": GPU}, SCALED | FUSED, []),
    ],
    "adaptive_sampler": [
        ({"parts": {"sampler": 0.4}}, QUIET | {"timesteps.name": "beta_policy", "timesteps.scan": 10},
         [{"timesteps.interval": 80}]),
        ({"parts": {"sampler": 0.4}}, QUIET, []),
    ],
    "number_formats": [
        (GAINS, PLAIN, [BF16 | LAYOUT, {"precision.matmul": "high"}]),
        (GAINS, PLAIN | {"precision.conv_tf32": False}, [
            BF16 | LAYOUT,
            {"precision.matmul": "high", "precision.conv_tf32": True},
        ]),
        # Convolutions in TF32 already: from TF32 to bfloat16.
        (GAINS | {"convolution_share": 1.0}, PLAIN | LAYOUT, [BF16 | LAYOUT]),
        ({"format_gains": {"fp16": 3.0}, "device": GPU}, PLAIN, [{"precision.amp": "fp16"} | LAYOUT]),
        ({"format_gains": {"bf16": 1.5}}, PLAIN, [BF16]),
        ({"format_gains": {"bf16": 0.4}}, PLAIN, []),
        ({"format_gains": {"bf16": 9.0}}, QUIET, []),
        ({"format_gains": {"bf16": 9.0}, "parts": {"forward": 0.4}}, PLAIN, []),
    ],
    "convolutions": [
        (CONVOLUTIONS, {"loader.workers": 2}, [LAYOUT]),
        (CONVOLUTIONS | {"device": GPU}, {"loader.workers": 2}, [{"precision.cudnn_benchmark": True}]),
        (CONVOLUTIONS | {"device": GPU}, BF16, [LAYOUT, {"precision.cudnn_benchmark": True}]),
        (CONVOLUTIONS | {"device": GPU}, QUIET, []),
    ],
    "launch_bound": [
        ({"device": GPU, "device_busy_share": 0.4}, QUIET, [{"compile.capture": "step"}]),
        ({"device": GPU, "device_busy_share": 0.9}, QUIET, []),
        # All passes of an accumulation are in one captured step.
        ({"device": GPU, "device_busy_share": 0.4}, QUIET | {"loader.accumulation": 2},
         [{"compile.capture": "step"}, {"loader.accumulation": 1}]),
        ({"device": GPU, "device_busy_share": 0.4}, QUIET | {"compile.mode": "max-autotune"}, []),
    ],
    "memory": [
        ({"step": {"peak_memory_mib": 9000.0}}, QUIET, [{"model.checkpoint_levels": [0]}]),
        ({"step": {"peak_memory_mib": 9000.0}}, QUIET | {"model.checkpoint_levels": [1]},
         [{"model.checkpoint_levels": [0, 1]}]),
        ({"step": {"peak_memory_mib": 9000.0}}, QUIET | {"model.checkpoint_levels": [0]}, []),
        ({"step": {"peak_memory_mib": 3000.0}}, QUIET | {"model.checkpoint_levels": [0], "loader.accumulation": 2},
         [{"model.checkpoint_levels": []}, {"loader.accumulation": 1}]),
        ({"step": {"peak_memory_mib": 3000.0, "peak_reserved_mib": 6000.0}},
         QUIET | {"model.checkpoint_levels": [0], "loader.accumulation": 2}, []),
    ],
    "more_gpus": [
        ({"device": GPU | {"gpus": 4}}, QUIET, [{"parallel.workers": 4}]),
        ({"device": GPU | {"gpus": 3}}, QUIET, []),  # the batch of 16 is no multiple of 3
        ({"device": GPU | {"gpus": 4}, "workers": 4}, QUIET, []),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "knobs", "expected"), [case for cases in CASES.values() for case in cases],
    ids=[f"{rule}-{number}" for rule, cases in CASES.items() for number in range(len(cases))],
)  # fmt: skip
def test_advice(values, knobs, expected):
    given = advise(profile(**values), cfg.override(tiny(), knobs))
    assert [one["change"] for one in given] == expected


def test_every_rule_is_tested():
    assert {rule.__name__ for rule in RULES} == {*CASES} - {"nothing"}


def test_reasons_have_their_numbers():
    resident, _ = advise(profile(WAITING, device=GPU), cfg.override(tiny(), QUIET))
    assert resident["reason"] == "waiting for images is 22 % of the step (22 ms); all images take 100 MiB"
    amp, _ = advise(profile(step={"peak_share": 0.35}, **GAINS), cfg.override(tiny(), PLAIN))
    assert amp["reason"] == (
        "forward and backward are 90 % of the step (90 ms), in float32 at 35 % of the fastest product; "
        "a product in bf16 is 8.0× as fast here"
    )


def test_what_the_workload_does_not_follow_is_not_advised():
    config = cfg.override(tiny(), QUIET)
    assert advise(profile(WAITING, device=GPU), config, ["loader.resident", "loader.workers"]) == []
