"""Short trainings, timed, and what is known of the machine."""

import contextlib
import copy
import csv
import gzip
import json
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers import CPU, shipped_toy, tiny, toy
from tests.profiling.conftest import PHASES
from tests.toy import train as toy_train
from tests.users import plain
from tunediff import config as cfg
from tunediff.core import environment
from tunediff.core.point import Point
from tunediff.data import images as data
from tunediff.distributed import alone
from tunediff.profiling import measure, tables, trace
from tunediff.profiling.advice import RULES, advise
from tunediff.profiling.measure import Bench
from tunediff.profiling.run import steps_in
from tunediff.workloads.diffusion.unet import network


def point(step_s, **values):
    parts = {f"step_{name}_s": 0.0 for name in (*PHASES, "other")}
    return Point.of({
        "index": 1, "train_s": step_s, "samples": 32, "steps": 1, "step_s": step_s, **parts, "seconds": {"compile": 7.0}, "disturbed": False, "peak_memory_mib": 100.0, "peak_host_memory_mib": 100.0,
        "first_step_s": 1.0, "flops_per_sample": 2e9, "peak_flops_per_s": 1e12,
        "peak_share": 0.9, **values,
    })  # fmt: skip


def test_a_summary_is_of_what_follows_the_warm_up():
    points = [
        point(9.0, step_forward_s=9.0, disturbed=True, peak_memory_mib=900.0),
        point(0.1, step_forward_s=0.06),
        point(0.3, step_forward_s=0.10, peak_memory_mib=120.0),
    ]
    found = measure.summary(points, 32, 2)
    assert found["step_s"] == pytest.approx(0.2)
    assert found["samples_per_s"] == pytest.approx(160)
    assert found["samples_per_s_sd"] == pytest.approx((320 - 106.667) / 2**0.5, rel=1e-4)
    assert found["parts_s"]["forward"] == pytest.approx(0.08)
    assert list(found["parts_s"]) == [*PHASES, "other"]
    assert (found["compile_s"], found["peak_memory_mib"], found["disturbed"]) == (7.0, 120.0, False)
    assert found["peak_share"] == pytest.approx(160 * 2e9 / 1e12), "of the mean rate, not of the last point"
    assert measure.summary(points[:2], 32, 1)["samples_per_s_sd"] is None


def test_a_part_that_a_later_segment_begins_with_takes_no_time_before():
    points = [point(0.1), point(0.1), point(0.1, step_late_s=0.04)]
    assert measure.summary(points, 32, 2)["parts_s"]["late"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("seconds", "step_s", "steps"), [(5, 0.1, 50), (5, 0.0001, 200), (5, 60, 3), (5, 1.7, 3), (5, 1.6, 4)]
)
def test_steps_follow_the_seconds(seconds, step_s, steps):
    assert steps_in(seconds, step_s) == steps


def test_speed(bench, tmp_path):
    found = bench.speed(tiny(), 5)
    assert (found["steps"], found["batch_size"]) == (6, 16), "equal segments: a little more than was asked for"
    assert found["samples_per_s"] == pytest.approx(16 / found["step_s"])
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"], rel=0.05)
    assert found["parts_s"]["backward"] > 0
    assert not list(tmp_path.iterdir()), "the trainings leave nothing behind"


def ten_seconds():
    """Let three batches take ten seconds."""
    return mock.patch.object(measure, "time", types.SimpleNamespace(monotonic=iter([0.0, 9.0, 10.0]).__next__))


def test_the_loader_is_credited_with_the_images_it_gave(bench):
    """With accumulation a batch comes in parts."""
    given, build = [], measure.loader.build

    @contextlib.contextmanager
    def counted(*words):
        with build(*words) as feed:
            yield types.SimpleNamespace(fetch=feed.fetch, move=lambda batch: given.append(len(feed.move(batch))))

    with ten_seconds(), mock.patch.object(measure.loader, "build", counted):
        rate = bench.loader_rate(tiny(loader__workers=1, loader__accumulation=2))
    assert given == [8] * len(given)
    # What its process had prepared before the clock started does not count
    assert rate == pytest.approx(sum(given[-3:]) / 10.0)
    assert bench.loader_rate(tiny(loader__resident=True)) is None


