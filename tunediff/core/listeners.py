"""Tell what shows, copies or records a search, comparison or training what happens in it.

A `Listener` hears five events. `Listeners` passes them on, each listener in its own thread: one
that fails or hangs is named once, and neither the trials nor the other listeners notice.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunediff.core.errors import ConfigError

log = logging.getLogger(__name__)

Say = Callable[[str], object]
LATE_S, END_S = 10.0, 900.0
"""Seconds that an event of a trial, and the end of the search, wait for one listener."""


@dataclasses.dataclass(frozen=True)
class Activity:
    """A search, a comparison, a training, or a study whose trials the caller runs."""

    module: str
    """The command that runs it: `search`, `compare`, `train`; or `ask`."""
    folder: Path
    resume: str
    """The command that goes on with it."""
    objective: str
    settings: Mapping[str, Any]
    """What a tracker shows as the configuration of the search as a whole."""
    track: str | None
    """The tracking service that was asked for."""
    result: Callable[[], Mapping[str, Any]] = dict
    """Returns the result once it has ended."""


class Listener:
    """Hears events; a subclass overrides those that it needs. `content` is as Ray Tune has it."""

    def search_begin(self, say: Say) -> None:
        """Hear that the search begins; `say` shows the user a message."""

    def start(self, trial: str, content: Mapping[str, Any]) -> None:
        """Hear that a trial starts; `content`: its drawn values."""

    def point(self, trial: str, content: Mapping[str, Any]) -> None:
        """Hear of an evaluation; `content`: what was measured."""

    def end(self, trial: str, content: Mapping[str, Any]) -> None:
        """Hear that a trial has ended, as its journal says; `content`: its drawn values."""

    def search_end(self, result: Callable[[], Mapping[str, Any]] | None) -> None:
        """Hear that the search has ended; `result` returns what it found, None: it stopped."""


class _ListenerThread:
    """Calls one listener in a thread of its own, in order."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._events = queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]()
        self._named = self._late = False
        threading.Thread(target=self._work, daemon=True).start()

    def tell(self, event: str, *content: Any) -> None:
        """Call a method of the listener and wait until it returns, for a while."""
        call = functools.partial(getattr(self._listener, event), *content)
        done = threading.Event()
        # IPython's displays belong to the context of the cell that runs.
        self._events.put((functools.partial(contextvars.copy_context().run, call), done))
        is_end = event == "search_end"
        wait_s = END_S if is_end and not self._late else LATE_S
        if not done.wait(0.0 if self._late and not is_end else wait_s):
            self._late = True
            self._name(f"takes longer than {wait_s:.0f} s for {event}; nothing waits for it")

    def _work(self) -> None:
        while True:
            call, done = self._events.get()
            try:
                call()
                self._late = False
            except BaseException as error:  # `SystemExit` of a package too
                self._name(f"failed: {type(error).__name__}: {error}")
                log.debug("the listener's error", exc_info=True)
            done.set()

    def _name(self, why: str) -> None:
        if not self._named:
            self._named = True
            log.warning("%s %s", type(self._listener).__name__, why)


class Listeners:
    """Passes events on to all listeners of one activity."""

    def __init__(self, *makers: Callable[[Activity], Iterator[Listener]]) -> None:
        """`makers`: of what hears an activity, in the order in which they hear its end."""
        self._makers = makers
        self._threads: list[_ListenerThread] = []
        self._say: Say = log.warning

    def say(self, message: str) -> None:
        """Show the user a message, where the progress is shown now."""
        self._say(message)

    def set_output(self, say: Say) -> None:
        """Let listeners show their messages by `say` from now on."""
        self._say = say

    def tell(self, event: str, trial: str, content: Mapping[str, Any]) -> None:
        """Pass on `start`, `point` or `end` of a trial."""
        for thread in tuple(self._threads):
            thread.tell(event, trial, content)

    @contextlib.contextmanager
    def with_listeners(self, *listeners: Listener) -> Iterator[None]:
        """Let further listeners hear the trials inside."""
        threads = [_ListenerThread(listener) for listener in listeners]
        self._threads += threads
        try:
            yield
        finally:
            self._threads = [one for one in self._threads if one not in threads]

    @contextlib.contextmanager
    def opened(self, activity: Activity, say: Say) -> Iterator[None]:
        """Tell all listeners of an activity that it begins and how it ends."""
        self._say = say
        with self.with_listeners(*self._made(activity)):
            threads = tuple(self._threads)
            result: Callable[[], Mapping[str, Any]] | None = None
            with contextlib.ExitStack() as ends:
                for thread in reversed(threads):  # every one hears the end, also after Ctrl-C
                    ends.callback(lambda one: one.tell("search_end", result), thread)
                for thread in threads:
                    thread.tell("search_begin", self.say)
                yield
                result = activity.result

    def _made(self, activity: Activity) -> Iterator[Listener]:
        """Yield an activity's listeners; report what fails, but let refusals pass."""
        for maker in self._makers:
            try:
                yield from maker(activity)
            except ConfigError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                log.warning("%s failed: %s", maker.__module__, why)
