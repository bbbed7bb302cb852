"""Command lines in a user's file: `parse_args` gets the knobs, not tunediff's options."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import unittest.mock
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def script_arguments(file: Path, knobs: Any = None, **values: Any) -> Iterator[None]:
    """Give command line parsers the arguments of a script that was started without any.

    Options of argparse and click, flags of absl and fields that tyro fills, if they have the name
    of a field of `knobs` or of one of `values`, get that value; the others keep their defaults.
    With a knob `lr`, `parser.parse_args().lr` is its value; `sys.argv` is `["mine.py"]`.
    """
    names = {field.name for field in dataclasses.fields(knobs)} if knobs is not None else set()
    argv, parse = sys.argv, argparse.ArgumentParser.parse_known_args

    def value_of(name: str) -> Any:
        return getattr(knobs, name) if name in names else values[name]

    def parse_known_args(
        parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = {word.partition("=")[0] for word in args or ()}
        for action in parser._actions:
            # What a list of the script's own names keeps that value: no knob is read for it.
            known = action.dest in names or action.dest in values
            if known and not given.intersection(action.option_strings):
                action.required = False
                action.default = value_of(action.dest)
        return parse(parser, args, namespace)

    sys.argv = [str(file)]
    libraries = _of_libraries(names | values.keys(), value_of) if knobs is not None else []
    if (absl := sys.modules.get("absl.flags")) is not None and knobs is not None:
        absl.FLAGS(sys.argv, known_only=True)
        for name in names & set(absl.FLAGS):
            absl.FLAGS[name].value = getattr(knobs, name)
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
    try:
        with contextlib.ExitStack() as stack:
            for patched in libraries:
                stack.enter_context(patched)
            yield
    finally:
        sys.argv = argv
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def _of_libraries(
    names: Collection[str], value_of: Callable[[str], Any]
) -> list[contextlib.AbstractContextManager[Any]]:
    """Return what gives these values to click and tyro, where the script imports them."""
    patches = list[contextlib.AbstractContextManager[Any]]()
    if (tyro := sys.modules.get("tyro")) is not None:
        cli = tyro.cli

        def with_knobs(*arguments: Any, **options: Any) -> Any:
            made = cli(*arguments, **options)
            if not dataclasses.is_dataclass(made) or isinstance(made, type):
                return made
            fields = {field.name for field in dataclasses.fields(made)}.intersection(names)
            return dataclasses.replace(made, **{name: value_of(name) for name in fields})

        patches.append(unittest.mock.patch.object(tyro, "cli", with_knobs))
    if (click := sys.modules.get("click")) is not None:
        parse, main = click.Command.parse_args, click.Command.main

        def parse_args(command: Any, context: Any, words: list[str]) -> Any:
            known = [option.name for option in command.get_params(context) if option.name in names]
            context.default_map = {
                **(context.default_map or {}),
                **{name: value_of(name) for name in known},
            }
            return parse(command, context, words)

        def run(command: Any, *arguments: Any, **options: Any) -> Any:
            # By itself it would end the process behind the function.
            return main(command, *arguments, **{**options, "standalone_mode": False})

        patches.append(unittest.mock.patch.object(click.Command, "parse_args", parse_args))
        patches.append(unittest.mock.patch.object(click.Command, "main", run))
    return patches
