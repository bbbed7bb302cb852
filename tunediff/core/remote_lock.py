"""The lock of a run whose storage has an address: two machines must not run it at once.

It is an object beside the run's files, `.lock.json`, which says who runs it. It is written at the
start, again about every minute, and removed at the end. An older one is a lost machine's.
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
"""Seconds until a start reads its lock again: a rival has written its own by then."""
_WRITTEN = ("LastModified", "last_modified", "mtime", "updated")
"""How the file systems of S3, Azure, folders and Google call an object's time of writing."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who runs what lies at an address."""

    host: str
    pid: int
    token: str
    """Differs between any two that have held the lock."""
    time: float
    """Unix time at which the lock was written, by the clock of the host."""

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})" if self.pid else self.host


class LostLockError(OSError):
    """Another process has taken the lock: what is at the address is not ours any more."""


@contextlib.contextmanager
def held(
    run: Path, force: bool | None = None, fetch: Callable[[], object] = lambda: None
) -> Iterator[StorageLock | None]:
    """Hold the lock of what runs in the folder `run`; yield None where its storage has no address.

    `force`: see `StorageLock.take`; `fetch`: called under the lock, for what another machine has
    written since. Raises `ConfigError` if another machine runs it, and what `fetch` raises.
    """
    if address_of(run.parent) is None:
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
    """The lock of one run. Its methods raise what the service raises, in any thread."""

    def __init__(self, run: Path, token: str | None = None) -> None:
        """`token`: of the lock that another process has taken; None: this process takes it."""
        self.token = token or uuid.uuid4().hex
        self._run, self._written = run, _now()
        self._guard, self._released = threading.Lock(), threading.Event()
        self._lost: LostLockError | None = None
        self._paused = False
        self._address = str(address_of(run.parent))
        self._system, self._root = connect(self._address)
        self._path = f"{self._root}/{run.name}/{NAME}"

    def take(self, force: bool | None = None) -> None:
        """Take the lock. Raises `ConfigError` if another process holds it.

        `force`: take it all the same; None: the command has no such option.
        """
        try:
            if (holder := self._other_holder()) is not None:
                age_s = self._age_s(holder)
                if not force and age_s <= STALE_S:
                    raise self._refusal(holder, age_s, "" if force is None else "with --force, or ")
            self._write()
            time.sleep(SETTLE_S)
            if (holder := self._other_holder()) is not None:
                raise self._refusal(holder, 0.0, "")
        except ConfigError:
            raise
        except Exception as error:  # every service has its own
            why = f"{self._address} cannot be locked: {short_error(error)}"
            raise ConfigError(f"--storage: {why}") from None

    def refresh(self) -> None:
        """Renew the lock if it is time. Raises `LostLockError` if another process took it."""
        with self._guard:
            if self._released.is_set() or _now() - self._written < REFRESH_S:
                return
            if (holder := self._other_holder()) is not None:
                raise LostLockError(f"{self._run.name} is run by {holder} now")
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
        """Return whether a new trial may start: no other machine can have taken a fresh lock.

        Raises `LostLockError` where one has.
        """
        if self._lost is not None:
            raise self._lost
        stale = _now() - self._written >= STALE_S
        if stale and not self._paused:
            unwritten = f"was not written for {text.seconds(STALE_S)}"
            log.warning(
                "--storage: the lock at %s %s: no trial starts until it is",
                self._address,
                unwritten,
            )
        self._paused = stale
        return not stale

    def release(self) -> None:
        """Remove the lock, unless another process has taken it. It is not written again."""
        with self._guard:
            self._released.set()
            if (holder := self._holder()) is not None and holder.token == self.token:
                self._system.rm_file(self._path)

    def _write(self) -> None:
        holder = Holder(socket.gethostname(), os.getpid(), self.token, time.time())
        make_folder(self._system, self._address, self._path.rpartition("/")[0])
        self._system.pipe_file(self._path, json.dumps(dataclasses.asdict(holder)).encode())
        self._written = _now()

    def _holder(self) -> Holder | None:
        self._system.invalidate_cache()
        try:
            content = json.loads(self._system.cat_file(self._path))
            return Holder(**{name: content[name] for name in ("host", "pid", "token", "time")})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):  # half written
            return Holder("another machine", 0, "", 0.0)

    def _other_holder(self) -> Holder | None:
        holder = self._holder()
        return None if holder is None or holder.token == self.token else holder

    def _age_s(self, holder: Holder) -> float:
        """Return the lock's age by the service's clock if it has one; hosts' clocks differ."""
        probe = f"{self._root}/{ADDRESS}"
        self._system.put_file(str(self._run.parent / ADDRESS), probe)
        now, written = _modified(self._system, probe), _modified(self._system, self._path)
        return time.time() - holder.time if now is None or written is None else now - written

    def _refusal(self, holder: Holder, age_s: float, option: str) -> ConfigError:
        return ConfigError(
            f"--storage: {self._run.name} is run by {holder}, which was last heard of"
            f" {text.seconds(max(0.0, age_s))} ago; wait for it, or stop it. If that machine is"
            f" gone, this works after {text.seconds(STALE_S)} without a sign of it, or now"
            f" {option}without the object {self._address}/{self._run.name}/{NAME}"
        )


def _now() -> float:
    """Return seconds on a clock that suspension does not stop, unlike the monotonic one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _modified(system: FileSystem, path: str) -> float | None:
    """Return the Unix time at which the service wrote an object; None where it does not say."""
    info: dict[str, Any] = system.info(path)
    value = next((info[name] for name in _WRITTEN if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    return float(value) if value is not None else None
