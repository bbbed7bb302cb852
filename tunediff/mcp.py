"""Serve the commands as tools to coding agents over stdio, by the Model Context Protocol: `tunediff
mcp`.

An agent's client starts it, for example with {"command": "tunediff", "args": ["mcp"]}. A search or
a comparison starts only with the token that its dry run gave: its cost is seen before it is spent.
What was started goes on when the server ends.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import __version__, cli
from tunediff.core import lock, remote
from tunediff.core.environment import install_command
from tunediff.core.errors import ConfigError
from tunediff.core.options import option
from tunediff.core.refusals import allow
from tunediff.experiment.model import is_search

INSTRUCTIONS = (
    "Finds the training configuration with the best result for its training seconds, on this"
    " machine. Order: doctor, knobs, a dry run, start with its token, status until it has ended,"
    " result, export. Run one search or comparison at a time: two disturb each other's clocks."
)
LOG_LINES, ANSWER_S = 8, 600.0
"""Lines of the output that `status` returns; seconds within which a command has to answer."""
OWN_OPTIONS = ("--force", "--name", "--resume", "--storage")
"""Options that the server gives itself, or that would pass by what a dry run has shown."""


class Server:
    """The tools; everything runs in processes of its own, as the commands do from a shell. The
    output of a search or comparison NAME is in `.NAME.log` beside its folder."""

    def __init__(self, storage: Path) -> None:
        self._storage, self._option = storage.absolute(), f"--storage={storage.absolute()}"
        self._planned = dict[str, list[str]]()
        self._started = dict[str, subprocess.Popen[bytes]]()

    def doctor(self) -> dict[str, Any]:
        """Check this machine: what works, what does not, and what that means for a search. Takes
        about a minute."""
        return _json("doctor", self._option)

    def knobs(self, workload: str = "digits", prefix: str = "") -> dict[str, Any]:
        """List the knobs of a workload (a name such as digits, or mine.py): type, bounds, default,
        help. prefix: a knob or a section, such as optimizer."""
        return _json("knobs", f"--workload={workload}", "--", *filter(None, [prefix]))

    def dry_run(self, words: Sequence[str]) -> dict[str, Any]:
        """Return what a search or a comparison would run and cost, and the token that starts it.
        words: those of the command line, ["search", "mine.py", "--trials", "8", "--budget", "60s"],
        ["compare", "mine.py@HEAD", "mine.py", "--budget", "60s"], ["compare", "--run", "python
        train.py --lr {lr} --seed {seed}", "lr=1e-3", "lr=3e-3", "--objective", "val_loss",
        "--outcome", "final"]."""
        command, *given = words
        allow(command in ("search", "compare"), "words", command, "search or compare, first")
        for word in given:
            option = word.partition("=")[0]  # argparse takes --stor as well
            own = len(option) > 2 and any(one.startswith(option) for one in OWN_OPTIONS)
            allow(not own, "words", word, "what a dry run shows")
        token = secrets.token_hex(8)
        planned = {**_json(command, *given, self._option, "--dry-run"), "token": token}
        self._planned[token] = [command, *given]
        return planned

    def start(self, token: str) -> dict[str, Any]:
        """Start the search or comparison of a dry run, in the background; return its name."""
        allow(token in self._planned, "token", token, "one of a dry run that has not started yet")
        names = {*self._started, *(folder.name for folder in self._storage.glob("*/"))}
        running = next(filter(self._running, sorted(names)), "")
        allow(not running, "token", token, f"once {running} has ended: it is running")
        command, *given = self._planned.pop(token)
        name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{token[:4]}"
        self._storage.mkdir(parents=True, exist_ok=True)
        line = [*_module(command), *given, f"--name={name}", self._option, "--json"]
        none = subprocess.DEVNULL  # its JSON goes there, which `result` returns
        with open(self._log(name), "wb") as log:
            self._started[name] = subprocess.Popen(
                line, stdin=none, stdout=none, stderr=log, start_new_session=True
            )
        return {"name": name, "folder": str(self._storage / name)}

    def status(self, name: str) -> dict[str, Any]:
        """Return whether a search or comparison is running, its latest lines, and, once it has
        ended, its exit code if this server has started it."""
        folder, log, process = self._folder(name), self._log(name), self._started.get(name)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        exit_code = process.poll() if process is not None else None
        return {"running": self._running(folder.name), "exit_code": exit_code, "latest": lines}

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a search or comparison; what it has measured stays, and its command with --resume
        NAME goes on."""
        holder, process = lock.runner(self._folder(name)), self._started.get(name)
        if process is not None:
            process.terminate()
            process.wait()
        elif holder is not None:
            here = holder.host == socket.gethostname()
            allow(here, "name", name, f"on {holder.host}, where it runs in process {holder.pid}")
            os.kill(holder.pid, signal.SIGTERM)
        return self.status(name)

    def result(self, name: str) -> dict[str, Any]:
        """Return what a search or comparison has shown so far, as `tunediff search --json` or
        `compare --json` do."""
        return _json("mcp", f"--result={self._folder(name)}")  # which runs the user's file

    def export(self, name: str, path: str | None = None) -> dict[str, Any]:
        """Write the best configuration of a search to a YAML file, with its weights; return the
        paths."""
        out = [] if path is None else [f"--out={path}"]
        return _json("export", *out, "--", str(self._folder(name)))

    def _folder(self, name: str) -> Path:
        known = os.path.basename(name) == name and (self._storage / name).is_dir()
        started = name in self._started
        allow(known or started, "name", name, f"of a search or comparison in {self._storage}")
        return self._storage / name

    def _log(self, name: str) -> Path:
        return self._storage / f".{name}.log"

    def _running(self, name: str) -> bool:
        process = self._started.get(name)
        held = lock.runner(self._storage / name) is not None
        return held or (process is not None and process.poll() is None)


