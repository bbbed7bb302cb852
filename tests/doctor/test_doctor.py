"""The doctor: every check says so when what it looks at is broken, and the command ends as its findings say."""

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import pytest
import torch

from tests.fake_cuda import GPU as GPU_WORLD
from tests.fake_cuda import fake_cuda
from tests.helpers import CPU
from tunediff.core import disk, machine
from tunediff.distributed import World
from tunediff.doctor import __main__ as command
from tunediff.doctor import checks
from tunediff.doctor.checks import Finding
from tunediff.profiling import measure

Usage = collections.namedtuple("Usage", "total used free")
GIB = 2**30


def raises(error):
    def call(*words, **options):
        raise error

    return call


def answering(wrong=""):
    return lambda probe, *options: wrong


def disk_of(total, free):
    return lambda path: Usage(total * GIB, (total - free) * GIB, free * GIB)


GPU = types.SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB, major=9, minor=0)
HEALTHY = [
    (machine, "cores", lambda: 8),
    (machine, "gpus", lambda: []),
    (torch.cuda, "is_available", lambda: False),
    (torch.cuda, "get_device_properties", lambda index: GPU),
    (checks.psutil, "cpu_percent", lambda interval: 0.0),
    (disk, "unwritable", lambda folder: None),
    (shutil, "disk_usage", disk_of(100, 50)),
    (measure, "format_gains", lambda world: {"bf16": 2.0, "tf32": 4.0}),
    (checks, "answer", answering()),
]
"""A machine with eight cores and without a GPU, where everything works."""
TWO_GPUS = [(torch.cuda, "is_available", lambda: True), (torch.cuda, "device_count", lambda: 2)]


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Examine the healthy machine with some of its functions replaced."""
    monkeypatch.delenv(machine.VISIBLE, raising=False)

    def examine(name, *replaced):
        for where, attribute, value in (*HEALTHY, *replaced):
            monkeypatch.setattr(where, attribute, value)
        return checks.examine(next(check for check in checks.CHECKS if check[0] == name), tmp_path)

    return examine


@pytest.mark.parametrize("name", [name for name, _, _ in checks.CHECKS if name != "GPU"])
def test_every_check_is_ok_on_a_healthy_machine(examine, name):
    finding = examine(name)
    assert (finding.state, finding.stops) == ("ok", False), finding


@pytest.mark.parametrize(
    ("name", "replaced", "state", "words"),
    [
        ("CPU", [(machine, "cores", lambda: 1)], "weak", "share one core"),
        ("CPU", [(checks.psutil, "cpu_percent", lambda interval: 50.0)], "weak", "others use 50%"),
        ("GPU", [], "weak", "small networks"),
        ("GPU", [(machine, "gpus", lambda: ["0"])], "missing", "1 GPU by the driver, 0 by torch"),
        ("GPU", TWO_GPUS, "missing", "0 GPUs by the driver, 2 by torch"),
        ("GPU", [*TWO_GPUS, (machine, "gpus", lambda: ["0", "1"])], "ok", "NVIDIA H200, NVIDIA H200; torch"),
        (
            "disk",
            [(disk, "unwritable", lambda folder: OSError(30, "Read-only file system"))],
            "missing",
            "Read-only",
        ),
        ("disk", [(shutil, "disk_usage", disk_of(1000, 20))], "weak", "over 95 % full"),
        ("number formats", [(measure, "format_gains", lambda world: {"bf16": 0.9})], "weak", "does not pay"),
        (
            "process group",
            [(checks, "answer", answering("wrong mean"))],
            "wrong",
            "wrong mean parallel.workers = 1 only",
        ),
        ("process group", [(checks, "answer", raises(TimeoutError("no answer")))], "missing", "no answer"),
        ("process group", [(machine, "gpus", lambda: ["0"])], "skipped", "one GPU"),
        ("loader processes", [(checks.loader.Batches, "move", lambda *_: torch.zeros(8))], "wrong", "lost or mixed"),
        ("loader processes", [(checks.loader, "build", raises(OSError("no space")))], "missing", "no space"),
        ("torch.compile", [(checks, "answer", raises(RuntimeError("no compiler")))], "missing", "no compiler"),
        ("torch.compile", [(checks, "answer", answering("0 graphs"))], "wrong", "0 graphs compile.mode = none only"),
        (
            "captured steps",
            [(machine, "gpus", lambda: ["0"]), (checks, "answer", answering("refused: x.py:3"))],
            "wrong",
            "x.py:3",
        ),
        ("Ray", [(checks, "answer", answering("other cores"))], "wrong", "other cores"),
        ("Ray", [(checks, "answer", raises(RuntimeError("raylet died")))], "missing", "raylet died"),
    ],
)
def test_a_check_says_what_is_broken_and_what_that_means(examine, name, replaced, state, words):
    finding = examine(name, *replaced)
    assert (finding.state, finding.stops) == (state, finding.needed and state in ("missing", "wrong")), finding
    assert words in f"{finding.found} {finding.means}"


@pytest.mark.nightly
def test_a_wrong_mean_of_a_process_group_is_noticed(monkeypatch):
    """Really two processes; then one whose mean is wrong."""
    assert checks.answer("averaged", 1200, ranks=2) == ""

    class Wrong(World):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def mean(self, tensor):
            return tensor + 1

    monkeypatch.setattr(checks, "from_environment", lambda: Wrong(0, 1, CPU.device))
    assert "is wrong" in checks.averaged()


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_compiled_network_that_computes_something_else_is_noticed(factor):
    with mock.patch.object(torch, "compile", lambda network, **_: lambda x: factor * network(x)):
        assert bool(checks.compiled()) == (factor != 1.0)


def test_a_captured_step_is_found_right():
    with fake_cuda(), mock.patch.object(checks, "alone", return_value=GPU_WORLD):
        assert checks.captured() == ""


@pytest.mark.nightly
@pytest.mark.cluster
def test_this_machine_has_all_that_a_search_needs(tmp_path):
    line = [sys.executable, "-m", "tunediff.doctor", "--json", "--storage", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    result = json.loads(done.stdout)
    states = {finding["name"]: finding["state"] for finding in result["findings"]}
    assert (done.returncode, result["can_search"]) == (0, True), result
    assert {states[name] for name in ("process group", "loader processes", "Ray")} == {"ok"}


# ---- the command
@pytest.fixture
def checked(monkeypatch):
    """Lets these be all checks."""
    return lambda made_up: monkeypatch.setattr(checks, "CHECKS", made_up)


def finding_of(state):
    return lambda storage: Finding(state, "a thing", "it means")


@pytest.mark.parametrize(
    ("states", "code", "verdict"),
    [
        ([("ok", True), ("skipped", True)], 0, "a search can run here"),
        ([("weak", True), ("missing", False)], 0, "a search can run here; weak one: weak; missing one: missing"),
        ([("wrong", False), ("missing", False)], 0, "a search can run here; wrong one: wrong; missing one: missing"),
        ([("ok", True), ("missing", True)], 1, "a search should not be started here: missing one"),
        ([("wrong", True)], 1, "a search should not be started here: wrong one"),
    ],
)
def test_exit_code_says_whether_a_search_can_run(checked, capsys, states, code, verdict):
    checked([(f"{state} one", needed, finding_of(state)) for state, needed in states])
    assert command.main([]) == code
    out = capsys.readouterr().out
    assert f"\n{verdict}\n" in out
    assert out.count("a thing") == len(states)
    assert command.main(["--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert (result["can_search"], result["verdict"]) == (code == 0, verdict)
    assert [finding["state"] for finding in result["findings"]] == [state for state, _ in states]


def test_sigterm_ends_a_check_as_ctrl_c_does(checked):
    check = ("stopped", False, lambda storage: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    checked([check])
    assert command.main([]) == 130
