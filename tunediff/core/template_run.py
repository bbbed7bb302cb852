"""What a process that a template has forked does: call the function of a run."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tunediff.core.errors import Failure

STARTED_WITH = dict(os.environ)
"""The environment in which the template has prepared."""


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which another process finds a function of a module."""
    return f"{function.__module__}:{function.__qualname__}"


def function_named(name: str) -> Callable[..., Any]:
    """Return the function that `name_of` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def call(descriptors: Sequence[int], function: str) -> NoReturn:
    """Call the function of a run in this process, then end it at once: a user's threads may hold
    up an orderly exit."""
    connection, status = Connection(descriptors[0]), 1
    try:
        for stream, descriptor in enumerate(descriptors[1:], 1):  # of its parent
            os.dup2(descriptor, stream)
            os.close(descriptor)
        environment, folder, content = connection.recv()
        _take_over(environment)
        os.chdir(folder or ".")
        function_named(function)(connection, content)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            connection.send(Failure.of(error))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _take_over(environment: Mapping[str, str]) -> None:
    """Set what the parent's environment has otherwise than this process was started with: what the
    user's file has set stays."""
    for name in environment.keys() | STARTED_WITH.keys():
        if environment.get(name) != STARTED_WITH.get(name):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
