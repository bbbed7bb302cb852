"""The lock of a run whose storage has an address: two machines must not run it at once.

It is an object beside the run's files, `.lock.json`, which says who runs it. It is written at the
start, again about every minute, and removed at the end. One that is older belongs to a machine that
is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tunediff.core import text
from tunediff.core.errors import ConfigError
from tunediff.core.files import ADDRESS, address_of
from tunediff.core.remote import FileSystem, connect, make_folder, short_error

log = logging.getLogger(__name__)

NAME = ".lock.json"
REFRESH_S = 60.0
"""Seconds after which the lock is written again."""
STALE_S = 300.0
"""Seconds after which a lock that was not written again is no obstacle."""
SETTLE_S = 3.0
"""Seconds after which a lock that was not created in one step is read again: by then another start
has written its."""
_CONDITIONAL = ("s3", "s3a", "gs", "gcs")
"""Protocols whose services create an object only if there is none."""
_WRITTEN = ("LastModified", "last_modified", "mtime", "updated")
"""What the file systems of S3, Azure, folders and Google's service call the time at which an object
was written."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who runs what lies at an address."""

    host: str
    pid: int
    created: float
    """Unix time of the start of the process."""
    token: str
    """Differs between any two that have held the lock."""
    time: float
    """Unix time at which the lock was written, by the clock of the host."""
    process_table: str = ""
    """Where `pid` is a process; see `_process_table`."""

    @property
    def gone(self) -> bool:
        """Return whether it was a process of this machine that has ended."""
        if (self.host, self.process_table) != (socket.gethostname(), _process_table()):
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.created) >= 1.0
        except psutil.NoSuchProcess:
            return True


class LostLockError(OSError):
    """Another process has taken the lock: what is at the address is not ours any more."""


@contextlib.contextmanager
def held(
    run: Path, force: bool | None = None, fetch: Callable[[], object] = lambda: None
) -> Iterator[StorageLock | None]:
    """Hold the lock of what runs in the folder `run`; yield None where its storage has no address.

    `force`: see `StorageLock.take`; `fetch`: called under the lock, to fetch what another machine
    has written since this one read. Raises `ConfigError` if another machine runs it, and what
    `fetch` raises.
    """
    if address_of(run.parent) is None:
        fetch()
        yield None
        return
    lock = StorageLock(run)
    lock.take(force)
    try:
        fetch()
        lock.keep()
        yield lock
    finally:
        with contextlib.suppress(Exception):  # of the service: the lock is stale soon
            lock.release()


