"""DDPM: a U-Net that learns to remove noise from images (Ho et al. 2020, arXiv 2006.11239)."""
