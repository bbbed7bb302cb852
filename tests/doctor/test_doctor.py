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
from tunediff.core import environment, files, machine
from tunediff.distributed import World
from tunediff.doctor import __main__ as command
from tunediff.doctor import finding, probes, software
from tunediff.doctor import machine as site_machine
from tunediff.doctor.finding import Answer, Finding, Site
from tunediff.evaluation import weights
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
    monkeypatch.setattr(site_machine.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(hardware, "disturbance", lambda *of: {"other_load_share": 0.0})
    monkeypatch.setattr(measure, "memory_limit_mib", lambda device: 2.0**14)
    monkeypatch.setattr(environment, "unwritable", lambda folder: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 50 * GIB, 50 * GIB))
    monkeypatch.setattr(weights, "cached", lambda: "here.pth")
    monkeypatch.setattr(hardware, "EnergyMeter", lambda device: types.SimpleNamespace(joules=lambda: 1.0))
    monkeypatch.setattr(software, "gains", lambda: {"bf16": 2.0, "tf32": 4.0})
    monkeypatch.setattr(software, "ask", lambda probe, **how: dict(WELL[probe]))
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    software._answer.cache_clear()
    yield Site(tmp_path, "cpu")
    software._answer.cache_clear()


WELL = {
    "group": {"right": True, "backend": "gloo", "mean_s": 0.01},
    "compiled": {"right": True, "graphs": 2, "compile_s": 20.0},
    "graphs": {"right": True},
    "cluster": {"right": True, "start_s": 4.0, "task_s": 5.0, "url": "127.0.0.1:8265", "status": 200, "message": ""},
}  # fmt: skip


def said(probe, **changes):
    """What a process that was asked says when something is broken."""

    def broken(monkeypatch):
        monkeypatch.setattr(software, "ask", lambda name, **how: WELL[name] | changes)

    return broken


def raises(error):
    def broken(monkeypatch):
        def ask(*words, **how):
            raise error

        monkeypatch.setattr(software, "ask", ask)

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
    move = software.loader.Batches.move
    monkeypatch.setattr(software.loader.Batches, "move", lambda self, fetched: move(self, fetched) * 0)


