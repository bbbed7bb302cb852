"""The training loop and its parts. Knows no Ray: runs in its workers, under torchrun, or alone."""
