"""Trainings: what is learned, and how. Each uses only what a user's own file can use."""
