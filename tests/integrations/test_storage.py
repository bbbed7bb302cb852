"""Searches whose storage has an address: what is copied, what is fetched, whatever the service does."""

import datetime
import json
import logging
import os
import shutil
import socket
import threading
import time

import fsspec
import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests import searches
from tunediff import cli, export, search, search_space
from tunediff.config import ConfigError
from tunediff.core import files, remote, remote_lock, text
from tunediff.core.listeners import Activity, Listeners
from tunediff.core.remote_lock import StorageLock
from tunediff.core.trial_record import read_trial, read_trials
from tunediff.integrations import companion
from tunediff.integrations import copier as copier_module
from tunediff.integrations.companion import Facts
from tunediff.integrations.copier import Copier
from tunediff.report import __main__ as report

CURVE = (5.0, 1000, 4.0), (20.0, 4000, 2.0)
FILE = searches.FILE | {"budget": {"per_trial": "20s", "trials": 2}}
SETTLE_S = 1e-6


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """An address; its copy is a folder."""
    monkeypatch.chdir(tmp_path)
    return f"file://{tmp_path}/bucket/prefix"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No start waits long for another one."""
    monkeypatch.setattr(remote_lock, "SETTLE_S", SETTLE_S)


@pytest.fixture
def refreshed(monkeypatch):
    """A lock is written again at every opportunity."""
    monkeypatch.setattr(remote_lock, "REFRESH_S", 0.0)


@pytest.fixture
def stale_after(monkeypatch):
    return lambda seconds: monkeypatch.setattr(remote_lock, "STALE_S", seconds)


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


def facts(folder, token):
    """What the process that copies is told."""
    return Facts(folder, f"--storage {files.address_of(folder.parent)}", token=token)


def there(tmp_path):
    root = tmp_path / "bucket" / "prefix"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def elsewhere(folder):
    """Another machine: it has nothing yet."""
    shutil.rmtree(folder)


def test_address_becomes_a_local_folder_that_remembers_it(bucket):
    folder = remote.local(bucket)
    assert folder.parent == text.STORAGE
    assert remote.local(f"{bucket}/") == folder != remote.local(f"{bucket}2")
    assert text.command("report", "night", storage=folder).endswith(f"--storage {bucket}")
    assert remote.local("there") == remote.Path("there")


def test_push_copies_what_changed_and_not_what_passes(here, tmp_path):
    for name in ("tune/state", "trials/t0001/doing.json", "study.db", ".lock"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text("x")
    assert remote.push(here, last=False) == 6
    trials = {"night/trials/t0000/journal.jsonl", "night/trials/t0000/weights.safetensors"}
    trials |= {"night/trials/t0001/journal.jsonl", "night/trials/t0001/checkpoint.pt"}
    assert there(tmp_path) == trials | {"night/search.yaml", "night/baseline.yaml"}
    assert remote.push(here, last=False) == 0
    (here / "trials/t0001/checkpoint.pt").unlink()  # the trial has ended
    assert remote.push(here, last=True) == 1
    assert there(tmp_path) == trials - {"night/trials/t0001/checkpoint.pt"} | {
        "night/search.yaml", "night/baseline.yaml", "night/study.db",
    }  # fmt: skip


def test_what_a_resumed_training_removes_does_not_come_back_from_the_address(here):
    weights, average = (here / "trials/t0001" / name for name in ("weights.safetensors", "averages/0002.safetensors"))
    average.parent.mkdir()
    for file in (weights, average):
        file.write_bytes(b"of an earlier stop")
    remote.push(here)
    for file in (weights, average, here / "trials/t0000/weights.safetensors"):
        file.unlink()
    with open(here / "trials/t0001/journal.jsonl", "a") as journal:
        journal.write("\n")  # it goes on
    remote.push(here)
    remote.pull(here, heavy=True)
    assert not weights.exists()
    assert not average.exists()
    assert (here / "trials/t0000/weights.safetensors").exists(), "removed for its room, by hand"


def test_pull_beside_a_push_keeps_a_checkpoint_that_was_written_again(here, connected):
    """The training writes again once its checkpoint is copied, and a command reads before the copier has finished."""
    remote.push(here)
    checkpoint, weights = here / "trials/t0001/checkpoint.pt", here / "trials/t0001/weights.safetensors"
    checkpoint.write_bytes(b"second")
    weights.write_bytes(b"w")
    system, root = remote.connect(files.address_of(here.parent))

    class Reading:
        def __getattr__(self, name):
            return getattr(system, name)

        def put_file(self, local, target):
            if local == str(weights):  # behind the checkpoint
                checkpoint.write_bytes(b"third, longer")
                remote.pull(here, heavy=True)
            system.put_file(local, target)

    connected(Reading(), root)
    remote.push(here)
    assert checkpoint.read_bytes() == b"third, longer"


def test_another_machine_reads_the_search_and_fetches_weights_only_where_needed(here, bucket, capsys):
    remote.push(here)
    elsewhere(here)
    assert report.main(["night", "--storage", bucket]) == cli.OK
    assert [trial.status for trial in read_trials(here)] == ["ok", None]
    assert not list(here.rglob("*.safetensors"))
    assert export.main(["night", "--storage", bucket, "--json"]) == cli.OK
    assert "best.safetensors" in capsys.readouterr().out
    assert (here / "best.safetensors").read_bytes() == b"w" * 100


def test_resume_elsewhere_has_checkpoints_of_unfinished_trials(here, bucket):
    from tunediff.api import search_setup
    from tunediff.api.search_setup import SearchOptions

    remote.push(here)
    elsewhere(here)
    request = search_setup.requested(SearchOptions(resume="night", storage=remote.local(bucket)))
    assert request.space.budget.trials == 2
    assert (here / "trials/t0001/checkpoint.pt").read_bytes() == b"c"
    assert not (here / "trials/t0000/weights.safetensors").exists()


def test_pull_takes_the_newer_of_two_and_the_longer_journal(here, tmp_path):
    remote.push(here)
    copy = tmp_path / "bucket" / "prefix" / "night"
    journal, settings = "trials/t0001/journal.jsonl", "search.yaml"
    (copy / settings).write_text((copy / settings).read_text() + "# elsewhere\n")
    (copy / journal).write_text((copy / journal).read_text() + "\n" * 10)
    with open(here / journal, "a") as file:  # measured here, and not copied yet
        file.write("\n" * 20)
    remote.pull(here)
    assert (here / settings).read_text().endswith("# elsewhere\n")
    assert (here / journal).read_text().endswith("\n" * 20)
    (copy / journal).write_text((copy / journal).read_text() + "\n" * 30)
    remote.pull(here)
    assert (here / journal).read_text().endswith("\n" * 40)
    (here / settings).write_text("changed here")
    remote.pull(here)
    assert (here / settings).read_text() == "changed here"


def test_a_name_that_is_taken_at_the_address_is_refused(here, bucket, capsys):
    remote.push(here)
    elsewhere(here)
    assert search.main(["digits", "--name", "night", "--storage", bucket]) == cli.BAD_INPUT
    assert "--name: 'night' exists" in capsys.readouterr().err


def test_storage_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert search.main(["digits", "--storage", f"file://{tmp_path}/file/prefix"]) == cli.BAD_INPUT
    assert f"--storage: file://{tmp_path}/file/prefix cannot be written: " in capsys.readouterr().err


def test_absent_package_of_an_address_names_the_extra(monkeypatch):
    def absent(*_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(ConfigError, match=r"s3://there: Install s3fs to access S3; run: pip install '.*\[s3\]'"):
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
    said = []
    copier = Copier(facts(here, "token"), said.append)
    refusing()
    assert not copier.sync(last=True)
    assert not copier.sync(last=True)
    assert len(said) == 1
    assert "; the search goes on, and is copied later" in said[0]
    refusing(False)
    assert copier.sync(last=True)
    assert "night/trials/t0001/journal.jsonl" in there(tmp_path)


def test_nothing_is_copied_before_the_first_trial(here, tmp_path):
    shutil.rmtree(here / "trials")
    assert Copier(facts(here, "token"), print).sync()
    assert not there(tmp_path)


@pytest.fixture
def elsewhere_running(here, tmp_path, monkeypatch):
    """The lock of another machine that runs the search; returns its file."""
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "node7")
        StorageLock(here).take()
    return tmp_path / "bucket/prefix/night" / remote_lock.NAME


def test_a_search_that_another_machine_runs_is_refused(here, bucket, elsewhere_running, capsys):
    before = elsewhere_running.read_bytes()
    remote.push(here)
    elsewhere(here)
    assert search.main(["--resume", "night", "--storage", bucket]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert f"--storage: night is run by node7 (process {os.getpid()}), which was last heard of " in error
    assert f"now with --force, or without the object {bucket}/night/.lock.json" in error
    assert elsewhere_running.read_bytes() == before
    assert not (here / remote_lock.NAME).exists()


def test_two_processes_of_one_machine_do_not_run_one_search(here):
    StorageLock(here).take()
    with pytest.raises(ConfigError, match=rf"night is run by .* \(process {os.getpid()}\)"):
        StorageLock(here).take()


def test_of_two_starts_at_once_one_has_the_lock(here, monkeypatch):
    """Both have found no holder before either writes, and both have written before either reads again."""
    writes, reads, refused = threading.Barrier(2), threading.Barrier(2), []
    pipe_file, sleep = LocalFileSystem.pipe_file, time.sleep
    for owner, name, replaced in (
        (LocalFileSystem, "pipe_file", lambda *words: (writes.wait(600), pipe_file(*words))),
        (time, "sleep", lambda s: reads.wait(600) if s == SETTLE_S else sleep(s)),
    ):
        monkeypatch.setattr(owner, name, replaced)

    def start():
        try:
            StorageLock(here).take()
        except ConfigError as error:
            refused.append(str(error))

    starts = [threading.Thread(target=start) for _ in range(2)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert len(refused) == 1
    assert f"night is run by {socket.gethostname()} (process {os.getpid()})" in refused[0]


def test_a_lock_that_was_not_written_again_is_taken_over(here, elsewhere_running):
    os.utime(elsewhere_running, (time.time() - 120,) * 2)
    with pytest.raises(ConfigError, match=r"last heard of 2m\d\ds ago.*this works after 5m00s without a sign of it"):
        StorageLock(here).take()
    os.utime(elsewhere_running, (time.time() - 310,) * 2)
    StorageLock(here).take()


def test_the_age_of_a_lock_is_by_the_clock_of_azure(here, elsewhere_running, monkeypatch):
    """As adlfs tells it; this machine's clock is ahead by an hour."""
    now, written = time.time, datetime.datetime.now(datetime.UTC)
    for owner, name, replaced in (
        (LocalFileSystem, "info", lambda _, path: {"name": path, "size": 1, "last_modified": written}),
        (time, "time", lambda: now() + 3600.0),
    ):
        monkeypatch.setattr(owner, name, replaced)
    with pytest.raises(ConfigError, match="night is run by node7"):
        StorageLock(here).take()


