"""Which timesteps are trained on. To add one: a dataclass in `tunediff.config`, a class here, a line in `KINDS`."""

from __future__ import annotations

from tunediff import config
from tunediff.diffusion.process import Diffusion
from tunediff.diffusion.timesteps.adaptive import GradientNorm, JointError, LossSecondMoment
from tunediff.diffusion.timesteps.base import ErrorsAt, TimestepSampler
from tunediff.diffusion.timesteps.fixed import LogitNormal, LogSnrCosine, LogSnrLaplace, Speed, Stratified, Uniform
from tunediff.diffusion.timesteps.policy import BetaPolicy

__all__ = ["KINDS", "ErrorsAt", "TimestepSampler", "build"]

KINDS: dict[type, type[TimestepSampler]] = {
    config.Uniform: Uniform,
    config.Stratified: Stratified,
    config.LossSecondMoment: LossSecondMoment,
    config.Speed: Speed,
    config.LogitNormal: LogitNormal,
    config.LogSnrLaplace: LogSnrLaplace,
    config.LogSnrCosine: LogSnrCosine,
    config.BetaPolicy: BetaPolicy,
    config.GradientNorm: GradientNorm,
    config.JointError: JointError,
}


def build(member: config.Timesteps, diffusion: Diffusion, channels: int = 3) -> TimestepSampler:
    """The sampler that the configuration asks for, for this process and images of so many channels."""
    return KINDS[type(member)](member, diffusion, channels)
