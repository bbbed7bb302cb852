"""The Optuna study of a search: its file, opened, and put aside when it is damaged."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from tunediff.config import ConfigError
from tunediff.core.files import has_locks, study_url
from tunediff.tuning import sessions

log = logging.getLogger(__name__)

STUDY = "tunediff"
FAULTS = (optuna.exceptions.StorageInternalError, SQLAlchemyError, OSError)
"""What Optuna raises when the disk is full, read-only or gone."""
LOCKED_S = 60.0
"""Seconds for which other programs may lock the study before the search stops."""
DAMAGES = ("malformed", "not a database")
"""SQLite's messages for a damaged file; errors such as a lock or a slow disk pass."""


def study_in(address: str | None, folder: Path) -> tuple[str, optuna.storages.BaseStorage]:
    """Return name and storage of the study of a search: study.db in its folder, or a database.

    address: of SQLAlchemy, with variables of the environment, so that no file holds its password.
    Raises `ConfigError` where the database's driver is missing, `StoppedError` if none answers.
    """
    if address is None:
        return STUDY, open_file(folder / "study.db")
    # Searches of several folders share a database.
    name = f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:6]}"
    try:
        return name, optuna.storages.RDBStorage(os.path.expandvars(address))
    except ImportError as error:
        why = f"its driver is missing: {error}"
        raise ConfigError(f"storage: {address}: {why}; pip install psycopg2-binary, …") from None
    except SQLAlchemyError as error:
        why = str(error).splitlines()[0]
        raise sessions.StoppedError(f"storage: {address} cannot be used: {why}") from None


def open_file(path: Path) -> optuna.storages.RDBStorage:
    """Open the study file. A damaged one is renamed: the journals hold all of it.

    Raises `StoppedError` if it cannot be read for another reason: its locks or its disk.

    SQLite does not wait for the disk: a kill loses nothing even so, a power cut at worst this file,
    and a draw takes 18 ms instead of 140.
    """
    if path.exists() and (damage := _damage(path)):
        number = len(list(path.parent.glob(f"{path.name}.damaged*")))
        aside = path.rename(path.with_name(f"{path.name}.damaged{number or ''}"))
        # SQLite's, of the transaction cut short
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
        log.warning(
            "%s is damaged (%s): rebuilt from the journals; the old one is %s",
            path,
            damage,
            aside.name,
        )
    engine_settings = {"connect_args": {"timeout": LOCKED_S}}
    storage = optuna.storages.RDBStorage(study_url(path), engine_kwargs=engine_settings)

    def relax(connection: sqlite3.Connection, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(storage.engine, "connect", relax)
    storage.engine.dispose()  # connections made so far
    return storage


def _damage(path: Path) -> str | None:
    """Return an SQLite file's damage, or None. Raises `StoppedError` if unreadable now."""
    plain = "" if has_locks(path.parent) else "?nolock=1"
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}{plain}", timeout=LOCKED_S, uri=True)
        ) as connection:
            answer = str(connection.execute("PRAGMA quick_check").fetchone()[0])
    except sqlite3.DatabaseError as error:
        if not any(word in str(error) for word in DAMAGES):
            raise sessions.StoppedError(f"{path} cannot be read: {error}") from None
        return str(error)
    return None if answer == "ok" else answer.splitlines()[0]
