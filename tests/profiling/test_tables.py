"""A profile in words, tables and figures."""

import copy
import csv
import json

import pytest
from PIL import Image

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
    "config": cfg.flat(tiny(loader__workers=2)), "fingerprint": "made up", "environment": environment.describe(),
    "samples": {"name": "digits", "count": 64, "mib": 0.1}, "format_gains": {},
    "device": {
        "type": "cpu", "name": "EPYC", "threads": 2, "cores": 2, "gpus": 0, "memory_mib": 9000.0,
        "memory_limit_mib": 5000.0,
    },
    "first": {"first_step_s": 2.5, "compile_s": 0.0, "step_s": 0.1},
    "step": STEP,
    "loader_alone": {"samples_per_s": 3968.0, "samples": 1000, "seconds": 0.25},
    "model_alone": dict(STEP), "feed_ratio": 3.1,
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
        "timeline": {
            "seconds": [0.0, 0.1, 0.2], "static_mib": [16.0] * 3, "batch_mib": [2.0] * 3,
            "forward_mib": [0.0, 450.0, 0.0], "backward_mib": [0.0, 32.0, 0.0], "rest_mib": [0.0, 0.0, 1.0],
        },
        "phases": [(0.0, 0.1, "forward"), (0.1, 0.2, "backward")],
    },
    "trace": "trace.json.gz", "snapshot": None, "traced_steps": 4,
    "advice": [
        Advice({"loader.workers": 4}, "waiting", 1.282), Advice({"loader.batch_size": 256}, "faster", 1.1),
        Advice({"model.checkpoint_levels": [0]}, "room"),
    ],
}  # fmt: skip
assert set(PARTS) == {*PHASES, "other"}


def profile(**values):
    return copy.deepcopy(FOUND) | values


def text(found):
    return "\n".join(section.text() for section in tables.sections(found))


