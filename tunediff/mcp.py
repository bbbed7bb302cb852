"""Serve the commands as tools to coding agents over stdio, by the Model Context Protocol: `tunediff
mcp`.

An agent's client starts it, for example with {"command": "tunediff", "args": ["mcp"]}. A search or
a comparison starts only with the token that its dry run gave: its cost is seen before it is spent.
What was started goes on when the server ends.
"""

from __future__ import annotations

import argparse
import contextlib
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

import psutil

from tunediff import __version__, cli
from tunediff.config import ConfigError
from tunediff.core import lock
from tunediff.core.environment import install_command
from tunediff.core.refusals import allow

INSTRUCTIONS = (
    "Finds the training configuration with the best result for its training seconds, on this"
    " machine. Order: doctor, knobs, a dry run, start with its token, status until it has ended,"
    " result, export. Run one search or comparison at a time: two disturb each other's clocks."
)
LOG_LINES = 8
"""Lines of the output that `status` returns."""
ANSWER_S = 600.0
"""Seconds within which a command has to answer: a dry run tries a user's file, which may hang."""
PROCESS = ".process"


class Server:
    """The tools; everything runs in processes of its own, as the commands do from a shell.

    A search or comparison NAME that a server starts has two files beside its folder: `.NAME.log`,
    and `.NAME.process`, which names its process until it has a lock.
    """

    def __init__(self, storage: Path) -> None:
        """`storage`: folder of all searches and comparisons."""
        self._storage = storage.absolute()
        self._option = f"--storage={self._storage}"
        self._planned: dict[str, tuple[str, list[str], list[str]]] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    # ---- tools
    def doctor(self) -> dict[str, Any]:
        """Check this machine: what works, what does not, and what that means for a search. Takes
        about a minute."""
        return self._json("doctor", self._option)

    def knobs(self, workload: str = "digits", prefix: str = "") -> dict[str, Any]:
        """List the knobs of a workload (a name such as digits, or mine.py): type, bounds, default,
        help.

        prefix: a knob or a section, such as optimizer.
        """
        return self._json("knobs", f"--workload={workload}", words=[prefix] if prefix else [])

    def dry_run_search(
        self, search: str = "digits", knobs: Sequence[str] = (), trials: int | None = None,
        budget: str | None = None, total: str | None = None, confirm: int | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a search would run and cost, and the token that starts it. Starts nothing.

        search: a search file, a shipped one's name, or a workload's file. knobs: fixed ones,
        "optimizer.lr=1e-3". trials: in all. budget: training seconds per trial, "60s". total:
        wall-clock of the whole, "2h". confirm: how many of the best are run again on new seeds; 0:
        none.
        """
        options = {"trials": trials, "budget": budget, "total": total, "confirm": confirm}
        return self._plan("search", [search, *knobs], options | {"seed": seed})

    def dry_run_comparison(
        self, a: str, b: str | None = None, a_knobs: Sequence[str] = (),
        b_knobs: Sequence[str] = (), budget: str | None = None, pairs: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a comparison of B with A would run and cost, and the token that starts it.
        Starts nothing.

        a, b: a configuration file, a baseline such as digits, or a workload's file, also
        mine.py@REVISION of its git repository; without b it is A with b_knobs. budget: training
        seconds of a run. pairs: of runs at most.
        """
        allowed = "a configuration or a workload's file, or b_knobs"
        allow(b is not None or len(b_knobs) > 0, "b", None, allowed)
        words = [a, *a_knobs, *([b] if b is not None else [a, *a_knobs]), *b_knobs]
        return self._plan("compare", words, {"budget": budget, "pairs": pairs})

    def dry_run_command_comparison(
        self, commands: Sequence[str], objective: str, values: Sequence[str] = (),
        revisions: Sequence[str] = (), mode: str | None = None, outcome: str = "budget",
        pattern: str | None = None, budget: str | None = None, pairs: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a comparison of commands would run, and the token that starts it. Starts
        nothing.

        A and B differ in one thing: two commands, two git revisions ("HEAD", "." is the working
        copy), or one value given twice ("lr=1e-3", "lr=3e-3"). commands: with {name} for values and
        {seed}, "python train.py --lr {lr} --seed {seed}". objective: the metric as they print it.
        mode: min or max (None: min, unless the name says more is better). outcome: budget (the
        value when the budget is spent) or final. pattern: a regular expression for the metric.
        """
        options: dict[str, Any] = {"run": commands, "at": revisions, "objective": objective}
        options |= {"mode": mode, "outcome": outcome, "pattern": pattern}
        options |= {"budget": budget, "pairs": pairs}
        return self._plan("compare", values, options)

    def dry_run_command_search(
        self, command: str, objective: str, baseline: dict[str, Any], search: dict[str, Any],
        mode: str | None = None, outcome: str = "budget", pattern: str | None = None,
        budget: str | None = None, trials: int | None = None, total: str | None = None,
        confirm: int | None = None, seed: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a search over the parameters of a command would run and cost, and the token
        that starts it. Starts nothing.

        command, objective, mode, outcome, pattern: as for a comparison of commands. baseline: a
        value for each {name} in the command. search: values to choose from, {"lr": [1e-3, 1e-2]},
        or a range, {"lr": {"low": 1e-4, "high": 1e-2, "log": true}}. budget: seconds per trial,
        "60s". trials: in all. total, confirm: as for other searches.
        """
        from tunediff.api import command_calls
        from tunediff.api.search import SearchCall

        call = SearchCall(
            command=command, objective=objective, baseline=baseline, search=search, mode=mode,
            outcome=outcome, pattern=pattern, budget=budget, trials=trials, storage=self._storage,
        )  # fmt: skip
        options = {"total": total, "confirm": confirm, "seed": seed}
        return self._plan("search", [str(command_calls.search_file(call))], options)

    def start(self, token: str) -> dict[str, Any]:
        """Start the search or comparison of a dry run, in the background; return its name."""
        allowed = "one of a dry run that has not started yet"
        allow(token in self._planned, "token", token, allowed)
        names = {folder.name for folder in self._storage.glob("*/")}
        names |= {
            file.name[1:].removesuffix(PROCESS) for file in self._storage.glob(f".*{PROCESS}")
        }
        if running := next(filter(self._running, sorted(names)), None):
            raise ConfigError(
                f"{running} is running; two disturb each other's clocks: wait for it, or stop it"
            )
        command, options, words = self._planned.pop(token)
        name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{token[:4]}"
        self._storage.mkdir(parents=True, exist_ok=True)
        line = [*_module(command), *options, f"--name={name}", self._option, "--json", "--", *words]
        with open(self._file(name, ".log"), "wb") as log:
            nothing = subprocess.DEVNULL  # its JSON goes there, which `result` returns
            process = self._started[name] = subprocess.Popen(
                line, stdin=nothing, stdout=nothing, stderr=log, start_new_session=True
            )
        with contextlib.suppress(psutil.NoSuchProcess):
            self._file(name, PROCESS).write_text(lock.identity(process.pid))
        return {"name": name, "folder": str(self._storage / name)}

    def status(self, name: str) -> dict[str, Any]:
        """Return whether a search or comparison is running, its latest lines, and, once it has
        ended, its exit code if this server has started it."""
        self._check(name)
        log, process = self._file(name, ".log"), self._started.get(name)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        running = self._running(name)
        exit_code = None if running or process is None else process.poll()
        return {"running": running, "exit_code": exit_code, "latest": lines}

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a search or comparison; what it has measured stays, and its command with --resume
        NAME goes on."""
        self._check(name)
        process, holder = self._started.get(name), self._runner(name)
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
        return self._json("mcp", f"--result={name}", self._option)

    def export(self, name: str, path: str | None = None) -> dict[str, Any]:
        """Write the best configuration of a search to a YAML file, with its weights; return the
        paths."""
        self._check(name)
        out = [] if path is None else [f"--out={path}"]
        return self._json("export", *out, self._option, words=[name])

    # ---- how
    def _plan(self, command: str, words: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
        """Return the dry run of a command, with a token for it."""
        allowed = "knob=value; options have arguments of their own"
        for word in words:
            allow(not word.startswith("-"), "knobs", word, allowed)
        named = [
            f"--{key}={value}"
            for key, given in options.items()
            for value in (given if isinstance(given, list | tuple) else [given])
            if value is not None
        ]
        planned = self._json(command, *named, self._option, "--dry-run", words=words)
        token = secrets.token_hex(8)
        self._planned[token] = command, named, list(words)
        return {**planned, "token": token}

    def _json(self, command: str, *options: str, words: Sequence[str] = ()) -> dict[str, Any]:
        """Run a command and return the JSON that it prints. Raises `ConfigError` with what it says
        instead."""
        line = [*_module(command), *options, "--json", *(["--", *words] if words else [])]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(
            line, stdin=nothing, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                answer, log = process.communicate(timeout=ANSWER_S)
            except BaseException as error:
                # The whole group: what the command has started holds its output open.
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise ConfigError(f"{command}: no answer within {ANSWER_S:g} s") from None
                raise
        try:
            printed: dict[str, Any] = json.loads(answer)
        except ValueError:
            code = f"{command}: exit code {process.returncode}"
            raise ConfigError(log.strip().removeprefix("error: ") or code) from None
        print(log, end="", file=sys.stderr, flush=True)
        return printed

    def _check(self, name: str) -> None:
        """Raise `ConfigError` unless there is a search or comparison of this name."""
        known = self._file(name, ".log").exists() or (self._storage / name).is_dir()
        allowed = f"the name of a search or comparison in {self._storage}"
        allow(os.path.basename(name) == name and known, "name", name, allowed)

    def _file(self, name: str, ending: str) -> Path:
        return self._storage / f".{name}{ending}"

    def _running(self, name: str) -> bool:
        process = self._started.get(name)
        return (process is not None and process.poll() is None) or self._runner(name) is not None

    def _runner(self, name: str) -> lock.Runner | None:
        """Return the process that runs it, whoever has started it.

        A process of another machine counts once it has the lock, which an end empties: from here
        nobody can see whether it lives.
        """
        folder = self._storage / name
        if (folder / lock.LOCK).exists():
            return lock.runner(folder)
        starting = lock.alive(self._file(name, PROCESS))
        return starting if starting is not None and starting.host == socket.gethostname() else None


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
    kind = Search if (folder / "search.yaml").exists() else PairedComparison
    cli.print_json(kind(folder).json())
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
