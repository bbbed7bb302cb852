"""Host memory that a training frees: kept by its process, or given back."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tunediff.training import memory

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
