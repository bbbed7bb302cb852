"""Note which files a program executes; `command.worktrees` puts this folder on its PYTHONPATH.

Python imports this file at its start. It takes the folder off the import path and gives its name
back, so that a `sitecustomize` of the user's runs as without it. Files are noted as they are
executed: a run is ended by a signal, after which nothing of it could tell.
"""

import contextlib
import os
import sys

_noted = {"<frozen>"}


def _note(event: str, values: "tuple[object, ...]") -> None:
    if event not in ("exec", "cpython.run_file"):
        return
    file = str(getattr(values[0], "co_filename", values[0]))
    if not file.startswith("<") and file not in _noted:
        _noted.add(file)
        with contextlib.suppress(OSError), open(os.environ["TUNEDIFF_LOADED"], "a") as note:
            note.write(f"{os.path.abspath(file)}\n")


sys.addaudithook(_note)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found] # noqa: E402, F401 – or this error, which Python expects
