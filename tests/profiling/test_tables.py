"""A profile in words, and its files."""

import copy
import csv
import json

import pytest

from tests.helpers import tiny
from tests.profiling.conftest import PHASES
from tunediff import config as cfg
from tunediff.core import environment
from tunediff.profiling import tables
from tunediff.profiling.advice import RULES, advise

PARTS = {
    "data_wait": 0.022, "host_to_device": 0.00001, "sampler": 0.001, "forward": 0.025, "backward": 0.045,
    "optimizer": 0.004, "ema": 0.001, "other": 0.00199,
}  # fmt: skip
STEP = {
    "samples_per_s": 1280.0, "samples_per_s_sd": 12.3, "step_s": 0.1, "parts_s": PARTS, "batch_size": 128, "steps": 21,
    "first_step_s": 2.5, "compile_s": 0.0, "peak_memory_mib": 1200.0, "peak_host_memory_mib": 1200.0, "disturbed": False,
    "flops_per_sample": 2.5e7, "peak_flops_per_s": 1e11, "peak_share": 0.32,
}  # fmt: skip
FOUND = {
    "name": "small", "command": "tunediff profile --config small.yaml", "workers": 1, "time": 0.0, "wall_s": 60.0,
    "unit": "images", "names": {"sampler": "noise and sampler", "ema": "EMA"},
    "config": cfg.flat(tiny(loader__workers=2)), "fingerprint": "made up", "environment": environment.describe() | {
        "cpu": "EPYC", "cpu_cores": 2, "memory_gib": 8.8, "python": "3.11.7",
        "versions": environment.describe()["versions"] | {"torch": "2.15.0"},
    },
    "samples": {"name": "digits", "count": 64, "mib": 0.1},
    "format_gains": {}, "device": {
        "type": "cpu", "name": "EPYC", "threads": 2, "cores": 2, "gpus": 0, "memory_mib": 9000.0, "memory_limit_mib": 5000.0,
    },
    "first": {"first_step_s": 2.5, "compile_s": 0.0, "step_s": 0.1},
    "step": STEP,
    "loader_samples_per_s": 3968.0, "traced_steps": 4, "convolution_share": 0.6,
    "operations": [
        {"operation": f"aten::op{i}", "calls": 30, "self_s": 0.2 / 2**i, "total_s": 0.2, "share": 0.5 / 2**i}
        for i in range(10)
    ],
    "memory": {
        "static": {"parameters": 4.0, "optimizer": 8.0, "ema": 4.0, "samples": 0.0},
        "peak": {
            "phase": "backward", "total_mib": 500.0, "static_mib": 16.0, "batch_mib": 2.0, "forward_mib": 450.0,
            "backward_mib": 32.0, "rest_mib": 0.0,
        },
    },
    "trace": "trace.json.gz",
    "advice": [{"change": {"loader.workers": 4}, "reason": "waiting"}],
}  # fmt: skip
assert set(PARTS) == {*PHASES, "other"}


def profile(**values):
    return copy.deepcopy(FOUND) | values


def test_report_says_where_time_and_memory_go():
    report = tables.report(FOUND)
    lines = [" ".join(line.split()) for line in report.splitlines()]
    for line in (
        "EPYC, 2 threads; batch 128, 21 steps measured",
        "1,280 ± 12.3 images/s, 100 ms per step; the first step of the process took 2.5 s",
        "0.025 GFLOP per image: 32 % of 0.1 TFLOP/s, the fastest matrix product measured here",
        "alone, the loader gives 3,968 images/s", "update 4 ms 4.0 %", "noise and sampler 1 ms 1.0 %",
        "waiting for images 22 ms 22 %", "aten::op0 7.5 50 ms 50 %", "peak 1,200 MiB (resident set of the process, libraries and images included)",
        "1. loader.workers=4: waiting", "tensors at their peak, during backward: 500 MiB", "activations (from forward) 450 MiB", "optimizer state 8.0 MiB",
    ):  # fmt: skip
        assert line in lines
    parts = [lines.index(line) for line in lines if line.startswith(("backward", "forward", "waiting"))]
    assert parts == sorted(parts), "the longest first"
    assert "GPU" not in report


