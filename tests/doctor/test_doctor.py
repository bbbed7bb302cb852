"""The doctor: every check says so when what it looks at is broken, and the command ends as its findings say."""

import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest
import torch

from tests.helpers import CPU
from tunediff import distributed
from tunediff.core import environment, machine
from tunediff.distributed import World
from tunediff.doctor import __main__ as command
from tunediff.doctor import checks, finding, probes
from tunediff.doctor.finding import Answer, Site
from tunediff.profiling import measure
from tunediff.training import hardware

Usage = collections.namedtuple("Usage", "total used free")
GIB = 2**30


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A machine where all is well: eight cores, no GPU, whatever is here."""
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "gpus", lambda: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(hardware, "disturbance", lambda *of: {"other_load_share": 0.0})
    monkeypatch.setattr(environment, "unwritable", lambda folder: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 50 * GIB, 50 * GIB))
    monkeypatch.setattr(measure, "format_gains", lambda world: {"bf16": 2.0, "tf32": 4.0})
    monkeypatch.setattr(checks, "ask", lambda probe, **how: dict(WELL[probe]))
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    return Site(tmp_path, "cpu")


WELL = {
    "group": {"right": True, "backend": "gloo", "mean_s": 0.01},
    "compiled": {"right": True, "graphs": 2, "compile_s": 20.0},
    "cluster": {"right": True, "start_s": 4.0, "task_s": 5.0, "url": "127.0.0.1:8265", "status": 200, "message": ""},
}  # fmt: skip


def said(probe, **changes):
    """What a process that was asked says when something is broken."""

    def broken(monkeypatch):
        monkeypatch.setattr(checks, "ask", lambda name, **how: WELL[name] | changes)

    return broken


def raises(error):
    def broken(monkeypatch):
        def ask(*words, **how):
            raise error

        monkeypatch.setattr(checks, "ask", ask)

    return broken


def patched(where, name, value):
    return lambda monkeypatch: monkeypatch.setattr(where, name, value)


def disk(total, free):
    return patched(shutil, "disk_usage", lambda path: Usage(total * GIB, (total - free) * GIB, free * GIB))


def torch_sees(count):
    def broken(monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties",
            lambda index: types.SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB, major=9, minor=0),
        )  # fmt: skip

    return broken


def loses_rows(monkeypatch):
    move = checks.loader.Batches.move
    monkeypatch.setattr(checks.loader.Batches, "move", lambda self, fetched: move(self, fetched) * 0)


BROKEN = [
    (checks.cpu, patched(machine, "cores", lambda: 1), "weak", "share one core"),
    (checks.cpu, patched(hardware, "disturbance", lambda *of: {"other_load_share": 0.5}), "weak", "others use 50%"),
    (checks.gpus, patched(machine, "gpus", lambda: ["0"]), "missing", "1 GPU by the driver, 0 by torch"),
    (checks.gpus, torch_sees(2), "missing", "0 GPUs by the driver, 2 by torch"),
    (checks.gpus, patched(machine, "signs", lambda: ["/dev/null"]), "missing", "a search would run on the CPU"),
    (checks.disk, patched(environment, "unwritable", lambda folder: "Read-only file system"), "missing", "Read-only"),
    (checks.disk, disk(1000, 20), "weak", "over 95% full"),
    (checks.disk, disk(10, 4), "weak", "--dry-run"),
    (checks.versions, patched(environment, "describe", lambda: {"versions": {"ray": "not installed"}}), "missing", "not installed: ray"),
    (checks.formats, patched(measure, "format_gains", lambda world: {"bf16": 0.9}), "weak", "does not pay"),
    (checks.group, said("group", right=False), "wrong", "parallel.workers = 1 only"),
    (checks.group, raises(TimeoutError("no answer within 120 s")), "missing", "no answer within 120 s"),
    (checks.loading, loses_rows, "wrong", "loader.workers = 0"),
    (checks.loading, patched(checks.loader, "build", lambda *of: 1 / 0), "missing", "ZeroDivisionError"),
    (checks.compiling, raises(RuntimeError("no C++ compiler")), "missing", "compile.mode = none only"),
    (checks.compiling, said("compiled", right=False), "wrong", "not what it computes eagerly"),
    (checks.compiling, said("compiled", graphs=0), "wrong", "no graph was compiled"),
    (checks.ray, said("cluster", right=False), "wrong", "other cores or GPUs"),
    (checks.ray, raises(RuntimeError("raylet died")), "missing", "raylet died"),
    (checks.ray, said("cluster", status=0, message="refused"), "weak", "refused"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "broken", "state", "words"), BROKEN)
def test_a_check_says_what_is_broken_and_what_that_means(site, monkeypatch, check, broken, state, words):
    well = check(site)
    assert well.state == "ok" or check is checks.gpus, well
    broken(monkeypatch)
    found = check(site)
    assert (found.state, found.stops) == (state, found.needed and state in ("missing", "wrong")), found
    assert words in f"{found.found} {found.means}"


def test_the_gpus_that_are_there_and_those_that_torch_sees_are_one(site, monkeypatch):
    none = checks.gpus(site)
    assert (none.state, none.stops) == ("weak", False)
    torch_sees(2)(monkeypatch)
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1"])
    both = checks.gpus(site)
    assert both.state == "ok"
    assert "NVIDIA H200, NVIDIA H200; torch" in both.found
    torch_sees(0)(monkeypatch)
    monkeypatch.setattr(machine, "gpus", lambda: [])
    monkeypatch.setattr(machine, "signs", lambda: ["/dev/null"])
    monkeypatch.setenv(machine.VISIBLE, "")  # hidden on purpose
    assert checks.gpus(site).state == "weak"


# -------------------------------------------------------------------------------------------- in processes of their own
def test_two_processes_agree_and_one_that_is_wrong_is_noticed(monkeypatch):
    """Really two processes; then a world whose mean is wrong."""
    found = checks.ask("group", ranks=2, within_s=1200)
    assert found["right"]
    assert found["backend"] == "gloo"
    assert found["mean_s"] > 0

    class Wrong(World):
        def mean(self, tensor):
            return tensor + 1

    monkeypatch.setattr(probes, "from_environment", lambda: contextlib.nullcontext(Wrong(0, 1, CPU.device)))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "none")
    assert probes.group()["right"] is False


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.1, False)])
def test_a_compiled_network_that_computes_something_else_is_noticed(monkeypatch, factor, right):
    monkeypatch.setattr(probes, "alone", lambda: CPU)
    monkeypatch.setattr(probes.compilation.Compilation, "apply", lambda self, model, *how: model.register_forward_hook(
        lambda module, inputs, output: output * factor) and model)  # fmt: skip
    found = probes.compiled()
    assert (found["right"], found["graphs"]) == (right, 0)


def test_who_dies_or_says_nothing_is_told(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text(
        "import sys, time; print('broken pipe'); time.sleep(int(sys.argv[1])); sys.exit(3)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda line, **how: popen([sys.executable, str(tmp_path / "one.py"), *line[3:]], **how)
    )
    with pytest.raises(RuntimeError, match="broken pipe"):
        checks.ask("0", within_s=1200)
    (tmp_path / "one.py").write_text("import sys, time; time.sleep(int(sys.argv[1]))")
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        checks.ask("60", within_s=1)


@pytest.mark.nightly
@pytest.mark.cluster
def test_here_all_that_a_search_needs_is_there(tmp_path):
    line = [sys.executable, "-m", "tunediff.doctor", "--json", "--storage", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    found = json.loads(done.stdout)
    states = {one["name"]: one["state"] for one in found["findings"]}
    assert (done.returncode, found["can_search"]) == (0, True), found
    assert {states[name] for name in ("process group", "loader processes", "Ray")} == {"ok"}


# --------------------------------------------------------------------------------------------------------- the command
def looks(*states):
    """Checks that find this."""
    return tuple(
        finding.check(f"{state} one", needed=needed)(lambda site, state=state: Answer(state, "a thing", "it means"))
        for state, needed in states
    )


@pytest.fixture
def found(monkeypatch):
    """The command's checks find this."""
    monkeypatch.setattr(distributed, "alone", lambda: CPU)
    return lambda *states: monkeypatch.setattr(checks, "CHECKS", looks(*states))


