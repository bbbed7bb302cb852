"""Preloaded by the server that forks loader processes alone: importing it has an effect.

A terminal's Ctrl-C, torchrun's shutdown and batch schedulers signal the whole process group. The
training process means to write a checkpoint then, and needs its loader processes until it has. So
they live in a group of their own; they end with their training process all the same, which tells
them to, or whose absence they notice.
"""

import contextlib
import multiprocessing
import os
import threading
import time

with contextlib.suppress(OSError):  # a session leader stays where it is
    os.setpgid(0, 0)


def _end_with_the_training() -> None:
    """Wait until the training process is gone, then end this process.

    torch's own watch looks at the parent in the system's sense, which is the fork server. That one
    lives on for as long as a loader process holds its pipe, so that after a kill of the training
    each would wait for the other.
    """
    while (training := multiprocessing.parent_process()) is None:  # set soon after the fork
        time.sleep(0.01)
    training.join()
    os._exit(1)  # the main thread may wait for a lock that nobody will release


def _watch() -> None:
    threading.Thread(target=_end_with_the_training, name="training watched", daemon=True).start()


os.register_at_fork(after_in_child=_watch)
