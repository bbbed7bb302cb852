"""What a search found, in words and pictures."""
