"""List the commands: `python -m tunediff`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tunediff import __version__, cli

COMMANDS = {
    "search": "search for the configuration with the best result for its training seconds",
    "report": "write the report of a search, while it runs or after",
    "export": "write the best configuration of a search, with its weights",
    "train": "train one configuration",
    "evaluate": "judge a model",
    "sample": "draw images from a diffusion model",
    "compare": "tell whether one configuration is better than another",
    "profile": "show where the time of a training goes",
    "doctor": "check this machine",
}


@cli.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands, or the version."""
    parser = argparse.ArgumentParser(prog="python -m tunediff", add_help=False)
    parser.add_argument("--version", action="store_true")
    args, words = parser.parse_known_args(argv)
    if args.version:
        print(f"tunediff {__version__}")
        return cli.OK
    command = next((word for word in words if word in COMMANDS), None)
    print("tunediff finds the training configuration that gives the best result for the wall-clock spent.\n")
    print("\n".join(f"python -m tunediff.{name:<9} {text}" for name, text in COMMANDS.items()))
    print("\nOptions of each: python -m tunediff.COMMAND --help; of this: --version")
    if unknown := [word for word in words if word not in ("-h", "--help")]:
        hint = f"write python -m tunediff.{command}" if command else f"allowed: {', '.join(COMMANDS)}"
        print(f"error: command line: {unknown[0]!r} is not understood here; {hint}", file=sys.stderr)
        return cli.BAD_INPUT
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
