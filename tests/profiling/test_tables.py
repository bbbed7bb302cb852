"""A profile in words, tables and figures."""

import copy
import csv
import json
import os
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.profiling.conftest import PHASES
from tunediff import config as cfg
from tunediff.core import environment
from tunediff.profiling import files, tables
from tunediff.profiling.result import Advice

PARTS = {
    "data_wait": 0.022, "host_to_device": 0.00001, "sampler": 0.001, "forward": 0.025, "backward": 0.045,
    "optimizer": 0.004, "ema": 0.001, "other": 0.00199,
}  # fmt: skip
STEP = {
    "samples_per_s": 1280.0, "samples_per_s_sd": 12.3, "step_s": 0.1, "parts_s": PARTS, "batch_size": 128, "steps": 21,
    "first_step_s": 2.5, "compile_s": 0.0, "peak_memory_mib": 1200.0, "peak_host_memory_mib": 1200.0, "disturbed": False,
    "flops_per_sample": 2.5e7, "peak_flops_per_s": 1e11, "peak_share": 0.32,
}  # fmt: skip
FOUND = {
    "name": "small", "command": "python -m tunediff.profile --config small.yaml", "workers": 1, "time": 0.0, "wall_s": 60.0,
    "unit": "images", "names": {"sampler": "noise and sampler", "ema": "EMA"},
    "config": cfg.flat(tiny(loader__workers=2)), "fingerprint": "made up", "environment": environment.describe() | {
        "cpu": "EPYC", "cpu_cores": 2, "memory_gib": 8.8, "python": "3.11.7",
        "versions": environment.describe()["versions"] | {"torch": "2.15.0"},
    },
    "samples": {"name": "digits", "count": 64, "mib": 0.1}, "format_gains": {},
    "device": {
        "type": "cpu", "name": "EPYC", "threads": 2, "cores": 2, "gpus": 0, "memory_mib": 9000.0,
        "memory_limit_mib": 5000.0,
    },
    "first": {"first_step_s": 2.5, "compile_s": 0.0, "step_s": 0.1},
    "step": STEP,
    "loader_alone": {"samples_per_s": 3968.0, "samples": 1000, "seconds": 0.25},
    "operations": {
        "kind": "operations", "convolution_share": 0.6, "self_s_per_step": 0.09,
        "longest": [
            {
                "operation": f"aten::op{i}|x", "calls_per_step": 7.5, "self_s_per_step": 0.05 / 2**i,
                "total_s_per_step": 0.05, "share": 0.5 / 2**i,
            }
            for i in range(10)
        ],
    },
    "memory": {
        "static": {"parameters": 4.0, "optimizer": 8.0, "ema": 4.0, "samples": 0.0},
        "peak": {
            "phase": "backward", "total_mib": 500.0, "static_mib": 16.0, "batch_mib": 2.0, "forward_mib": 450.0,
            "backward_mib": 32.0, "rest_mib": 0.0,
        },
    },
    "trace": "trace.json.gz", "traced_steps": 4,
    "advice": [
        Advice({"loader.workers": 4}, "waiting"), Advice({"loader.batch_size": 256}, "faster"),
        Advice({"model.checkpoint_levels": [0]}, "room"),
    ],
}  # fmt: skip
assert set(PARTS) == {*PHASES, "other"}


def profile(**values):
    return copy.deepcopy(FOUND) | values


def on_gpu():
    """The same on a GPU, compiled, as one of four workers."""
    made = profile(
        device_busy_share=0.71, workers=4,
        first={"first_step_s": 62.0, "compile_s": 62.0, "step_s": 0.1},
    )  # fmt: skip
    made["device"] |= {"type": "cuda", "name": "H200"}
    made["step"] |= {"peak_reserved_mib": 1500.0, "peak_host_memory_mib": 3000.0, "disturbed": True}
    made["operations"]["kind"] = "kernels"
    made["memory"]["peak"]["static_mib"] = 96.0
    return made


@pytest.mark.parametrize(("name", "made"), [("cpu", FOUND), ("gpu", on_gpu())])
def test_report_is_what_the_file_holds(name, made):
    """GOLDEN_UPDATE=1 writes the files again."""
    path, report = Path(__file__).with_name(f"report_{name}.md"), files.markdown(made)
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(report)
    assert report == path.read_text()
    for section in tables.sections(made):  # the terminal has the same words and numbers
        for line in (*section.sentences, *map(" ".join, section.rows)):
            assert " ".join(line.split()) in " ".join(section.text().split()), line


def test_numbers():
    assert [tables.percent(share) for share in (0, 0.0001, 0.004, 0.0949, 0.096, 0.5)] == [
        "0.0 %", "< 0.1 %", "0.4 %", "9.5 %", "10 %", "50 %",
    ]  # fmt: skip
    assert [tables.milliseconds(value) for value in (0.00012, 0.0123, 3.982)] == ["0.12 ms", "12.3 ms", "3.98 s"]
    assert [tables.mebibytes(value) for value in (0.84, 1234.4)] == ["0.8 MiB", "1,234 MiB"]
    assert [tables.rate(value) for value in (3.14159, 61000.4)] == ["3.14", "61,000"]


@pytest.mark.parametrize(
    ("values", "config", "end"),
    [
        ({}, {}, "alone, the loader gives 3,968 images/s; the training takes 1,280"),
        ({"loader_alone": None}, {}, "the workload has its own loader"),
        ({"loader_alone": None}, {"loader.resident": True}, "the loader plays no part"),
    ],
)  # fmt: skip
def test_feeding(values, config, end):
    made = profile(**values)
    made["config"] |= config
    assert tables.feeding(made).endswith(end)


def test_files(tmp_path):
    written = files.write_all(profile(), tmp_path)
    assert set(written.values()) == set(tmp_path.iterdir())
    numbers = json.loads(written["numbers"].read_text())
    assert numbers["memory"]["peak"]["phase"] == "backward"
    with open(written["operations"]) as file:
        operations = list(csv.DictReader(file))
    assert (len(operations), float(operations[0]["self_s_per_step"])) == (10, 0.05)


def test_report_of_a_short_profile_with_parts_that_only_its_workload_has(tmp_path):
    made = profile(advice=[])
    made["memory"]["peak"] = None
    made["operations"]["longest"] = []
    made["step"]["parts_s"]["augment"] = 0.001
    report = files.write_all(made, tmp_path)["report"].read_text()
    assert "## what to try next\n\nnothing stands out" in report
    assert "| augment | 1 ms | 1.0 % |" in report
