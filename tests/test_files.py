"""Files that are written whole or not at all."""

import errno
import os
import resource
import stat
import subprocess

import numpy
import pytest
import torch

from tunediff.core.files import write_atomically, write_csv, write_text


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
