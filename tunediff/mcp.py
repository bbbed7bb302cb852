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
from typing import TYPE_CHECKING, Any

from tunediff import __version__, cli
from tunediff.config import ConfigError
from tunediff.core.environment import install_command

if TYPE_CHECKING:
    from tunediff.core.lock import Runner

INSTRUCTIONS = (
    "Finds the training configuration with the best result for its training seconds, on this"
    " machine. Order: doctor, knobs, dry_run_search or dry_run_comparison, start with its token,"
    " status until it has ended, result, export. Run one search or comparison at a time: two"
    " disturb each other's clocks."
)
LOG_LINES = 8
"""Of the output that `status` returns."""
ANSWER_S = 600.0
"""Seconds within which a command has to answer; a dry run tries a user's file, which may never
end."""
PROCESS = ".process"


class Server:
    """The tools; everything runs in processes of its own, as the commands do from a shell."""

    def __init__(self, storage: Path) -> None:
        """`storage`: folder of all searches and comparisons."""
        self._storage = storage.absolute()
        self._planned: dict[str, tuple[str, list[str], list[str]]] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    # ---- look around
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

    # ---- plan
    def dry_run_search(
        self, search: str = "digits", knobs: Sequence[str] = (), trials: int | None = None, budget: str | None = None,
        total: str | None = None, confirm: int | None = None, seed: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a search would run and cost, and the token that starts it. Starts nothing.

        search: a search file, a shipped one's name, or a workload's file. knobs: fixed ones,
        "optimizer.lr=1e-3". trials: in all. budget: training seconds per trial, "60s". total:
        wall-clock of the whole, "2h". confirm: how many of the best are run again on new seeds; 0:
        none.
        """
        options = {
            "trials": trials,
            "budget": budget,
            "total": total,
            "confirm": confirm,
            "seed": seed,
        }
        return self._plan("search", [search, *knobs], options)

    def dry_run_comparison(
        self, a: str, b: str | None = None, a_knobs: Sequence[str] = (), b_knobs: Sequence[str] = (),
        budget: str | None = None, pairs: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what a comparison of B with A would run and cost, and the token that starts it.
        Starts nothing.

        a, b: a configuration file, a baseline such as digits, or a workload's file, also
        mine.py@REVISION of its git repository; without b it is A with b_knobs. budget: training
        seconds of a run. pairs: of runs at most.
        """
        if b is None and not b_knobs:
            raise ConfigError(
                "b: nothing is not allowed; allowed: a configuration or a workload's file, or"
                " b_knobs"
            )
        other = [b] if b is not None else [a, *a_knobs]
        words = [a, *a_knobs, *other, *b_knobs]
        return self._plan("compare", words, {"budget": budget, "pairs": pairs})

    # ---- run
    def start(self, token: str) -> dict[str, Any]:
        """Start the search or comparison of a dry run, in the background; return its name."""
        if token not in self._planned:
            raise ConfigError(
                f"token: {token!r} is not allowed; allowed: one of a dry run that has not"
                " started yet"
            )
        earlier = [
            folder.name for folder in self._storage.glob("*/")
        ]  # by other servers, or from a shell
        without_folder = [
            file.name[1:].removesuffix(PROCESS) for file in self._storage.glob(f".*{PROCESS}")
        ]
        if running := [
            name for name in {*self._started, *earlier, *without_folder} if self._running(name)
        ]:
            raise ConfigError(
                f"{running[0]} is running; two disturb each other's clocks: wait for it, or stop it"
            )
        import psutil

        from tunediff.core.lock import identity

        command, options, words = self._planned.pop(token)
        name = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{token[:4]}"
        self._storage.mkdir(parents=True, exist_ok=True)
        line = [*_module(command), *options, f"--name={name}", self._option, "--json", "--", *words]
        environment = {**os.environ, cli.EXIT_CODE_FILE: str(self._exit_code_file(name))}
        with open(self._log(name), "wb") as log:  # the JSON on stdout is what `result` returns
            self._started[name] = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
                env=environment,
            )  # fmt: skip
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process(name).write_text(identity(self._started[name].pid))
        return {"name": name, "folder": str(self._storage / name)}

    def status(self, name: str) -> dict[str, Any]:
        """Return whether a search or comparison is running, its exit code if it has ended, and its
        latest lines."""
        self._check(name)
        log, running = self._log(name), self._running(name)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        return {
            "running": running,
            "exit_code": None if running else self._exit_code(name),
            "latest": lines,
        }

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a search or comparison; what it has measured stays, and its command with --resume
        NAME goes on."""
        self._check(name)
        process, holder = self._started.get(name), self._runner(name)
        if process is not None and process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
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
        return self._json(
            "mcp", f"--result={name}", self._option
        )  # a user's file runs, which may print or never end

    def export(self, name: str, path: str | None = None) -> dict[str, Any]:
        """Write the best configuration of a search to a YAML file, with its weights; return the
        paths."""
        self._check(name)
        out = [] if path is None else [f"--out={path}"]
        return self._json("export", *out, self._option, words=[name])

    # ---- how
    def _plan(self, command: str, words: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
        """Return the dry run of a command, with a token for it."""
        for word in words:
            cli.allow(
                not word.startswith("-"),
                "knobs",
                word,
                "knob=value; options have arguments of their own",
            )
        named = [f"--{key}={value}" for key, value in options.items() if value is not None]
        planned = self._json(command, *named, self._option, "--dry-run", words=words)
        token = secrets.token_hex(8)
        self._planned[token] = command, named, list(words)
        return {**planned, "token": token}

    def _json(self, command: str, *options: str, words: Sequence[str] = ()) -> dict[str, Any]:
        """Run a command and return the JSON that it prints. Raises `ConfigError` with what it says
        instead."""
        line = [*_module(command), *options, "--json", *(["--", *words] if words else [])]
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                answer, log = process.communicate(timeout=ANSWER_S)
            except BaseException as error:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # also what it has started, which holds its output open
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise ConfigError(f"{command}: no answer within {ANSWER_S:g} s") from None
        try:
            printed: dict[str, Any] = json.loads(answer)
        except ValueError:
            raise ConfigError(
                log.strip().removeprefix("error: ") or f"{command}: exit code {process.returncode}"
            ) from None
        print(log, end="", file=sys.stderr, flush=True)
        return printed

    def _check(self, name: str) -> None:
        """Raise `ConfigError` unless there is a search or comparison of this name."""
        cli.allow(
            os.path.basename(name) == name, "name", name, "the name of a search or comparison"
        )
        if not self._log(name).exists() and not (self._storage / name).is_dir():
            raise ConfigError(
                f"name: {name!r} is not allowed; there is no such search or comparison in"
                f" {self._storage}"
            )

    @property
    def _option(self) -> str:
        return f"--storage={self._storage}"

    def _running(self, name: str) -> bool:
        process = self._started.get(name)
        return (process is not None and process.poll() is None) or self._runner(name) is not None

    def _runner(self, name: str) -> Runner | None:
        """Return the process that runs it, also if another server, a shell or another machine has
        started it.

        On another machine, only once it has a lock, which an end empties: its process cannot be
        looked at from here.
        """
        from tunediff.core.lock import LOCK, alive, runner

        folder = self._storage / name
        if (folder / LOCK).exists():
            return runner(folder)
        starting = alive(self._process(name))
        return starting if starting is not None and starting.host == socket.gethostname() else None

    def _exit_code(self, name: str) -> int | None:
        """Return the exit code of a process that has ended.

        None if it was killed and another server started it, or if another process has gone on with
        the run since.
        """
        from tunediff.core.lock import LOCK

        ended = self._exit_code_file(name)
        with contextlib.suppress(
            OSError
        ):  # a run lets go of its lock before it writes its exit code
            if (self._storage / name / LOCK).stat().st_mtime > ended.stat().st_mtime:
                return None
        if (process := self._started.get(name)) is not None:
            return process.poll()
        with contextlib.suppress(OSError, ValueError):
            return int(ended.read_text())
        return None

    def _exit_code_file(self, name: str) -> Path:
        return self._storage / f".{name}.exit_code"

    def _process(self, name: str) -> Path:
        """Return the file that names the process: the search has no folder until its workload is
        checked."""
        return self._storage / f".{name}{PROCESS}"

    def _log(self, name: str) -> Path:
        return self._storage / f".{name}.log"


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

    tools, server = (
        Server(storage),
        MCPServer("tunediff", instructions=INSTRUCTIONS, version=__version__),
    )
    for tool in (
        tools.doctor, tools.knobs, tools.dry_run_search, tools.dry_run_comparison, tools.start, tools.status,
        tools.result, tools.export, tools.stop,
    ):  # fmt: skip
        server.tool()(answered(tool))
    return server


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = cli.parser("mcp", __doc__ or "")
    cli.add_storage(parser, "all searches and comparisons")
    parser.add_argument(
        "--result", help=argparse.SUPPRESS
    )  # prints what the tool of that name returns
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the client closes stdin; see `--help`."""
    args = arguments(argv)
    if args.result is None:
        serve(args.storage).run("stdio")
    else:
        cli.print_json(_result(args.storage / args.result))
    return cli.OK


def _result(folder: Path) -> dict[str, Any]:
    """Return the result so far of a search or a comparison."""
    from tunediff.api.comparison import PairedComparison
    from tunediff.api.search import Search

    return (Search if (folder / "search.yaml").exists() else PairedComparison)(folder).json()


if __name__ == "__main__":
    sys.exit(main())
