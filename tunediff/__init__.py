"""tunediff finds the training configuration that gives a diffusion model the best FID for the wall-clock spent."""

__version__ = "0.1.0"
