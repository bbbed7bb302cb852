"""Short trainings, timed, and what is known of the machine."""

import contextlib
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers import CPU, tiny
from tests.profiling.conftest import PHASES
from tests.users import plain
from tunediff import config as cfg
from tunediff.core.point import Point
from tunediff.profiling import measure
from tunediff.profiling.run import steps_in


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
