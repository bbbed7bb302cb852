"""Which knobs a training reads in some of several configurations: `python -m
tunediff.training.read_probe`.

Runs in a process of its own, which may run out of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tunediff import config as cfg
from tunediff.config.systems import Systems, eager
from tunediff.core import processes
from tunediff.core.clock import Budget
from tunediff.core.files import write_text
from tunediff.distributed import from_environment
from tunediff.training import write_watch
from tunediff.training.engine import Engine
from tunediff.training.observer import Observer
from tunediff.training.trial import run

LONGEST_S = 300.0
_READ = "read.json"


def knobs_read(configs: Sequence[Systems]) -> set[str]:
    """Return the knobs that one step and an evaluation read in any of these configurations, up to
    one that fails."""
    with tempfile.TemporaryDirectory(prefix="tunediff-read-") as folder:
        for index, config in enumerate(configs):
            write_text(Path(folder) / f"{index:03}.yaml", cfg.dump(config))
        with contextlib.suppress(TimeoutError, RuntimeError):
            processes.answer("tunediff.training.read_probe", folder, within_s=LONGEST_S)
        return set(processes.read_answer(Path(folder) / _READ).get("read", ()))


def main(folder: Path, answer: Path) -> None:
    """Train each configuration of the folder for one step, and write after each which knobs have
    been read so far."""
    read = set[str]()
    with from_environment() as world, write_watch.watching(after_others=True) as writes:
        for path in sorted(folder.glob("*.yaml")):
            config = cfg.override(eager(cfg.load(path)), {"evaluation.points": 1}, check=False)
            engine = Engine(config, Budget(steps=1), world, Observer())
            with contextlib.suppress(Exception, SystemExit):  # what it has read until then counts
                run(engine)
            read.update(engine.read_knobs)
            write_text(folder / _READ, json.dumps({"read": sorted(read)}))
    writes.clean()
    write_text(answer, "{}")
    os._exit(0)  # threads of the user's may still run


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