def test_the_loader_counts_what_an_item_counts_as(tmp_path):
    text = Path(plain.__file__).read_text().replace("trial.batches((X, Y))", "trial.batches((X, Y), samples_each=1024)")
    (tmp_path / "mine.py").write_text(text)
    config = cfg.baseline(str(tmp_path / "mine.py"))
    with ten_seconds():
        assert measure.Bench(config, CPU).loader_rate(config) == pytest.approx(3 * 16 * 1024 / 10.0)


@pytest.mark.parametrize("reads", [True, False])
def test_what_a_loader_of_its_own_follows_is_known(tmp_path, reads):
    batch = "X[: trial.loader_options['batch_size']], Y[:16]" if reads else "X[:16], Y[:16]"
    text = Path(plain.__file__).read_text().replace("trial.batches((X, Y))", f"tunediff.steps(trial, [({batch})])")
    (tmp_path / "mine.py").write_text(text)
    config = cfg.baseline(str(tmp_path / "mine.py"))
    bench = measure.Bench(config, CPU)
    bench.train(config, 2)
    assert "loader.resident" in bench.unread
    assert ("loader.batch_size" in bench.unread) != reads


def test_device():
    found = measure.device(CPU)
    assert (found["type"], found["threads"]) == ("cpu", 1)
    assert found["memory_limit_mib"] < found["memory_mib"]
    gains = measure.format_gains(CPU)
    assert set(gains) <= {"bf16"}
    assert all(gain > 0 for gain in gains.values())
    assert torch.get_float32_matmul_precision() == "highest"


# -------------------------------------------------------------------------- the profiler's trace: operations and memory
MIB = 2**20


def row(name, calls, seconds, kernel=False, annotation=False):
    return types.SimpleNamespace(
        key=name, count=calls, self_cpu_time_total=seconds * 1e6, cpu_time_total=seconds * 2e6, self_device_time_total=seconds * 3e6,
        device_time_total=seconds * 4e6, device_type="DeviceType.CUDA" if kernel else "DeviceType.CPU", is_user_annotation=annotation,
    )  # fmt: skip


def test_the_longest_operations():
    rows = [row("forward", 4, 9.0, annotation=True), *(row(f"aten::op{i}", 4, 0.1) for i in range(20))]
    rows += [row("aten::mkldnn_convolution", 8, 2.0), row("nothing", 1, 0.0)]
    found = trace.operations(rows, cuda=False)
    assert found[0] == {
        "operation": "aten::mkldnn_convolution",
        "calls": 8,
        "self_s": 2.0,
        "total_s": 4.0,
        "share": 0.5,
    }
    assert len(found) == 21
    assert (found[-1]["self_s"], found[-1]["share"]) == (pytest.approx(0.1), pytest.approx(0.025))


def test_kernels_are_listed_where_operations_do_not_account_for_them():
    kernels = [row("gemm", 4, 1.0, True), row("copy", 4, 3.0, True)]
    names = lambda rows: [one["operation"] for one in trace.operations(rows, cuda=True)]  # noqa: E731
    partly = [row("aten::mm", 4, 1.0), row("aten::copy_", 4, 2.0)]  # some launch without an operation of their own
    assert names(kernels + partly) == ["aten::copy_", "aten::mm"]
    assert names([*kernels, row("aten::mm", 4, 0.5)]) == ["copy", "gemm"]
    assert trace.operations(kernels, cuda=True)[0] == {
        "operation": "copy", "calls": 4, "self_s": 9.0, "total_s": 12.0, "share": 0.75,
    }  # fmt: skip
    assert trace.operations([], cuda=True) == []


