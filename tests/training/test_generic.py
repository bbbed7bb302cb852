"""The room trains anything: it knows nothing of a workload, and one file alone speaks to other processes."""

import ast
import re
from pathlib import Path

import tunediff

PACKAGE = Path(tunediff.__file__).parent
WORDS = ("noise", "noisy", "timestep", "u-net", "unet", "fid", "frechet", "fréchet", "diffusion", "denois")


def sources(*rooms):
    return [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]


def parts(word):
    """`step_noise`, `UNet` and `test-FID` in the parts they are made of, and whole."""
    pieces = re.findall(r"[A-ZÀ-Ý]?[a-zà-ÿ]+|[A-ZÀ-Ý]+", word)
    return {word.lower(), *(piece.lower() for piece in pieces)}


def test_training_has_no_word_of_a_workload():
    for path in sources("training"):
        words = {part for word in re.findall(r"[\w-]+", path.read_text()) for part in parts(word)}
        assert {word for word in words if word.startswith(WORDS)} <= {"fidelity"}, path


def collectives(tree):
    """Names of torch.distributed that a file uses, but those that say who is there or begin and end the group."""
    allowed = {"init_process_group", "destroy_process_group", "is_available", "is_initialized", "is_nccl_available"}
    allowed |= {"get_backend"}
    names = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "torch.distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names and node.attr not in allowed:
            yield node.attr


ENGINES = {"default_hooks", "init_device_mesh", "FSDPModule", "MixedPrecisionPolicy", "fully_shard", "DTensor",
           "distribute_tensor", "PipelineStage", "Schedule1F1B", "ScheduleGPipe"}  # fmt: skip
"""What torch has of parallel strategies: only `training/strategies` makes them."""


def test_only_world_speaks_to_other_processes():
    for path in {*sources(".")} - {PACKAGE / "distributed.py"}:
        allowed = ENGINES if path.parent == PACKAGE / "training" / "strategies" else set()
        assert set(collectives(ast.parse(path.read_text()))) <= allowed, path
