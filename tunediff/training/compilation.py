"""torch.compile as the section `compile` asks for it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tunediff.config.systems import Compile


def compiled(model: nn.Module, network: nn.Module, options: Compile, blocks: type[nn.Module] | None) -> nn.Module:
    """`model` under torch.compile as configured; `network` is the plain one inside it, `blocks` what repeats there."""
    if not options.active:
        return model
    how: dict[str, Any] = {"mode": options.mode, "dynamic": options.dynamic or None}
    if options.scope == "model" or blocks is None:
        return torch.compile(model, **how)  # type: ignore[return-value]
    for module in network.modules():
        if isinstance(module, blocks):
            module.compile(**how)  # in place: names and state stay
    return model


def graphs() -> int:
    """Graphs that torch.compile has compiled in this process: more than expected means that it compiles again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


@contextlib.contextmanager
def cold_cache(options: Compile) -> Iterator[None]:
    """torch.compile finds nothing on disk that an earlier training left: its seconds are those of a first time."""
    if not options.active:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tunediff-compile-", ignore_cleanup_errors=True) as folder:
        here = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
        before = {name: os.environ.get(name) for name in here}
        os.environ.update(here)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
