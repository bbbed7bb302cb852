"""Preloaded by the server that forks loader processes alone: importing it has an effect.

A terminal's Ctrl-C, torchrun's shutdown and batch schedulers signal the whole process group. The
training process means to write a checkpoint then, and needs its loader processes until it has. So
they live in a group of their own; they end with their training process all the same, which tells
them to, or whose end kills them (`loader_processes.begin_worker`).
"""

import contextlib
import os

with contextlib.suppress(OSError):  # a session leader stays where it is
    os.setpgid(0, 0)
