"""Note which files a program executes; `command.worktrees` puts this folder on its PYTHONPATH.

Python imports this file at its start. It takes the folder off the import path and gives its name
back, so that a `sitecustomize` of the user's runs as without it. Files are noted as they are
executed: a run is ended by a signal, after which nothing of it could tell.
"""

import contextlib
import os
import sys

_NOTE = os.environ.get("TUNEDIFF_LOADED")
_noted = {"<string>"}


def _note(event: str, values: "tuple[object, ...]") -> None:
    if _NOTE is None or event not in ("exec", "cpython.run_file"):
        return
    with contextlib.suppress(Exception):  # what a hook raises would end the program
        file = str(getattr(values[0], "co_filename", values[0]))
        if not file.startswith("<") and file not in _noted:
            _noted.add(file)
            with open(_NOTE, "a", encoding="utf-8", errors="replace") as note:
                note.write(f"{os.path.abspath(file)}\n")


sys.addaudithook(_note)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401 – or this error, which Python expects
