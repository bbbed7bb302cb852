"""What one configuration spends its seconds and its memory on, and what to try next."""
