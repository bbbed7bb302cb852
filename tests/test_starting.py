"""Commands that are interrupted while they start, or that nobody listens to: a line and an exit code, never pages."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEARING = ["env", "--default-signal=INT"]
"""Ctrl-C is heard, also where the tests run in the background of a shell, which has it ignored."""
COMMANDS = sorted(set(re.findall(r"python -m tunediff\.(\w+)", (ROOT / "README.md").read_text())))


def started(command, *words, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.Popen(
        [*HEARING, sys.executable, "-m", f"tunediff.{command}", *words], env=environment, text=True, **pipes
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interruption_during_imports(command, tmp_path):
    """Sent as soon as the package is imported, which the handler of the signal tells: it then takes seconds more."""
    process = started(command, "nope", cwd=tmp_path)
    status = Path(f"/proc/{process.pid}/maps")
    while "pydantic_core" not in status.read_text():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=1200) == ("", "\ninterrupted\n")
    assert process.returncode == 130


@pytest.mark.parametrize(("command", "setup"), [("search", "search_setup"), ("compare", "compare_setup")])
def test_sigterm_ends_a_command_before_ray_starts(command, setup):
    """As Ctrl-C does: processes that measure for it end with it."""
    code = (
        f"import os, signal, sys, time; from tunediff import {command}; from tunediff.api import {setup}\n"
        f"{setup}.prepare = lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(20))\n"
        f"sys.exit({command}.main(['digits', '--dry-run']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_a_command_begins_with_its_process_and_a_call_when_it_is_made():
    """Between the two a module is imported that takes its time, as torch does."""
    code = (
        "import sys, time, psutil; sys.argv[0] = {name!r}; time.sleep(1); from tunediff.core import signals\n"
        "print(time.monotonic() - signals.command_began(), time.time() - psutil.Process().create_time())"
    )
    for name, is_command in (("/bin/tunediff", True), ("mine.py", False)):
        words = [sys.executable, "-c", code.format(name=name)]
        age_s, process_s = map(float, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
        assert process_s >= 1
        assert (0.9 < age_s <= process_s) if is_command else age_s < process_s / 2


def test_an_import_by_somebody_else_leaves_the_signal_alone():
    code = "import signal, tunediff; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([*HEARING, sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("words", [["search", "--help"], ["knobs"]])
def test_output_that_nobody_reads_is_no_error(words, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = started(*words, cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=1200)[1] == ""
    assert process.returncode == 0


def test_output_to_a_full_disk_is_an_error_of_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        process = started("knobs", cwd=tmp_path, stdout=full)
    assert process.communicate(timeout=1200)[1] == "error: No space left on device\n"
    assert process.returncode == 1


def test_closed_output_is_no_error(tmp_path):
    line = f"{sys.executable} -m tunediff.knobs >&-"
    done = subprocess.run(line, shell=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interruption_while_the_program_tunediff_imports(tmp_path):
    """The console script has no -m by which the package could tell that a command starts."""
    script = tmp_path / "tunediff"
    script.write_text("import sys\nfrom tunediff.__main__ import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*HEARING, sys.executable, str(script), "search", "nope"], env=environment, text=True, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while "pydantic_core" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=1200) == ("", "\ninterrupted\n")
    assert process.returncode == 130
