"""Name other processes as the reason where they held the memory that a trial lacked. Imports no torch."""

from __future__ import annotations

import dataclasses

from tunediff.core.trial_record import End


def name_other_processes(end: End) -> End:
    """Return the end of a trial that ran out of memory; its reason names the other processes if they held it.

    See `End.crowded_out` for when that is.
    """
    if not end.crowded_out:
        return end
    others, total = (f"{end.memory[name]:,.0f}" for name in ("others_mib", "total_mib"))
    return dataclasses.replace(end, reason=f"{end.reason}; other processes held {others} of {total} MiB")