def _module(command: str) -> list[str]:
    return [sys.executable, "-m", f"tunediff.{command}"]


def _json(command: str, *words: str) -> dict[str, Any]:
    """Return the JSON that a command prints. Raises `ConfigError` with what it says instead."""
    try:
        done = subprocess.run(
            [*_module(command), "--json", *words], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=ANSWER_S,
        )  # fmt: skip
        printed: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        said = done.stderr.strip() if isinstance(error, ValueError) else str(error)
        raise ConfigError(said.removeprefix("error: ") or f"{command}: no answer") from None
    print(done.stderr, end="", file=sys.stderr, flush=True)
    return printed


def serve(storage: Path) -> Any:
    """Return the server with its tools. Raises `ConfigError` without the package `mcp`."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise ConfigError(f"mcp: is not installed; {install_command('mcp')}") from None

    def answered(tool: Any) -> Any:
        @functools.wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return tool(*args, **kwargs)
            except (ConfigError, OSError) as error:
                raise ToolError(str(error)) from error

        return call

    tools = Server(storage)
    server = MCPServer("tunediff", instructions=INSTRUCTIONS, version=__version__)
    for name in vars(Server):
        if not name.startswith("_"):
            server.tool()(answered(getattr(tools, name)))
    return server


class McpOptions(remote.StorageOptions):
    """The options of the command."""

    result: Path | None = option(None, argparse.SUPPRESS)
    """For the server itself: print what the tool `result` returns."""
    as_json: bool = option(False, argparse.SUPPRESS, flag="--json")


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the client closes stdin; see `--help`."""
    options = cli.parse("mcp", __doc__, McpOptions, argv)
    if options.result is None:
        serve(Path(options.storage)).run("stdio")
        return cli.OK
    from tunediff.api.compare import PairedComparison
    from tunediff.api.search import Search

    kind = Search if is_search(options.result) else PairedComparison
    cli.print_json(kind(options.result).json())
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
