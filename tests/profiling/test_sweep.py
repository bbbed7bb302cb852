"""Batch sizes: which are measured, and where it ends."""

import itertools
import math

import pytest
import torch

from tests.helpers import tiny
from tunediff.config import ConfigError
from tunediff.profiling import sweep as sweeping
from tunediff.profiling.sweep import sweep


@pytest.mark.parametrize(
    ("values", "samples", "sizes"),
    [
        ({}, 128, [4, 8, 16, 32, 64, 128]),
        ({}, 100, [4, 8, 16, 32, 64]),
        ({}, 10, [4, 8, 16]),
        ({"loader__batch_size": 6}, 24, [3, 6, 12, 24]),
        ({"loader__batch_size": 7}, 14, [7, 14]),
        ({"loader__batch_size": 16, "loader__accumulation": 8}, 64, [8, 16, 32, 64]),
        ({"loader__batch_size": 32768}, 10**6, [8192, 16384, 32768, 65536]),
        ({"loader__batch_size": 32768}, math.inf, [8192, 16384, 32768, 65536]),
    ],
)
def test_batch_sizes(values, samples, sizes):
    assert list(sweeping.batch_sizes(tiny(**values), samples)) == sizes


def swept(*triples):
    return [{"batch_size": b, "samples_per_s": r, "step_s": b / r, "peak_memory_mib": m} for b, r, m in triples]


def test_memory_is_extrapolated():
    assert sweeping.predicted_mib(swept((8, 100, 300)), 16) == 600, "one point: in proportion, rather too much"
    rows = swept((8, 100, 300), (16, 100, 340), (32, 100, 420))
    assert sweeping.predicted_mib(rows, 64) == 420 + 5 * 32
    assert sweeping.predicted_mib(swept((8, 100, 300), (16, 100, 290)), 32) == 290, "noise is no shrinking"
    assert sweeping.largest_batch(rows, 1000) == 32 + 116
    assert sweeping.largest_batch(rows[:1], 1000) is None
    assert sweeping.largest_batch(swept((8, 100, 300), (16, 100, 290)), 1000) is None
    reserved = [r | {"peak_reserved_mib": 2 * r["peak_memory_mib"]} for r in rows]
    assert sweeping.predicted_mib(reserved, 64) == 2 * 580, "a GPU's allocator keeps what it has reserved"


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
    assert sweeping.end_of_sweep(rows, batch, limit, "images") == why


def measured(config, mib):
    batch = config.loader.batch_size
    return {"batch_size": batch, "step_s": 0.1, "samples_per_s": batch / 0.1, "peak_memory_mib": mib}


def test_batches_of_a_stream_grow_up_to_what_the_configuration_allows(bench, monkeypatch):
    monkeypatch.setattr(bench, "speed", lambda config, steps, segments: measured(config, 10.0))
    bench.samples["count"] = 0
    found = sweep(bench, tiny(loader__batch_size=16384), 0.1, lambda batch: None)
    assert [row["batch_size"] for row in found["rows"]] == [4096, 8192, 16384, 32768, 65536]
    assert found["stopped"] == "the configuration allows no larger batch"


def test_a_stream_that_is_shorter_than_a_larger_batch_ends_the_sweep(bench, monkeypatch):
    def speed(config, steps, segments):
        if config.loader.batch_size > 32:
            raise ConfigError("trial.batches: the data set gives fewer items than one batch")
        return measured(config, 10.0)

    monkeypatch.setattr(bench, "speed", speed)
    bench.samples["count"] = 0
    found = sweep(bench, tiny(), 0.1, lambda batch: None)
    assert [row["batch_size"] for row in found["rows"]] == [4, 8, 16, 32]
    assert found["stopped"] == "64 failed: trial.batches: the data set gives fewer items than one batch"


def test_no_batches_are_measured_with_a_loader_that_does_not_follow_their_size(bench, monkeypatch):
    monkeypatch.setattr(bench, "unread", ("loader.batch_size",))
    found = sweep(bench, tiny(), 0.1, lambda batch: None)
    assert found["rows"] == []
    assert found["stopped"] == "the workload's own loader does not follow loader.batch_size"


