"""The kernel: all that one trial needs, without Ray, to train, be measured, judged and resumed. A newcomer reads it first.

It imports nothing of the rest, but inside a function a part that hangs on it and is asked for by a knob.
"""

import ast

from tests.test_ratchets import is_statement, sources

KERNEL = [
    "analysis.divergence analysis.error_spending analysis.outcome analysis.sequential analysis.statistics",
    "config config.code config.files config.knobs config.schema",
    "config.systems config.workload core.clock core.disk core.environment core.errors core.files core.journal",
    "core.machine core.options core.outcomes core.point core.target core.text core.trial_record data.items",
    "data.loader data.loader_processes data.randomness distributed experiment.model training.capture training.capture.steps",
    "training.compilation training.engine training.evaluation training.hardware",
    "training.loop training.memory training.meter training.model_setup training.observer training.outcome training.pace",
    "training.precision training.read_tracking training.state",
    "training.step training.strategies training.strategies.single training.trial training.weights",
]
PARTS = {
    "training.capture.step_capture training.capture.captured_call": "compile.capture",
    "training.strategies.dp training.strategies.fsdp training.strategies.pipeline": "parallel.strategy",
}
"""What is imported where a knob asks for it."""
STATEMENTS = 5_650
"""A hundredth above what was counted; it may only fall."""


def imported(node, known):
    """Return the modules of `tunediff/` that a node of a syntax tree imports."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.ImportFrom) and one.module.startswith("tunediff")]
    names = [(one.module.partition(".")[2], alias.name) for one in found for alias in one.names]
    below = [(package, f"{package}.{name}".strip(".")) for package, name in names]
    return {module if module in known else package for package, module in below}


def test_kernel_is_small_and_imports_nothing_of_the_rest():
    names = {path: ".".join(path.with_suffix("").parts[1:]) for path in sources("tunediff")}
    trees = {names[path].removesuffix(".__init__"): ast.parse(text) for path, text in sources("tunediff").items()}
    kernel, parts = {name: trees[name] for name in " ".join(KERNEL).split()}, set(" ".join(PARTS).split())
    anywhere = {one for tree in kernel.values() for one in imported(tree, trees)}
    imports = {
        one
        for tree in kernel.values()
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for one in imported(node, trees)
    }
    assert (anywhere - set(kernel), imports & parts) == (parts, set())
    assert sum(is_statement(node) for tree in kernel.values() for node in ast.walk(tree)) <= STATEMENTS