@pytest.mark.usefixtures("refreshed")
def test_a_search_that_was_taken_over_is_not_copied_any_more(here, elsewhere_running, tmp_path):
    said, lock = [], json.loads(elsewhere_running.read_text())
    copier = Copier(facts(here, lock["token"]), said.append)
    assert copier.sync()
    StorageLock(here).take(force=True)
    shutil.rmtree(tmp_path / "bucket/prefix/night/trials")
    assert not copier.sync(last=True)
    assert len(said) == 1
    assert (
        f"night is run by {socket.gethostname()} (process {os.getpid()}) now; nothing is copied from here any more"
        in said[0]
    )
    assert not (tmp_path / "bucket/prefix/night/trials").exists()
    assert json.loads(elsewhere_running.read_text())["token"] != lock["token"]


@pytest.mark.parametrize(("during", "file"), [("training", "baseline.yaml"), ("copying", "search.yaml")])
def test_machine_that_was_suspended_overwrites_nothing_of_the_one_that_took_over(
    here, elsewhere_running, monkeypatch, during, file
):
    """Linux's monotonic clock stands still meanwhile."""
    copier = Copier(facts(here, json.loads(elsewhere_running.read_text())["token"]), print)
    assert copier.sync()
    for name in ("baseline.yaml", "search.yaml"):  # in the order of copying
        (here / name).write_text("of the machine that was suspended")
    copy, clock, make_folder = elsewhere_running.parent / file, time.clock_gettime, remote.make_folder

    def suspend():
        if not copy.read_text().startswith("of the other"):
            copy.write_text("of the other machine")
            StorageLock(here).take(force=True)
            asleep_s = {time.CLOCK_BOOTTIME: 600.0}
            monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + asleep_s.get(which, 0.0))

    if during == "training":
        suspend()
    monkeypatch.setattr(remote, "make_folder", lambda *arguments: (make_folder(*arguments), suspend()))
    assert not copier.sync()
    assert copy.read_text() == "of the other machine"


