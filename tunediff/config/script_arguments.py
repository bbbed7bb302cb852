"""Command lines inside a user's file: `parse_args` there gets the knobs, not the options of
tunediff."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def script_arguments(file: Path, knobs: Any = None, **values: Any) -> Iterator[None]:
    """Give command line parsers the arguments of a script that was started without any.

    Options of argparse and flags of absl that have the name of a field of `knobs`, or of one of
    `values`, get that value; the others keep their defaults. Example: with a knob `lr`,
    `parser.parse_args().lr` is its value, and `sys.argv` is `["mine.py"]`.
    """
    names = {field.name for field in dataclasses.fields(knobs)} if knobs is not None else set()
    argv, parse = sys.argv, argparse.ArgumentParser.parse_known_args

    def parse_known_args(
        parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        if not args:
            for action in parser._actions:
                if action.dest in names or action.dest in values:
                    action.required = False
                    action.default = (
                        getattr(knobs, action.dest) if action.dest in names else values[action.dest]
                    )
        return parse(parser, args, namespace)

    sys.argv = [str(file)]
    if (absl := sys.modules.get("absl.flags")) is not None and knobs is not None:
        absl.FLAGS(sys.argv, known_only=True)
        for name in names & set(absl.FLAGS):
            absl.FLAGS[name].value = getattr(knobs, name)
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        sys.argv = argv
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
