"""Check and apply the options that choose a machine or a cluster: --address, --cpus and --gpus."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterable

from tunediff.core import machine
from tunediff.core.errors import ConfigError
from tunediff.core.options import Options, option

log = logging.getLogger(__name__)


class MachineOptions(Options):
    """What a search or comparison may use."""

    address: str | None = option(
        None, "a running Ray cluster, auto or HOST:PORT (default: one on this machine)"
    )
    cpus: int | None = option(None, "CPU cores of this machine to use (default: all)")
    gpus: int | None = option(None, "GPUs of this machine to use (default: all)")


def check(args: MachineOptions) -> None:
    """Apply the options. Raises `ConfigError` for more than there is."""
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    if args.address is None:
        machine.take(args.cpus, args.gpus)
        return
    if not re.fullmatch(r"auto|[^\s/]+:\d+", args.address):
        client = "Ray Client keeps the search away from its cluster's files; run it on a node"
        why = f" ({client}: ray job submit does)" if args.address.startswith("ray://") else ""
        allowed = "allowed: auto or HOST:PORT"
        raise ConfigError(f"--address: {args.address!r} is not allowed{why}; {allowed}")
    if args.address != "auto":  # Ray would look for it for minutes
        host, _, port = args.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--address: no cluster answers at {args.address}: {error}") from None
    for flag, value in (("--cpus", args.cpus), ("--gpus", args.gpus)):
        if value is not None:
            theirs = f"of the cluster at {args.address} Ray gives out what is free"
            raise ConfigError(f"{flag}: takes a part of this machine; {theirs}")


def warn_emulated(formats: Iterable[str], address: str | None = None) -> None:
    """Warn of those values of `precision.amp` that the CPU of this machine only emulates."""
    if address is None and not machine.gpus():
        for name in sorted(machine.emulated().intersection(formats)):
            log.warning("precision.amp=%s: this CPU has no units for it and emulates it", name)