def test_journal_that_is_longer_at_the_address_is_not_overwritten(here, bucket):
    """Of a machine that took the search over a moment ago."""
    remote.push(here)
    journal = "trials/t0001/journal.jsonl"
    copy = remote.Path(bucket.removeprefix("file://")) / "night" / journal
    longer = copy.read_text() + "\n" * 10
    copy.write_text(longer)
    for grown, expected in (("\n", longer), ("\n" * 20, longer + "\n" * 11)):
        with open(here / journal, "a") as file:
            file.write(grown)
        remote.push(here)
        assert copy.read_text() == expected


def test_journal_is_not_copied_where_the_service_does_not_say_which_is_longer(here, bucket, connected):
    remote.push(here)
    journal = "trials/t0001/journal.jsonl"
    copy = remote.Path(bucket.removeprefix("file://")) / "night" / journal
    copy.write_text(longer := copy.read_text() + "\n" * 10)
    with open(here / journal, "a") as file:
        file.write("\n")
    system, root = remote.connect(bucket)

    class Throttled:
        def __getattr__(self, name):
            return getattr(system, name)

        def info(self, path, **options):
            raise PermissionError("throttled")

    connected(Throttled(), root)
    with pytest.raises(PermissionError):
        remote.push(here)
    assert copy.read_text() == longer


