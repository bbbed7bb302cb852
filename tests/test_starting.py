"""Commands that are interrupted while they start, or that nobody listens to: a line and an exit code, never pages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunediff import compare, search
from tunediff.api import compare_setup, search_setup

ROOT = Path(__file__).parent.parent
HEARING = ["env", "--default-signal=INT"]
"""Ctrl-C is heard, also where the tests run in the background of a shell, which has it ignored."""
COMMANDS = "compare doctor evaluate export knobs profile report sample search train verify".split()


def started(words, folder):
    return subprocess.Popen(
        [*HEARING, sys.executable, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def interrupted(process):
    """Interrupt a process as soon as the package is imported, which the signal's handler tells: it takes seconds more."""
    while "pydantic_core" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=1200) == ("", "\ninterrupted\n")
    assert process.returncode == 130


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interruption_during_imports(command, tmp_path):
    """The one process of each command in these tests; all others are called in this one."""
    interrupted(started(["-m", f"tunediff.{command}", "nope"], tmp_path))


@pytest.mark.parametrize(("command", "setup"), [(search, search_setup), (compare, compare_setup)])
def test_sigterm_ends_a_command_before_ray_starts(command, setup, monkeypatch, capsys):
    """As Ctrl-C does: processes that measure for it end with it."""
    monkeypatch.setattr(setup, "prepare", lambda *_: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(600)))
    assert command.main(["digits", "seed=99", "--dry-run"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_folder_of_its_name_does_not_hide_the_package(tmp_path):
    """A clone beside the user's file, where the package is installed as README does it."""
    (tmp_path / "tunediff").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "from tunediff import Choice, Metric, Range, Trial"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_a_command_begins_with_its_process_and_a_call_when_it_is_made():
    """Between the two a module is imported that takes its time, as torch does."""
    code = (
        "import sys, time, psutil; sys.argv[0] = {name!r}; from tunediff.core import signals; time.sleep(1)\n"
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


def test_an_interruption_while_the_program_tunediff_imports(tmp_path):
    """The console script has no -m by which the package could tell that a command starts."""
    script = tmp_path / "tunediff"
    script.write_text("import sys\nfrom tunediff.__main__ import main\nsys.exit(main())\n")
    interrupted(started([str(script), "search", "nope"], tmp_path))
