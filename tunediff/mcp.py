"""Serve the commands as tools to coding agents, by the Model Context Protocol: `tunediff mcp`.

A search or comparison starts only by the token of its dry run, and goes on when the server ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tunediff import __version__, cli
from tunediff.core import lock, remote
from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.options import allow, timed_name

PYTHON = (sys.executable, "-m", "tunediff")
Command = Literal["doctor", "knobs", "export", "search", "compare"]
OWN = ("--force", "--name", "--resume", "--storage")  # the server gives them, or none shall


class Tools:
    """Finds the training configuration with the best result for its training seconds, on this
    machine. Order: doctor, knobs, a dry run, start with its token, status until it has ended,
    result, export. Run one search or comparison at a time: two disturb each other's clocks."""

    def __init__(self, storage: Path) -> None:
        self._storage, self._planned = storage.absolute(), dict[str, list[str]]()
        self._started = dict[str, subprocess.Popen[bytes]]()

    def run(self, command: Command, words: list[str]) -> dict[str, Any]:
        """Return the JSON of `doctor` (a minute), `knobs --workload mine.py`, `export NAME`, or of
        a dry run, the cost and a token: `search mine.py --trials 8 --budget 60s`, `compare
        mine.py@HEAD mine.py --budget 60s`, `compare --run "python train.py --lr {lr} --seed {seed}"
        lr=1e-3 lr=3e-3 --objective val_loss`. words: what stands behind the command, in a list."""
        storage = [f"--storage={self._storage}"] * (command != "knobs")
        if command not in ("search", "compare"):
            return _json(command, *words, *storage)
        for given in (word.partition("=")[0] for word in words if len(word) > 2):
            allow(not any(own.startswith(given) for own in OWN), "words", given, "all other ones")
        plan = _json(command, *words, *storage, "--dry-run")
        self._planned[token := timed_name(command)] = [command, *words]
        return {**plan, "token": token}

    def start(self, token: str) -> dict[str, Any]:
        """Start the search or comparison of a dry run, in the background; return its name."""
        allow(token in self._planned, "token", token, "one of a dry run that has not started yet")
        names = [*self._started, *(folder.name for folder in self._storage.glob("*/"))]
        running = next((name for name in names if self.status(name)["running"]), "")
        allow(not running, "token", token, f"once {running} has ended: it is running")
        options = (f"--name={token}", f"--storage={self._storage}", "--json")
        line, none = [*PYTHON, *self._planned.pop(token), *options], subprocess.DEVNULL
        self._storage.mkdir(parents=True, exist_ok=True)
        with open(self._storage / f".{token}.log", "wb") as log:
            self._started[token] = subprocess.Popen(
                line, stdin=none, stdout=none, stderr=log, start_new_session=True
            )
        return {"name": token, "folder": str(self._storage / token)}

    def status(self, name: str) -> dict[str, Any]:
        """Return whether it is running, its latest lines, and its exit code if it began here."""
        folder, process = self._storage / name, self._started.get(name)
        allow(process is not None or folder.is_dir(), "name", name, f"one in {self._storage}")
        code = process.poll() if process is not None else None
        running = (process is not None and code is None) or lock.is_running(folder)
        log = folder.with_name(f".{name}.log")
        lines = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
        return {"running": running, "exit_code": code, "latest": lines}

    def stop(self, name: str) -> dict[str, Any]:
        """Stop what this server has started; what it measured stays, and --resume goes on."""
        allow(name in self._started, "name", name, "what this server has started")
        self._started[name].terminate()
        self._started[name].wait()
        return self.status(name)

    def result(self, name: str) -> dict[str, Any]:
        """Return what a search or comparison has shown so far, and write its report."""
        self.status(name)  # refuses what is no name
        written = _json("report", name, f"--storage={self._storage}")["report"]
        return dict(json.loads(Path(written).with_name("result.json").read_bytes()))


def _json(*words: str) -> dict[str, Any]:
    """Return the JSON that a command prints. Raises `ConfigError` with what it says instead."""
    line, none = [*PYTHON, *words, "--json"], subprocess.DEVNULL
    done = subprocess.run(line, stdin=none, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        raise ConfigError(done.stderr.strip().removeprefix("error: ") or done.stdout)
    return dict(json.loads(done.stdout))


def serve(storage: Path) -> Any:
    """Return the server with its tools. Raises `ConfigError` without the package `mcp`."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise ConfigError(f"mcp: is not installed; {install_command('mcp')}") from None

    @contextlib.contextmanager
    def refusals() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ToolError(str(error)) from error

    server = MCPServer("tunediff", instructions=Tools.__doc__, version=__version__)
    tools = Tools(storage)
    for tool in (tools.run, tools.start, tools.status, tools.stop, tools.result):
        server.tool()(refusals()(tool))
    return server


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the client closes stdin; see `--help`."""
    serve(Path(cli.parse("mcp", __doc__, remote.StorageOptions, argv).storage)).run("stdio")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