@pytest.mark.usefixtures("refreshed")
def test_the_lock_is_written_again_and_removed_at_the_end(here, elsewhere_running):
    lock = remote_lock.Holder(**json.loads(elsewhere_running.read_text()))
    copier = Copier(facts(here, lock.token), print)
    assert copier.sync()
    again = remote_lock.Holder(**json.loads(elsewhere_running.read_text()))
    assert (again.token, again.time > lock.time) == (lock.token, True)
    assert copier.sync(last=True)
    assert not elsewhere_running.exists()


def changed(file):
    """Wait until a file is written again."""
    before = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == before:
        time.sleep(0.01)


@pytest.mark.usefixtures("refreshed")
def test_the_search_writes_the_lock_again_whatever_becomes_of_the_process_that_copies(here, tmp_path):
    file = tmp_path / "bucket/prefix/night" / remote_lock.NAME
    with remote_lock.held(here):
        changed(file)
        changed(file)
    assert not file.exists()


def test_no_trial_starts_while_the_lock_is_stale_or_after_it_was_lost(here, stale_after, monkeypatch, caplog):
    """A machine that was suspended, or whose service did not answer for minutes."""
    with remote_lock.held(here) as lock:
        assert lock.may_start()
        stale_after(0.0)
        assert not lock.may_start()
        assert not lock.may_start()
        stale_after(300.0)
        assert lock.may_start()
        assert len(caplog.messages) == 1
        assert "no trial starts until it is" in caplog.text
    monkeypatch.setattr(remote_lock, "REFRESH_S", 0.01)
    with remote_lock.held(here) as lock:
        StorageLock(here).take(force=True)
        with pytest.raises(OSError, match="night is run by .* now"):
            while lock.may_start():
                time.sleep(0.01)


def test_the_process_that_copies_is_started_again_when_it_dies(here, tmp_path, monkeypatch):
    monkeypatch.setattr(companion, "RETRY_S", 0.01)
    said, copy = [], tmp_path / "bucket/prefix/night/trials/t0001/journal.jsonl"
    earlier = {process.pid for process in psutil.Process().children()}
    with remote_lock.held(here) as lock:
        activity = Activity("search", here, "tunediff search", "frechet", {}, None, token=lock.token)
        (copying,) = copier_module.listeners(activity)
        copying.search_begin(said.append)
        for process in psutil.Process().children():
            if process.pid not in earlier:
                process.kill()
        while not copy.exists():
            time.sleep(0.05)
        copying.search_end(None)
    address = files.address_of(here.parent)
    assert said[0] == f"--storage {address}: its process has ended (-9) and is started again"
    assert len([line for line in said if "ended" in line]) == 1


@pytest.mark.usefixtures("refreshed")
def test_a_lost_lock_is_said_although_a_failure_was_said_before(here, elsewhere_running, refusing):
    said = []
    copier = Copier(facts(here, json.loads(elsewhere_running.read_text())["token"]), said.append)
    refusing()
    assert not copier.sync(last=True)
    refusing(False)
    StorageLock(here).take(force=True)
    assert not copier.sync(last=True)
    assert not copier.sync(last=True)
    assert len(said) == 2
    assert "is run by" in said[1]


