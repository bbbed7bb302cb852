"""What all commands share."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from tunediff import cli, search
from tunediff.core import text

WORDS = "4 trials × 3s → 0.9 ± 0.1 ▁▂▃"


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [("closed", 0, ""), ("unread", 0, ""), ("full", 1, "error: No space left on device\n")],
)
def test_output_that_cannot_be_written(monkeypatch, capsys, output, code, message):
    """`>&-`, `| head` and `> /dev/full`."""
    stream = None
    if output == "full":
        stream = open("/dev/full", "w")  # noqa: SIM115
    if output == "unread":
        reading, writing = os.pipe()
        os.close(reading)
        stream = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.guarded(lambda argv: print(WORDS) or 0)([]) == code
    with contextlib.suppress(OSError):
        sys.stdout.close()
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(("path", "start"), [(None, "tunediff"), ("/usr/bin:/bin", "python -m tunediff")])
def test_commands_start_with_the_script_where_a_shell_finds_this_interpreters(capsys, monkeypatch, path, start):
    monkeypatch.setenv("PATH", path or os.environ["PATH"])
    with pytest.raises(SystemExit):
        search.main(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {start} search [")
    assert text.command("report", "night") == f"{start} report night"


def test_help_is_on_stdout_also_with_json(capsys):
    with pytest.raises(SystemExit):
        search.main(["--json", "--help"])
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.training  # in a process of its own: subprocesses write to the descriptor
def test_only_the_json_of_a_result_is_on_stdout():
    program = (
        "import logging, os, sys; from tunediff import cli\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "def command(argv):\n"
        "    print('object'); logging.warning('logger'); os.system('echo subprocess')\n"
        "    return cli.print_json({'key': 1}) or 0\n"
        "sys.exit(cli.guarded(command)())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"schema": text.SCHEMA, "key": 1}
    assert sorted(done.stderr.split()) == ["WARNING:root:logger", "object", "subprocess"]