def test_load_of_others_is_a_share_of_all_cores_as_in_a_training(tmp_path, monkeypatch):
    usages = iter([hardware.Usage(0.0, 0.0, 0.0, 0.0), hardware.Usage(1.0, 2.0, 0.0, 0.0)])
    monkeypatch.setattr(hardware.Usage, "now", lambda: next(usages))
    monkeypatch.setattr(site_machine.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(site_machine.psutil, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    found = site_machine.cpu(Site(tmp_path, "cpu"))
    assert (found.state, found.numbers["other_load_share"]) == ("ok", 2 / 64)


BROKEN = [
    (site_machine.cpu, patched(machine, "cores", lambda: 1), "weak", "share one core"),
    (site_machine.cpu, patched(hardware, "disturbance", lambda *of: {"other_load_share": 0.5}), "weak", "others use 50%"),
    (site_machine.memory, patched(measure, "memory_limit_mib", lambda device: 1024.0), "weak", "small batches"),
    (site_machine.gpus, patched(machine, "gpus", lambda: ["0"]), "missing", "1 GPU by the driver, 0 by torch"),
    (site_machine.gpus, torch_sees(2), "missing", "0 GPUs by the driver, 2 by torch"),
    (site_machine.gpus, patched(site_machine.machine, "signs", lambda: ["/dev/null"]), "missing", "a search would run on the CPU"),
    (site_machine.shared_memory, patched(site_machine, "SHM", site_machine.Path("/nowhere")), "missing", "no /nowhere"),
    (site_machine.shared_memory, patched(environment, "unwritable", lambda folder: "Permission denied"), "missing", "Permission"),
    (site_machine.shared_memory, disk(1 / 16, 1 / 16), "weak", "--shm-size"),
    (site_machine.disk, patched(environment, "unwritable", lambda folder: "Read-only file system"), "missing", "Read-only"),
    (site_machine.disk, disk(1000, 20), "weak", "over 95% full"),
    (site_machine.disk, disk(10, 4), "weak", "--dry-run"),
    (site_machine.home, patched(files, "home", lambda: None), "weak", "TUNEDIFF_CACHE"),
    (site_machine.energy, patched(hardware, "EnergyMeter", lambda device: types.SimpleNamespace(joules=lambda: None)), "missing", "NVML"),
    (software.versions, patched(environment, "describe", lambda: {"python": "3", "versions": {"ray": "not installed"}}), "missing", "not installed: ray"),
    (software.bf16, patched(software, "gains", dict), "missing", "precision.amp"),
    (software.bf16, patched(software, "gains", lambda: {"bf16": 0.9}), "weak", "does not pay"),
    (software.tf32, patched(software, "gains", dict), "missing", "precision.matmul"),
    (software.group, said("group", right=False), "wrong", "parallel.workers = 1 only"),
    (software.group, raises(TimeoutError("no answer within 120 s")), "missing", "no answer within 120 s"),
    (software.loading, loses_rows, "wrong", "loader.workers = 0"),
    (software.loading, patched(software.loader, "build", lambda *of: 1 / 0), "missing", "ZeroDivisionError"),
    (software.compiling, raises(RuntimeError("no C++ compiler")), "missing", "compile.mode = none only"),
    (software.compiling, said("compiled", right=False), "wrong", "not what it computes eagerly"),
    (software.compiling, said("compiled", graphs=0), "wrong", "no graph was compiled"),
    (software.cuda_graphs, patched(machine, "gpus", list), "missing", "no GPU"),
    (software.ray, said("cluster", right=False), "wrong", "other cores or GPUs"),
    (software.ray, raises(RuntimeError("raylet died")), "missing", "raylet died"),
    (software.dashboard, said("cluster", status=0, message="refused"), "missing", "refused"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "broken", "state", "words"), BROKEN)
def test_a_check_says_what_is_broken_and_what_that_means(site, monkeypatch, check, broken, state, words):
    well = check(site)
    assert well.state == "ok" or check in (site_machine.gpus, software.cuda_graphs), well
    broken(monkeypatch)
    software._answer.cache_clear()
    found = check(site)
    assert (found.state, found.stops) == (state, found.needed and state in ("missing", "wrong")), found
    assert words in f"{found.found} {found.means}"


def test_the_gpus_that_are_there_and_those_that_torch_sees_are_one(site, monkeypatch):
    none = site_machine.gpus(site)
    assert (none.state, none.stops) == ("weak", False)
    torch_sees(2)(monkeypatch)
    monkeypatch.setattr(machine, "gpus", lambda: ["0", "1"])
    both = site_machine.gpus(site)
    assert both.state == "ok"
    assert "NVIDIA H200, 140 GiB, compute capability 9.0" in both.found
    torch_sees(0)(monkeypatch)
    monkeypatch.setattr(machine, "gpus", lambda: [])
    monkeypatch.setattr(site_machine.machine, "signs", lambda: ["/dev/null"])
    monkeypatch.setenv(machine.VISIBLE, "")  # hidden on purpose
    assert site_machine.gpus(site).state == "weak"


ROW = ["570.86", "700.00", "700.00", "0", "512", "16", "16"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({1: "400.00"}, "limited to 400 of 700 W"),
        ({3: "80"}, "somebody else is on GPU 0"),
        ({4: "30000"}, "somebody else is on GPU 0"),
        ({5: "4"}, "4 of 16 PCIe lanes"),
    ],
)
def test_a_gpu_that_is_held_back_or_shared_is_weak(changes, words):
    assert site_machine.judged([ROW]).state == "ok"
    assert site_machine.judged([[word if i in (0, 4) else "[N/A]" for i, word in enumerate(ROW)]]).state == "ok"
    found = site_machine.judged([[changes.get(place, word) for place, word in enumerate(ROW)]])
    assert found.state == "weak"
    assert words in found.means


@pytest.mark.parametrize(("gpus", "ours"), [(["1", "3"], ["-i", "1,3"]), (["GPU-5e"], ["-i", "GPU-5e"])])
def test_doctor_asks_only_about_gpus_that_are_ours(site, monkeypatch, gpus, ours):
    commands = []

    def run(command, **how):
        commands.append(command)
        return types.SimpleNamespace(stdout=", ".join(ROW))

    monkeypatch.setattr(site_machine.machine, "gpus", lambda: gpus)
    monkeypatch.setattr(site_machine.subprocess, "run", run)
    assert site_machine.condition(Site(site.storage, "cuda")).state == "ok"
    assert commands[0][:-2] == ["nvidia-smi", *ours]


def test_checks_of_a_gpu_fail_where_the_gpu_does(site, monkeypatch):
    gpu = Site(site.storage, "cuda")
    assert software.cuda_graphs(gpu).state == "ok"
    said("graphs", right=False)(monkeypatch)
    assert software.cuda_graphs(gpu).state == "wrong"
    raises(RuntimeError("CUDA error"))(monkeypatch)
    assert software.cuda_graphs(gpu).state == "missing"
    monkeypatch.setenv("PATH", "")
    assert site_machine.condition(gpu).state == "missing"
    assert site_machine.condition(site).state == "skipped"


def test_weights_are_never_fetched_and_their_source_is_named(site, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    asked = []

    def urlopen(request, timeout):
        asked.append(request.get_method())
        return contextlib.nullcontext()

    monkeypatch.setattr(weights.urllib.request, "urlopen", urlopen)
    found = site_machine.inception(site)
    assert (found.state, asked) == ("weak", ["HEAD"])
    assert weights.URL in found.found
    monkeypatch.setattr(weights, "URL", "http://127.0.0.1:9/none.pth")
    monkeypatch.setattr(
        weights.urllib.request, "urlopen", lambda *of, **how: (_ for _ in ()).throw(OSError("no route"))
    )
    assert "no route" in site_machine.inception(site).found
    assert site_machine.inception(site).state == "missing"
    path = tmp_path / "hub" / "checkpoints" / weights.FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"torn")
    assert site_machine.inception(site).state == "missing"
    monkeypatch.setattr(weights, "DIGEST_PREFIX", "")
    assert site_machine.inception(site).state == "ok"


# -------------------------------------------------------------------------------------------- in processes of their own
def test_two_processes_agree_and_one_that_is_wrong_is_noticed(monkeypatch):
    """Really two processes; then a world whose mean is wrong."""
    found = software.ask("group", ranks=2, within_s=1200)
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
        software.ask("0", within_s=1200)
    (tmp_path / "one.py").write_text("import sys, time; time.sleep(int(sys.argv[1]))")
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        software.ask("60", within_s=1)


@pytest.mark.nightly
@pytest.mark.cluster
def test_here_all_that_a_search_needs_is_there(tmp_path):
    line = [sys.executable, "-m", "tunediff.doctor", "--json", "--storage", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    found = json.loads(done.stdout)
    states = {one["name"]: one["state"] for one in found["findings"]}
    assert (done.returncode, found["can_search"]) == (0, True), found
    assert {states[name] for name in ("process group", "loader processes", "Ray", "Ray's dashboard")} == {"ok"}


# --------------------------------------------------------------------------------------------------------- the command
def looks(*states):
    """Checks that find this."""
    return tuple(
        finding.check(f"{state} one", needed=needed)(lambda site, state=state: Answer(state, "a thing", "it means"))
        for state, needed in states
    )


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setattr(distributed, "alone", lambda: CPU)
    monkeypatch.setattr(software, "CHECKS", ())

    def use(*states):
        monkeypatch.setattr(site_machine, "CHECKS", looks(*states))

    return use


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
def test_the_exit_code_says_whether_a_search_can_run(checks, capsys, states, code, verdict):
    checks(*states)
    assert command.main([]) == code
    out = capsys.readouterr().out
    assert f"\n{verdict}\n" in out
    assert out.count("a thing") == len(states)
    assert command.main(["--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert (told["can_search"], told["verdict"]) == (code == 0, verdict)
    assert [one["state"] for one in told["findings"]] == [state for state, _ in states]


def test_sigterm_ends_a_look_as_ctrl_c_does(checks, monkeypatch):
    checks(("ok", True))
    check = finding.check("asked to stop")(lambda site: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
    monkeypatch.setattr(software, "CHECKS", (check,))
    assert command.main([]) == 130


def test_the_doctor_refuses_a_workload(capsys):
    assert command.main(["digits"]) == 2
    assert "unrecognized arguments: digits" in capsys.readouterr().err


def test_a_line_keeps_addresses_whole():
    found = "x " * 50 + "https://a-b.example/" + "c" * 90
    one = Finding("ok", found, "so", name="a name that is longer than its column", needed=False, seconds=0.0)
    text = finding.lines(one)
    assert any("https://a-b.example/" + "c" * 90 in line for line in text)
    assert all(len(line) <= finding.WIDTH for line in "\n".join(text).splitlines() if "https" not in line)
