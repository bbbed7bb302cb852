"""Real images: where they come from (`sources`), as one uint8 tensor (`images`), as training
batches (`loader`)."""
