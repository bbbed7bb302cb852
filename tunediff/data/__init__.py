"""Real images: files (`sources`), one uint8 tensor (`images`), batches (`loader`)."""
