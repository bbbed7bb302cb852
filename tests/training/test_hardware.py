"""What is said of the machine and of where a step's time goes."""

import contextlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import DEVICE, fake_cuda
from tests.helpers import toy, train
from tunediff.training import hardware, memory
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


# ------------------------------------------------ host memory that a training frees: kept by its process, or given back
ROOT = Path(__file__).resolve().parents[2]
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")

# Page faults of one more block of each size, when the heap has found its shape; before and after the order. In a process
# of its own: what a process keeps can be undone only in part.
FAULTS = """
import json, resource, sys, threading
import torch
from tests.helpers import toy, train
from tunediff.training import memory

def faults(mib):
    taken = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(mib * 2**18).fill_(1.0)
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return taken[-1]

def look():
    found = [[faults(mib) for mib in (40, 100)]]
    for keep, device in ((True, "cuda"), (True, "cpu"), (False, "cpu")):
        memory.keep_freed(keep, torch.device(device))
        found.append([faults(mib) for mib in (40, 100)])
    print(json.dumps(found))

if sys.argv[1] == "main":
    look()
else:
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
"""
PAGES = {40: 40 * 256, 100: 100 * 256}


def faults(where="main"):
    """Before, asked to keep for a GPU, kept, given back: for blocks of 40 and of 100 MiB."""
    done = subprocess.run([sys.executable, "-c", FAULTS, where], cwd=ROOT, text=True, check=True, capture_output=True)
    return json.loads(done.stdout)


@pytest.mark.nightly  # a process of its own
@glibc
def test_memory_kept_needs_no_new_pages_and_a_gpus_training_changes_nothing():
    before, of_gpu, kept, given_back = faults()
    for counts in (before, of_gpu):
        assert all(count > pages / 2 for count, pages in zip(counts, PAGES.values(), strict=True))
    assert given_back[-1] > PAGES[100] / 2  # the smaller block may fit into what stays between thresholds
    assert all(count < pages / 20 for count, pages in zip(kept, PAGES.values(), strict=True))


# Peak memory of points whose evaluation takes so many MiB, and how often memory was given back since the first step, in a
# process that keeps what it frees.
JUDGED = """
import json, sys
import torch
from tests.helpers import toy, train
from tests.toy.train import INPUTS, TARGETS, begin, loss_of
from tunediff.training import memory

mib, trims, trim = int(sys.argv[1]), [], memory.trim
memory.trim = lambda: trims.append(trim())

def judge():
    torch.empty(mib * 2**18).fill_(1.0)
    return {"error": 1.0}

def body(trial):
    net, optimizer = begin(trial)
    trial.evaluate_with(judge)
    for step, batch in enumerate(trial.batches((INPUTS, TARGETS))):
        torch.empty(50 * 2**18).fill_(1.0)
        trial.step(loss_of(net, batch), optimizer)
        if step == 0:
            trims.clear()

outcome = train(toy(memory__keep_freed=True, evaluation__points=4), samples=160, evaluates=True, body=body)
print(json.dumps([[point.peak_memory_mib for point in outcome.points], len(trims)]))
"""


def judged(mib):
    """Return the peak of every point in MiB, and how often memory was given back."""
    command = [sys.executable, "-c", JUDGED, str(mib)]
    return json.loads(subprocess.run(command, cwd=ROOT, text=True, check=True, capture_output=True).stdout)


@pytest.mark.nightly  # a process of its own
@glibc
def test_freed_memory_is_kept_at_points_whose_judging_needs_less_than_training():
    """The next step waits for pages that were given back, on the clock of the budget."""
    _, trims = judged(mib=1)
    assert trims == 0


# ------------------------------------------------------------------------------------------------------- it ran out
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA: no words that are known"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("ray.exceptions.OutOfMemoryError: Task was killed"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError(
            "ncclUnhandledCudaError: Call to CUDA library failed.\nLast error:\nFailed to CUDA calloc async 24 bytes"
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8000000000000 bytes."),
        RuntimeError("std::bad_alloc"),
    ],
    ids=lambda error: str(error)[:40] or type(error).__name__,
)
def test_every_sign_of_too_little_memory(error):
    assert memory.is_oom(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: illegal memory access"), ValueError("memory"), OSError(28, "No space left on device")],
    ids=str,
)
def test_other_errors_are_no_lack_of_memory(error):
    assert not memory.is_oom(error)


class Normalized(torch.nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.linear, self.norm, self.broken = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), broken

    def forward(self, x):
        x = self.norm(self.linear(x))
        if self.broken:
            torch._dynamo.graph_break()
        return x.relu()


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("scope", "broken"),
    [("model", False), ("blocks", True), pytest.param("model", True, marks=NIGHTLY),
     pytest.param("blocks", False, marks=NIGHTLY)],
)  # fmt: skip
def test_checkpointed_blocks_can_be_compiled(scope, broken):
    """They learn the same, batch statistics included, also where a block cannot be compiled in one piece."""
    states, x = [], torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for compiled in (False, True):
        torch.manual_seed(0)
        model = call = torch.nn.Sequential(Normalized(broken), Normalized(broken))
        if compiled:
            torch.compiler.reset()
            memory.checkpoint(model, Normalized, 1.0)
            call = torch.compile(model, backend="aot_eager") if scope == "model" else model
            for block in model if scope == "blocks" else ():
                block.compile(backend="aot_eager")
        call(x).square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        states.append(gradients | dict(model.named_buffers()))
    torch.compiler.reset()
    torch.testing.assert_close(states[0], states[1])
