"""The diffusion model itself: network, noising process, timestep samplers, loss weightings, averaged weights."""
