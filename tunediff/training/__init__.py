"""The training loop and what it stands on. It knows no Ray: it runs in a Ray Train worker, under
torchrun, or alone."""