def table(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def squeezed(words):
    """Columns are as wide as their widest cell: that is not what is tested here."""
    return "\n".join(" ".join(line.split()) for line in words.splitlines())


def test_numbers():
    assert [tables.percent(share) for share in (0, 0.0001, 0.004, 0.0949, 0.096, 0.5)] == [
        "0.0 %", "< 0.1 %", "0.4 %", "9.5 %", "10 %", "50 %",
    ]  # fmt: skip
    assert [tables.milliseconds(value) for value in (0.00012, 0.0123, 3.982)] == ["0.12 ms", "12.3 ms", "3.98 s"]
    assert [tables.mebibytes(value) for value in (0.84, 1234.4)] == ["0.8 MiB", "1,234 MiB"]
    assert [tables.rate(value) for value in (3.14159, 61000.4)] == ["3.14", "61,000"]


def test_the_report_on_a_cpu():
    said = text(profile())
    for line in (
        "  EPYC, 2 threads; batch 128, 21 steps measured",
        "  1,280 ± 12.3 images/s, 100 ms per step; the first step of the process took 2.5 s",
        "  0.025 GFLOP per image: 32 % of 0.1 TFLOP/s, the fastest matrix product measured here",
        "  waiting for images       22 ms     22 %",
        "  images to the device   0.01 ms  < 0.1 %",
        "the ten longest operations:",
        "  peak 1,200 MiB (resident set of the process, libraries and images included)",
        "  tensors at their peak, during backward: 500 MiB",
        "  activations (from forward)   450 MiB",
        "  1. loader.workers=4: waiting; up to about 1.28×",
        "  2. loader.batch_size=256: faster; up to about 1.10×",
        "  3. model.checkpoint_levels=[0]: room",
    ):
        assert squeezed(line) in squeezed(said), line
    assert "what stays" not in said, "its parts have lines of their own"
    assert "others used the machine" not in said
    parts = [line for line in said.splitlines() if line.startswith(("  backward  ", "  forward  ", "  waiting for"))]
    assert [line.split()[0] for line in parts] == ["backward", "forward", "waiting"], "the longest first"


def test_the_report_on_a_gpu():
    found = profile(snapshot="memory_snapshot.pickle", device_busy_share=0.71)
    found["device"] |= {"type": "cuda", "name": "H200"}
    found["step"] |= {"peak_reserved_mib": 1500.0, "peak_host_memory_mib": 3000.0, "disturbed": True}
    found["operations"]["kind"] = "kernels"
    found["memory"]["peak"]["static_mib"] = 96.0
    said = text(found)
    for words in (
        "the GPU computes 71 % of the time", "peak 1,200 MiB (allocated on the GPU)",
        "reserved 1,500 MiB, host 3,000 MiB", "the ten longest kernels:", "GPU self time",
        "measure again when it is quiet",
    ):  # fmt: skip
        assert words in said, words
    assert "other, from before the step 80 MiB" in squeezed(said), "what the allocator holds and nobody here can name"


def test_feeding():
    assert tables.feeding(profile()) == (
        "alone, the loader gives 3,968 images/s and the model takes 1,280 images/s: "
        "the loader can feed 3.1× what the model takes"
    )
    in_turn = profile(feed_ratio=3.0)
    in_turn["config"]["loader.workers"] = 0
    assert tables.feeding(in_turn).endswith("; with loader.workers=0 they take turns, the loader 25 % of the time")
    assert "feed 12,345× what" in tables.feeding(profile(feed_ratio=12345.0))
    resident = profile(loader_alone=None, model_alone=None, feed_ratio=None)
    assert tables.feeding(resident) == "not measured: the workload has its own loader"
    resident["config"]["loader.resident"] = True
    assert "plays no part" in tables.feeding(resident)
    items = profile(model_alone=None, feed_ratio=None, samples={"name": "", "count": 64, "mib": 0.0})
    assert tables.feeding(items).endswith("; the model is not measured alone: the data set is not made of tensors")
    assert tables.feeding(profile(model_alone=None, feed_ratio=None)).endswith("the device cannot hold all images")


@pytest.mark.parametrize(
    ("tried", "end"),
    [
        ({"gain": 1.2, "within_noise": False}, "waiting; tried: 1.20×"),
        ({"gain": 1.02, "within_noise": True}, "waiting; tried: 1.02×, within the noise"),
        ({"failed": "RuntimeError: no"}, "waiting; tried: RuntimeError: no"),
    ],
)
def test_what_was_tried(tried, end):
    found = profile()
    found["advice"][0].tried = tried
    assert f"1. loader.workers=4: {end}\n" in text(found)


def test_other_reports():
    assert text(profile(advice=[])).endswith("what to try next:\n  nothing stands out")
    assert "one of 4 training workers" in text(profile(workers=4))
    assert "compiling took 1m02s" in text(profile(first={"first_step_s": 62.0, "compile_s": 62.0}))


def test_files(tmp_path, rendered):
    written = files.write_all(profile(), tmp_path)
    assert set(written.values()) == set(tmp_path.iterdir())
    for path in written.values():
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert min(image.size) > 300
    numbers = json.loads(written["numbers"].read_text())
    assert numbers["feed_ratio"] == 3.1
    assert numbers["memory"]["peak"]["phase"] == "backward"
    assert "timeline" not in numbers["memory"]
    rows = table(written["memory"])
    assert [float(row["forward_mib"]) for row in rows] == [0.0, 450.0, 0.0]
    operations = table(written["operations"])
    assert (len(operations), float(operations[0]["self_s_per_step"])) == (10, 0.05)

    report = written["report"].read_text()
    for section in tables.sections(profile()):
        assert f"\n## {section.title}\n" in report
    for figure in ("step.png", "memory.png"):
        assert report.count(f"]({figure})") == 1
    assert "| aten::op0\\|x | 7.5 | 50 ms | 50 % |" in report
    assert "memory_viz" not in report
    assert "memory_viz" in files.markdown(profile(snapshot="memory_snapshot.pickle"), [])


def test_files_of_a_short_profile(tmp_path):
    found = profile()
    found["memory"] |= {"peak": None, "timeline": None, "phases": []}
    found["operations"]["longest"] = []
    written = files.write_all(found, tmp_path)
    assert set(written) == {"report", "numbers", "operations", "step_figure"}
    assert "memory.png" not in written["report"].read_text()
    assert set(written.values()) == set(tmp_path.iterdir())


def test_parts_that_a_workload_has_named_itself(tmp_path):
    found = profile()
    del found["step"]["parts_s"]["sampler"]
    found["step"]["parts_s"]["augment"] = 0.001
    found["memory"]["phases"].append((0.2, 0.3, "augment"))
    found["memory"]["peak"]["phase"] = "augment"
    assert "augment 1 ms 1.0 %" in squeezed(text(found))
    assert "tensors at their peak, during augment: 500 MiB" in text(found)
    assert "memory_figure" in files.write_all(found, tmp_path)
