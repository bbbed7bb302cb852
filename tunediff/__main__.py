"""Run a command, `tunediff search …`, or list them all: `tunediff`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tunediff import __version__, cli
from tunediff.config import ConfigError
from tunediff.config.knobs import nearest

COMMANDS = {
    "search": "search for the configuration with the best result for its training seconds",
    "report": "write the report of a search or comparison, while it runs or after",
    "export": "write the best configuration of a search, with its weights",
    "train": "train one configuration",
    "evaluate": "judge a model",
    "sample": "draw images from a diffusion model",
    "compare": "decide whether one configuration is better than another",
    "judge": "judge runs that have already finished",
    "verify": "check a comparison that somebody else has made",
    "profile": "show where the time of a training goes",
    "knobs": "list the knobs of a workload: type, bounds, default, help",
    "doctor": "check this machine",
    "mcp": "serve these commands as tools to coding agents",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, or print what there is; return the code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return int(module_of(words[0]).main(words[1:]))
    return _overview(words)


def module_of(command: str) -> Any:
    """Return the module of a command, whose `main` runs it."""
    # `tunediff.judge` is the function
    name = f"tunediff.{'judging' if command == 'judge' else command}"
    package = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(package, "__path__") else package


@cli.guarded
def _overview(words: Sequence[str] | None) -> int:
    words = words or []
    if "--version" in words:
        print(f"tunediff {__version__}")
        return cli.OK
    if unknown := [word for word in words if word not in ("-h", "--help")]:
        raise ConfigError(
            f"command line: {unknown[0]!r} is not allowed; {nearest(unknown[0], COMMANDS)}"
        )
    print(
        "tunediff finds the training configuration that gives the best result for the wall-clock"
        " spent.\n"
    )
    print("\n".join(f"tunediff {name:<9} {text}" for name, text in COMMANDS.items()))
    print(
        "\nOptions of each: tunediff COMMAND --help; of this: --version. Also as python -m"
        " tunediff COMMAND"
    )
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
