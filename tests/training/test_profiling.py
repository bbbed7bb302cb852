"""What a profile measures, and the arithmetic behind it."""

import gzip
import itertools
import json
import os
import signal
import time

import pytest
import torch

from tests.training.conftest import tiny
from tunediff import config as cfg
from tunediff.distributed import World, alone
from tunediff.training import profiling
from tunediff.training.phases import PHASES
from tunediff.workloads.diffusion.unet import UNet

CPU = World(0, 1, torch.device("cpu"))
MIB = 2**20


@pytest.fixture
def bench(images, tmp_path):
    return profiling.Bench(images, CPU)


# ------------------------------------------------------------------------------------------------------------ timings
def point(step_s, **values):
    parts = {f"step_{name}_s": 0.0 for name in (*PHASES, "other")}
    return {
        "step_s": step_s, **parts, "seconds": {"compile": 7.0}, "disturbed": False, "peak_memory_mib": 100.0,
        "first_step_s": 1.0, "flops_per_image": 2e9, "peak_flops_per_s": 1e12, "load_average": 1.0,
        "peak_share": 0.9, **values,
    }  # fmt: skip


def test_a_summary_is_of_what_follows_the_warm_up():
    points = [
        point(9.0, step_forward_s=9.0, disturbed=True, peak_memory_mib=900.0),
        point(0.1, step_forward_s=0.06),
        point(0.3, step_forward_s=0.10, peak_memory_mib=120.0),
    ]
    found = profiling.summary(points, 32)
    assert found["step_s"] == pytest.approx(0.2)
    assert found["images_per_s"] == pytest.approx(160)
    assert found["images_per_s_sd"] == pytest.approx((320 - 106.667) / 2**0.5, rel=1e-4)
    assert found["parts_s"]["forward"] == pytest.approx(0.08)
    assert list(found["parts_s"]) == [*PHASES, "other"]
    assert (found["compile_s"], found["peak_memory_mib"], found["disturbed"]) == (7.0, 120.0, False)
    assert found["peak_share"] == pytest.approx(160 * 2e9 / 1e12), "of the mean rate, not of the last point"
    assert profiling.summary(points[:2], 32)["images_per_s_sd"] is None


@pytest.mark.parametrize(
    ("seconds", "step_s", "steps"), [(5, 0.1, 50), (5, 0.0001, 200), (5, 60, 3), (5, 1.7, 3), (5, 1.6, 4)]
)
def test_steps_follow_the_seconds(seconds, step_s, steps):
    assert profiling.steps_in(seconds, step_s) == steps


def test_speed(bench, tmp_path):
    found = bench.speed(tiny(), 5)
    assert (found["steps"], found["batch_size"]) == (6, 16), "equal segments: a little more than was asked for"
    assert found["images_per_s"] == pytest.approx(16 / found["step_s"])
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"], rel=0.05)
    assert found["parts_s"]["backward"] > 0
    assert not list(tmp_path.iterdir()), "the trainings leave nothing behind"


def test_loader_and_model_alone(bench):
    config = tiny(loader__workers=1)
    alone = bench.loader_alone(config, 0.2)
    assert alone["images"] >= 3 * 16
    assert alone["seconds"] >= 0.2
    assert alone["images_per_s"] == pytest.approx(alone["images"] / alone["seconds"])
    assert bench.model_alone(config, 3)["images_per_s"] > 0


def test_a_set_that_does_not_fit_on_the_device(bench, monkeypatch):
    def full(config, steps):
        assert config.loader.resident
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "speed", full)
    assert bench.model_alone(tiny(), 3) is None


def test_an_attempt_is_compared_with_what_is_measured_beside_it(bench, monkeypatch):
    def speed(config, steps):
        changed = config.loader.resident
        return {"images_per_s": 120.0 if changed else 100.0, "images_per_s_sd": 3.0, "peak_memory_mib": 7.0}

    monkeypatch.setattr(bench, "speed", speed)
    found = bench.attempt(tiny(), {"loader.resident": True}, 3)
    assert found["gain"] == pytest.approx(1.2)
    assert not found["within_noise"]
    assert bench.attempt(tiny(), {"ema.max_decay": 0.5}, 3)["within_noise"]
    assert bench.attempt(tiny(), {"parallel.workers": 2}, 3) == {"failed": "it needs several processes"}