class StorageLock:
    """The lock of one run. Its methods raise what the service raises; `refresh` and `release` may
    come from threads."""

    def __init__(self, run: Path, token: str | None = None) -> None:
        """`token`: of the lock that the parent of this process has taken; None: this process takes
        it."""
        self._run, self._token, self._written = run, token or uuid.uuid4().hex, _now()
        self._guard, self._released = threading.Lock(), threading.Event()
        self._lost: LostLockError | None = None
        self._paused = False
        self._process = os.getpid() if token is None else os.getppid()
        self._address = str(address_of(run.parent))
        self._system, self._root = connect(self._address)
        self._path = f"{self._root}/{run.name}/{NAME}"

    @property
    def token(self) -> str:
        """Return what another process needs to hold the same lock."""
        return self._token

    def take(self, force: bool | None = None) -> None:
        """Take the lock. Raises `ConfigError` if another process holds it.

        `force`: take it all the same; None: the command has no such option, and the message does
        not name it.
        """
        try:
            if not (self._is_free(force) and self._create()):
                self._is_free(force)  # or another process has created it meanwhile
                self._write()
                time.sleep(
                    SETTLE_S
                )  # who has found no holder at the same time writes now: the last one holds it
            if (holder := self._holder()) is not None and holder.token != self._token:
                raise ConfigError(self._busy(holder, 0.0, ""))
        except ConfigError:
            raise
        except Exception as error:  # every service has its own
            raise ConfigError(
                f"--storage: {self._address} cannot be locked: {short_error(error)}"
            ) from None

    def refresh(self) -> None:
        """Write the lock again if it is time. Raises `LostLockError` if another process has taken
        it."""
        with self._guard:
            if self._released.is_set() or _now() - self._written < REFRESH_S:
                return
            if (holder := self._holder()) is not None and holder.token != self._token:
                now = f"{self._run.name} is run by {_named(holder)} now"
                raise LostLockError(now)
            self._write()

    def keep(self) -> None:
        """Refresh the lock in a thread until it is released or lost, whatever this one does."""

        def refresh() -> None:
            while not self._released.wait(REFRESH_S):
                try:
                    self.refresh()
                except LostLockError as error:
                    self._lost = error
                    return
                except Exception:  # of the service, which may be back the next time
                    continue

        threading.Thread(target=refresh, daemon=True).start()

    def may_start(self) -> bool:
        """Return whether a new trial may start: another machine cannot have taken the lock.

        Raises `LostLockError` where one has.
        """
        if self._lost is not None:
            raise self._lost
        stale = _now() - self._written >= STALE_S
        if stale and not self._paused:
            log.warning(
                "--storage: the lock at %s was not written for %s: no trial starts until it is",
                self._address,
                text.seconds(STALE_S),
            )
        self._paused = stale
        return not stale

    def release(self) -> None:
        """Remove the lock, unless another process has taken it. It is not written again."""
        with self._guard:
            if (holder := self._holder()) is not None and holder.token == self._token:
                self._system.rm_file(self._path)
            self._released.set()

    def _is_free(self, force: bool | None) -> bool:
        """Return whether there is no lock. Raises `ConfigError` for one that another process
        holds."""
        if (holder := self._holder()) is None:
            return True
        age_s = self._age_s(holder)
        if not (force or holder.gone or age_s > STALE_S or holder.token == self._token):
            raise ConfigError(
                self._busy(holder, age_s, "" if force is None else "with --force, or ")
            )
        return False

    def _create(self) -> bool:
        """Write the lock if there is none, in one step; return whether that is certain.

        Servers that imitate S3 or Google's service may ignore the condition: then they write it a
        second time as well.
        """
        if self._address.partition("://")[0] not in _CONDITIONAL:
            return False
        written = False
        try:
            self._write(mode="create")
            written = True
            self._write(mode="create")
        except Exception:  # there is a lock, or the service does not know the condition
            return written
        return False

    def _write(self, **how: str) -> None:
        """Write the lock; `how`: options of the file system's `pipe_file`."""
        try:
            created = psutil.Process(self._process).create_time()
        except psutil.NoSuchProcess:  # killed a moment ago
            created = 0.0
        holder = Holder(
            socket.gethostname(), self._process, created, self._token, time.time(), _process_table()
        )
        make_folder(self._system, self._address, self._path.rpartition("/")[0])
        self._system.pipe_file(self._path, json.dumps(dataclasses.asdict(holder)).encode(), **how)
        self._written = _now()

    def _holder(self) -> Holder | None:
        self._system.invalidate_cache()
        try:
            return Holder(**json.loads(self._system.cat_file(self._path)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # of another version, or half written
            return Holder("another machine", 0, 0.0, "", 0.0)

    def _age_s(self, holder: Holder) -> float:
        """Return how old the lock is by the clock of the service, where it has one; hosts' clocks
        differ."""
        here = f"{self._root}/{ADDRESS}"
        self._system.put_file(str(self._run.parent / ADDRESS), here)
        now, written = _modified(self._system, here), _modified(self._system, self._path)
        return time.time() - holder.time if now is None or written is None else now - written

    def _busy(self, holder: Holder, age_s: float, option: str) -> str:
        last = text.seconds(max(0.0, age_s))
        return (
            f"--storage: {self._run.name} is run by {_named(holder)}, which was last heard of"
            f" {last} ago; wait for it, or stop it. If that machine is gone, this works after"
            f" {text.seconds(STALE_S)} without a sign of it, or now {option}without the object"
            f" {self._address}/{self._run.name}/{NAME}"
        )


def _now() -> float:
    """Return seconds on a clock that runs on while the machine is suspended, as Linux's monotonic
    one does not."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process_table() -> str:
    """Return what two process tables differ in, the boot of the machine and a container's
    namespace; '' if unknown.

    Host names do not tell: machines that are copies of one image, and containers, may share them.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _named(holder: Holder) -> str:
    return f"{holder.host} (process {holder.pid})" if holder.pid else holder.host


def _modified(system: FileSystem, path: str) -> float | None:
    """Return the Unix time at which the service wrote an object; None where it does not say."""
    info: dict[str, Any] = system.info(path)
    value = next((info[name] for name in _WRITTEN if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    return float(value) if value is not None else None
