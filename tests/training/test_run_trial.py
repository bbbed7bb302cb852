"""What an exception of a training means: a status, or nothing about the configuration."""

import errno
import os
import types

import pytest
import torch

from tunediff.core.journal import Journal
from tunediff.core.trial_record import NotFiniteError
from tunediff.distributed import alone
from tunediff.training import state
from tunediff.training.outcome import end_of, run_trial

DEAD_LOADER = RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")


WRITERS = {
    "checkpoint": lambda folder: state.save({"step": 1}, folder),
    "journal": lambda folder: Journal(folder).write("about"),
}


class NotOfTrialError(RuntimeError):
    pass


def raising(error):
    def train():
        raise error

    return train


@pytest.mark.parametrize(("finished", "status"), [(True, "ok"), (False, "pruned")])
def test_a_training_that_returns_is_ok_or_pruned(tmp_path, finished, status):
    outcome = types.SimpleNamespace(
        finished=finished, seconds={"train": 2.0}, steps=3, peak={"peak_memory_mib": 4.0}, reason=""
    )
    result = run_trial(lambda: outcome, alone(), tmp_path)
    assert (result.end.status, result.end.steps, result.end.seconds, result.end.peak) == (
        status, 3, {"train": 2.0}, {"peak_memory_mib": 4.0},
    )  # fmt: skip
    assert result.outcome is outcome
    assert result.error is None


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotFiniteError("the loss is not finite"), "nan", "the loss is not finite"),
        (MemoryError("no"), "oom", "MemoryError: no"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", "OutOfMemoryError: CUDA out of memory"),
        (ZeroDivisionError("why"), "error", "ZeroDivisionError: why"),
    ],
)
@pytest.mark.usefixtures("no_users_code")
def test_an_exception_becomes_a_status(tmp_path, error, status, reason):
    result = run_trial(raising(error), alone(), tmp_path)
    assert (result.end.status, result.end.reason, result.outcome) == (status, reason, None)
    assert result.error is (None if status == "nan" else error), "what is not finite harms no process"
    assert result.end.peak["peak_memory_mib"] > 0
    assert (end_of(error).status, end_of(error).peak) == (status, {})


@pytest.mark.parametrize("error", [DEAD_LOADER, NotOfTrialError("the slot is gone")])
def test_what_says_nothing_about_the_configuration_has_no_end(tmp_path, error):
    result = run_trial(raising(error), alone(), tmp_path, not_of_trial=(NotOfTrialError,))
    assert (result.end, result.outcome, result.error) == (None, None, error)


def test_a_disk_fault_behind_another_error_is_found(tmp_path, disk_probe):
    disk_probe(full := OSError(errno.ENOSPC, "full"))
    error = ValueError("could not be written")
    result = run_trial(raising(error), alone(), tmp_path)
    assert (result.end, result.error, result.error.__cause__) == (None, full, error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.usefixtures("no_users_code")
def test_an_error_of_another_disk_is_the_trials_own(tmp_path, code):
    """Such as that of a cache which `train(trial)` writes: the search's folder can be written."""
    elsewhere = "/dev/no-such-folder/tokens.bin"  # a file system of its own
    result = run_trial(raising(OSError(code, "no", elsewhere)), alone(), tmp_path)
    assert (result.end.status, result.end.reason) == ("error", f"OSError: [Errno {code}] no: '{elsewhere}'")
    own = OSError(code, "no", str(tmp_path / "sub" / "cache.bin"))
    assert run_trial(raising(own), alone(), tmp_path).end is None


def test_a_full_disk_of_a_file_without_a_name_is_the_trials_own(tmp_path, disk_probe):
    """Writing to a file on a full disk names no file; only opening one does."""

    def train():
        with open("/dev/full", "wb") as cache:
            cache.write(b"tokens")

    result = run_trial(train, alone(), tmp_path)
    assert (result.end.status, result.error.filename) == ("error", None)
    assert "No space left on device" in result.end.reason
    disk_probe(OSError(errno.ENOSPC, "full"))
    assert run_trial(train, alone(), tmp_path).end is None, "the results' disk is full as well"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_of_the_trials_own_files_has_no_end(tmp_path, disk_fault, disk_probe, write):
    """The probe may find room: it is smaller than a checkpoint."""
    disk_fault(errno.ENOSPC)
    disk_probe(None)
    result = run_trial(lambda: write(tmp_path), alone(), tmp_path)
    assert result.end is None
    assert str(tmp_path) in str(result.error)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_passing_fault_of_the_trials_own_files_has_no_end(tmp_path, disk_fault, disk_probe, code):
    """As of NFS: when the folder is probed, it is over."""
    disk_fault(code)
    disk_probe(None)
    result = run_trial(lambda: Journal(tmp_path).write("about"), alone(), tmp_path)
    assert (result.end, result.error.errno) == (None, code)
    images = OSError(code, os.strerror(code), "/data/images/1.png")
    assert run_trial(raising(images), alone(), tmp_path).end.status == "error", "the user's own files"


def test_an_interrupt_passes(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_trial(raising(KeyboardInterrupt()), alone(), tmp_path)
