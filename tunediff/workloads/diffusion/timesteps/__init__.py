"""Which timesteps are trained on. To add one: a dataclass in `methods`, in its union, and a class
here naming it: importing a module registers its classes."""

from __future__ import annotations

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps import adaptive, fixed, policy, wiener  # noqa: F401
from tunediff.workloads.diffusion.timesteps.base import KINDS, TimestepSampler


def build(
    member: methods.Timesteps, diffusion: Diffusion, channels: int, world: World
) -> TimestepSampler:
    """Return the sampler of the configuration, for this process and images of so many channels."""
    return KINDS[type(member)](member, diffusion, channels, world)