def test_memory_ends_a_sweep_only_beyond_the_configured_batch(bench, monkeypatch):
    monkeypatch.setattr(
        bench, "speed", lambda config, steps, segments: measured(config, 800.0 + config.loader.batch_size)
    )
    monkeypatch.setattr(sweeping.measure, "memory_limit_mib", lambda device: 820.0)
    found = sweep(bench, tiny(), 0.1, lambda batch: None)
    assert [row["batch_size"] for row in found["rows"]] == [4, 8, 16]
    assert found["stopped"] == "32 images would need about 832 MiB of the 820 MiB that may be taken"


def test_sweep(bench, monkeypatch):
    monkeypatch.setattr(sweeping, "SECONDS", 0.02)
    heard = []
    found = sweep(bench, tiny(), 0.01, heard.append)
    assert heard == [one["batch_size"] for one in found["rows"]]
    assert heard[:3] == [4, 8, 16]
    assert found["stopped"] in (
        "images/s have stopped growing", "a larger batch would be larger than the set of images",
    )  # fmt: skip
    for one in found["rows"]:
        assert one["samples_per_s"] == pytest.approx(one["batch_size"] / one["step_s"])
        assert one["peak_memory_mib"] > 10


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_sweep_survives_the_end_of_memory(bench, monkeypatch, error):
    def speed(config, steps, segments):
        if config.loader.batch_size > 16:
            raise error
        batch = config.loader.batch_size
        return {
            "batch_size": batch,
            "step_s": 0.1,
            "samples_per_s": batch / 0.1,
            "peak_memory_mib": 10.0 * batch,
            "disturbed": False,
        }

    monkeypatch.setattr(bench, "speed", speed)
    found = sweep(bench, tiny(), 0.01, lambda batch: None)
    assert [one["batch_size"] for one in found["rows"]] == [4, 8, 16]
    assert found["stopped"] == "out of memory at 32"


@pytest.mark.parametrize("first", [4, 8])
def test_a_sweep_ends_at_what_the_device_cannot_do(bench, monkeypatch, first):
    """Too large an index, a kernel that does not fit, a device that is gone: whatever it is, smaller batches stand."""
    gone = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    def fail(*_):
        raise gone

    def speed(config, steps, segments):
        if (batch := config.loader.batch_size) >= first:
            monkeypatch.setattr(sweeping.memory, "reset", fail)  # nor does anything else work from here on
            raise gone
        return {"batch_size": batch, "step_s": 0.1, "samples_per_s": batch / 0.1, "peak_memory_mib": 10.0 * batch}

    monkeypatch.setattr(bench, "speed", speed)
    if first == 4:
        with pytest.raises(RuntimeError, match="illegal memory access"):  # what was measured before the sweep
            sweep(bench, tiny(), 0.01, lambda batch: None)
        return
    found = sweep(bench, tiny(), 0.01, lambda batch: None)
    assert [one["batch_size"] for one in found["rows"]] == [4]
    assert found["stopped"] == "8 failed: RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_sweep_hides_no_other_fault(bench, monkeypatch):
    def speed(config, steps, segments):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(bench, "speed", speed)
    with pytest.raises(ValueError, match="a fault of ours"):
        sweep(bench, tiny(), 0.01, lambda batch: None)


def test_sweep_measures_for_as_long_as_it_is_told(bench, monkeypatch):
    counter = itertools.count()

    def speed(config, steps, segments):
        next(counter)
        assert steps == 20, "2 s of 0.1 s"
        batch = config.loader.batch_size
        return {
            "batch_size": batch,
            "step_s": 0.1,
            "samples_per_s": batch / 0.1,
            "peak_memory_mib": 10.0,
            "disturbed": False,
        }

    monkeypatch.setattr(bench, "speed", speed)
    monkeypatch.setattr(sweeping, "batch_sizes", lambda config, samples: [16])
    sweep(bench, tiny(), 0.1, lambda batch: None)
    assert next(counter) == 1
