"""Shared by all tests."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the commands do; before anything imports torch
