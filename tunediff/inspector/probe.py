"""Time an evaluation before a search in a process of its own. Imports no torch: slow.

The process is `tunediff.inspector.rehearsal`.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypedDict, cast

from tunediff.config import ConfigError, Values
from tunediff.config.systems import Systems
from tunediff.core.template import Template, TemplateError
from tunediff.training import entries
from tunediff.training.number_formats import FormatChoice

PROBE_S = 60.0
"""What takes longer to be timed is not known."""


class Measured(TypedDict, total=False):
    """What is known of a search before it starts."""

    data: list[str]
    """Lines about the images that are learned: see `Images.summary`."""
    evaluation_s: float
    """Seconds of one evaluation; absent: not known, or no model is evaluated."""
    final_s: float
    """The same by the search's `final`."""
    confirming_final_s: float
    """The same by the `final` of its confirming runs."""
    evaluation_format: FormatChoice
    """What `evaluation.precision: auto` is in the search; absent: nothing was measured."""
    parameters: int
    """Parameters of the model; absent if its workload does not say how to build it."""
    saved_parameters: int
    """Those that are written, an adapter's without its frozen base; absent: all."""


def before_search(
    config: Systems,
    evaluates: bool,
    prepare: bool = True,
    finals: Mapping[str, Values] | None = None,
    prepared: Callable[[], Template] | None = None,
) -> Measured:
    """Call `measured` in a process that leaves nothing behind; report it on stderr.

    Without seconds where that fails, after a line that says why. `prepare`: prepare evaluations
    completely, however long it takes; else what takes over `PROBE_S` is not timed. `prepared`:
    returns the template of the runs that follow. Raises `ConfigError` for
    data that cannot be used, as every trial would.
    """
    answered, limit_s = dict[str, Any](), None
    with contextlib.ExitStack() as stack:
        if prepared is not None:
            template = prepared()
        else:
            new = Template(entries.prepare, config.schema.workload, base=entries.prepare_base)
            template = stack.enter_context(new)
        content = (pickle.dumps(config), evaluates, dict(finals or {}))
        try:
            run = template.start(answer, content, streams=(2, 2))
            while (message := run.receive(limit_s)) is not None:
                answered, limit_s = message or answered, None if prepare else PROBE_S
        except TimeoutError:
            template.close()
            why = f"it takes over {PROBE_S:.0f} s here"
            print(f"WARNING: one evaluation could not be timed: {why}", file=sys.stderr)
        except TemplateError as error:
            print(f"WARNING: what a trial costs could not be measured: {error}", file=sys.stderr)
    if refused := answered.get("refused"):
        raise ConfigError(refused)
    return cast("Measured", answered)


def answer(connection: Connection, content: Any) -> None:
    """Measure in a process that imports torch; the function of a template's run."""
    from tunediff.inspector import rehearsal

    rehearsal.answer(connection, content)
