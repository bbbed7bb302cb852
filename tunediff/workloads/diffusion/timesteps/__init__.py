"""Which timesteps are trained on, as the training draws them.

A fixed p(t) is a method `density` of its knobs in `methods`; a sampler that draws in another way or
learns is a class here, named in `KINDS`.
"""

from __future__ import annotations

from tunediff.distributed import World
from tunediff.workloads.diffusion import methods
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps.adaptive import InfoNoise, LossSecondMoment
from tunediff.workloads.diffusion.timesteps.base import (
    Speed,
    Stratified,
    TableSampler,
    TimestepSampler,
    Uniform,
)
from tunediff.workloads.diffusion.timesteps.policy import BetaPolicy
from tunediff.workloads.diffusion.timesteps.wiener import Wiener

KINDS: dict[type, type[TimestepSampler]] = {
    methods.Uniform: Uniform,
    methods.Stratified: Stratified,
    methods.Speed: Speed,
    methods.LogitNormal: TableSampler,
    methods.LogNormal: TableSampler,
    methods.LogSnrLaplace: TableSampler,
    methods.LogSnrCosine: TableSampler,
    methods.LossSecondMoment: LossSecondMoment,
    methods.InfoNoise: InfoNoise,
    methods.BetaPolicy: BetaPolicy,
    methods.Wiener: Wiener,
}
"""The sampler of each member of `methods.Timesteps`."""


def build(
    knobs: methods.Timesteps, diffusion: Diffusion, channels: int, world: World
) -> TimestepSampler:
    """Return the sampler of a configuration, for this process and images of so many channels."""
    return KINDS[type(knobs)](knobs, diffusion, channels, world)
