"""What a process may use of its machine: quotas of cgroups, affinity, visible devices, and a part by option."""

import json
import os
import subprocess
import sys
from unittest import mock

import joblib
import pytest

from tunediff import compare, search
from tunediff.core import environment, machine

FOUR = tuple(f"GPU-{name}" for name in ("aa11", "ab22", "bb33", "cc44"))


@pytest.fixture
def has(tmp_path, monkeypatch):
    """Gives the machine eight cores and these GPUs: an `nvidia-smi` lists them, or does what a line of the shell says."""

    def make(gpus=(), smi=""):
        lines = ["#!/bin/sh", *(f"echo 'GPU {i}: NVIDIA H200 (UUID: {gpu})'" for i, gpu in enumerate(gpus)), smi]
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/nvidia-smi").write_text("\n".join(lines) + "\n")
        (tmp_path / "bin/nvidia-smi").chmod(0o755)

    machine.cards.cache_clear()  # they are listed once in a process
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 8)
    yield make
    machine.cards.cache_clear()


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", {"bf16", "fp16"}),
        ("flags\t\t: sse2 avx2 avx512f avx512_bf16 amx_bf16", {"fp16"}),
        ("flags\t\t: sse2 avx2 avx512_bf16 avx512_fp16", set()),
        ("Features\t: fp asimd fphp asimdhp", {"bf16"}),
        ("Features\t: fp asimd asimdhp bf16", set()),
        ("isa\t\t: rv64imafdc", set()),
    ],
)
def test_formats_that_a_cpu_has_no_units_for(tmp_path, flags, missing):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    assert machine.emulated(tmp_path / "cpuinfo") == missing


@pytest.mark.parametrize(
    ("content", "gpus", "said"),
    [
        ({"fixed": {"precision.amp": "bf16"}}, [], ["bf16"]),
        ({"search": {"precision.amp": ["none", "bf16", "fp16"]}}, [], ["bf16", "fp16"]),
        ({"ladder": {"amp": {"precision.amp": "fp16"}}}, [], ["fp16"]),
        ({"search": {"precision.amp": ["none", "bf16"]}}, ["GPU-1"], []),
        ({"search": {"loader.batch_size": [64, 128]}}, [], []),
    ],
    ids=str,
)
def test_a_search_says_which_formats_will_be_slow(
    tmp_path, monkeypatch, capsys, probe_says, content, gpus, said, at_tmp_path
):
    trials = {} if "ladder" in content else {"trials": 2}
    file = {"workload": "digits", "budget": {"per_trial": "3s", **trials}, **content}
    file |= {"search": {"optimizer.lr": [1e-3, 2e-3]}} if "fixed" in content else {}
    (tmp_path / "mine.yaml").write_text(json.dumps(file))
    for name, found in (("emulated", {"bf16", "fp16"}), ("gpus", gpus)):
        monkeypatch.setattr(machine, name, lambda found=found: found)
    probe_says({})  # what it measures is not asked
    assert search.main(["mine.yaml", "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert [name for name in ("bf16", "fp16") if f"precision.amp={name}: this CPU has no units" in told] == said


# ------------------------------------------------------------------------------------- GPUs without files or nvidia-smi
@pytest.mark.parametrize(
    ("smi", "expected"),
    [
        (None, ["0", "1"]),
        ("exit 9", ["0", "1"]),  # a container without NVML
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa11)'", ["0"]),  # what is kept from us
    ],
)
def test_gpus_are_device_files_where_nvidia_smi_cannot_say(tmp_path, has, smi, expected):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    if smi is not None:
        has(smi=smi)
    assert machine.gpus() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2, 0", ["2", "0"]),
        ("GPU-bb33,GPU-aa", ["GPU-bb33", "GPU-aa"]),
        ("MIG-2,MIG-3", ["MIG-2", "MIG-3"]),  # parts of GPUs, one for each trial
    ],
)
def test_visible_devices(has, chosen, expected):
    has(FOUR)
    with mock.patch.dict(os.environ, {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}):
        assert machine.gpus() == expected


def test_a_machine_without_gpus_has_none_whatever_the_environment_says(has, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert machine.gpus() == []


def test_a_part_of_a_machine(has):
    has(FOUR)
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "3,1,0"}):
        machine.take(None, None)
        assert (machine.cores(), machine.gpus()) == (8, ["3", "1", "0"])
        machine.take(2, 2)
        assert (machine.cores(), machine.gpus()) == (2, ["3", "1"])
        machine.take(2, 0)
        assert machine.gpus() == []
        assert environment.describe()["usable_cores"] == 2, "results on 2 of 8 cores are told from those on 8"
        machine.take(1, 0)
        assert environment.describe()["usable_cores"] == 1, "a notebook runs one search after the other"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
        ({"OMP_NUM_THREADS": "3"}, None),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 4),  # torchrun's choice
        ({"MKL_NUM_THREADS": "3"}, None),
        ({"OMP_NUM_THREADS": "8", machine.PART: "8", "LOCAL_WORLD_SIZE": "2"}, 4),  # of --cpus
    ],
)
@pytest.mark.usefixtures("has")
def test_processes_share_the_cores_unless_the_user_has_chosen(environment, expected):
    with mock.patch.dict(os.environ, environment, clear=True):
        assert machine.threads() == expected


@pytest.mark.training  # in a process of its own
def test_every_process_started_from_here_knows_the_part():
    with mock.patch.dict(os.environ):
        machine.take(1, 0)
        code = "import torch; from tunediff.core import machine; print(machine.cores(), machine.gpus(), torch.get_num_threads())"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "1 [] 1\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpus", "65"], "--cpus: 65 is not allowed; allowed: 1 to 8, the CPU cores that are there"),
        (["--cpus", "0"], "--cpus: 0 is not allowed; allowed: 1 to 8"),
        (["--gpus", "5"], "--gpus: 5 is not allowed; allowed: 0 to 4, the GPUs that are there"),
        (["--gpus", "-1"], "--gpus: -1 is not allowed; allowed: 0 to 4"),
        (
            ["--gpus", "2", "--address", "auto"],
            "--gpus: takes a part of this machine; of the cluster at auto Ray gives",
        ),
    ],
)
def test_more_than_there_is(has, capsys, words, message):
    has(FOUR)
    for command in (search.main, compare.main):
        assert command(["digits", *words]) == 2
        assert message in capsys.readouterr().err