def test_resume_reads_what_was_copied_until_it_has_the_lock(here, bucket, monkeypatch, instead_of_trials):
    """The machine that ran it ends between the check of `--resume` and the start."""
    from tunediff.api import search_run, search_setup
    from tunediff.api.search_setup import SearchOptions
    from tunediff.core.progress import EventLines

    remote.push(here)
    request = search_setup.requested(options := SearchOptions(resume="night", storage=remote.local(bucket)))
    copy = remote.Path(bucket.removeprefix("file://")) / "night"
    searches.write(copy, request.space, 1, {"optimizer.lr": 1e-2}, CURVE)
    (copy / "search.yaml").write_text((copy / "search.yaml").read_text().replace("trials: 2", "trials: 3"))
    started = []

    def run(folder, space, *_):
        started.append((space.budget.trials, [trial.status for trial in read_trials(folder)]))

    instead_of_trials(run)
    monkeypatch.setattr("tunediff.report.listener._of_search", lambda *_: None)
    search_run.run(request, options, EventLines())
    assert started == [(3, ["ok", "ok"])]
    assert "end" in (copy / "trials/t0001/journal.jsonl").read_text()


def test_a_fetch_that_fails_leaves_no_lock(here, tmp_path):
    def fetch():
        raise ConfigError("refused")

    with pytest.raises(ConfigError, match="refused"), remote_lock.held(here, fetch=fetch):
        pass
    assert not (tmp_path / "bucket/prefix/night" / remote_lock.NAME).exists()


class S3:
    """A real server with a bucket, which can be stopped and started again."""

    scheme = "s3"

    def __init__(self, monkeypatch, folder, port):
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


class Gs(S3):
    """An emulator of Google Cloud Storage."""

    scheme = "gs"

    def __init__(self, monkeypatch, folder, port):
        pytest.importorskip("gcsfs")
        self.emulator, self.port, self.folder = pytest.importorskip("gcp_storage_emulator.server"), port, folder
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks for the kind of a bucket
        self.start()

    def start(self):
        where = {"data_dir": str(self.folder / "gs"), "default_bucket": "bucket"}
        self.server = self.emulator.create_server("127.0.0.1", self.port, **where)
        self.server.start()


@pytest.fixture(params=[S3, Gs])
def service(request, monkeypatch, tmp_path):
    """A service with a bucket that lives in this process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = request.param(monkeypatch, tmp_path, port)
    fsspec.get_filesystem_class(server.scheme).clear_instance_cache()  # they keep the address of an earlier one
    yield server
    server.stop()


@pytest.mark.nightly
def test_server_that_is_killed_gets_everything_when_it_is_back(service, caplog):
    address = f"{service.scheme}://bucket/prefix"
    folder, said = remote.local(address).absolute() / "night", []
    remote.check(folder.parent)
    space = searches.make(folder, FILE)
    searches.write(folder, space, 0, {}, CURVE[:1], status=None)
    with caplog.at_level(logging.WARNING, "tunediff"), remote_lock.held(folder) as lock:
        hub = Listeners(lock)
        with hub.opened(Activity("train", folder, "the same", "frechet", {}, None), said.append):
            pass  # one point is copied at the end
    assert not [line for line in said if "Ctrl-C" not in line]
    assert "not everything is copied" not in caplog.text
    service.stop()
    searches.write(folder, space, 0, {}, CURVE)
    copier = Copier(facts(folder, "token"), said.append)
    said.clear()
    assert not copier.sync(last=True)
    assert len(said) == 1
    service.start()
    assert copier.sync(last=True)
    before = [point.flat for point in read_trial(folder / "trials" / "t0000").points]
    elsewhere(folder)
    assert search_space.folder_of("night", remote.local(address)) == folder
    assert [point.flat for point in read_trial(folder / "trials" / "t0000").points] == before


@pytest.mark.nightly
def test_the_age_of_a_lock_is_that_of_its_object(service, monkeypatch, stale_after):
    folder = remote.local(f"{service.scheme}://bucket/prefix").absolute() / "night"
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "node7")
        there.setattr("time.time", lambda: 0.0)  # its clock is wrong
        lock = StorageLock(folder)
        lock.take()
    with pytest.raises(ConfigError, match=r"night is run by node7 .* last heard of \d"):
        StorageLock(folder).take()
    stale_after(-1.0)
    StorageLock(folder).take()
    lock.release()  # it is that of another now
    with pytest.raises(ConfigError, match="night is run by"):
        stale_after(300.0)
        StorageLock(folder).take()


@pytest.mark.nightly
def test_bucket_that_does_not_exist_is_refused(service):
    address = f"{service.scheme}://none/prefix"
    with pytest.raises(ConfigError, match=f"--storage: {address} cannot be written: "):
        remote.check(remote.local(address))


def test_an_address_with_a_password_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--storage: sftp://…@host/p: a password is not allowed"):
        remote.local("sftp://user:secret@host/p")
    assert not list(tmp_path.iterdir())
