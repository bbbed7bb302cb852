"""torch.compile as the section `compile` asks for it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tunediff.config.knobs import refuse
from tunediff.config.systems import CUDA_GRAPHS, Compile


class Compilation:
    """torch.compile of one training, and whether it compiled what it should."""

    def __init__(self, options: Compile) -> None:
        self._options, self._before = options, graphs()
        # What is compiled, and by which attribute it is called.
        self._parts: list[tuple[nn.Module, str]] = []
        self._seen: set[Hashable] = set()

    def apply(
        self, model: nn.Module, network: nn.Module, blocks: type[nn.Module] | None
    ) -> nn.Module:
        """Compile `model`; `network`: the plain one in it; `blocks`: its repeated modules.

        Raises `ConfigError` where blocks are to be compiled and the network has none of that class.
        """
        if not self._options.active:
            return model
        mode, dynamic = self._options.mode, self._options.dynamic
        if self._options.scope == "model" or blocks is None:
            compiled = torch.compile(model, mode=mode, dynamic=dynamic or None)
            self._parts = [(compiled, "forward")]  # type: ignore[list-item]
            return compiled  # type: ignore[return-value]
        modules = [module for module in network.modules() if isinstance(module, blocks)]
        why = "the model has no blocks that trial.prepare(model, blocks=…) names; allowed: model"
        refuse(not modules, f"compile.scope: 'blocks' is not allowed: {why}")
        # Blocks share their code, and torch compiles a function for 8 kinds of calls only, then
        # runs it as it is: here there may be as many as blocks, trained and judged, with and
        # without gradients.
        torch._dynamo.config.recompile_limit = max(8, 4 * len(modules))
        torch._dynamo.config.accumulated_recompile_limit = max(256, 4 * len(modules))
        for block in modules:
            # By itself torch would take the second block's other shape for a sign that shapes vary.
            block.compile(mode=mode, dynamic=dynamic)  # in place: names and state stay
        self._parts = [(block, "_compiled_call_impl") for block in modules]
        return model

    def detach(self, loss: Tensor) -> Tensor:
        """Return a detached loss to read later: a CUDA graph's next run overwrites it."""
        return loss.detach().clone() if self._options.mode in CUDA_GRAPHS else loss.detach()

    def warm_ups(self, device: str) -> int:
        """Return the steps until all is compiled: a CUDA graph's second run records it."""
        return 3 if device == "cuda" and self._options.mode in CUDA_GRAPHS else 1

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record the different calls of compiled modules inside: each needs a graph of its own."""
        plain = [(module, name, getattr(module, name)) for module, name in self._parts]
        for module, name, call in plain:
            setattr(module, name, functools.partial(self._noted, module, repr(module), call))
        try:
            yield
        finally:
            for module, name, call in plain:
                setattr(module, name, call)

    def _noted(
        self, module: nn.Module, structure: str, call: Any, *inputs: Any, **named: Any
    ) -> Any:
        static = self._options.scope == "blocks" and not self._options.dynamic
        arguments = tuple(_kind(leaf, static) for leaf in tree_leaves((inputs, named)))
        weights = tuple(_kind(parameter, True) for parameter in module.parameters())
        modes = tuple(part.training for part in module.modules()), torch.is_grad_enabled()
        formats = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        self._seen.add((structure, weights, arguments, modes, formats))
        return call(*inputs, **named)

    def facts(self) -> dict[str, Any]:
        """Return `compiled_graphs` and `expected_graphs` as in a `Point`; {}: none compiled.

        A framework that compiles by itself leaves open how many are to be expected.
        """
        if not self._options.active:
            return {}
        expected = {"expected_graphs": len(self._seen)} if self._parts else {}
        return {"compiled_graphs": graphs() - self._before, **expected}


def _kind(value: Any, static: bool) -> Hashable:
    """Return what of an argument needs a graph: without `static`, the number of axes."""
    if not isinstance(value, torch.Tensor):
        return str(type(value))
    shape = (value.shape, value.stride()) if static else value.dim()
    return shape, value.dtype, value.requires_grad


def graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


@contextlib.contextmanager
def cold_cache(options: Compile) -> Iterator[None]:
    """Hide earlier trainings' compiled code on disk: compiling takes as long as at first."""
    if not options.active:
        yield
        return
    with tempfile.TemporaryDirectory(
        prefix="tunediff-compile-", ignore_cleanup_errors=True
    ) as folder:
        names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
        before = {name: os.environ[name] for name in names if name in os.environ}
        os.environ |= dict(zip(names, (folder, os.path.join(folder, "triton")), strict=True))
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name)
            os.environ |= before