@pytest.mark.parametrize(
    ("states", "code", "verdict"),
    [
        ([("ok", True), ("skipped", True)], 0, "a search can run here"),
        ([("weak", True), ("missing", False)], 0, "a search can run here; weak: weak one; missing: missing one"),
        ([("wrong", False), ("missing", False)], 0, "a search can run here; wrong: wrong one; missing: missing one"),
        ([("ok", True), ("missing", True)], 1, "a search should not be started here: missing one"),
        ([("wrong", True)], 1, "a search should not be started here: wrong one"),
    ],
)
def test_the_exit_code_says_whether_a_search_can_run(found, capsys, states, code, verdict):
    found(*states)
    assert command.main([]) == code
    out = capsys.readouterr().out
    assert f"\n{verdict}\n" in out
    assert out.count("a thing") == len(states)
    assert command.main(["--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["can_search"], told["verdict"]) == (code == 0, verdict)
    assert [one["state"] for one in told["findings"]] == [state for state, _ in states]


def test_sigterm_ends_a_look_as_ctrl_c_does(monkeypatch):
    monkeypatch.setattr(distributed, "alone", lambda: CPU)
    check = finding.check("asked to stop")(lambda site: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    monkeypatch.setattr(checks, "CHECKS", (check,))
    assert command.main([]) == 130


def test_the_doctor_refuses_a_workload(capsys):
    assert command.main(["digits"]) == 2
    assert "unrecognized arguments: digits" in capsys.readouterr().err
