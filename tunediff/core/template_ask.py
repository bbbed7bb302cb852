"""Ask processes for one answer: a function is called in each rank of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

from tunediff.core.errors import Failure
from tunediff.core.template import Template, TemplateError
from tunediff.core.template_process import Base


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """Return the environment of every rank of this machine as torchrun describes it; {} of one
    alone, which a file may take for one of several otherwise."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def ask(
    function: Callable[[Connection, Any], object], content: Any, *, within_s: float, ranks: int = 1,
    prepare: Callable[[Any], str | None] | None = None,
    options: Any = None, output: IO[bytes] | None = None, base: Base | None = None,
) -> Any:  # fmt: skip
    """Return the first message of `function(connection, content)`, called in a process for each
    rank, and end the processes.

    Raises TimeoutError, and `TemplateError` if one of them fails or none has a message.
    """
    until = time.monotonic() + within_s
    with contextlib.ExitStack() as stack:
        made = [Template(prepare, options, output, base=base) for _ in range(ranks)]
        for template in made:
            stack.enter_context(template)
        runs = [
            template.start(function, content, None, variables, max(0.0, until - time.monotonic()))
            for template, variables in zip(made, rank_variables(ranks), strict=True)
        ]
        while runs:
            sources = {source: run for run in runs for source in run.sources}
            ready = multiprocessing.connection.wait(sources, max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer within {within_s:.0f} s")
            run = sources[ready[0]]
            if (message := run.receive()) is not None:
                return message
            runs.remove(run)
    raise TemplateError(Failure("it has ended without an answer"))
