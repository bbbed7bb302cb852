"""Searches whose storage has an address: what is copied, what is fetched, whatever the service does."""

import shutil
import socket

import fsspec
import pytest

from tests import searches
from tunediff import cli, export, search, search_space
from tunediff.config import ConfigError
from tunediff.core import files, remote, text
from tunediff.core.listeners import Activity
from tunediff.core.trial_record import read_trial, read_trials
from tunediff.integrations import background
from tunediff.report import __main__ as report

CURVE = (5.0, 1000, 4.0), (20.0, 4000, 2.0)
FILE = searches.FILE | {"budget": {"per_trial": "20s", "trials": 2}}


@pytest.fixture
def bucket(tmp_path, at_tmp_path):
    """An address; its copy is a folder."""
    return f"file://{tmp_path}/bucket/prefix"


@pytest.fixture
def connected(monkeypatch):
    """Lets an address lead to this file system, and to this folder in it."""
    return lambda system, root: monkeypatch.setattr(remote, "connect", lambda address: (system, root))


@pytest.fixture
def here(bucket):
    """A search of which one trial has ended and one runs, in the local folder of the address."""
    folder = remote.local(bucket).absolute() / "night"
    space = searches.make(folder, FILE)
    (searches.write(folder, space, 0, {}, CURVE) / "weights.safetensors").write_bytes(b"w" * 100)
    (searches.write(folder, space, 1, {"optimizer.lr": 1e-2}, CURVE[:1], status=None) / "checkpoint.pt").write_bytes(
        b"c"
    )
    return folder


def there(tmp_path):
    root = tmp_path / "bucket" / "prefix"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def elsewhere(folder):
    """Another machine: it has nothing yet."""
    shutil.rmtree(folder)


def test_address_becomes_a_local_folder_that_remembers_it(bucket):
    folder = remote.local(bucket)
    assert folder.parent == files.STORAGE
    assert remote.local(f"{bucket}/") == folder != remote.local(f"{bucket}2")
    assert text.command("report", "night", storage=folder).endswith(f"--storage {bucket}")
    assert remote.local("there") == remote.Path("there")


def run(folder, said=None):
    """One session of the copier."""
    said = [] if said is None else said
    (copier,) = background.listeners(Activity("search", folder, "again", "frechet", {}, None))
    copier.search_begin(said.append)
    copier.search_end(None)
    return said


def test_copier_copies_what_changed_and_not_what_passes(here, tmp_path):
    for name in ("tune/state", "trials/t0001/doing.json", ".lock"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text("x")
    remote.push_run(here)
    trials = {"night/trials/t0000/journal.jsonl", "night/trials/t0000/weights.safetensors"}
    trials |= {"night/trials/t0001/journal.jsonl", "night/trials/t0001/checkpoint.pt"}
    assert there(tmp_path) == trials | {"night/experiment.yaml", "night/baseline.yaml"}
    (tmp_path / "bucket/prefix/night/baseline.yaml").unlink()
    space = searches.make(tmp_path / "other", FILE)
    searches.write(here, space, 1, {"optimizer.lr": 1e-2}, CURVE)
    (here / "trials/t0001/checkpoint.pt").unlink()  # the trial has ended
    assert run(here) == []
    assert there(tmp_path) == trials - {"night/trials/t0001/checkpoint.pt"} | {"night/experiment.yaml"}


def test_another_machine_reads_the_search_and_fetches_weights_only_where_needed(here, bucket, capsys):
    remote.push_run(here)
    elsewhere(here)
    assert report.main(["night", "--storage", bucket]) == cli.OK
    assert [trial.status for trial in read_trials(here)] == ["ok", None]
    assert not list(here.rglob("*.safetensors"))
    assert export.main(["night", "--storage", bucket, "--json"]) == cli.OK
    assert "best.safetensors" in capsys.readouterr().out
    assert (here / "best.safetensors").read_bytes() == b"w" * 100


def test_what_another_machine_lacks_stays_at_the_address_and_what_was_never_copied_is(here, bucket, tmp_path):
    (here / "trials/t0000/model.pt").write_bytes(b"a program's own")
    remote.push_run(here)
    elsewhere(here)
    remote.pull(here)
    remote.push_run(here)
    assert "night/trials/t0000/model.pt" in there(tmp_path)
    shutil.rmtree(tmp_path / "bucket")
    (here / remote.COPIED).unlink()
    remote.pull(here)  # as a report does before the first copy
    remote.push_run(here)
    assert "night/trials/t0000/journal.jsonl" in there(tmp_path)


def test_resume_elsewhere_has_checkpoints_of_unfinished_trials(here, bucket):
    from tunediff.api import search_setup
    from tunediff.api.options import SearchOptions

    remote.push_run(here)
    elsewhere(here)
    request = search_setup.requested(SearchOptions(resume="night", storage=remote.local(bucket)))
    assert request.space.budget.trials == 2
    assert (here / "trials/t0001/checkpoint.pt").read_bytes() == b"c"
    assert not (here / "trials/t0000/weights.safetensors").exists()


def test_a_trial_that_was_continued_elsewhere_is_fetched_whole_and_not_overwritten(here, tmp_path):
    """Its journal is the longer one at the address; another trial has gone on here, and that stays."""
    remote.push_run(here)
    copy, journal = tmp_path / "bucket/prefix/night/trials", "journal.jsonl"
    for place in (copy / "t0001", here / "trials/t0000"):
        (place / journal).write_text((place / journal).read_text() + "\n" * 10)
    (copy / "t0001/checkpoint.pt").write_bytes(b"elsewhere")
    (here / "trials/t0001/checkpoint.pt").write_bytes(b"of this machine")
    said = run(here)
    assert ["night/trials/t0001: longer at the address" in line for line in said] == [True, False]
    assert (copy / "t0001/checkpoint.pt").read_bytes() == b"elsewhere"
    assert (copy / "t0000" / journal).read_text().endswith("\n" * 10)
    remote.pull(here)
    assert not (here / "trials/t0001/checkpoint.pt").exists(), "of the shorter journal"
    remote.pull(here, heavy=True)
    assert (here / "trials/t0001/checkpoint.pt").read_bytes() == b"elsewhere"
    assert (here / "trials/t0001" / journal).read_text() == (copy / "t0001" / journal).read_text()


def test_a_name_that_is_taken_at_the_address_is_refused(here, bucket, capsys):
    remote.push_run(here)
    elsewhere(here)
    assert search.main(["digits", "--name", "night", "--storage", bucket]) == cli.BAD_INPUT
    assert "--name: 'night' exists" in capsys.readouterr().err


def test_storage_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, capsys, at_tmp_path):
    (tmp_path / "file").write_text("")
    assert search.main(["digits", "--storage", f"file://{tmp_path}/file/prefix"]) == cli.BAD_INPUT
    assert f"--storage: file://{tmp_path}/file/prefix cannot be written: " in capsys.readouterr().err