def phase(name, begin, end):
    return {"cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}


def allocation(moment, address, mib, total=0, kind=0):
    args = {"Addr": address, "Bytes": mib * MIB, "Total Allocated": total * MIB, "Device Type": kind}
    return {"name": "[memory]", "ts": moment, "args": args}


def test_memory_belongs_to_the_phase_that_took_it():
    events = [
        phase("forward", 100, 200), phase("backward", 200, 300), phase("data_wait", 0, 100),
        allocation(10, 1, 1), allocation(110, 2, 30), allocation(110, 8, 0), allocation(120, 3, 10), allocation(210, 4, 5),
        allocation(250, 2, -30), allocation(260, 99, -7), allocation(350, 5, 2), allocation(360, 4, -5),
        allocation(115, 7, 1000, kind=1),
        {"name": "aten::add", "cat": "cpu_op", "ts": 0, "dur": 400},
    ]  # fmt: skip
    assert trace.memory_peak(events, PHASES, 20.0, cuda=False) == {
        "phase": "backward", "total_mib": 66.0, "static_mib": 20.0,
        "batch_mib": 1.0, "forward_mib": 40.0, "backward_mib": 5.0, "rest_mib": 0.0,
    }  # fmt: skip


def test_memory_from_before_the_trace_is_that_of_a_gpus_allocator():
    events = [phase("forward", 0, 100), allocation(10, 1, 8, total=508, kind=1), allocation(5, 9, 1, total=1)]
    peak = trace.memory_peak(events, PHASES, 20.0, cuda=True)
    assert (peak["static_mib"], peak["total_mib"]) == (500.0, 508.0)


def test_what_a_gpu_releases_of_that_is_not_counted_any_more():
    events = [phase("forward", 0, 10), phase("backward", 11, 20)]
    events += [allocation(1, 1, 10, total=160, kind=1), allocation(2, 2, -50, total=110, kind=1)]
    events += [allocation(12, 3, 60, total=170, kind=1)]
    peak = trace.memory_peak(events, PHASES, 0.0, cuda=True)
    assert (peak["static_mib"], peak["backward_mib"], peak["total_mib"]) == (100.0, 60.0, 170.0)


def test_a_trace_without_allocations():
    assert trace.memory_peak([], PHASES, 1.0, cuda=False) is None


@pytest.fixture
def untraced(tmp_path):
    """Trace one step without a profiler's events."""
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": []}, file)
    with mock.patch.multiple(trace, TRACED=1, _profiler=mock.MagicMock()):
        yield lambda bench, config: trace.trace(bench, config, path, 0.1)


def test_what_stays_in_memory(bench, untraced, monkeypatch):
    config = tiny()
    weights = sum(p.numel() for p in network(config.knobs).parameters()) * 4 / MIB
    found = untraced(bench, config)["memory"]["static"]
    assert found["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert found["parameters"] == pytest.approx(found["ema"], rel=0.01)
    assert found["parameters"] >= weights
    assert found["samples"] == data.load(config.data).pixels.nbytes / MIB
    monkeypatch.setattr(bench, "cuda", True)
    assert untraced(bench, config)["memory"]["static"]["samples"] == 0.0
    assert untraced(bench, tiny(loader__resident=True))["memory"]["static"]["samples"] > 0.0


def test_what_stays_in_memory_is_what_a_training_keeps():
    """Plain SGD has no moments, and not every workload averages weights."""
    config = toy()
    with shipped_toy():
        bench = Bench(config, alone())
        with mock.patch.object(cfg.of(config).code, "train", toy_train.plain()):
            bench.train(config, 2)
    assert bench.state_mib.keys() == {"parameters", "optimizer"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_of_a_gpu(tmp_path):
    bench, config = Bench(tiny(), alone()), tiny()
    step = bench.speed(config, 6)
    assert step["peak_reserved_mib"] >= step["peak_memory_mib"] > 0
    found = trace.trace(bench, config, tmp_path / "trace.json.gz", step["step_s"])
    assert 0 < found["device_busy_share"] <= 1
    assert found["memory"]["peak"]["forward_mib"] > 0
    assert found["memory"]["peak"]["static_mib"] >= 0.9 * sum(found["memory"]["static"].values())
    assert set(measure.format_gains(alone())) >= {"fp16"}


# ------------------------------------------------------------------------------------ a profile in words, and its files
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
MACHINE = {"type": "cpu", "cores": 8, "gpus": 0, "memory_mib": 16000.0, "memory_limit_mib": 10000.0}
GPU = {"type": "cuda", "cores": 16, "gpus": 1, "memory_mib": 80000.0, "memory_limit_mib": 80000.0}
FUSED = {"optimizer.implementation": "fused"}


def profile_of(parts=None, step=None, **values):
    """A profile in which nothing stands out, with changes on top."""
    shares = dict.fromkeys((*PHASES, "other"), 0.0) | (parts or {"forward": 0.3, "backward": 0.6})
    return {
        "device": MACHINE, "samples": {"mib": 100.0}, "format_gains": {}, "unit": "images", "workers": 1,
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
