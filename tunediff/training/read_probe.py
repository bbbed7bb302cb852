"""Which knobs a training reads, in a process of its own, which may run out of memory."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from tunediff import config as cfg
from tunediff.config.systems import Systems, eager
from tunediff.core.clock import Budget
from tunediff.core.template import Template, TemplateError
from tunediff.distributed import alone
from tunediff.training import prepared
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

LONGEST_S = 300.0


def knobs_read(configs: Sequence[Systems]) -> set[str]:
    """Return the knobs that a step and an evaluation read; stops at one that fails."""
    read, until = set[str](), time.monotonic() + LONGEST_S
    options = {"workload": configs[0].schema.workload, "trains": False}
    with (
        tempfile.TemporaryFile() as output,
        Template(prepared.PREPARE, options, output, base=prepared.BASE) as template,
        contextlib.suppress(TimeoutError, TemplateError),
    ):
        content = [pickle.dumps(config) for config in configs]
        process = template.start(f"{__name__}:tell", content, within_s=LONGEST_S)
        while (knobs := process.receive(max(0.0, until - time.monotonic()))) is not None:
            read.update(knobs)
    return read


def tell(connection: Connection, content: Sequence[bytes]) -> None:
    """Train each configuration for a step, and send which knobs were read; run by a template."""
    prepared.begin()
    for pickled in content:
        config = cfg.override(eager(pickle.loads(pickled)), {"evaluation.points": 1}, check=False)
        engine = Engine(config, Budget(steps=1), alone(), Observer())
        with contextlib.suppress(Exception, SystemExit):  # what it has read until then counts
            run(engine)
        connection.send(set(engine.read_knobs))