def test_an_attempt_that_fails_is_a_result(bench, monkeypatch):
    def speed(config, steps):
        raise RuntimeError("no such kernel\nmore of it")

    monkeypatch.setattr(bench, "speed", speed)
    assert bench.attempt(tiny(), {"loader.resident": True}, 3) == {"failed": "RuntimeError: no such kernel"}


# -------------------------------------------------------------------------------------------------------------- trace
def test_trace(bench, tmp_path):
    config = tiny(loader__accumulation=2)
    found = bench.trace(config, tmp_path / "trace.json.gz", 0.1)
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert set(PHASES) <= names
    assert sum(event["name"] == "forward" for event in events) == 2 * profiling.TRACED, "two passes in each step"

    longest = found["operations"]["longest"]
    assert 0 < len(longest) <= 10
    assert not {row["operation"] for row in longest} & {*PHASES, "ProfilerStep*"}
    seconds = [row["self_s_per_step"] for row in longest]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < found["operations"]["convolution_share"] < 1
    assert "device_busy_share" not in found, "only a GPU is busy by itself"

    memory = found["memory"]
    assert memory["peak"]["phase"] in ("forward", "backward")
    assert memory["peak"]["forward_mib"] > 0
    lines = memory["timeline"]
    assert max(map(sum, zip(*(v for k, v in lines.items() if k != "seconds"), strict=True))) == pytest.approx(
        memory["peak"]["total_mib"]
    )
    assert len(memory["phases"]) >= 5 * profiling.TRACED
    assert not bench.snapshot(config, tmp_path / "snapshot.pickle")


def row(name, calls, seconds, kernel=False):
    return {"name": name, "calls": calls, "self_s": seconds, "total_s": 2 * seconds, "kernel": kernel}


def test_the_longest_operations():
    rows = [row(f"aten::op{i}", 4, 0.1) for i in range(20)]
    rows += [row("aten::mkldnn_convolution", 8, 2.0), row("nothing", 1, 0.0)]
    found = profiling.operations(rows, steps=4)
    assert found["kind"] == "operations"
    assert len(found["longest"]) == 10
    assert found["longest"][0] == {
        "operation": "aten::mkldnn_convolution", "calls_per_step": 2.0, "self_s_per_step": 0.5,
        "total_s_per_step": 1.0, "share": 0.5,
    }  # fmt: skip
    assert found["convolution_share"] == 0.5
    assert found["self_s_per_step"] == 1.0