def test_report_of_a_gpu_compiled_as_one_of_four_workers():
    made = profile(device_busy_share=0.71, workers=4, first={"first_step_s": 62.0, "compile_s": 62.0, "step_s": 0.1})
    made["device"] |= {"type": "cuda", "name": "H200"}
    made["step"] |= {"peak_reserved_mib": 1500.0, "peak_host_memory_mib": 3000.0, "disturbed": True}
    made["memory"]["peak"]["static_mib"] = 96.0
    report = tables.report(made)
    for words in (
        "CUDA self time", "compiling took 1m02s", "the GPU computes 71 % of the time", "one of 4 training workers",
        "others used the machine meanwhile", "peak 1,200 MiB (allocated on the GPU)", "reserved 1,500 MiB, host 3,000 MiB",
        "other, from before the step",
    ):  # fmt: skip
        assert words in report


def test_numbers():
    assert [tables.percent(share) for share in (0, 0.0001, 0.004, 0.0949, 0.096, 0.5)] == [
        "0.0 %", "< 0.1 %", "0.4 %", "9.5 %", "10 %", "50 %",
    ]  # fmt: skip
    assert [tables.milliseconds(value) for value in (0.00012, 0.0123, 3.982)] == ["0.12 ms", "12.3 ms", "3.98 s"]
    assert [tables.mebibytes(value) for value in (0.84, 1234.4)] == ["0.8 MiB", "1,234 MiB"]
    assert [tables.rate(value) for value in (3.14159, 61000.4)] == ["3.14", "61,000"]


def test_files(tmp_path):
    written = tables.write_all(profile(), tmp_path)
    assert set(written.values()) == set(tmp_path.iterdir())
    numbers = json.loads(written["numbers"].read_text())
    assert (numbers["loader_samples_per_s"], numbers["memory"]["peak"]["phase"]) == (3968.0, "backward")
    assert tables.report(FOUND) in written["report"].read_text()
    with open(written["operations"]) as file:
        operations = list(csv.DictReader(file))
    assert (len(operations), float(operations[0]["self_s"])) == (10, 0.2)


def test_report_of_a_short_profile_with_parts_that_only_its_workload_has():
    made = profile(operations=[], loader_samples_per_s=None, advice=[])
    made["memory"]["peak"] = None
    made["step"]["parts_s"]["augment"] = 0.001
    words = " ".join(tables.report(made).split())
    assert "augment 1 ms 1.0 %" in words
    assert "what to try next: nothing stands out" in words


# ------------------------------------------------------------------------------------------------- advice, rule by rule
QUIET = {"loader.workers": 2, "precision.amp": "bf16", "memory.channels_last": True, "precision.cudnn_benchmark": True}
"""Knobs about which nothing is said."""
PLAIN = {"loader.workers": 2, "precision.cudnn_benchmark": True}
CPU = {"type": "cpu", "cores": 8, "gpus": 0, "memory_mib": 16000.0, "memory_limit_mib": 10000.0}
GPU = {"type": "cuda", "cores": 16, "gpus": 1, "memory_mib": 80000.0, "memory_limit_mib": 80000.0}
FUSED = {"optimizer.implementation": "fused"}


def profile_of(parts=None, step=None, **values):
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
    given = advise(profile_of(**values), cfg.override(tiny(), knobs))
    assert [one["change"] for one in given] == expected


def test_every_rule_is_tested():
    assert {rule.__name__ for rule in RULES} == {*CASES} - {"nothing"}


def test_reasons_have_their_numbers():
    resident, _ = advise(profile_of(WAITING, device=GPU), cfg.override(tiny(), QUIET))
    assert resident["reason"] == "waiting for images is 22 % of the step (22 ms); all images take 100 MiB"
    amp, _ = advise(profile_of(step={"peak_share": 0.35}, **GAINS), cfg.override(tiny(), PLAIN))
    assert amp["reason"] == (
        "forward and backward are 90 % of the step (90 ms), in float32 at 35 % of the fastest product; "
        "a product in bf16 is 8.0× as fast here"
    )


def test_what_the_workload_does_not_follow_is_not_advised():
    config = cfg.override(tiny(), QUIET)
    assert advise(profile_of(WAITING, device=GPU), config, ["loader.resident", "loader.workers"]) == []
