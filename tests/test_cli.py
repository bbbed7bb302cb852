"""What all commands share."""

import contextlib
import errno
import json
import os
import resource
import stat
import subprocess
import sys

import numpy
import pytest
import torch

from tunediff import cli, search
from tunediff.core import text
from tunediff.core.files import write_atomically, write_csv, write_text

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


@pytest.mark.parametrize(("name", "value", "start"), [
    ("HOME", "/root", "tunediff"),
    ("PATH", "/usr/bin:/bin", "python"),
    ("UV", "1", "python"),
])  # fmt: skip
def test_commands_start_with_the_script_where_a_shell_finds_this_interpreters(capsys, monkeypatch, name, value, start):
    monkeypatch.setenv(name, value)
    start = start.replace("python", f"{sys.executable.removeprefix(f'{os.getcwd()}/')} -m tunediff")
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


# --------------------------------------------------------------------------- files that are written whole or not at all
@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


BIG = torch.zeros(2**20)
WRITERS = {
    "torch.save": lambda file: torch.save({"weights": BIG}, file),
    "numpy.savez": lambda file: numpy.savez(file, BIG.numpy()),
    "write": lambda file: file.write(BIG.numpy().tobytes()),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_full_disk_is_an_oserror_whatever_the_writer_raises(small_disk, write):
    """torch.save raises a RuntimeError about its archive, which names no disk."""
    write_text(small_disk / "state.pt", "old")
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_atomically(small_disk / "state.pt", write)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in small_disk.iterdir()] == ["state.pt"]
    assert (small_disk / "state.pt").read_text() == "old"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_file_that_exceeds_its_limit_is_an_oserror_whatever_the_writer_raises(tmp_path, write):
    """As a full disk is, without a file system of its own, which needs root."""
    write_text(tmp_path / "state.pt", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_atomically(tmp_path / "state.pt", write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    assert (tmp_path / "state.pt").read_text() == "old"


def test_error_of_the_writer_itself_stays_as_it_is(tmp_path):
    def refuse(file):
        file.write(b"a part")
        raise ValueError("no such format")

    with pytest.raises(ValueError, match="no such format"):
        write_atomically(tmp_path / "state.pt", refuse)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_file_mode_follows_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "result.csv", "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "result.csv").stat().st_mode) == mode


def test_cells_of_a_table_are_numbers_or_text(tmp_path):
    rows = [(-0.5, "-0.5", True), (numpy.float32(1.23456789), "a", None), (float("nan"), "b", 10**9)]
    write_csv(tmp_path / "table.csv", ["x", "y", "n"], rows, digits=3)
    assert (tmp_path / "table.csv").read_text() == "x,y,n\n-0.5,-0.5,True\n1.23,a,\n,b,1000000000\n"