def test_kernels_are_listed_where_operations_do_not_account_for_them():
    kernels = [row("gemm", 4, 1.0, True), row("copy", 4, 3.0, True)]
    launched = [row("aten::mm", 4, 1.0), row("aten::copy_", 4, 3.0)]
    assert profiling.operations(kernels + launched, 4)["kind"] == "operations"
    graphs = profiling.operations([*kernels, row("aten::mm", 4, 0.5)], 4)
    assert (graphs["kind"], [one["operation"] for one in graphs["longest"]]) == ("kernels", ["copy", "gemm"])
    assert graphs["longest"][0]["share"] == 0.75
    assert profiling.operations([], 4) == {
        "kind": "operations", "longest": [], "convolution_share": 0, "self_s_per_step": 0.0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- memory
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
    found = profiling.timeline(events, 20.0, cuda=False)
    assert found["peak"] == {
        "phase": "backward", "total_mib": 66.0, "static_mib": 20.0,
        "batch_mib": 1.0, "forward_mib": 40.0, "backward_mib": 5.0, "rest_mib": 0.0,
    }  # fmt: skip
    lines = found["timeline"]
    assert lines["seconds"][0] == 0.0
    assert lines["seconds"][-1] == pytest.approx(350e-6), "from the first allocation, in seconds"
    assert (lines["forward_mib"][-1], lines["backward_mib"][-1], lines["rest_mib"][-1]) == (10.0, 0.0, 2.0)
    assert found["phases"][0] == [-1e-5, pytest.approx(9e-5), "data_wait"]


def test_a_gpu_knows_what_was_there_before():
    events = [phase("forward", 0, 100), allocation(10, 1, 8, total=508, kind=1), allocation(5, 9, 1, total=1)]
    found = profiling.timeline(events, 20.0, cuda=True)
    assert found["peak"]["static_mib"] == 500.0
    assert found["peak"]["total_mib"] == 508.0


def test_a_trace_without_allocations():
    assert profiling.timeline([], 1.0, cuda=False) == {"peak": None, "timeline": None, "phases": []}


def test_a_long_timeline_keeps_its_peak():
    events = [phase("forward", 0, 100_000)]
    events += [allocation(i, i, 1) for i in range(1, 5000)] + [allocation(5000 + i, i, -1) for i in range(1, 5000)]
    found = profiling.timeline(events, 0.0, cuda=False, most=100)
    assert len(found["timeline"]["seconds"]) <= 101
    assert max(found["timeline"]["forward_mib"]) == 4999.0 == found["peak"]["total_mib"]


def test_what_stays_in_memory(images):
    config = tiny()
    weights = sum(p.numel() for p in UNet(config.model, 1, 8).parameters()) * 4 / MIB
    found = profiling.static_mib(config, images, cuda=False)
    assert found["optimizer"] == pytest.approx(2 * weights)
    assert found["parameters"] == found["ema"] >= weights
    assert found["images"] == images.pixels.nbytes / MIB
    assert profiling.static_mib(config, images, cuda=True)["images"] == 0.0
    assert profiling.static_mib(tiny(loader__resident=True), images, cuda=True)["images"] > 0.0


def test_the_limit_leaves_room_for_others():
    import psutil

    limit = profiling.memory_limit_mib(torch.device("cpu"))
    assert 0 < limit < psutil.virtual_memory().total / MIB


# -------------------------------------------------------------------------------------------------------------- sweep
@pytest.mark.parametrize(
    ("values", "images", "sizes"),
    [
        ({}, 128, [4, 8, 16, 32, 64, 128]),
        ({}, 100, [4, 8, 16, 32, 64]),
        ({}, 10, [4, 8, 16]),
        ({"loader__batch_size": 6}, 24, [3, 6, 12, 24]),
        ({"loader__batch_size": 7}, 14, [7, 14]),
        ({"loader__batch_size": 16, "loader__accumulation": 8}, 64, [8, 16, 32, 64]),
        ({"loader__batch_size": 32768}, 10**6, [8192, 16384, 32768, 65536]),
    ],
)
def test_batch_sizes(values, images, sizes):
    assert list(profiling.batch_sizes(tiny(**values), images)) == sizes


def swept(*triples):
    return [{"batch_size": b, "images_per_s": r, "step_s": b / r, "peak_memory_mib": m} for b, r, m in triples]


def test_memory_is_extrapolated():
    assert profiling.predicted_mib(swept((8, 100, 300)), 16) == 600, "one point: in proportion, rather too much"
    rows = swept((8, 100, 300), (16, 100, 340), (32, 100, 420))
    assert profiling.predicted_mib(rows, 64) == 420 + 5 * 32
    assert profiling.predicted_mib(swept((8, 100, 300), (16, 100, 290)), 32) == 290, "noise is no shrinking"
    assert profiling.largest_batch(rows, 1000) == 32 + 116
    assert profiling.largest_batch(rows[:1], 1000) is None
    assert profiling.largest_batch(swept((8, 100, 300), (16, 100, 290)), 1000) is None
    reserved = [r | {"peak_reserved_mib": 2 * r["peak_memory_mib"]} for r in rows]
    assert profiling.predicted_mib(reserved, 64) == 2 * 580, "a GPU's allocator keeps what it has reserved"


@pytest.mark.parametrize(
    ("rows", "batch", "limit", "why"),
    [
        ([], 8, 0.0, ""),
        (swept((8, 100, 300)), 16, 1000, ""),
        (swept((8, 100, 300)), 16, 599, "16 images would need about 600 MiB of the 599 MiB that may be taken"),
        (swept((8, 100, 300)), 16, None, ""),
        (swept((8, 1, 300)), 32, None, "a step of 32 images would take over 30 s"),
        (swept((8, 100, 10), (16, 101, 10), (32, 102, 10)), 64, 1000, "images/s have stopped growing"),
        (swept((8, 100, 10), (16, 101, 10), (32, 102, 10)), 64, None, ""),
        (swept((8, 100, 10), (16, 95, 10), (32, 110, 10)), 64, 1000, ""),
        (swept((8, 100, 10), (16, 50, 10)), 32, 1000, ""),
    ],
)
def test_the_end_of_a_sweep(rows, batch, limit, why):
    assert profiling.end_of_sweep(rows, batch, limit) == why


def test_sweep(bench):
    heard = []
    found = bench.sweep(tiny(), 0.01, heard.append, seconds=0.02)
    assert heard == [one["batch_size"] for one in found["rows"]]
    assert heard[:3] == [4, 8, 16]
    assert found["stopped"] in (
        "images/s have stopped growing", "a larger batch would be larger than the set of images",
    )  # fmt: skip
    for one in found["rows"]:
        assert one["images_per_s"] == pytest.approx(one["batch_size"] / one["step_s"])
        assert one["peak_memory_mib"] > 10


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_sweep_survives_the_end_of_memory(bench, monkeypatch, error):
    def speed(config, steps, segments):
        if config.loader.batch_size > 16:
            raise error
        batch = config.loader.batch_size
        return {"step_s": 0.1, "images_per_s": batch / 0.1, "peak_memory_mib": 10.0 * batch, "disturbed": False}

    monkeypatch.setattr(bench, "speed", speed)
    found = bench.sweep(tiny(), 0.01, lambda batch: None)
    assert [one["batch_size"] for one in found["rows"]] == [4, 8, 16]
    assert found["stopped"] == "out of memory at 32"


def test_a_sweep_hides_no_other_fault(bench, monkeypatch):
    def speed(config, steps, segments):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(bench, "speed", speed)
    with pytest.raises(ValueError, match="a fault of ours"):
        bench.sweep(tiny(), 0.01, lambda batch: None)


# ------------------------------------------------------------------------------------------------------------ compile
def test_break_even():
    found = profiling.break_even(eager=100.0, compiled=150.0, compile_s=60.0)
    assert found == {"images": pytest.approx(18_000), "seconds": pytest.approx(180)}
    assert 60 + found["images"] / 150 == pytest.approx(found["seconds"]), "both trainings are there at that second"
    assert profiling.break_even(100.0, 100.0, 1.0) is None
    assert profiling.break_even(100.0, 90.0, 0.0) is None
    assert profiling.break_even(100.0, 110.0, 0.0) == {"images": 0.0, "seconds": 0.0}


def measured(images_per_s, sd=1.0, **values):
    return {
        "images_per_s": images_per_s, "images_per_s_sd": sd, "first_step_s": 2.0, "compile_s": 0.0,
        "peak_memory_mib": 5.0, "disturbed": False, **values,
    }  # fmt: skip


def test_compiled_against_eager():
    eager = [measured(98.0, first_step_s=9.0), measured(102.0)]
    found = profiling.compared("default", eager, measured(150.0, compile_s=62.0, compiled_graphs=3))
    assert found["compile_s"] == 60.0, "the first step is not compilation"
    assert (found["eager_images_per_s"], found["speedup"]) == (100.0, 1.5)
    assert found["break_even"]["seconds"] == pytest.approx(180)
    assert (found["within_noise"], found["graphs"], found["disturbed"]) == (False, 3, False)
    assert profiling.compared("default", [measured(100.0, sd=20.0)], measured(130.0, sd=20.0))["within_noise"]
    drifted = [measured(60.0), measured(140.0, disturbed=True)]
    assert profiling.compared("default", drifted, measured(150.0))["within_noise"]
    assert profiling.compared("default", drifted, measured(150.0))["disturbed"]
    assert profiling.compared("default", [measured(100.0, None)], measured(130.0, None))["break_even"] is not None


def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def uncompilable(*args):
    assert ".compiled-" in os.environ["TORCHINDUCTOR_CACHE_DIR"], "an empty cache of its own"
    raise RuntimeError("no C++ compiler\nand a long story")


@pytest.mark.parametrize(
    ("child", "reason"),
    [(killed, "the process that compiled was killed"), (uncompilable, "RuntimeError: no C++ compiler")],
)
def test_compilation_that_fails_is_a_result(tmp_path, monkeypatch, child, reason):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setattr(profiling, "_eager_and_compiled", child)
    assert profiling.compile_cost(tiny(), 3, tmp_path) == {"mode": "default", "failed": reason}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert not list(tmp_path.iterdir())


def test_what_is_measured_beside_each_other(monkeypatch):
    seen = []

    def speed(bench, config, steps, segments=3):
        if segments > 1:
            seen.append((config.compile.mode, config.compile.scope))
        return {"first_step_s": 1.0, "compile_s": 0.0, "step_s": 1.0}

    monkeypatch.setattr(profiling.Bench, "speed", speed)
    threads = torch.get_num_threads()
    nested = cfg.to_dict(tiny(compile__mode="max-autotune", compile__scope="blocks"))
    eager, _ = profiling._eager_and_compiled(nested, "max-autotune", 3, threads)
    assert len(eager) == 2
    profiling._eager_and_compiled(cfg.to_dict(tiny()), "default", 3, threads)
    plain = ("none", "model")
    assert seen == [plain, ("max-autotune", "blocks"), plain, plain, ("default", "model"), plain]


@pytest.mark.slow
def test_compile_cost(tmp_path):
    found = profiling.compile_cost(tiny(), 10, tmp_path)
    assert "failed" not in found
    assert found["compile_s"] > 1
    assert found["graphs"] >= 1


# ------------------------------------------------------------------------------------------------------------- device
def test_device():
    found = profiling.device(CPU)
    assert (found["type"], found["threads"]) == ("cpu", 1)
    assert found["memory_limit_mib"] < found["memory_mib"]
    gains = profiling.format_gains(CPU)
    assert set(gains) <= {"bf16"}
    assert all(gain > 0 for gain in gains.values())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_of_a_gpu(images, tmp_path):
    bench, config = profiling.Bench(images, alone()), tiny()
    step = bench.speed(config, 6)
    assert step["peak_reserved_mib"] >= step["peak_memory_mib"] > 0
    found = bench.trace(config, tmp_path / "trace.json.gz", step["step_s"])
    assert 0 < found["device_busy_share"] <= 1
    assert found["memory"]["peak"]["forward_mib"] > 0
    assert found["memory"]["peak"]["static_mib"] >= 0.9 * sum(found["memory"]["static"].values())
    assert bench.snapshot(config, tmp_path / "snapshot.pickle")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 1000
    assert set(profiling.format_gains(alone())) >= {"fp16"}
    assert bench.sweep(config, step["step_s"], lambda batch: None, seconds=0.02)["rows"]


def test_sweep_measures_for_as_long_as_it_is_told(bench, monkeypatch):
    counter = itertools.count()

    def speed(config, steps, segments):
        next(counter)
        assert steps == 20, "2 s of 0.1 s"
        batch = config.loader.batch_size
        return {"step_s": 0.1, "images_per_s": batch / 0.1, "peak_memory_mib": 10.0, "disturbed": False}

    monkeypatch.setattr(bench, "speed", speed)
    monkeypatch.setattr(profiling, "batch_sizes", lambda config, images: [16])
    begin = time.monotonic()
    bench.sweep(tiny(), 0.1, lambda batch: None)
    assert next(counter) == 1
    assert time.monotonic() - begin < 2
