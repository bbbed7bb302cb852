"""What is said of the machine and of where a step's time goes."""

import contextlib
import subprocess
import sys

import pytest
import torch

from tests.fake_cuda import DEVICE, fake_cuda
from tests.helpers import toy, train
from tunediff.training import hardware
from tunediff.training.hardware import Usage, disturbance
from tunediff.training.meter import COMMON, Phases

CPU = torch.device("cpu")


def last_point(**how):
    return train(toy(), **({"samples": 8 * 20} | how)).points[-1]


# ------------------------------------------------------------------------------------------------------------- phases


def test_phases_of_a_captured_step_count_for_each_replay(passing):
    phases = Phases(CPU)
    with phases.captured():
        for name, seconds in (("forward", 2), ("backward", 3)):
            with phases(name):
                passing(seconds)
    for _ in range(4):
        phases.replayed()
    assert phases.read() == {**dict.fromkeys(COMMON, 0.0), "forward": 8.0, "backward": 12.0}


def test_a_phase_that_fails_is_counted_and_can_be_entered_again(passing):
    phases = Phases(CPU)
    with pytest.raises(ValueError, match="x"), phases("forward"):
        passing(2)
        raise ValueError("x")
    passing(8)
    with phases("forward"):
        passing(1)
    assert phases.read()["forward"] == 3.0


def test_one_phase_is_on_at_a_time(passing):
    """An inner one interrupts the one around it, which goes on afterwards; `switch` ends whatever is on."""
    phases = Phases(CPU)
    with phases("forward"):
        passing(1)
        with phases("sampler"):
            passing(2)
            with phases("sampler"):
                passing(4)
        passing(8)
    assert (phases.read()["forward"], phases.read()["sampler"]) == (9.0, 6.0)
    assert phases.switch("forward") is None
    passing(1)
    assert phases.switch("backward") == "forward"
    passing(2)
    assert phases.switch("backward") == "backward"
    assert phases.switch(None) == "backward"
    passing(4)
    assert (phases.read()["forward"], phases.read()["backward"]) == (10.0, 2.0)


def test_phases_are_ranges_of_the_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        last_point(samples=16)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["forward"] == counts["backward"] == 3  # the warm-up step and two more
    assert set(COMMON) <= set(counts)


def test_phases_of_a_device_that_is_behind_are_waited_for():
    """Averaging the weights is queued after the clock was read."""
    with fake_cuda():
        phases = Phases(DEVICE)
        for _ in range(2):
            for name in ("forward", "ema"):
                with phases(name):
                    pass
            found = phases.read()
    assert (found["forward"], found["ema"]) == pytest.approx((0.002, 0.002))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_phases_on_a_gpu_are_device_time():
    device = torch.device("cuda", 0)
    phases, a = Phases(device), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with phases("forward"):
        begin.record()
        for _ in range(20):
            a @ a
        end.record()
    torch.cuda.synchronize()
    assert phases.read()["forward"] >= 0.99 * begin.elapsed_time(end) / 1000


@pytest.fixture
def slow(monkeypatch):
    """Lets a function be called whenever batches are fetched, or moved to the device."""
    from tunediff.data.loader import Batches

    def slow(name, wait):
        method = getattr(Batches, name)
        monkeypatch.setattr(Batches, name, lambda *given: (wait(), method(*given))[1])

    return slow


@pytest.mark.parametrize(("slow_part", "expected"), [("fetch", [0.02, 0.0]), ("move", [0.0, 0.02])])
def test_a_slow_loader_shows_as_waiting_and_a_slow_copy_as_copying(monkeypatch, slow, slow_part, expected):
    """A microsecond passes between two looks at the clock, and 20 ms in what is slow."""
    now = [100.0]

    def passing(seconds):
        now[0] += seconds
        return now[0]

    monkeypatch.setattr("tunediff.training.meter.time.perf_counter", lambda: passing(1e-6))
    slow(slow_part, lambda: passing(0.02))
    parts = last_point()
    assert [parts["step_data_wait_s"], parts["step_host_to_device_s"]] == pytest.approx(expected, abs=0.001)


# --------------------------------------------------------------------------------------------------------- arithmetic
def test_the_roof_is_that_of_a_product():
    assert hardware.peak_flops_per_s(CPU, None, "highest") > 0
    assert "peak_share" not in last_point(), "nobody said what an sample costs"


# ---------------------------------------------------------------------------------------------------------- neighbours
@pytest.mark.parametrize(
    ("machine_s", "own_s", "expected"),
    [
        (20.0, 20.0, (0.0, False)),  # alone on both cores
        (20.0, 10.0, (0.5, True)),  # another process takes half of them
        (16.0, 10.0, (0.3, False)),  # it uses what this one leaves idle
        (19.0, 19.0, (0.0, False)),  # its own threads and loaders
    ],
)  # fmt: skip
def test_disturbed_is_who_shares_full_cores_with_others(machine_s, own_s, expected):
    used = Usage(wall_s=10.0, machine_s=machine_s, own_s=own_s)
    found = disturbance(used, own_s, cores=2)
    assert tuple(found.values()) == pytest.approx(expected)


@contextlib.contextmanager
def busy():
    """Yield a process that computes, once it has computed for a while, until the end of the block."""
    code = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        yield other
    finally:
        other.kill()
        other.communicate()


def test_own_processes_are_no_others():
    """Those that run, and those that have ended."""
    before = Usage.now()
    with busy():
        assert Usage.now().since(before).own_s > 0.3
    assert Usage.now().since(before).own_s > 0.3
