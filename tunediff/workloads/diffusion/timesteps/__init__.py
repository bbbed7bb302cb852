"""Which timesteps are trained on, as the training draws them.

A fixed p(t) is a method `density` of its knobs in `methods`; a sampler that draws in another way or
learns is a class here, named in `KINDS`.
"""

from __future__ import annotations

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.base import (
    InfoNoiseSampler,
    LossSecondMomentSampler,
    SpeedSampler,
    StratifiedSampler,
    TableSampler,
    TimestepSampler,
    UniformSampler,
)
from tunediff.workloads.diffusion.timesteps.policy import BetaPolicySampler
from tunediff.workloads.diffusion.timesteps.wiener import WienerSampler

KINDS: dict[type, type[TimestepSampler]] = {
    methods.Uniform: UniformSampler,
    methods.Stratified: StratifiedSampler,
    methods.Speed: SpeedSampler,
    methods.LossSecondMoment: LossSecondMomentSampler,
    methods.InfoNoise: InfoNoiseSampler,
    methods.BetaPolicy: BetaPolicySampler,
    methods.Wiener: WienerSampler,
}
"""The samplers of the members of `methods.Timesteps` that draw in another way than from a table."""


def build(
    knobs: methods.Timesteps, diffusion: Diffusion, channels: int, world: World
) -> TimestepSampler:
    """Return the sampler of a configuration, for this process and images of so many channels."""
    return KINDS.get(type(knobs), TableSampler)(knobs, diffusion, channels, world)
