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
from tunediff.config import ConfigError
from tunediff.core import lock
from tunediff.core.environment import install_command
from tunediff.core.refusals import allow
from tunediff.experiment import model

INSTRUCTIONS = (
    "Finds the training configuration with the best result for its training seconds, on this"
    " machine. Order: doctor, knobs, a dry run, start with its token, status until it has ended,"
    " result, export. Run one search or comparison at a time: two disturb each other's clocks."
)
LOG_LINES = 8
"""Lines of the output that `status` returns."""
ANSWER_S = 600.0
"""Seconds within which a command has to answer: a dry run tries a user's file, which may hang."""
OWN_OPTIONS = ("--name", "--storage", "--json", "--dry-run", "--resume", "--force")
"""Options that the server gives itself, or that would pass by what a dry run has shown."""


class Server:
    """The tools; everything runs in processes of its own, as the commands do from a shell.

    A search or comparison NAME that a server starts has its output in `.NAME.log` beside its
    folder.
    """

    def __init__(self, storage: Path) -> None:
        """`storage`: folder of all searches and comparisons."""
        self._storage = storage.absolute()
        self._option = f"--storage={self._storage}"
        self._planned: dict[str, list[str]] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    # ---- tools
    def doctor(self) -> dict[str, Any]:
        """Check this machine: what works, what does not, and what that means for a search. Takes
        about a minute."""
        return self._json(["doctor", self._option])

    def knobs(self, workload: str = "digits", prefix: str = "") -> dict[str, Any]:
        """List the knobs of a workload (a name such as digits, or mine.py): type, bounds, default,
        help.

        prefix: a knob or a section, such as optimizer.
        """
        return self._json(["knobs", f"--workload={workload}", "--", *filter(None, [prefix])])

    def dry_run(self, words: Sequence[str]) -> dict[str, Any]:
        """Return what a search or a comparison would run and cost, and the token that starts it.
        Starts nothing.

        words: those of the command line, ["search", "mine.py", "--trials", "8", "--budget", "60s"],
        ["compare", "mine.py@HEAD", "mine.py", "--budget", "60s"], ["compare", "--run", "python
        train.py --lr {lr} --seed {seed}", "lr=1e-3", "lr=3e-3", "--objective", "val_loss",
        "--outcome", "final"].
        """
        command, *given = words
        allow(command in ("search", "compare"), "words", command, "search or compare, first")
        for word in given:
            option = word.partition("=")[0]
            refused = next((own for own in OWN_OPTIONS if option and own.startswith(option)), None)
            allow(len(option) < 3 or refused is None, "words", word, "what a dry run shows")
        planned = self._json([command, *given, self._option, "--dry-run"])
        token = secrets.token_hex(8)
        self._planned[token] = [command, *given]
        return {**planned, "token": token}

    def start(self, token: str) -> dict[str, Any]:
        """Start the search or comparison of a dry run, in the background; return its name."""
        allow(token in self._planned, "token", token, "one of a dry run that has not started yet")
        names = {*self._started, *(folder.name for folder in self._storage.glob("*/"))}
        if running := next(filter(self._running, sorted(names)), None):
            raise ConfigError(
                f"{running} is running; two disturb each other's clocks: wait for it, or stop it"
            )
        command, *given = self._planned.pop(token)
        name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{token[:4]}"
        self._storage.mkdir(parents=True, exist_ok=True)
        line = [*_module(command), *given, f"--name={name}", self._option, "--json"]
        with open(self._log(name), "wb") as log:
            nothing = subprocess.DEVNULL  # its JSON goes there, which `result` returns
            self._started[name] = subprocess.Popen(
                line, stdin=nothing, stdout=nothing, stderr=log, start_new_session=True
            )
        return {"name": name, "folder": str(self._storage / name)}

    def status(self, name: str) -> dict[str, Any]:
        """Return whether a search or comparison is running, its latest lines, and, once it has
        ended, its exit code if this server has started it."""
        self._check(name)
        log, process = self._log(name), self._started.get(name)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        running = self._running(name)
        exit_code = None if running or process is None else process.poll()
        return {"running": running, "exit_code": exit_code, "latest": lines}

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a search or comparison; what it has measured stays, and its command with --resume
        NAME goes on."""
        self._check(name)
        process, holder = self._started.get(name), lock.runner(self._storage / name)
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        elif holder is not None:
            if holder.host != socket.gethostname():
                raise ConfigError(
                    f"{name} runs in process {holder.pid} on {holder.host}; stop it there"
                )
            os.kill(holder.pid, signal.SIGTERM)
        return self.status(name)

    def result(self, name: str) -> dict[str, Any]:
        """Return what a search or comparison has shown so far, as `tunediff search --json` or
        `compare --json` do."""
        self._check(name)
        if not (self._storage / name).exists():
            raise ConfigError(f"{name}: has not begun")
        # In another process: reading a search imports the user's file, which may print or hang.
        return self._json(["mcp", f"--result={name}", self._option])

    def export(self, name: str, path: str | None = None) -> dict[str, Any]:
        """Write the best configuration of a search to a YAML file, with its weights; return the
        paths."""
        self._check(name)
        return self._json(
            ["export", *([] if path is None else [f"--out={path}"]), self._option, "--", name]
        )

    # ---- how
    def _json(self, words: Sequence[str]) -> dict[str, Any]:
        """Run a command and return the JSON that it prints. Raises `ConfigError` with what it says
        instead."""
        line, pipe = [*_module(words[0]), "--json", *words[1:]], subprocess.PIPE
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                answer, log = process.communicate(timeout=ANSWER_S)
            except BaseException as error:
                # The whole group: what the command has started holds its output open.
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise ConfigError(f"{words[0]}: no answer within {ANSWER_S:g} s") from None
                raise
        try:
            printed: dict[str, Any] = json.loads(answer)
        except ValueError:
            code = f"{words[0]}: exit code {process.returncode}"
            raise ConfigError(log.strip().removeprefix("error: ") or code) from None
        print(log, end="", file=sys.stderr, flush=True)
        return printed

    def _check(self, name: str) -> None:
        """Raise `ConfigError` unless there is a search or comparison of this name."""
        known = self._log(name).exists() or (self._storage / name).is_dir()
        allowed = f"the name of a search or comparison in {self._storage}"
        allow(os.path.basename(name) == name and known, "name", name, allowed)

    def _log(self, name: str) -> Path:
        return self._storage / f".{name}.log"

    def _running(self, name: str) -> bool:
        process = self._started.get(name)
        held = lock.runner(self._storage / name) is not None
        return held or (process is not None and process.poll() is None)


def _module(command: str) -> list[str]:
    return [sys.executable, "-m", f"tunediff.{command}"]


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


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = cli.parser("mcp", __doc__ or "")
    cli.add_storage(parser)
    # For the server itself: print what the tool `result` returns.
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the client closes stdin; see `--help`."""
    args = arguments(argv)
    if args.result is None:
        serve(args.storage).run("stdio")
        return cli.OK
    from tunediff.api.comparison import PairedComparison
    from tunediff.api.search import Search

    folder = args.storage / args.result
    kind = Search if model.is_search(folder) else PairedComparison
    cli.print_json(kind(folder).json())
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