def test_absent_package_of_an_address_names_the_extra(monkeypatch):
    def absent(*_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(ConfigError, match=r"s3://there: Install s3fs to access S3"):
        remote.connect("s3://there")


def test_keys_that_leave_the_folder_are_not_fetched(here, connected):
    class Odd:
        def invalidate_cache(self): ...
        def find(self, path, detail):
            return {f"{path}/../../outside": {"size": 1}}

    connected(Odd(), "root")
    remote.pull(here)  # and does not ask for it


@pytest.fixture
def refusing(bucket):
    """Makes the address refuse everything, until it is told not to."""
    root = remote.Path(bucket.removeprefix("file://"))
    aside = root.with_name("aside")

    def refuse(does=True):
        if does:
            root.mkdir(parents=True, exist_ok=True)
            root.rename(aside)
            root.write_text("in the way")
        else:
            root.unlink()
            aside.rename(root)

    return refuse


def test_copier_says_once_that_storage_fails_and_copies_later(here, tmp_path, refusing):
    refusing()
    first, last = run(here)
    assert "; the search goes on, and is sent later" in first
    assert "not everything was sent; this sends it: again" in last
    refusing(False)
    assert run(here) == []
    assert "night/trials/t0001/journal.jsonl" in there(tmp_path)


class S3:
    """A real server with a bucket, which can be stopped and started again."""

    scheme = "s3"

    def __init__(self, monkeypatch, port):
        pytest.importorskip("s3fs")
        self.moto, boto3, self.port = pytest.importorskip("moto.server"), pytest.importorskip("boto3"), port
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        self.start()
        boto3.client("s3").create_bucket(Bucket="bucket")

    def start(self):
        self.server = self.moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()

    def stop(self):
        self.server.stop()


@pytest.fixture
def service(monkeypatch, at_tmp_path):
    """A service with a bucket that lives in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = S3(monkeypatch, port)
    fsspec.get_filesystem_class(server.scheme).clear_instance_cache()  # they keep the address of an earlier one
    yield server
    server.stop()


@pytest.mark.nightly
def test_server_that_is_killed_gets_everything_when_it_is_back(service):
    address = f"{service.scheme}://bucket/prefix"
    folder = remote.local(address).absolute() / "night"
    remote.check(folder.parent)
    space = searches.make(folder, FILE)
    searches.write(folder, space, 0, {}, CURVE[:1], status=None)
    assert not [line for line in run(folder) if "Ctrl-C" not in line]
    service.stop()
    searches.write(folder, space, 0, {}, CURVE)
    assert len([line for line in run(folder) if "Ctrl-C" not in line]) == 2
    service.start()
    assert not [line for line in run(folder) if "Ctrl-C" not in line]
    before = [point.flat for point in read_trial(folder / "trials" / "t0000").points]
    elsewhere(folder)
    assert search_space.folder_of("night", remote.local(address)) == folder
    assert [point.flat for point in read_trial(folder / "trials" / "t0000").points] == before
